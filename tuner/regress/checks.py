"""`moetune check`: plans every scenario again and judges it, several at a time.

    scenario --plan--> PlanFacts --judge(accepted PlanFacts)-->  ScenarioResult
                       measurements beside it

A scenario that cannot be read or planned is an `error` of its own; the others go on.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from profilers.errors import ProfilerError
from tuner.errors import PlanUnreadableError, SpecError, TunerError
from tuner.goals.registry import GOALS
from tuner.goals.stored_figures import Json
from tuner.regress.baseline import Baseline, read_accepted, read_baseline
from tuner.regress.observed import plan_facts
from tuner.regress.profile_check import measurement_findings
from tuner.regress.records import ScenarioResult, ScenarioVerdict
from tuner.regress.rules import Tolerance, judge
from tuner.regress.scenarios import SPEC_NAME, Checks, Scenario, read_checks
from tuner.regress.versions import OtherVersion
from tuner.regress.workers import OWN_TREE, Limits, Planner, PlanningJob, PlanResult
from tuner.spec.kind import goal_kind


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A plan to compare with, or in one line why there is none."""

    name: str
    plan: Json | None = None
    baseline: Baseline | None = None
    error: str = ""


Plan = Callable[[PlanningJob], PlanResult]


def check_all(
    checks: Checks,
    *,
    manner: Manner,
    scratch: Path,
    other_version: OtherVersion | None = None,
    on_result: Callable[[ScenarioResult], None] = lambda _: None,
) -> tuple[CheckedScenario, ...]:
    """Check every scenario, in the order of their names.

    Args:
        checks: what to check.
        manner: tolerances, limits, and how many at a time.
        scratch: a folder for temporary files.
        other_version: what to compare with in place of the accepted plans.
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
            if other_version is not None and other_version.plans is None:
                reference = open_planners.enter_context(
                    Planner(scratch=scratch, limits=manner.limits, tree=other_version.tree)
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
                    other_version=other_version,
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


def missing_scenarios(
    checks: Checks, other_version: OtherVersion | None
) -> tuple[ScenarioResult, ...]:
    """Return results for scenarios that are listed and missing."""
    there = {scenario.name for scenario in checks.scenarios}
    listed = dict.fromkeys(checks.gone, "scenarios.json lists it")
    if other_version is not None and not checks.is_single:
        listed |= dict.fromkeys(sorted(other_version.names - there), f"{other_version.name} has it")
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
    other_version: OtherVersion | None,
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
        before = find_reference(scenario, job, plan=plan_theirs, other_version=other_version)
        if before.plan is None:
            verdict = (
                ScenarioVerdict.MISSING if other_version is None else ScenarioVerdict.INCOMPARABLE
            )
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


def find_reference(
    scenario: Scenario,
    job: PlanningJob,
    *,
    plan: Plan | None,
    other_version: OtherVersion | None,
) -> Reference:
    """Find the accepted plan of a scenario, or make the plan of another version.

    Args:
        scenario: as it is today.
        job: that plans it.
        plan: plans with the other version; None where accepted plans are compared with.
        other_version: that of `plan`; None: the accepted plans.

    Raises:
        PlanUnreadableError: an accepted plan is damaged or of a newer schema.
    """
    then = scenario_then(scenario, other_version)
    if then is None:
        name = "" if other_version is None else other_version.name
        return Reference(name=name, error=f"{name} has no such scenario")
    if plan is None or other_version is None:
        return _accepted(then)
    result = plan(PlanningJob(kind=job.kind, spec=then.spec, profiles=then.profiles))
    if result.plan is None:
        return Reference(
            name=other_version.name, error=f"{other_version.name} cannot plan it: {result.error}"
        )
    return Reference(name=other_version.name, plan=result.plan)


def scenario_then(scenario: Scenario, other_version: OtherVersion | None) -> Scenario | None:
    """Return the scenario of the other version; None where it has none."""
    folder = None if other_version is None else (other_version.plans or other_version.checks)
    if folder is None:
        return scenario
    is_single = (folder / SPEC_NAME).is_file()
    at = folder if is_single else folder / scenario.name
    if not (at / SPEC_NAME).is_file():
        return None
    (then,) = read_checks(at).scenarios
    return then


def _accepted(scenario: Scenario) -> Reference:
    file = scenario.plan_file
    accepted = read_accepted(file)
    if accepted is None:
        return Reference(
            name=str(file), error=f"no accepted plan ({file.name}); accept today's with --update"
        )
    return Reference(name=str(file), plan=accepted, baseline=read_baseline(scenario.baseline_file))
