"""One deadline for a plan, and the passes that linear programs are solved for until then.

    P passes   L layers

Searches are told how long they may take; what comes between them is not. Almost all of that is
linear programs, one for a layer and a pass of every placement that is weighed or judged. What one
pass takes is measured first, and as many passes are looked at as fit in what is left.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from solvers.placement.dispatch.sampling import PASS_BY_PASS
from solvers.placement.ranks import Floats, Placement, Ranks
from tuner.planner.place.evaluation import judge
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.passes import MOST_SOLVED_PASSES

LEAST_JUDGED: Final = 2
"""Passes of a workload: one says nothing of how passes differ."""

LEAST_PROGRAMS_S: Final = 0.8
"""For linear programs in each step, however short the limit is: small cases are looked at whole."""

MARGIN_RATIO: Final = 1.25
"""Of measured seconds: other placements take more rounds than the one that was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """When a plan is due."""

    limit_s: float
    until_s: float
    """By the clock."""
    clock: Callable[[], float] = time.perf_counter

    @property
    def left_s(self) -> float:
        """Seconds until then, 0 after it."""
        return max(self.until_s - self.clock(), 0.0)

    def share_s(self, ratio: float) -> float:
        """Return a share of the whole limit, of which no more than what is left."""
        return min(ratio * self.limit_s, self.left_s)


def pass_seconds(
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    *,
    ranks: Ranks,
    clock: Callable[[], float],
) -> float:
    """Measure what the linear programs of all layers of one pass take."""
    took_s = []
    # The first also loads and warms what it runs on.
    for load_LE in evidence[0].whole_PLE[:2]:
        started_s = clock()
        judge(placement, load_PLE=load_LE[None], ranks=ranks, dispatch=min(PASS_BY_PASS))
        took_s.append(clock() - started_s)
    return MARGIN_RATIO * min(took_s)


def fewer_planned(
    evidence: Sequence[WorkloadEvidence], *, placements: int, pass_s: float, time_s: float
) -> tuple[WorkloadEvidence, ...]:
    """Keep as many planned passes to weigh placements on as are solved in time, 1 at least."""
    most = _affordable(placements * len(evidence), pass_s=pass_s, time_s=time_s)
    most = max(1, min(most, MOST_SOLVED_PASSES))
    return tuple(_with(one, planned=most, judged=None) for one in evidence)


def fewer_judged(
    evidence: Sequence[WorkloadEvidence], *, placements: int, pass_s: float, time_s: float
) -> tuple[WorkloadEvidence, ...]:
    """Keep as many judged passes as are solved in time, at least `LEAST_JUDGED`."""
    most = _affordable(placements * len(evidence), pass_s=pass_s, time_s=time_s)
    return tuple(_with(one, planned=None, judged=max(LEAST_JUDGED, most)) for one in evidence)


def fewer_note(
    evidence: Sequence[WorkloadEvidence], looked_at: Sequence[WorkloadEvidence]
) -> tuple[str, ...]:
    """Say in a line which workloads were judged on fewer passes than they have; nothing: none."""
    cut = [
        f"{len(few.judged_PLE)} of {len(one.judged_PLE)} passes of {one.name!r}"
        for one, few in zip(evidence, looked_at, strict=True)
        if len(few.judged_PLE) < len(one.judged_PLE)
    ]
    if not cut:
        return ()
    return (
        f"judged on {', '.join(cut)}, from the first to the last: no more linear programs fit in"
        " the time limit; give more with --time-limit",
    )


def spread(passes: int, most: int) -> list[int]:
    """Return which of some passes to take, from the first to the last."""
    taken = np.linspace(0, passes - 1, min(most, passes))
    return [int(place) for place in taken.round()]


def _affordable(passes_each: int, *, pass_s: float, time_s: float) -> int:
    return int(time_s / max(pass_s * passes_each, 1e-9))


def _with(one: WorkloadEvidence, *, planned: int | None, judged: int | None) -> WorkloadEvidence:
    if not one.is_split:
        return one
    planned_PLE = _some(one.whole_PLE[: one.planned_passes], planned)
    judged_PLE = _some(one.judged_PLE, judged)
    return replace(
        one,
        judged_PLE=judged_PLE,
        whole_PLE=np.concatenate([planned_PLE, judged_PLE]),
        planned_passes=len(planned_PLE),
    )


def _some(load_PLE: Floats, most: int | None) -> Floats:
    if most is None or most >= len(load_PLE):
        return load_PLE
    return load_PLE[spread(len(load_PLE), most)]
