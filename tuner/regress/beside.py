"""What stands beside a plan: the measurements that it was made from, and the effort of making it.

Effort is compared in loops (tuner/regress/worker.py) and over idle memory, with wide limits: it is
there to notice a search that became many times as long, not to time one.
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
from tuner.regress.records import Change, Effort, Verdict
from tuner.regress.rules import Finding
from tuner.regress.scenarios import Scenario, measured_on
from tuner.regress.workers import Answer

LOOPS_RATIO: Final = 4.0
"""Processor time, in loops, may grow by this factor: neighbours on a shared machine slow memory
and arithmetic differently."""
LEAST_LOOPS: Final = 500.0
"""Growth below this many loops, about a second, is not told."""
MEMORY_RATIO: Final = 2.0
"""Peak memory, over what is resident before, may grow by this factor."""

MOST_NAMED: Final = 2
"""Families of cases, and pieces of software, that a reason names."""


def measurement_findings(scenario: Scenario, baseline: Baseline | None) -> Iterator[Finding]:
    """What became of the profiles that the accepted plan was made from."""
    if baseline is None:
        return
    for folder in measured_on(scenario):
        before = baseline.profiles.get(folder.name)
        if before is not None and before.sha256 != folder_sha256(folder):
            yield from _profile(folder.name, before, sum_up(folder))


def _profile(name: str, before: MeasuredBefore, now: MeasuredBefore) -> Iterator[Finding]:
    anew = Change(what=f"profile {name}", accepted=before.sha256, found=now.sha256)
    hardware = other_hardware(before.machine, now.machine)
    if hardware:
        yield Finding(
            verdict=Verdict.INCOMPARABLE,
            words=f"profile {name!r} is of another machine: {hardware}; accept it with --update",
            changes=(anew,),
        )
        return
    software = other_software(before.machine, now.machine)
    told = f" ({', '.join(software[:MOST_NAMED])})" if software else ""
    yield Finding(
        verdict=Verdict.DRIFT, words=f"profile {name!r} was measured anew{told}", changes=(anew,)
    )
    found = families(before, now)
    for verdict in (Verdict.REGRESSION, Verdict.MISSING, Verdict.BETTER):
        some = [family for family in found if family.verdict is verdict]
        if some:
            more = f" and {len(some) - MOST_NAMED} more" if len(some) > MOST_NAMED else ""
            words = "; ".join(family.words for family in some[:MOST_NAMED])
            yield Finding(
                verdict=verdict if verdict is Verdict.REGRESSION else Verdict.DRIFT,
                words=f"profile {name!r}{told}: {words}{more}",
                changes=tuple(family.change for family in some),
            )


def effort_findings(before: Effort | None, now: Effort | None) -> Iterator[Finding]:
    """Say where planning takes much more than it took."""
    if before is None or now is None:
        return
    if now.loops > LOOPS_RATIO * before.loops and now.loops - before.loops > LEAST_LOOPS:
        yield _grown("solve effort, in loops", before.loops, now.loops)
    if now.memory_ratio > MEMORY_RATIO * before.memory_ratio:
        yield _grown("solve memory, over idle", before.memory_ratio, now.memory_ratio)


def _grown(what: str, before: float, now: float) -> Finding:
    return Finding(
        verdict=Verdict.REGRESSION,
        words=f"{what}: {before:.3g} -> {now:.3g}, x{now / before:.1f}",
        changes=(
            Change(what=what, accepted=before, found=now, ratio=now / before, weight="worse"),
        ),
    )


def is_laborious(before: Effort | None, now: Effort | None) -> bool:
    """Whether planning seems to take much more than it took, so that it is worth a second try."""
    return any(True for _ in effort_findings(before, now))


def lighter(first: Answer, second: Answer) -> Answer:
    """Return the answer that took less, as a neighbour can only add."""
    if first.effort is None or second.effort is None:
        return first
    return min((first, second), key=lambda one: one.effort.loops if one.effort else 0.0)
