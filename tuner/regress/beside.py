"""Findings on what a plan was made from: its measurements, and the effort of planning.

Effort is compared in loops (tuner/regress/worker.py) and over idle memory, with wide limits: it
detects a search that became many times slower, and does not benchmark one.
"""

from collections.abc import Iterator
from typing import Final

from tuner.regress.baseline import Baseline
from tuner.regress.measurements import (
    MeasuredBefore,
    families,
    folder_sha256,
    other_hardware,
    other_software,
    sum_up,
)
from tuner.regress.records import AcceptedChange, PlanningCost, ScenarioVerdict
from tuner.regress.rules import Finding
from tuner.regress.scenarios import Scenario, measured_profiles
from tuner.regress.workers import PlanResult

LOOPS_RATIO: Final = 4.0
"""Processor time, in loops, may grow by this factor: neighbours on a shared machine slow memory
and arithmetic differently."""
LEAST_LOOPS: Final = 500.0
"""Growth below this many loops, about a second, is not reported."""
MEMORY_RATIO: Final = 2.0
"""Peak memory, over what is resident before, may grow by this factor."""

MOST_NAMED: Final = 2
"""Families of cases, and pieces of software, that a reason names."""


def measurement_findings(scenario: Scenario, baseline: Baseline | None) -> Iterator[Finding]:
    """Compare the profiles with those that the accepted plan was made from."""
    if baseline is None:
        return
    for folder in measured_profiles(scenario):
        before = baseline.profiles.get(folder.name)
        if before is not None and before.sha256 != folder_sha256(folder):
            yield from _profile(folder.name, before, sum_up(folder))


def _profile(name: str, before: MeasuredBefore, now: MeasuredBefore) -> Iterator[Finding]:
    anew = AcceptedChange(what=f"profile {name}", accepted=before.sha256, found=now.sha256)
    hardware = other_hardware(before.machine, now.machine)
    if hardware:
        yield Finding(
            verdict=ScenarioVerdict.INCOMPARABLE,
            words=f"profile {name!r} is of another machine: {hardware}; accept it with --update",
            changes=(anew,),
        )
        return
    software = other_software(before.machine, now.machine)
    software_note = f" ({', '.join(software[:MOST_NAMED])})" if software else ""
    yield Finding(
        verdict=ScenarioVerdict.DRIFT,
        words=f"profile {name!r} was measured anew{software_note}",
        changes=(anew,),
    )
    changed = families(before, now)
    for verdict in (ScenarioVerdict.REGRESSION, ScenarioVerdict.MISSING, ScenarioVerdict.BETTER):
        some = [family for family in changed if family.verdict is verdict]
        if some:
            more = f" and {len(some) - MOST_NAMED} more" if len(some) > MOST_NAMED else ""
            words = "; ".join(family.words for family in some[:MOST_NAMED])
            yield Finding(
                verdict=verdict if verdict is ScenarioVerdict.REGRESSION else ScenarioVerdict.DRIFT,
                words=f"profile {name!r}{software_note}: {words}{more}",
                changes=tuple(family.change for family in some),
            )


def effort_findings(before: PlanningCost | None, now: PlanningCost | None) -> Iterator[Finding]:
    """Report where planning takes much more time or memory than before."""
    if before is None or now is None:
        return
    if now.loops > LOOPS_RATIO * before.loops and now.loops - before.loops > LEAST_LOOPS:
        yield _grown("solve effort, in loops", before.loops, now.loops)
    if now.memory_ratio > MEMORY_RATIO * before.memory_ratio:
        yield _grown("solve memory, over idle", before.memory_ratio, now.memory_ratio)


def _grown(what: str, before: float, now: float) -> Finding:
    return Finding(
        verdict=ScenarioVerdict.REGRESSION,
        words=f"{what}: {before:.3g} -> {now:.3g}, x{now / before:.1f}",
        changes=(
            AcceptedChange(
                what=what, accepted=before, found=now, ratio=now / before, weight="worse"
            ),
        ),
    )


def took_much_longer(before: PlanningCost | None, now: PlanningCost | None) -> bool:
    """Whether planning seems to take much more than before, so that a second run is worth it."""
    return any(True for _ in effort_findings(before, now))


def lighter_result(first: PlanResult, second: PlanResult) -> PlanResult:
    """Return the result that took less: other load on the machine only adds."""
    if first.effort is None or second.effort is None:
        return first
    return min((first, second), key=lambda one: one.effort.loops if one.effort else 0.0)
