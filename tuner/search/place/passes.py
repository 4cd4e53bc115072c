"""The fit passes that placements are scored on under a dispatch rule."""

from collections.abc import Sequence
from typing import Final

from solvers.placement.dispatch.sampling import PASS_BY_PASS
from solvers.placement.ranks import Floats, Placement, Ranks
from tuner.search.place.evaluation import evaluate
from tuner.search.place.evidence import WorkloadEvidence, spread_passes
from tuner.spec.place import Dispatch

MOST_PASSES: Final = 32
"""Passes scored under a rule that acts pass by pass."""

MOST_SOLVED_PASSES: Final = 8
"""Passes scored where each takes a linear program per layer."""


def is_per_pass(dispatch: str) -> bool:
    """Return whether a rule acts pass by pass, so that the mean pass does not represent it."""
    return dispatch in PASS_BY_PASS or dispatch == Dispatch.LEAST_LOADED.value


def scoring_passes(one: WorkloadEvidence, dispatch: str) -> Floats:
    """Return the passes to score a rule on: the mean pass, or several where the rule needs them.

    Rules that act pass by pass (by the imbalance or the best split of a pass) are scored on
    recorded passes.
    """
    if not is_per_pass(dispatch):
        return one.fit_LE[None]
    return spread_passes(
        one.fit_PLE, MOST_SOLVED_PASSES if dispatch in PASS_BY_PASS else MOST_PASSES
    )


def fit_imbalances(
    evidence: Sequence[WorkloadEvidence], placement: Placement, *, ranks: Ranks, dispatch: str
) -> list[float]:
    """Return each workload's imbalance on its scoring passes, under a rule that acts on each."""
    return [
        evaluate(
            placement, load_PLE=scoring_passes(one, dispatch), ranks=ranks, dispatch=dispatch
        ).imbalance
        for one in evidence
    ]
