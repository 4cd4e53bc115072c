"""Rank loads of a placement on recorded passes, under the engine's dispatch rule.

    P passes   L layers   G ranks   E experts

Every pass is split over the replicas as the engine does it; the other ranks wait for the
most-loaded rank of each layer. A rank's load is divided by its speed. The imbalance of a pass is
the sum over layers of the largest loads, over the sum of the means.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from solvers.placement.dispatch import launches
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.least_loaded import LeastLoaded
from solvers.placement.dispatch.least_loaded import plan as least_loaded_plan
from solvers.placement.dispatch.sampling import PASS_BY_PASS, expected_loads
from solvers.placement.ranks import Floats, Placement, Ranks
from tuner.plans.place import Band, PassSpread
from tuner.search.place.evidence import WorkloadEvidence, spread_passes
from tuner.spec.place import Dispatch

SEED: Final = 90_001
"""Seed of the launches drawn for evaluation; choices and certificates use others."""

MOST_PASSES: Final = 32
"""Passes scored under a rule that acts pass by pass."""

MOST_SOLVED: Final = 8
"""Passes scored where each takes a linear program per layer."""

STATED_RATIO = 0.9
"""Share of passes inside a printed band."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """One placement on the passes of one workload."""

    copies_PLG: Floats
    """Token copies of each rank; the passes may be the evaluated ones several times over."""
    ratio_PL: Floats
    """Largest load over the mean."""
    imbalance_P: Floats
    active_PLG: Floats | None = None
    """Experts that each rank reads, where the rule decides that; None: replicas share equally."""
    weights_PLG: Floats | None = None
    """Experts whose weights a rank sends or receives in the pass, the larger of the two; None: no
    weights move."""
    num_launches: int = 1
    """Launches with tables of their own that neighbouring passes belong to."""

    @property
    def imbalance(self) -> float:
        """Mean over passes."""
        return float(self.imbalance_P.mean())

    @property
    def band(self) -> Band:
        """The range that holds nine of ten passes."""
        tail = (1.0 - STATED_RATIO) / 2.0
        low, high = np.quantile(self.imbalance_P, (tail, 1.0 - tail))
        return float(low), float(high)

    @property
    def spread(self) -> PassSpread:
        """Return the largest load over the mean, over passes and layers."""
        p50, p99 = np.quantile(self.ratio_PL, (0.5, 0.99))
        return PassSpread(p50=float(p50), p99=float(p99))

    @property
    def worst_ratio(self) -> float:
        """Return the worst layer's largest load over the mean, mean over passes."""
        return float(self.ratio_PL.mean(axis=0).max())

    def mean_ratio_LG(self, ranks: Ranks) -> Floats:
        """Load of each rank over the mean of its layer, mean over passes."""
        time_PLG = self.copies_PLG / ranks.speed_G
        mean_PL = self.copies_PLG.sum(axis=2) / ranks.speed_G.sum()
        return np.asarray((time_PLG / mean_PL[:, :, None]).mean(axis=0))


def scoring_passes(workload: WorkloadEvidence, dispatch: str) -> Floats:
    """Return the fit passes to score a rule on: the mean pass, or several where it acts on each.

    Rules that act pass by pass (by the imbalance or the best split of a pass) are scored on
    recorded passes.
    """
    if not is_per_pass(dispatch):
        return workload.fit_LE[None]
    return spread_passes(workload.fit_PLE, MOST_SOLVED if dispatch in PASS_BY_PASS else MOST_PASSES)


def is_per_pass(dispatch: str) -> bool:
    """Return whether a rule acts pass by pass, so that the mean pass does not represent it."""
    return dispatch in PASS_BY_PASS or dispatch == Dispatch.LEAST_LOADED.value


def evaluate(
    placement: Placement, *, load_PLE: Floats, ranks: Ranks, dispatch: str, seed: int = SEED
) -> Evaluation:
    """Split the passes over replicas and find the most-loaded ranks.

    Loads are expected values. `static` assigns replicas once a launch, so its passes are divided
    among launches, repeated in turn where there are fewer. Least-loaded dispatch also says which
    experts a rank reads, and whose weights move.
    """
    case = DispatchCase(load_PLE=load_PLE, placement=placement, ranks=ranks, seed=seed)
    read_PLG = weights_PLG = None
    num_launches = 1
    if dispatch == Dispatch.LEAST_LOADED.value:
        moved = least_loaded_plan(case, knobs=LeastLoaded())
        copies_PLG, read_PLG = moved.load_PLG, moved.active_PLG.astype(np.float64)
        weights_PLG = np.maximum(moved.sent_PLG, moved.received_PLG).astype(np.float64)
    elif dispatch == Dispatch.STATIC.value:
        num_launches = launches.LAUNCHES
        repeats = -(-num_launches // len(load_PLE))
        copies_PLG = launches.loads(replace(case, load_PLE=np.tile(load_PLE, (repeats, 1, 1))))
    else:
        copies_PLG = expected_loads(dispatch, case)
    mean_PL = copies_PLG.sum(axis=2) / ranks.speed_G.sum()
    largest_PL = (copies_PLG / ranks.speed_G).max(axis=2)
    # A pass scaled to very few tokens can have a layer without any: no rank waits there.
    total_P = mean_PL.sum(axis=1)
    some_PL = np.where(mean_PL > 0.0, mean_PL, 1.0)
    return Evaluation(
        copies_PLG=copies_PLG,
        ratio_PL=np.where(mean_PL > 0.0, largest_PL / some_PL, 1.0),
        imbalance_P=np.where(total_P > 0.0, largest_PL.sum(axis=1), 1.0)
        / np.where(total_P > 0.0, total_P, 1.0),
        active_PLG=read_PLG,
        weights_PLG=weights_PLG,
        num_launches=num_launches,
    )


def active_PLG(
    placement: Placement, *, load_PLE: Floats, ranks: Ranks, is_counted: bool = False
) -> Floats:
    """Experts of each rank that at least one token reaches, on average.

    An expert's tokens take any of its r replicas with equal chance, so a load of n reaches a
    replica with probability

        1 - (1 - 1/r)^n      n tokens of a recorded pass
        1 - exp(-n / r)      passes of n tokens on average, Poisson arrivals

    Args:
        placement: of the replicas.
        load_PLE: token copies.
        ranks: with their slots.
        is_counted: loads are those of recorded passes.
    """
    num_layers, num_experts = load_PLE.shape[1:]
    copies_LE = placement.copies_LE(num_experts).astype(np.float64)
    if is_counted:
        missed_PLE = (1.0 - 1.0 / copies_LE) ** load_PLE
    else:
        missed_PLE = np.exp(-load_PLE / copies_LE)
    rows = np.arange(num_layers)[:, None]
    reached_PLS = 1.0 - missed_PLE[:, rows, placement.expert_LS]
    return np.asarray(np.add.reduceat(reached_PLS, ranks.first_slot_G, axis=2))
