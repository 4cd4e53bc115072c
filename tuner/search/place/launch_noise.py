"""Uncertainty of a gain from the random tables of static dispatch.

    W workloads   D launches   L layers   G ranks

The engine draws its table once per launch, from a random stream over all decoder layers. A
recording of some layers does not tell their part of the stream, so the gain is evaluated under one
table, and another table has another gain. With every layer recorded the table is the engine's.
"""

from typing import Final

import numpy as np

from solvers.placement.balance.check import launch_times
from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch
from solvers.placement.ranks import Floats, Placement
from tuner.search.place.comparison import placement_ranks
from tuner.search.place.evaluation import evaluate_loads
from tuner.search.place.evidence import WorkloadEvidence, weight_W
from tuner.search.place.prices import Pricing
from tuner.search.place.verdict import CONFIDENCE_FACTOR
from tuner.spec.place import Dispatch
from tuner.spec.place_read import PlaceSpec

SEED: Final = 90_001
"""Seed of launches that neither choices nor certificates use."""


def launch_noise(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    chosen: Placement,
    pricing: Pricing | None,
    *,
    dispatch: str,
    beside: Placement | None = None,
) -> float:
    """Return the uncertainty of the saved share between launches, at 95 %.

    Args:
        spec: what to plan.
        evidence: with the hold-out passes.
        chosen: the plan's placement.
        pricing: of seconds; None: loads count.
        dispatch: the dispatch rule.
        beside: the placement to compare with; None: the current one.
    """
    if dispatch != Dispatch.STATIC.value or is_table_known(spec):
        return 0.0
    before_D, after_D = (
        weight_W(evidence) @ np.stack([_cost_D(spec, one, placement, pricing) for one in evidence])
        for placement in (beside or spec.current, chosen)
    )
    return float(CONFIDENCE_FACTOR * np.std(1.0 - after_D / before_D, ddof=1))


def is_table_known(spec: PlaceSpec) -> bool:
    """Whether every layer of the engine's random stream was recorded, as far as is stated."""
    is_stated = spec.model is not None or any(
        one.num_decoder_layers is not None for one in spec.recordings.values()
    )
    return is_stated and len(spec.layer_ids) == spec.num_layers


def _cost_D(
    spec: PlaceSpec, one: WorkloadEvidence, placement: Placement, pricing: Pricing | None
) -> Floats:
    """Seconds of the mean hold-out pass in each launch; its imbalance where nothing is priced."""
    ranks, mean_LE = placement_ranks(spec, placement), one.holdout_PLE.mean(axis=0)
    problem = BalanceProblem(
        load_WLE=mean_LE[None], weight_W=np.ones(1), ranks=ranks, dispatch=ReplicaDispatch.STATIC
    )
    copies_DLG = launch_times(problem, placement, seed=SEED)[:, 0] * ranks.speed_G
    evaluation = evaluate_loads(copies_DLG, ranks=ranks)
    if pricing is None:
        return evaluation.imbalance_P
    return pricing.price(
        placement,
        evaluation,
        load_PLE=np.repeat(mean_LE[None], len(copies_DLG), axis=0),
        ranks=ranks,
        token_LTK=one.holdout_LTK,
    ).pass_P
