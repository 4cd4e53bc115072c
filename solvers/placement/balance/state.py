"""The placements that a local search works on, layer by layer, with what changes as slots do.

    L layers   W workloads   S slots   G ranks   E experts

Times are relative to each workload's lower bound in that layer, so 1 is as good as can be, in
single precision: the claim's objective is recomputed from the placement, nothing rests on them.
Work sums drift by rounding (1e-7 a change) and are summed again now and then.

Where near replicas come first, times are means over launches, and every slot and rank has a
variance beside them (`dispatch/scatter.py`). A search sees peaks, mean + caution * deviation. An
expert is put on a node once; one that is there twice from the start is priced as it is, and
re-priced whenever one of its replicas moves.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from solvers.placement.balance.objective import cost_of, slot_shares, slot_variances
from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch
from solvers.placement.dispatch.scatter import spread_variance
from solvers.placement.ranks import Floats, Ints, Placement

Singles = npt.NDArray[np.float32]

NEVER_ENTERS = np.iinfo(np.int32).max
"""Value of `until_LGE` for an expert that the rank holds: a second copy there is useless."""


def replica_groups(problem: BalanceProblem) -> Ints:
    """Return the group of each rank in which a second copy of an expert is useless.

    Where near replicas come first, one on a node serves it: a second one would serve its own rank.
    """
    ranks = problem.ranks
    if problem.dispatch.is_near and ranks.num_nodes > 1:
        return ranks.node_G
    return np.arange(ranks.num_ranks, dtype=np.int64)


@dataclass(slots=True, kw_only=True, eq=False)
class Noise:
    """Variances over launches."""

    caution: np.float32
    """Standard deviations that a peak lies above the mean."""
    slot_LWS: Singles
    """Variance of every slot's cost at speed 1, relative to the squared bound."""
    rank_LWG: Singles
    """Variance of every rank's time; slots are taken as independent."""
    held_LNE: npt.NDArray[np.int16]
    """Copies of an expert in a group of ranks, where one is of use."""
    crowded_LE: npt.NDArray[np.bool_]
    """Experts with more than one copy in a group."""

    def peak(self, time: Singles, variance: Singles) -> Singles:
        """Return mean + caution * deviation; sums drift, so a variance may be just below 0."""
        return np.asarray(time + self.caution * np.sqrt(np.maximum(variance, 0.0)))


