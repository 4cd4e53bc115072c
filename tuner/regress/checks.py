"""`moetune check`: every scenario planned again and judged, several at a time.

    scenario --plan--> Observed  --judge(accepted Observed)-->  ScenarioResult
                       measurements and effort beside it

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
from tuner.regress.baseline import KINDS
from tuner.regress.before import Before, before_of
from tuner.regress.beside import effort_findings, is_laborious, lighter, measurement_findings
from tuner.regress.observed import observed
from tuner.regress.records import Effort, ScenarioResult, Verdict
from tuner.regress.reprice import is_worth_repricing, repriced
from tuner.regress.rules import Tolerance, judge
from tuner.regress.scenarios import Checks, Scenario
from tuner.regress.versions import Other
from tuner.regress.workers import OWN_TREE, Answer, Job, Limits, Planner
from tuner.spec.kind import goal_kind

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A result with what an update would store."""

    result: ScenarioResult
    scenario: Scenario
    plan: Json | None = None
    effort: Effort | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How scenarios are checked."""

    tolerance: Tolerance = field(default_factory=Tolerance)
    limits: Limits = field(default_factory=Limits)
    workers: int = 1
    tree: Path = OWN_TREE
    """Holds the packages of the moetune that plans; see tuner/regress/workers.py."""


Plan = Callable[[Job], Answer]


def check_all(
    checks: Checks,
    *,
    manner: Manner,
    scratch: Path,
    other: Other | None = None,
    told: Callable[[ScenarioResult], None] = lambda _: None,
) -> tuple[Checked, ...]:
    """Check every scenario, in the order of their names.

    Args:
        checks: what to check.
        manner: tolerances, limits, and how many at a time.
        scratch: a folder for temporary files.
        other: what to compare with in place of the accepted plans.
        told: called with each result as it is there, from several threads.
    """
    with ExitStack() as open_planners:
        pairs: SimpleQueue[tuple[Planner, Planner | None]] = SimpleQueue()
        planners: list[Planner] = []
        for _ in range(max(1, min(manner.workers, len(checks.scenarios)))):
            own = open_planners.enter_context(
                Planner(scratch=scratch, limits=manner.limits, tree=manner.tree)
            )
            theirs = None
            if other is not None and other.plans is None:
                theirs = open_planners.enter_context(
                    Planner(scratch=scratch, limits=manner.limits, tree=other.tree)
                )
            pairs.put((own, theirs))
            planners += [own] if theirs is None else [own, theirs]

        def check_one(scenario: Scenario) -> Checked:
            own, theirs = pairs.get()
            try:
                checked = _checked(
                    scenario,
                    plan=own.plan,
                    plan_theirs=None if theirs is None else theirs.plan,
                    other=other,
                    manner=manner,
                )
            finally:
                pairs.put((own, theirs))
            told(checked.result)
            return checked

        with ThreadPoolExecutor(max_workers=pairs.qsize()) as pool:
            try:
                return tuple(pool.map(check_one, checks.scenarios))
            finally:
                # After Ctrl-C threads still wait for plans that nobody wants any more.
                for planner in planners:
                    planner.stop()
                pool.shutdown(wait=True, cancel_futures=True)


def gone(checks: Checks, other: Other | None) -> tuple[ScenarioResult, ...]:
    """Tell of scenarios that ought to be there and are not."""
    there = {one.name for one in checks.scenarios}
    listed = dict.fromkeys(checks.gone, "scenarios.json lists it")
    if other is not None and not checks.is_single:
        listed |= dict.fromkeys(sorted(other.names - there), f"{other.name} has it")
    return tuple(
        ScenarioResult(
            name=name,
            kind="",
            verdict=Verdict.MISSING,
            reason=f"the scenario is gone, and {why}; restore it, or drop it with --update",
            file=str(checks.folder / name),
        )
        for name, why in listed.items()
    )


def _checked(
    scenario: Scenario,
    *,
    plan: Plan,
    plan_theirs: Plan | None,
    other: Other | None,
    manner: Manner,
) -> Checked:
    """Check one scenario; whatever a user can meet becomes its verdict."""
    kind = ""
    try:
        kind = goal_kind(scenario.spec) or ""
        if kind not in KINDS:
            raise SpecError(f"goal.kind {kind!r} is not one of {', '.join(KINDS)}")
        job = Job(kind=kind, spec=scenario.spec, profiles=scenario.profiles)
        answer = plan(job)
    except TunerError as error:
        answer = Answer(error=" ".join(str(error).split()))
    if answer.plan is None:
        return Checked(
            result=_refused(scenario, kind, Verdict.ERROR, answer.error), scenario=scenario
        )
    try:
        before = before_of(scenario, job, plan=plan_theirs, other=other)
        if before.plan is None:
            verdict = Verdict.MISSING if other is None else Verdict.INCOMPARABLE
            result = _refused(scenario, kind, verdict, before.error)
        else:
            if is_laborious(before.effort, answer.effort):
                answer = lighter(answer, plan(job))
            result = _compared(scenario, job, before, answer, manner=manner, plan=plan)
    except (TunerError, ProfilerError) as error:
        result = _refused(scenario, kind, Verdict.ERROR, " ".join(str(error).split()))
    return Checked(result=result, scenario=scenario, plan=answer.plan, effort=answer.effort)


def _compared(
    scenario: Scenario, job: Job, before: Before, answer: Answer, *, manner: Manner, plan: Plan
) -> ScenarioResult:
    assert before.plan is not None
    assert answer.plan is not None
    try:
        accepted = observed(before.plan)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanUnreadableError(
            f"{before.name}: its plan lacks what is compared ({error})"
        ) from error
    beside = (
        *measurement_findings(scenario, before.baseline),
        *effort_findings(before.effort, answer.effort),
    )
    found = observed(answer.plan)
    judged = judge(accepted, found, tolerance=manner.tolerance, beside=beside)
    if judged.verdict is Verdict.REGRESSION and is_worth_repricing(accepted, found):
        assert accepted.decision is not None
        price = repriced(job, accepted.decision, plan=plan)
        judged = judge(
            accepted, found, tolerance=manner.tolerance, beside=beside, price_today=price
        )
    return ScenarioResult(
        name=scenario.name,
        kind=job.kind,
        verdict=judged.verdict,
        reason=judged.reason,
        changes=judged.changes,
        effort=answer.effort,
        file=str(scenario.spec),
    )


def _refused(scenario: Scenario, kind: str, verdict: Verdict, reason: str) -> ScenarioResult:
    return ScenarioResult(
        name=scenario.name, kind=kind, verdict=verdict, reason=reason, file=str(scenario.spec)
    )
