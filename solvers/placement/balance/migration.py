"""Placement under a limit on moved experts: the layers and swaps with the largest gain.

    L layers   W workloads   G ranks   S slots   B moves allowed   N layers of a batch
    C choices of every layer

A rank moves an expert when it holds one that it lacked before. Three steps:

 1. From the current placement every layer walks downhill: of all swaps and overwrites that
    relieve its most-loaded rank, the one that lowers the potential (`moves.py`) most per moved
    expert. Every intermediate placement is a choice, with its moves and its time.
 2. The unlimited search gives each layer one more choice. Its ranks are renamed among equals, which
    changes no time, so that as little as possible moves: an assignment problem per group of equal
    ranks.
 3. One choice a layer, B moves in all, the least sum of times: a multiple-choice knapsack, solved
    exactly by dynamic programming over moves, O(L * C * B).

Step 3 is exact for the choices it is given and for the mean; for worst case and CVaR it weighs the
workloads as the unlimited plan's slope does. Proves nothing beyond `bound.py`.
"""

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from solvers.placement.balance.moves import best_overwrite, best_swap
from solvers.placement.balance.objective import largest_times, time_weights
from solvers.placement.balance.packing import least_choices
from solvers.placement.balance.problem import BalanceProblem, Migration
from solvers.placement.balance.state import Singles, State
from solvers.placement.matching import augmented
from solvers.placement.ranks import Floats, Ints, Placement, Ranks

MOST_CHOICES = 64
"""Intermediate placements of one layer."""

OVERWRITES_DRAWN = 128
"""Candidates evaluated in one step downhill."""

CAUTION = 2.0
"""Standard deviations above the mean of the descent, where dispatch is random."""

SEED = 1


def moved(current: Placement, new: Placement, ranks: Ranks) -> int:
    """Experts, over all layers and ranks, that a rank must load because it lacked them."""
    return int(loaded_LG(current, new, ranks=ranks).sum())


def loaded_LG(
    current: Placement, new: Placement, *, ranks: Ranks, current_ranks: Ranks | None = None
) -> Ints:
    """Count the experts that each rank must load; `current_ranks` None: the same slots."""
    num_experts = int(max(current.expert_LS.max(), new.expert_LS.max())) + 1
    had_LGE = _held_LGE(current, current_ranks or ranks, num_experts)
    return np.asarray((_held_LGE(new, ranks, num_experts) & ~had_LGE).sum(axis=2))


def _held_LGE(placement: Placement, ranks: Ranks, num_experts: int) -> npt.NDArray[np.bool_]:
    num_layers = len(placement.expert_LS)
    held_LGE = np.zeros((num_layers, ranks.num_ranks, num_experts), dtype=bool)
    held_LGE[np.arange(num_layers)[:, None], ranks.rank_S, placement.expert_LS] = True
    return held_LGE


def relabelled(
    current: Placement, new: Placement, ranks: Ranks, *, group_G: Ints | None = None
) -> Placement:
    """Rename equal ranks of the new placement, layer by layer, so that least must be loaded.

    Args:
        current: what runs.
        new: to be renamed.
        ranks: of both.
        group_G: nodes of ranks, where they count: ranks are then renamed within their node.
    """
    expert_LS = new.expert_LS.copy()
    num_experts = int(max(current.expert_LS.max(), new.expert_LS.max())) + 1
    held_LGE = _held_LGE(current, ranks, num_experts)
    node_G = np.zeros(ranks.num_ranks) if group_G is None else group_G
    traits_3G = np.stack([ranks.slots_G, ranks.speed_G, node_G])
    kind_G = np.unique(traits_3G, axis=1, return_inverse=True)[1].ravel()
    for kind in range(int(kind_G.max()) + 1):
        rank_K = np.flatnonzero(kind_G == kind)
        slot_KC = ranks.first_slot_G[rank_K][:, None] + np.arange(ranks.slots_G[rank_K[0]])
        for layer, expert_S in enumerate(new.expert_LS):
            expert_KC = expert_S[slot_KC]
            # Twins on one rank count twice here and once in `moved`: a rename is never worse off.
            kept_KK = held_LGE[layer][rank_K][:, expert_KC].sum(axis=2)
            expert_LS[layer, slot_KC[augmented(kept_KK.T.astype(np.float64))]] = expert_KC
    renamed = Placement(expert_LS=expert_LS)
    return min((renamed, new), key=lambda placement: moved(current, placement, ranks))


