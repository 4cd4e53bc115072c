"""Number of passes whose linear programs can be solved until the deadline of a plan.

    P passes   L layers

Searches have time limits; the steps between them have none. Almost all of their time goes to linear
programs, one per layer, pass and placement that is scored or evaluated. One pass is timed first,
and the number of passes is limited to what fits in the time left.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from solvers.placement.dispatch.sampling import PASS_BY_PASS
from solvers.placement.ranks import Placement, Ranks
from tuner.search.place.evaluation import evaluate
from tuner.search.place.evidence import WorkloadEvidence, spread_passes
from tuner.search.place.passes import MOST_SOLVED_PASSES

MIN_HOLDOUT_PASSES: Final = 2
"""Fewest hold-out passes of a workload: one pass does not show how passes differ."""

MIN_LP_S: Final = 0.8
"""Minimum time for linear programs in each step, so that small cases use all passes."""

MARGIN_RATIO: Final = 1.25
"""Factor on measured seconds: other placements may take more rounds than the one that was timed."""


def pass_seconds(
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    *,
    ranks: Ranks,
    clock: Callable[[], float],
) -> float:
    """Time the linear programs of all layers of one pass."""
    took_s = []
    # The first run includes imports and warm-up.
    for load_LE in evidence[0].whole_PLE[:2]:
        started_s = clock()
        evaluate(placement, load_PLE=load_LE[None], ranks=ranks, dispatch=min(PASS_BY_PASS))
        took_s.append(clock() - started_s)
    return MARGIN_RATIO * min(took_s)


def limit_fit_passes(
    evidence: Sequence[WorkloadEvidence], *, placements: int, pass_s: float, time_s: float
) -> tuple[WorkloadEvidence, ...]:
    """Limit the fit passes for scoring to what is solved in time, at least 1."""
    most = _affordable(placements * len(evidence), pass_s=pass_s, time_s=time_s)
    most = max(1, min(most, MOST_SOLVED_PASSES))
    return tuple(_limit_passes(one, num_fit=most, num_holdout=None) for one in evidence)


def limit_holdout_passes(
    evidence: Sequence[WorkloadEvidence], *, placements: int, pass_s: float, time_s: float
) -> tuple[WorkloadEvidence, ...]:
    """Limit the hold-out passes to what is solved in time, at least `MIN_HOLDOUT_PASSES`."""
    most = _affordable(placements * len(evidence), pass_s=pass_s, time_s=time_s)
    return tuple(
        _limit_passes(one, num_fit=None, num_holdout=max(MIN_HOLDOUT_PASSES, most))
        for one in evidence
    )


def limit_note(
    evidence: Sequence[WorkloadEvidence], reduced: Sequence[WorkloadEvidence]
) -> tuple[str, ...]:
    """Return a note on workloads evaluated on fewer passes than they have; empty: none."""
    cut = [
        f"{len(few.holdout_PLE)} of {len(one.holdout_PLE)} passes of {one.name!r}"
        for one, few in zip(evidence, reduced, strict=True)
        if len(few.holdout_PLE) < len(one.holdout_PLE)
    ]
    if not cut:
        return ()
    return (
        f"evaluated on {', '.join(cut)}, evenly spaced: no more linear programs fit in the time"
        " limit; give more with --time-limit",
    )


def _affordable(passes_each: int, *, pass_s: float, time_s: float) -> int:
    return int(time_s / max(pass_s * passes_each, 1e-9))


def _limit_passes(
    one: WorkloadEvidence, *, num_fit: int | None, num_holdout: int | None
) -> WorkloadEvidence:
    if not one.is_split:
        return one
    fit_PLE = spread_passes(one.fit_PLE, num_fit or one.num_fit_passes)
    holdout_PLE = spread_passes(one.holdout_PLE, num_holdout or len(one.holdout_PLE))
    return replace(
        one,
        holdout_PLE=holdout_PLE,
        whole_PLE=np.concatenate([fit_PLE, holdout_PLE]),
        num_fit_passes=len(fit_PLE),
    )