@dataclass(slots=True, kw_only=True, eq=False)
class State:
    """Some layers of a problem; changed in place by the search that owns it."""

    problem: BalanceProblem
    layer_L: Ints
    """Numbers of these layers in the problem."""
    scale_WL: Floats
    """Lower bounds on the times, of these layers; seconds or load."""
    expert_LS: Ints
    copies_LE: Ints
    held_LGE: npt.NDArray[np.int16]
    """Copies of an expert on a rank."""
    until_LGE: npt.NDArray[np.int32]
    """Step before which an expert may not enter a rank."""
    cost_LWS: Singles
    """Cost of every slot at speed 1, relative to the bound."""
    time_LWG: Singles
    """Time of every rank, relative to the bound."""
    group_G: Ints
    """Group of each rank in which an expert may have one copy: its node, or the rank itself."""
    noise: Noise | None = None
    """Variances over launches; None where nothing is random."""

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
        num_layers, ranks = len(layer_L), problem.ranks
        shape_LGE = (num_layers, ranks.num_ranks, problem.num_experts)
        num_slots, num_workloads = ranks.num_slots, problem.num_workloads
        state = cls(
            problem=problem,
            layer_L=layer_L,
            scale_WL=bound_WL[:, layer_L],
            expert_LS=placement.expert_LS[layer_L].astype(np.int64),
            copies_LE=placement.copies_LE(problem.num_experts)[layer_L],
            held_LGE=np.zeros(shape_LGE, dtype=np.int16),
            until_LGE=np.zeros(shape_LGE, dtype=np.int32),
            cost_LWS=np.empty((num_layers, num_workloads, num_slots), dtype=np.float32),
            time_LWG=np.empty((num_layers, num_workloads, ranks.num_ranks), dtype=np.float32),
            group_G=replica_groups(problem),
        )
        if problem.dispatch.is_near:
            state.noise = Noise(
                caution=np.float32(caution),
                slot_LWS=np.empty_like(state.cost_LWS),
                rank_LWG=np.empty_like(state.time_LWG),
                held_LNE=np.zeros(
                    (num_layers, int(state.group_G.max()) + 1, problem.num_experts), dtype=np.int16
                ),
                crowded_LE=np.zeros((num_layers, problem.num_experts), dtype=np.bool_),
            )
        state.count(np.arange(num_layers))
        return state

    def count(self, chosen_N: Ints) -> None:
        """Compute all that follows from `expert_LS`, for the chosen layers."""
        ranks, expert_NS = self.problem.ranks, self.expert_LS[chosen_N]
        held_NGE = np.zeros((len(chosen_N), *self.held_LGE.shape[1:]), dtype=np.int16)
        row_N1 = np.arange(len(chosen_N))[:, None]
        np.add.at(held_NGE, (row_N1, ranks.rank_S, expert_NS), 1)
        self.held_LGE[chosen_N] = held_NGE
        if self.noise is not None:
            held_NNE = np.zeros((len(chosen_N), *self.noise.held_LNE.shape[1:]), dtype=np.int16)
            np.add.at(held_NNE, (row_N1, self.group_G[ranks.rank_S], expert_NS), 1)
            self.noise.held_LNE[chosen_N] = held_NNE
        self.copies_LE[chosen_N] = held_NGE.sum(axis=1)
        self.until_LGE[chosen_N] = np.where(held_NGE > 0, NEVER_ENTERS, 0)
        self.price(chosen_N)

    def price(self, chosen_N: Ints) -> None:
        """Compute costs and times from experts and copies, for the chosen layers."""
        if self.noise is not None:
            self._price_near(self.noise, chosen_N)
            return
        expert_NWS = np.broadcast_to(
            self.expert_LS[chosen_N][:, None, :], (len(chosen_N), *self.cost_LWS.shape[1:])
        )
        cost_NWE = self.cost_of_copies(chosen_N, self.copies_LE[chosen_N])
        cost_NWS = np.take_along_axis(cost_NWE, expert_NWS, axis=2)
        ranks = self.problem.ranks
        time_NWG = np.add.reduceat(cost_NWS, ranks.first_slot_G, axis=2) / ranks.speed_G
        self.cost_LWS[chosen_N] = cost_NWS
        self.time_LWG[chosen_N] = time_NWG

    def _price_near(self, noise: Noise, chosen_N: Ints) -> None:
        problem, ranks, expert_NS = self.problem, self.problem.ranks, self.expert_LS[chosen_N]
        noise.crowded_LE[chosen_N] = (noise.held_LNE[chosen_N] > 1).any(axis=1)
        shares = slot_shares(problem, expert_NS)
        load_WNE = problem.load_WLE[:, self.layer_L[chosen_N]]
        load_WNS = np.take_along_axis(load_WNE, expert_NS[None], axis=2)
        scale_WN1 = self.scale_WL[:, chosen_N, None]
        cost_WNS = cost_of(load_WNS * shares.mean_LS, problem.active_load) / scale_WN1
        scatter = problem.variance_WLE
        scatter_WNE = None if scatter is None else scatter[:, self.layer_L[chosen_N]]
        noise_WNS = slot_variances(load_WNE, scatter_WNE, expert_NS, shares) / np.square(scale_WN1)
        for slot_LWS, rank_LWG, value_WNS, speed_G in (
            (self.cost_LWS, self.time_LWG, cost_WNS, ranks.speed_G),
            (noise.slot_LWS, noise.rank_LWG, noise_WNS, np.square(ranks.speed_G)),
        ):
            sum_WNG = np.add.reduceat(value_WNS, ranks.first_slot_G, axis=2) / speed_G
            slot_LWS[chosen_N] = value_WNS.transpose(1, 0, 2)
            rank_LWG[chosen_N] = sum_WNG.transpose(1, 0, 2)

    def peak_NWG(self, chosen_N: Ints) -> Singles:
        """Return what the search lowers: times, or a cautious guess of them."""
        time_NWG = self.time_LWG[chosen_N]
        if self.noise is None:
            return time_NWG
        return self.noise.peak(time_NWG, self.noise.rank_LWG[chosen_N])

    def noise_of_copies(self, chosen_N: Ints, copies_NE: Ints) -> Floats:
        """Variance of one of so many copies of each expert on distinct groups, [N][W][E]."""
        problem, layer_N = self.problem, self.layer_L[chosen_N]
        variance_WNE = np.zeros((problem.num_workloads, len(chosen_N), problem.num_experts))
        if problem.dispatch is ReplicaDispatch.STATIC:
            share_NE = spread_variance(copies_NE, ranks=problem.ranks)
            variance_WNE += np.square(problem.load_WLE[:, layer_N]) * share_NE
        if problem.variance_WLE is not None:
            variance_WNE += problem.variance_WLE[:, layer_N] / np.square(copies_NE)
        variance_WNE /= np.square(self.scale_WL[:, chosen_N, None])
        return np.asarray(variance_WNE.transpose(1, 0, 2))

    def cost_of_copies(self, chosen_N: Ints, copies_NE: Ints) -> Floats:
        """Return the relative cost of one copy of each expert with that many copies, [N][W][E]."""
        load_WNE = self.problem.load_WLE[:, self.layer_L[chosen_N]]
        cost_WNE = cost_of(load_WNE / copies_NE, self.problem.active_load)
        return np.asarray(
            (cost_WNE / self.scale_WL[:, chosen_N, None]).transpose(1, 0, 2), dtype=np.float64
        )

    def swap(self, chosen_N: Ints, slot_N: Ints, other_N: Ints, until_N: Ints) -> None:
        """Let two slots of each chosen layer change experts; neither returns before `until_N`."""
        rank_S, speed_G = self.problem.ranks.rank_S, self.problem.ranks.speed_G.astype(np.float32)
        rank_N, other_rank_N = rank_S[slot_N], rank_S[other_N]
        cost_NW, other_NW = self.cost_LWS[chosen_N, :, slot_N], self.cost_LWS[chosen_N, :, other_N]
        self.cost_LWS[chosen_N, :, slot_N] = other_NW
        self.cost_LWS[chosen_N, :, other_N] = cost_NW
        change_NW = other_NW - cost_NW
        self.time_LWG[chosen_N, :, rank_N] += change_NW / speed_G[rank_N, None]
        self.time_LWG[chosen_N, :, other_rank_N] -= change_NW / speed_G[other_rank_N, None]
        expert_N, incoming_N = self.expert_LS[chosen_N, slot_N], self.expert_LS[chosen_N, other_N]
        self.expert_LS[chosen_N, slot_N] = incoming_N
        self.expert_LS[chosen_N, other_N] = expert_N
        self._replace_expert(chosen_N, rank_N, expert_N, incoming_N, until_N)
        self._replace_expert(chosen_N, other_rank_N, incoming_N, expert_N, until_N)
        if self.noise is not None:
            self._swap_noise(self.noise, chosen_N, slot_N, other_N)

    def _swap_noise(self, noise: Noise, chosen_N: Ints, slot_N: Ints, other_N: Ints) -> None:
        rank_S, speed_G = self.problem.ranks.rank_S, self.problem.ranks.speed_G.astype(np.float32)
        rank_N, other_rank_N = rank_S[slot_N], rank_S[other_N]
        mine_NW = noise.slot_LWS[chosen_N, :, slot_N]
        other_NW = noise.slot_LWS[chosen_N, :, other_N]
        noise.slot_LWS[chosen_N, :, slot_N] = other_NW
        noise.slot_LWS[chosen_N, :, other_N] = mine_NW
        change_NW = other_NW - mine_NW
        noise.rank_LWG[chosen_N, :, rank_N] += change_NW / speed_G[rank_N, None] ** 2
        noise.rank_LWG[chosen_N, :, other_rank_N] -= change_NW / speed_G[other_rank_N, None] ** 2
        is_crowded_N = np.zeros(len(chosen_N), dtype=np.bool_)
        for slots_N in (slot_N, other_N):
            expert_N = self.expert_LS[chosen_N, slots_N]
            is_crowded_N |= noise.crowded_LE[chosen_N, expert_N]
            is_crowded_N |= (noise.held_LNE[chosen_N, :, expert_N] > 1).any(axis=1)
        if is_crowded_N.any():
            self.price(chosen_N[is_crowded_N])

    def overwrite(self, chosen_N: Ints, slot_N: Ints, expert_N: Ints, until_N: Ints) -> None:
        """Put a copy of another expert in a slot; the copies of both experts change."""
        rank_N, gone_N = self.problem.ranks.rank_S[slot_N], self.expert_LS[chosen_N, slot_N]
        self.expert_LS[chosen_N, slot_N] = expert_N
        self.copies_LE[chosen_N, gone_N] -= 1
        self.copies_LE[chosen_N, expert_N] += 1
        self._replace_expert(chosen_N, rank_N, gone_N, expert_N, until_N)
        self.price(chosen_N)

    def _replace_expert(
        self, chosen_N: Ints, rank_N: Ints, gone_N: Ints, come_N: Ints, until_N: Ints
    ) -> None:
        self.held_LGE[chosen_N, rank_N, gone_N] -= 1
        self.held_LGE[chosen_N, rank_N, come_N] += 1
        if self.noise is not None:
            self.noise.held_LNE[chosen_N, self.group_G[rank_N], gone_N] -= 1
            self.noise.held_LNE[chosen_N, self.group_G[rank_N], come_N] += 1
        is_held_N = self.held_LGE[chosen_N, rank_N, gone_N] > 0
        self.until_LGE[chosen_N, rank_N, gone_N] = np.where(is_held_N, NEVER_ENTERS, until_N)
        self.until_LGE[chosen_N, rank_N, come_N] = NEVER_ENTERS