def within_limit(
    problem: BalanceProblem,
    migration: Migration,
    *,
    time_limit_s: float,
    bound_WL: Floats,
    unlimited: Callable[[float], Placement],
) -> Placement:
    """Return the best placement found that moves no more than is allowed.

    Args:
        problem: with its loads and ranks.
        migration: the limit.
        time_limit_s: of it all; half for the unlimited search, the rest for walking downhill.
        bound_WL: least time of each layer.
        unlimited: searches for that many seconds without the limit.
    """
    ranks, deadline_s = problem.ranks, time.perf_counter() + time_limit_s
    group_G = ranks.node_G if problem.dispatch.is_near else None
    best = unlimited(0.5 * time_limit_s)
    free = relabelled(migration.current, best, ranks, group_G=group_G)
    if moved(migration.current, free, ranks) <= migration.most_moved:
        return free
    weight_W = time_weights(problem, largest_times(problem, free).mean(axis=0))
    layer_L = np.arange(problem.num_layers)
    expert_CLS, moved_CL, value_CL = [], [], []

    def keep(state: State) -> Ints:
        placement = Placement(expert_LS=state.expert_LS.copy())
        time_LW = state.largest_NW(layer_L) * bound_WL.T
        expert_CLS.append(placement.expert_LS)
        moved_L = loaded_LG(migration.current, placement, ranks=ranks).sum(axis=1)
        moved_CL.append(moved_L)
        value_CL.append(time_LW @ weight_W)
        return np.asarray(moved_L)

    keep(State.of(problem, free, layer_L=layer_L, bound_WL=bound_WL, caution=CAUTION))
    state = State.of(
        problem, migration.current, layer_L=layer_L, bound_WL=bound_WL, caution=CAUTION
    )
    rng, open_N = np.random.default_rng(SEED), layer_L
    for _ in range(MOST_CHOICES):
        moved_L = keep(state)
        open_N = open_N[moved_L[open_N] < migration.most_moved]
        if not len(open_N) or time.perf_counter() >= deadline_s:
            break
        open_N = _step_down(state, open_N, (weight_W / weight_W.sum()).astype(np.float32), rng)
        state.price(layer_L)
    chosen_L = least_choices(np.array(moved_CL), np.array(value_CL), limit=migration.most_moved)
    return Placement(expert_LS=np.array(expert_CLS)[chosen_L, layer_L])


def _step_down(state: State, open_N: Ints, weight_W: Singles, rng: np.random.Generator) -> Ints:
    """Make the move that pays most per expert in every layer; return the layers that had one."""
    rank_N = np.einsum("nwg,w->ng", state.peak_NWG(open_N), weight_W).argmax(axis=1)
    limit_NW = np.ones((len(open_N), len(weight_W)), dtype=np.float32)
    swap = best_swap(state, open_N, rank_N, limit_NW=limit_NW, weight_W=weight_W, step=0)
    overwrite = best_overwrite(
        state,
        open_N,
        rank_N,
        limit_NW=limit_NW,
        weight_W=weight_W,
        draw_C3=rng.random((OVERWRITES_DRAWN, 3)),
    )
    # A swap loads two experts, an overwrite one.
    each_2N = np.stack([overwrite[2], 0.5 * swap[2]])
    for number, (move, make) in enumerate(((overwrite, state.overwrite), (swap, state.swap))):
        is_made_N = (each_2N.argmin(axis=0) == number) & (each_2N[number] < 0.0)
        until_N = np.zeros(len(open_N), dtype=np.int64)
        make(*(of_N[is_made_N] for of_N in (open_N, *move[:2], until_N)))
    return np.asarray(open_N[each_2N.min(axis=0) < 0.0])
