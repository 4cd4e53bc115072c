"""The reference of a comparison: the accepted plan, or the plan of another version."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.regress.baseline import Baseline, read_accepted, read_baseline
from tuner.regress.scenarios import SPEC_NAME, Scenario, read_checks
from tuner.regress.versions import OtherVersion
from tuner.regress.workers import PlanningJob, PlanResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A plan to compare with, or in one line why there is none."""

    name: str
    plan: Mapping[str, Any] | None = None
    baseline: Baseline | None = None
    error: str = ""


def find_reference(
    scenario: Scenario,
    job: PlanningJob,
    *,
    plan: Callable[[PlanningJob], PlanResult] | None,
    other: OtherVersion | None,
) -> Reference:
    """Find the reference of a scenario.

    Args:
        scenario: as it is today.
        job: that plans it.
        plan: plans with the other version; None where accepted plans are compared with.
        other: the other version; None: the accepted plans.

    Raises:
        PlanUnreadableError: an accepted plan is damaged or of a newer schema.
    """
    then = scenario_then(scenario, other)
    if then is None:
        return Reference(name=_name(other), error=f"{_name(other)} has no such scenario")
    if plan is None or other is None:
        return _accepted(then)
    result = plan(PlanningJob(kind=job.kind, spec=then.spec, profiles=then.profiles))
    if result.plan is None:
        return Reference(name=other.name, error=f"{other.name} cannot plan it: {result.error}")
    return Reference(name=other.name, plan=result.plan)


def scenario_then(scenario: Scenario, other: OtherVersion | None) -> Scenario | None:
    """Return the scenario of the other version; None where it has none."""
    folder = None if other is None else (other.plans or other.checks)
    if folder is None:
        return scenario
    is_single = (folder / SPEC_NAME).is_file()
    at = folder if is_single else folder / scenario.name
    if not (at / SPEC_NAME).is_file():
        return None
    (then,) = read_checks(at).scenarios
    return then


def _name(other: OtherVersion | None) -> str:
    return "" if other is None else other.name


def _accepted(scenario: Scenario) -> Reference:
    file = scenario.plan_file
    accepted = read_accepted(file)
    if accepted is None:
        return Reference(
            name=str(file), error=f"no accepted plan ({file.name}); accept today's with --update"
        )
    return Reference(name=str(file), plan=accepted, baseline=read_baseline(scenario.baseline_file))
