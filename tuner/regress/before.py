"""The other side of a comparison: the plan that was accepted, or that another version makes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.regress.baseline import Baseline, read_accepted, read_baseline
from tuner.regress.records import Effort
from tuner.regress.scenarios import SPEC_NAME, Scenario, read_checks
from tuner.regress.versions import Other
from tuner.regress.workers import Answer, Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """A plan to compare with, or one line that says why there is none."""

    name: str
    plan: Mapping[str, Any] | None = None
    effort: Effort | None = None
    baseline: Baseline | None = None
    error: str = ""


def before_of(
    scenario: Scenario, job: Job, *, plan: Callable[[Job], Answer] | None, other: Other | None
) -> Before:
    """Find what a scenario is compared with.

    Args:
        scenario: as it is today.
        job: that plans it.
        plan: plans with the other version; None where accepted plans are compared with.
        other: the other state; None: what was accepted.

    Raises:
        PlanUnreadableError: an accepted plan is damaged or of a newer schema.
    """
    then = scenario_then(scenario, other)
    if then is None:
        return Before(name=_name(other), error=f"{_name(other)} has no such scenario")
    if plan is None or other is None:
        return _accepted(then)
    answer = plan(Job(kind=job.kind, spec=then.spec, profiles=then.profiles))
    if answer.plan is None:
        return Before(name=other.name, error=f"{other.name} cannot plan it: {answer.error}")
    return Before(name=other.name, plan=answer.plan, effort=answer.effort)


def scenario_then(scenario: Scenario, other: Other | None) -> Scenario | None:
    """Return a scenario as the other state has it; None where it does not."""
    folder = None if other is None else (other.plans or other.checks)
    if folder is None:
        return scenario
    is_single = (folder / SPEC_NAME).is_file()
    at = folder if is_single else folder / scenario.name
    if not (at / SPEC_NAME).is_file():
        return None
    (then,) = read_checks(at).scenarios
    return then


def _name(other: Other | None) -> str:
    return "" if other is None else other.name


def _accepted(scenario: Scenario) -> Before:
    file = scenario.plan_file
    accepted = read_accepted(file)
    if accepted is None:
        return Before(
            name=str(file), error=f"no accepted plan ({file.name}); accept today's with --update"
        )
    baseline = read_baseline(scenario.baseline_file)
    return Before(
        name=str(file),
        plan=accepted,
        effort=None if baseline is None else baseline.effort,
        baseline=baseline,
    )
