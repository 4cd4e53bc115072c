"""What the draws of static dispatch leave open about a gain.

    W workloads   D launches   L layers   G ranks

The engine draws its table once a launch, from a stream that runs over all decoder layers. A
recording of some of them does not say which part of the stream theirs is: the gain is judged under
one table, and another would show another gain. With every layer recorded the table is the engine's.
"""

from typing import Final

import numpy as np

from solvers.placement.balance.check import launch_times
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.balance.problem import Dispatch as Solved
from solvers.placement.ranks import Floats, Placement
from tuner.planner.place.comparison import ranks_of
from tuner.planner.place.evaluation import judged_of
from tuner.planner.place.evidence import WorkloadEvidence, weight_W
from tuner.planner.place.prices import Pricing
from tuner.planner.place.verdict import CONFIDENCE_FACTOR
from tuner.spec.place import Dispatch
from tuner.spec.place_read import PlaceSpec

SEED: Final = 90_001
"""Of launches that nothing was chosen or certified by."""


def launch_noise(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    chosen: Placement,
    pricing: Pricing | None,
    *,
    dispatch: str,
    beside: Placement | None = None,
) -> float:
    """Return what one launch leaves open of the share that the plan saves, at 95 %.

    Args:
        spec: the question.
        evidence: judged on.
        chosen: the plan's placement.
        pricing: of seconds; None: of loads.
        dispatch: the rule.
        beside: the placement that the share is of; None: what runs.
    """
    if dispatch != Dispatch.STATIC.value or is_table_known(spec):
        return 0.0
    before_D, after_D = (
        weight_W(evidence) @ np.stack([_cost_D(spec, one, placement, pricing) for one in evidence])
        for placement in (beside or spec.current, chosen)
    )
    return float(CONFIDENCE_FACTOR * np.std(1.0 - after_D / before_D, ddof=1))


def is_table_known(spec: PlaceSpec) -> bool:
    """Whether every layer that the engine's stream runs over was recorded, as far as is told."""
    is_told = spec.model is not None or any(
        one.num_decoder_layers is not None for one in spec.recordings.values()
    )
    return is_told and len(spec.layer_ids) == spec.num_layers


def _cost_D(
    spec: PlaceSpec, one: WorkloadEvidence, placement: Placement, pricing: Pricing | None
) -> Floats:
    """Seconds of the mean judged pass in each launch, or its imbalance where nothing is priced."""
    ranks, mean_LE = ranks_of(spec, placement), one.judged_PLE.mean(axis=0)
    problem = BalanceProblem(
        load_WLE=mean_LE[None], weight_W=np.ones(1), ranks=ranks, dispatch=Solved.STATIC
    )
    copies_DLG = launch_times(problem, placement, seed=SEED)[:, 0] * ranks.speed_G
    judged = judged_of(copies_DLG, ranks=ranks)
    if pricing is None:
        return judged.imbalance_P
    return pricing.price(
        placement,
        judged,
        load_PLE=np.repeat(mean_LE[None], len(copies_DLG), axis=0),
        ranks=ranks,
        token_LTK=one.judged_LTK,
    ).pass_P
