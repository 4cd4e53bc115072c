"""`moetune check`: plans every scenario again and judges it, several at a time.

    scenario --plan--> PlanFacts --judge(accepted PlanFacts)-->  ScenarioResult
                       measurements beside it

A scenario that cannot be read or planned is an `error` of its own; the others go on.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from profilers.errors import ProfilerError
from tuner.errors import PlanUnreadableError, SpecError, TunerError
from tuner.goals.registry import GOALS
from tuner.regress.before import Reference, find_reference
from tuner.regress.beside import measurement_findings
from tuner.regress.observed import plan_facts
from tuner.regress.records import ScenarioResult, ScenarioVerdict
from tuner.regress.rules import Tolerance, judge
from tuner.regress.scenarios import Checks, Scenario
from tuner.regress.versions import OtherVersion
from tuner.regress.workers import OWN_TREE, Limits, Planner, PlanningJob, PlanResult
from tuner.spec.kind import goal_kind

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedScenario:
    """A result with what an update would store."""

    result: ScenarioResult
    scenario: Scenario
    plan: Json | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """Settings of a check: tolerances, limits, parallelism."""

    tolerance: Tolerance = field(default_factory=Tolerance)
    limits: Limits = field(default_factory=Limits)
    workers: int = 1
    tree: Path = OWN_TREE
    """Folder with the packages of the moetune version that plans; see tuner/regress/workers.py."""


Plan = Callable[[PlanningJob], PlanResult]


def check_all(
    checks: Checks,
    *,
    manner: Manner,
    scratch: Path,
    other: OtherVersion | None = None,
    on_result: Callable[[ScenarioResult], None] = lambda _: None,
) -> tuple[CheckedScenario, ...]:
    """Check every scenario, in the order of their names.

    Args:
        checks: what to check.
        manner: tolerances, limits, and how many at a time.
        scratch: a folder for temporary files.
        other: what to compare with in place of the accepted plans.
        on_result: called with each result once it is known, from several threads.
    """
    with ExitStack() as open_planners:
        pairs: SimpleQueue[tuple[Planner, Planner | None]] = SimpleQueue()
        planners: list[Planner] = []
        for _ in range(max(1, min(manner.workers, len(checks.scenarios)))):
            today = open_planners.enter_context(
                Planner(scratch=scratch, limits=manner.limits, tree=manner.tree)
            )
            reference = None
            if other is not None and other.plans is None:
                reference = open_planners.enter_context(
                    Planner(scratch=scratch, limits=manner.limits, tree=other.tree)
                )
            pairs.put((today, reference))
            planners += [today] if reference is None else [today, reference]

        def check_one(scenario: Scenario) -> CheckedScenario:
            today, reference = pairs.get()
            try:
                checked = _check_scenario(
                    scenario,
                    plan=today.plan,
                    plan_theirs=None if reference is None else reference.plan,
                    other=other,
                    manner=manner,
                )
            finally:
                pairs.put((today, reference))
            on_result(checked.result)
            return checked

        with ThreadPoolExecutor(max_workers=pairs.qsize()) as pool:
            try:
                return tuple(pool.map(check_one, checks.scenarios))
            finally:
                # After Ctrl-C threads still wait for plans that are no longer needed.
                for planner in planners:
                    planner.stop()
                pool.shutdown(wait=True, cancel_futures=True)


def missing_scenarios(checks: Checks, other: OtherVersion | None) -> tuple[ScenarioResult, ...]:
    """Return results for scenarios that are listed and missing."""
    there = {one.name for one in checks.scenarios}
    listed = dict.fromkeys(checks.gone, "scenarios.json lists it")
    if other is not None and not checks.is_single:
        listed |= dict.fromkeys(sorted(other.names - there), f"{other.name} has it")
    return tuple(
        ScenarioResult(
            name=name,
            kind="",
            verdict=ScenarioVerdict.MISSING,
            reason=f"the scenario is gone, and {why}; restore it, or drop it with --update",
            file=str(checks.folder / name),
        )
        for name, why in listed.items()
    )


def _check_scenario(
    scenario: Scenario,
    *,
    plan: Plan,
    plan_theirs: Plan | None,
    other: OtherVersion | None,
    manner: Manner,
) -> CheckedScenario:
    """Check one scenario; a user error becomes its verdict."""
    kind = ""
    try:
        kind = goal_kind(scenario.spec) or ""
        if kind not in GOALS:
            raise SpecError(f"goal.kind {kind!r} is not one of {', '.join(GOALS)}")
        job = PlanningJob(kind=kind, spec=scenario.spec, profiles=scenario.profiles)
        plan_result = plan(job)
    except TunerError as error:
        plan_result = PlanResult(error=" ".join(str(error).split()))
    if plan_result.plan is None:
        return CheckedScenario(
            result=_failed_result(scenario, kind, ScenarioVerdict.ERROR, plan_result.error),
            scenario=scenario,
        )
    try:
        before = find_reference(scenario, job, plan=plan_theirs, other=other)
        if before.plan is None:
            verdict = ScenarioVerdict.MISSING if other is None else ScenarioVerdict.INCOMPARABLE
            result = _failed_result(scenario, kind, verdict, before.error)
        else:
            result = _compare(scenario, job, before, plan_result, manner=manner)
    except (TunerError, ProfilerError) as error:
        result = _failed_result(scenario, kind, ScenarioVerdict.ERROR, " ".join(str(error).split()))
    return CheckedScenario(result=result, scenario=scenario, plan=plan_result.plan)


def _compare(
    scenario: Scenario,
    job: PlanningJob,
    before: Reference,
    plan_result: PlanResult,
    *,
    manner: Manner,
) -> ScenarioResult:
    assert before.plan is not None
    assert plan_result.plan is not None
    try:
        accepted = plan_facts(before.plan)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanUnreadableError(
            f"{before.name}: its plan lacks what is compared ({error})"
        ) from error
    judgement = judge(
        accepted,
        plan_facts(plan_result.plan),
        tolerance=manner.tolerance,
        beside=tuple(measurement_findings(scenario, before.baseline)),
    )
    return ScenarioResult(
        name=scenario.name,
        kind=job.kind,
        verdict=judgement.verdict,
        reason=judgement.reason,
        changes=judgement.changes,
        cpu_s=plan_result.cpu_s,
        file=str(scenario.spec),
    )


def _failed_result(
    scenario: Scenario, kind: str, verdict: ScenarioVerdict, reason: str
) -> ScenarioResult:
    return ScenarioResult(
        name=scenario.name, kind=kind, verdict=verdict, reason=reason, file=str(scenario.spec)
    )
