"""Balance: the most-loaded rank of every layer should have as little to do as possible.

    W workloads   L layers   E experts   G ranks   S slots of a layer

Replicas of an expert share its load evenly. The cost of one replica of expert e in r copies is

    c(w, l, e, r) = load / r + active_load * (1 - exp(-load / r))

The second term is what a replica costs as soon as one token reaches it (its weights are read: a
memory-bound decode step, Janus, arXiv 2512.13525), tokens taken as Poisson arrivals of mean
load / r a pass; with `active_load` 0, the default, only token counts matter and loads may have any
unit. A rank's time is the sum over its slots divided by its speed. The imbalance of a workload is

    imbalance(w) = sum_l max_g time(w, l, g) / sum_l mean(w, l),  mean = sum_e load / sum_g speed

and the objective is the weighted mean of the imbalances over workloads, the worst of them, or the
mean of the worst share of the weight (CVaR, Rockafellar and Uryasev 2000). It is never the
imbalance of the mean load: a placement that is even on the mean can be uneven on every workload.

With another `dispatch` the shares are those of near and of far replicas, with as many tokens from
every rank. Static dispatch assigns the far ones once a launch: max_g time is then its mean over
`LAUNCHES` launches of `check.py`, drawn by numbers that no runtime has.

True for runtimes that wait for the slowest rank in each layer and split a replicated expert's
tokens evenly (EPLB's assumption) or as `dispatch` says. Not covered: traffic between ranks.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from solvers.placement.ranks import Floats, Placement, Ranks


class ReplicaDispatch(StrEnum):
    """Rule by which the runtime splits an expert's tokens over its replicas."""

    EVEN = "even"
    """Equal shares for all replicas; also what a draw for each token expects."""
    NEAR = "near_dynamic"
    """The one near a source rank takes its tokens (`dispatch/launches.py`), all equally those of
    ranks that have none near: what a draw for each token expects beside an all-to-all backend."""
    STATIC = "static"
    """The near one, or one that is assigned once a launch (`dispatch/launches.py`)."""

    @property
    def is_near(self) -> bool:
        """Return whether the split of tokens depends on where replicas are."""
        return self is not ReplicaDispatch.EVEN


class Robust(StrEnum):
    """Aggregate of several workloads' imbalances."""

    MEAN = "mean"
    """Weighted mean of the imbalances."""
    WORST = "worst"
    """The largest."""
    CVAR = "cvar"
    """The weighted mean of the worst `tail_ratio` of the weight."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Migration:
    """A limit on how far a placement may lie from the one that runs."""

    current: Placement
    most_moved: int
    """Largest number of experts, over all layers, that a rank must load because it lacked them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BalanceProblem:
    """Loads to be spread.

    Raises:
        ValueError: a shape is wrong, a load or weight is negative or not a number, a layer has no
            load at all, there are more experts than slots, or the current placement is not a
            placement of these experts on these ranks.
    """

    load_WLE: Floats
    """Token copies, a pass on average or in all; any unit unless `active_load` is set."""
    weight_W: Floats
    """Weight of each workload, positive; they sum to 1."""
    ranks: Ranks
    robust: Robust = Robust.MEAN
    tail_ratio: float = 0.5
    """Share of the weight that CVaR looks at, in (0, 1]."""
    active_load: float = 0.0
    """Cost of reading one replica's weights, in token copies."""
    migration: Migration | None = None
    dispatch: ReplicaDispatch = ReplicaDispatch.EVEN

    def __post_init__(self) -> None:
        if self.load_WLE.ndim != 3 or 0 in self.load_WLE.shape:
            raise ValueError("loads are [workloads][layers][experts], none of them empty")
        num_workloads, _, num_experts = self.load_WLE.shape
        if not np.isfinite(self.load_WLE).all() or (self.load_WLE < 0.0).any():
            raise ValueError("every load must be a non-negative number")
        if (self.load_WLE.sum(axis=-1) <= 0.0).any():
            raise ValueError("every layer of every workload needs some load")
        if self.weight_W.shape != (num_workloads,) or not (self.weight_W > 0.0).all():
            raise ValueError("every workload needs a positive weight")
        if abs(float(self.weight_W.sum()) - 1.0) > 1e-9:
            raise ValueError("weights of workloads must sum to 1")
        if not 0.0 < self.tail_ratio <= 1.0 or not 0.0 <= self.active_load < np.inf:
            raise ValueError("tail_ratio must be in (0, 1] and active_load at least 0")
        if num_experts > self.ranks.num_slots:
            raise ValueError(
                f"{self.ranks.num_slots} slots on {self.ranks.num_ranks} ranks cannot hold"
                f" {num_experts} experts"
            )
        if self.migration is not None:
            self._check_migration(self.migration)
        for array in (self.load_WLE, self.weight_W):
            array.setflags(write=False)

    def _check_migration(self, migration: Migration) -> None:
        expert_LS = migration.current.expert_LS
        expected = (self.num_layers, self.ranks.num_slots)
        if expert_LS.shape != expected:
            raise ValueError(f"the current placement is {expert_LS.shape}, expected {expected}")
        if expert_LS.min() < 0 or expert_LS.max() >= self.num_experts:
            raise ValueError(
                f"the current placement names experts outside 0..{self.num_experts - 1}"
            )
        if (migration.current.copies_LE(self.num_experts) == 0).any():
            raise ValueError("the current placement lacks an expert in some layer")
        if migration.most_moved < 0:
            raise ValueError(f"most_moved is {migration.most_moved}, it must be at least 0")

    @property
    def num_workloads(self) -> int:
        """W."""
        return int(self.load_WLE.shape[0])

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.load_WLE.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.load_WLE.shape[2])

    @property
    def mean_WL(self) -> Floats:
        """Time of every rank if the load could be spread perfectly."""
        return np.asarray(self.load_WLE.sum(axis=2) / self.ranks.speed_G.sum())
