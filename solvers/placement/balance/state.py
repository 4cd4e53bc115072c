"""The placements that a local search works on, layer by layer, with what changes as slots do.

    L layers   W workloads   S slots   G ranks   E experts   N groups of ranks
    M moments of a time: its mean and, where launches differ, its variance over them

Times are relative to each workload's lower bound in that layer, so 1 is as good as can be, in
single precision: the claim's objective is recomputed from the placement, nothing rests on them.
Sums drift by rounding (1e-7 a change), and are made anew whenever a layer is priced.
Ranks add up moments of their slots, taken as independent, and divide the m-th by the m-th power of
their speed. A search sees peaks, mean + caution * deviation.

An expert is put into a group of ranks once. Where near replicas come first a group is a node (one
replica on it serves it, a second one would serve its own rank), and replicas on different nodes
take equal shares, as under an even split. An expert that is in a group twice from the start is
priced as it is, up to date whenever its layer is priced anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from solvers.placement.balance.copies import replica_groups
from solvers.placement.balance.objective import cost_of
from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch
from solvers.placement.dispatch.nearest import near_shares, spread_variance
from solvers.placement.ranks import Floats, Ints, Placement

Singles = npt.NDArray[np.float32]

NEVER_ENTERS = np.iinfo(np.int32).max
"""Value of `until_LGE` for an expert that the rank holds: a second copy there is useless."""


@dataclass(slots=True, kw_only=True, eq=False)
class State:
    """Some layers of a problem; changed in place by the search that owns it."""

    problem: BalanceProblem
    layer_L: Ints
    """Numbers of these layers in the problem."""
    scale_WL: Floats
    """Lower bounds on the times, of these layers; seconds or load."""
    caution: np.float32
    """Standard deviations that a peak lies above the mean."""
    expert_LS: Ints
    copies_LE: Ints
    held_LNE: npt.NDArray[np.int16]
    """Copies of an expert in a group of ranks."""
    until_LGE: npt.NDArray[np.int32]
    """Step before which an expert may not enter a rank."""
    slot_MLWS: Singles
    """Moments of every slot's cost at speed 1, relative to the bound."""
    rank_MLWG: Singles
    """Moments of every rank's time, relative to the bound."""
    group_G: Ints
    """Group of each rank in which an expert may have one copy."""
    best_LS: Ints
    """Best placement of each layer so far."""
    best_time_LW: Floats
    """Its peaks, relative to the bound."""
    improved_L: Ints
    """Step at which the best was found."""

    @classmethod
    def of(
        cls,
        problem: BalanceProblem,
        placement: Placement,
        *,
        layer_L: Ints,
        bound_WL: Floats,
        caution: float = 0.0,
    ) -> Self:
        """Start at some layers of a placement."""
        ranks, group_G = problem.ranks, replica_groups(problem)
        shape_MLW = (
            1 + (problem.dispatch is ReplicaDispatch.STATIC),
            len(layer_L),
            problem.num_workloads,
        )
        expert_LS = placement.expert_LS[layer_L].astype(np.int64)
        row_L1 = np.arange(len(layer_L))[:, None]
        held_LNE = np.zeros(
            (len(layer_L), int(group_G.max()) + 1, problem.num_experts), dtype=np.int16
        )
        np.add.at(held_LNE, (row_L1, group_G[ranks.rank_S], expert_LS), 1)
        until_LGE = np.zeros((len(layer_L), ranks.num_ranks, problem.num_experts), dtype=np.int32)
        until_LGE[row_L1, ranks.rank_S, expert_LS] = NEVER_ENTERS
        state = cls(
            problem=problem,
            layer_L=layer_L,
            scale_WL=bound_WL[:, layer_L],
            caution=np.float32(caution),
            expert_LS=expert_LS,
            copies_LE=placement.copies_LE(problem.num_experts)[layer_L],
            held_LNE=held_LNE,
            until_LGE=until_LGE,
            slot_MLWS=np.empty((*shape_MLW, ranks.num_slots), dtype=np.float32),
            rank_MLWG=np.empty((*shape_MLW, ranks.num_ranks), dtype=np.float32),
            group_G=group_G,
            best_LS=expert_LS.copy(),
            best_time_LW=np.full((len(layer_L), problem.num_workloads), np.inf),
            improved_L=np.zeros(len(layer_L), dtype=np.int64),
        )
        state.price(row_L1[:, 0])
        state.best_time_LW = state.largest_NW(row_L1[:, 0])
        return state

    def price(self, chosen_N: Ints) -> None:
        """Compute moments from the experts in the slots, for the chosen layers."""
        problem, expert_NS = self.problem, self.expert_LS[chosen_N]
        if problem.dispatch.is_near:
            shares = near_shares(expert_NS, ranks=problem.ranks, num_experts=problem.num_experts)
            share_NS, variance_NS = shares.mean_LS, shares.variance_LS
        else:
            share_NS = 1.0 / np.take_along_axis(self.copies_LE[chosen_N], expert_NS, axis=1)
            variance_NS = np.zeros_like(share_NS)
        load_WNE = problem.load_WLE[:, self.layer_L[chosen_N]]
        load_WNS = np.take_along_axis(load_WNE, expert_NS[None], axis=2)
        scale_WN1 = self.scale_WL[:, chosen_N, None]
        moments = (
            cost_of(load_WNS * share_NS, problem.active_load) / scale_WN1,
            np.square(load_WNS / scale_WN1) * variance_NS,
        )
        for moment, (slot_LWS, value_WNS) in enumerate(
            zip(self.slot_MLWS, moments, strict=False), start=1
        ):
            slot_LWS[chosen_N] = value_NWS = value_WNS.transpose(1, 0, 2)
            sum_NWG = np.add.reduceat(value_NWS, problem.ranks.first_slot_G, axis=2)
            self.rank_MLWG[moment - 1, chosen_N] = sum_NWG / problem.ranks.speed_G**moment

    def of_copies(self, moment: int, chosen_N: Ints, copies_NE: Ints) -> Singles:
        """Return a moment of one of so many copies of each expert in distinct groups, [N][W][E]."""
        scale_WN1 = self.scale_WL[:, chosen_N, None]
        load_WNE = self.problem.load_WLE[:, self.layer_L[chosen_N]]
        if moment == 0:
            value_WNE = cost_of(load_WNE / copies_NE, self.problem.active_load) / scale_WN1
        else:
            variance_NE = spread_variance(copies_NE, ranks=self.problem.ranks)
            value_WNE = np.square(load_WNE / scale_WN1) * variance_NE
        return value_WNE.transpose(1, 0, 2).astype(np.float32)

    def peak(self, moment_M: Sequence[Singles] | Singles) -> Singles:
        """Return what the search lowers, given the moments of times."""
        if len(moment_M) == 1:
            return moment_M[0]
        return moment_M[0] + self.caution * np.sqrt(np.maximum(moment_M[1], 0.0))

    def peak_NWG(self, chosen_N: Ints) -> Singles:
        """Return the peaks of the chosen layers."""
        return self.peak(self.rank_MLWG[:, chosen_N])

    def largest_NW(self, chosen_N: Ints) -> Floats:
        """Return the largest peaks of the chosen layers."""
        return np.asarray(self.peak_NWG(chosen_N).max(axis=2), dtype=np.float64)

    def swap(self, chosen_N: Ints, slot_N: Ints, other_N: Ints, until_N: Ints) -> None:
        """Let two slots of each chosen layer change experts; neither returns before `until_N`."""
        row_N1, pair_N2 = chosen_N[:, None], np.stack([slot_N, other_N], axis=1)
        here_N, there_N = self.expert_LS[row_N1, pair_N2].T
        self._replace(chosen_N, slot_N, here_N, there_N, until_N)
        self._replace(chosen_N, other_N, there_N, here_N, until_N)
        rank_N2 = self.problem.ranks.rank_S[pair_N2]
        speed_N21 = self.problem.ranks.speed_G.astype(np.float32)[rank_N2][:, :, None]
        for moment, slot_LWS in enumerate(self.slot_MLWS, start=1):
            value_N2W = slot_LWS[row_N1, :, pair_N2]
            slot_LWS[row_N1, :, pair_N2] = value_N2W[:, ::-1]
            change_N2W = (value_N2W[:, ::-1] - value_N2W) / speed_N21**moment
            self.rank_MLWG[moment - 1][row_N1, :, rank_N2] += change_N2W

    def overwrite(self, chosen_N: Ints, slot_N: Ints, expert_N: Ints, until_N: Ints) -> None:
        """Put a copy of another expert in a slot; the copies of both experts change."""
        gone_N = self.expert_LS[chosen_N, slot_N]
        self.copies_LE[chosen_N, gone_N] -= 1
        self.copies_LE[chosen_N, expert_N] += 1
        self._replace(chosen_N, slot_N, gone_N, expert_N, until_N)
        self.price(chosen_N)

    def _replace(
        self, chosen_N: Ints, slot_N: Ints, gone_N: Ints, come_N: Ints, until_N: Ints
    ) -> None:
        rank_N = self.problem.ranks.rank_S[slot_N]
        self.expert_LS[chosen_N, slot_N] = come_N
        self.held_LNE[chosen_N, self.group_G[rank_N], gone_N] -= 1
        self.held_LNE[chosen_N, self.group_G[rank_N], come_N] += 1
        self.until_LGE[chosen_N, rank_N, gone_N] = until_N
        self.until_LGE[chosen_N, rank_N, come_N] = NEVER_ENTERS
