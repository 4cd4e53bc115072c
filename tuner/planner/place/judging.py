"""What a placement does to recorded passes under the engine's own dispatch rule.

    P passes   L layers   G ranks   E experts

Every pass is shared out over the replicas as the engine does it; the busiest rank of each layer is
what the others wait for. A rank's load counts over its speed. The imbalance of a pass is the sum of
the largest loads over the sum of the means, over its layers.
"""

from dataclasses import dataclass

import numpy as np

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.registry import rank_loads
from solvers.placement.ranks import Floats, Placement, Ranks
from tuner.place_plan import Band, PassSpread

STATED_RATIO = 0.9
"""Share of passes that a printed band holds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """One placement on the passes of one workload."""

    copies_PLG: Floats
    """Token copies of each rank."""
    ratio_PL: Floats
    """Largest load over the mean."""
    imbalance_P: Floats

    @property
    def imbalance(self) -> float:
        """Mean over passes."""
        return float(self.imbalance_P.mean())

    @property
    def band(self) -> Band:
        """Between which values nine of ten passes lie."""
        tail = (1.0 - STATED_RATIO) / 2.0
        low, high = np.quantile(self.imbalance_P, (tail, 1.0 - tail))
        return float(low), float(high)

    @property
    def spread(self) -> PassSpread:
        """Over passes and layers."""
        p50, p99 = np.quantile(self.ratio_PL, (0.5, 0.99))
        return PassSpread(p50=float(p50), p99=float(p99), mean=float(self.ratio_PL.mean()))

    @property
    def worst_ratio(self) -> float:
        """Of the worst layer, mean over passes."""
        return float(self.ratio_PL.mean(axis=0).max())

    def mean_ratio_LG(self, ranks: Ranks) -> Floats:
        """Load of each rank over the mean of its layer, mean over passes."""
        time_PLG = self.copies_PLG / ranks.speed_G
        mean_PL = self.copies_PLG.sum(axis=2) / ranks.speed_G.sum()
        return np.asarray((time_PLG / mean_PL[:, :, None]).mean(axis=0))


def judge(
    placement: Placement,
    *,
    load_PLE: Floats,
    ranks: Ranks,
    dispatch: str,
    source_HLE: Floats | None = None,
) -> Judged:
    """Share out the passes and find the busiest ranks."""
    case = DispatchCase(load_PLE=load_PLE, placement=placement, ranks=ranks, source_HLE=source_HLE)
    copies_PLG = rank_loads(dispatch, case)
    time_PLG = copies_PLG / ranks.speed_G
    mean_PL = copies_PLG.sum(axis=2) / ranks.speed_G.sum()
    largest_PL = time_PLG.max(axis=2)
    return Judged(
        copies_PLG=copies_PLG,
        ratio_PL=largest_PL / mean_PL,
        imbalance_P=largest_PL.sum(axis=1) / mean_PL.sum(axis=1),
    )


def active_PLG(placement: Placement, *, load_PLE: Floats, ranks: Ranks) -> Floats:
    """Experts of each rank that at least one token reaches, tokens of a pass as Poisson arrivals.

    Replicas share an expert's tokens evenly.
    """
    num_layers, num_experts = load_PLE.shape[1:]
    copies_LE = placement.copies_LE(num_experts)
    rows = np.arange(num_layers)[:, None]
    share_PLS = (load_PLE / copies_LE)[:, rows, placement.expert_LS]
    reached_PLS = -np.expm1(-share_PLS)
    return np.asarray(np.add.reduceat(reached_PLS, ranks.first_slot_G, axis=2))
