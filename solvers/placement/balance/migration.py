"""Placement under a limit on moved experts: the layers and swaps with the largest gain.

    L layers   W workloads   G ranks   S slots   B moves allowed   N layers of a batch

A rank moves an expert when it holds one that it lacked before. Three steps:

 1. From the current placement every layer walks downhill: of all swaps and overwrites that
    relieve its most-loaded rank, the one that lowers the potential (`moves.py`) most per moved
    expert. Every intermediate placement is a choice, with its moves and its time.
 2. The unlimited search gives each layer one more choice. Its ranks are renamed among equals, which
    changes no time, so that as little as possible moves: an assignment problem per group of equal
    ranks (Kuhn 1955, by shortest augmenting paths, O(G^3)).
 3. One choice a layer, B moves in all, the least sum of times: a multiple-choice knapsack, solved
    exactly by dynamic programming over moves, O(L * choices * B).

Step 3 is exact for the choices it is given and for the mean; for worst case and CVaR it weighs the
workloads as the unlimited plan's slope does. Proves nothing beyond `bound.py`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from solvers.placement.balance.moves import best_overwrite, best_swap
from solvers.placement.balance.objective import largest_times, layer_weights, robust_slope
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.balance.state import State
from solvers.placement.matching import augmented
from solvers.placement.ranks import Floats, Ints, Placement, Ranks

MOST_CHOICES = 64
"""Intermediate placements of one layer."""

OVERWRITES_DRAWN = 128
"""Candidates evaluated in one step downhill."""

CAUTION = 2.0
"""Standard deviations above the mean of the descent, where dispatch is random."""

SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Choice:
    """One placement of one layer."""

    expert_S: Ints
    moved: int
    value: float


def moved(current: Placement, new: Placement, ranks: Ranks) -> int:
    """Experts, over all layers and ranks, that a rank must load because it lacked them."""
    return int(loaded_LG(current, new, ranks=ranks).sum())


def loaded_LG(
    current: Placement, new: Placement, *, ranks: Ranks, current_ranks: Ranks | None = None
) -> Ints:
    """Count the experts that each rank must load; `current_ranks` None: the same slots."""
    last_expert = int(max(current.expert_LS.max(), new.expert_LS.max()))
    had_LGE = _experts_of_ranks(current.expert_LS, current_ranks or ranks, last_expert)
    has_LGE = _experts_of_ranks(new.expert_LS, ranks, last_expert)
    return np.asarray((has_LGE & ~had_LGE).sum(axis=2))


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
    held_LGE = _experts_of_ranks(
        current.expert_LS, ranks, int(max(current.expert_LS.max(), new.expert_LS.max()))
    )
    node_G = np.zeros(ranks.num_ranks) if group_G is None else group_G
    kinds = np.unique(
        np.stack([ranks.slots_G, ranks.speed_G, node_G]), axis=1, return_inverse=True
    )[1]
    for kind in np.unique(kinds):
        rank_K = np.flatnonzero(kinds.ravel() == kind)
        if len(rank_K) == 1:
            continue
        slot_KC = ranks.first_slot_G[rank_K][:, None] + np.arange(ranks.slots_G[rank_K[0]])
        for layer, expert_S in enumerate(new.expert_LS):
            expert_KC = expert_S[slot_KC]
            # Twins on one rank count twice here and once in `moved`: a rename is never worse off.
            kept_KK = held_LGE[layer][rank_K][:, expert_KC].sum(axis=2)
            rank_of_K = augmented(kept_KK.T.astype(np.float64))
            expert_LS[layer, slot_KC[rank_of_K]] = expert_KC
    renamed = Placement(expert_LS=expert_LS)
    return min((renamed, new), key=lambda placement: moved(current, placement, ranks))


def within_limit(
    problem: BalanceProblem,
    *,
    time_limit_s: float,
    bound_WL: Floats,
    unlimited: Callable[[float], Placement],
) -> Placement:
    """Return the best placement found that moves no more than the problem allows.

    Args:
        problem: with a limit on migration.
        time_limit_s: of it all; half for the unlimited search, the rest for walking downhill.
        bound_WL: least time of each layer.
        unlimited: searches for that many seconds without the limit.
    """
    assert problem.migration is not None
    current, limit = problem.migration.current, problem.migration.most_moved
    deadline_s = time.perf_counter() + time_limit_s
    ranks = problem.ranks
    is_local = problem.dispatch.is_near and ranks.num_nodes > 1
    free = relabelled(
        current,
        unlimited(0.5 * time_limit_s),
        ranks,
        group_G=ranks.node_G if is_local else None,
    )
    if moved(current, free, problem.ranks) <= limit:
        return free
    weight_W = robust_slope(problem, _imbalances(problem, free)) * layer_weights(problem)
    choices_L = _downhill(problem, bound_WL, weight_W, deadline_s)
    moved_L = loaded_LG(current, free, ranks=ranks).sum(axis=1)
    value_L = _values(problem, free, weight_W)
    for layer, choices in enumerate(choices_L):
        choices.append(
            _Choice(
                expert_S=free.expert_LS[layer],
                moved=int(moved_L[layer]),
                value=float(value_L[layer]),
            )
        )
    picked = _knapsack(choices_L, limit)
    return Placement(expert_LS=np.stack([choice.expert_S for choice in picked]))


def _downhill(
    problem: BalanceProblem, bound_WL: Floats, weight_W: Floats, deadline_s: float
) -> list[list[_Choice]]:
    """Every placement of each layer's descent, the current one first."""
    assert problem.migration is not None
    current, limit = problem.migration.current, problem.migration.most_moved
    layers_L = np.arange(problem.num_layers)
    state = State.of(problem, current, layer_L=layers_L, bound_WL=bound_WL, caution=CAUTION)
    potential_W = (weight_W / weight_W.sum()).astype(np.float32)
    limit_LW = np.ones((problem.num_layers, problem.num_workloads), dtype=np.float32)
    rng = np.random.default_rng(SEED)
    choices_L: list[list[_Choice]] = [[] for _ in layers_L]
    open_N = layers_L
    for _ in range(MOST_CHOICES):
        placed = Placement(expert_LS=state.expert_LS.copy())
        moved_L = loaded_LG(current, placed, ranks=problem.ranks).sum(axis=1)
        value_L = _values(problem, placed, weight_W)
        for layer in open_N:
            choices_L[layer].append(
                _Choice(
                    expert_S=placed.expert_LS[layer],
                    moved=int(moved_L[layer]),
                    value=float(value_L[layer]),
                )
            )
        open_N = open_N[moved_L[open_N] < limit]
        if not len(open_N) or time.perf_counter() >= deadline_s:
            break
        open_N = _step_down(state, open_N, limit_LW[open_N], potential_W, rng)
    return choices_L


def _step_down(
    state: State,
    open_N: Ints,
    limit_NW: np.typing.NDArray[np.float32],
    weight_W: np.typing.NDArray[np.float32],
    rng: np.random.Generator,
) -> Ints:
    """Make the move that pays most per expert in every layer; return the layers that had one."""
    rank_N = np.einsum("nwg,w->ng", state.peak_NWG(open_N), weight_W).argmax(axis=1)
    swap = best_swap(state, open_N, rank_N, limit_NW=limit_NW, weight_W=weight_W, step=0)
    overwrite = best_overwrite(
        state,
        open_N,
        rank_N,
        limit_NW=limit_NW,
        weight_W=weight_W,
        draw_CX=rng.random((OVERWRITES_DRAWN, 3)),
    )
    # A swap loads two experts, an overwrite one.
    is_overwrite_N = overwrite.change_N < 0.5 * swap.change_N
    change_N = np.minimum(overwrite.change_N, 0.5 * swap.change_N)
    for is_made_N, moves, make in (
        (is_overwrite_N & (change_N < 0.0), overwrite, state.overwrite),
        (~is_overwrite_N & (change_N < 0.0), swap, state.swap),
    ):
        make(
            open_N[is_made_N],
            moves.slot_N[is_made_N],
            moves.partner_N[is_made_N],
            np.zeros(int(is_made_N.sum()), dtype=np.int64),
        )
    return open_N[change_N < 0.0]


def _knapsack(choices_L: list[list[_Choice]], limit: int) -> list[_Choice]:
    """One choice a layer with the least sum of values and at most `limit` moves."""
    value_B = np.zeros(limit + 1)
    taken_LB = np.empty((len(choices_L), limit + 1), dtype=np.int64)
    for layer, choices in enumerate(choices_L):
        next_B = np.full(limit + 1, np.inf)
        for number, choice in enumerate(choices):
            if choice.moved > limit:
                continue
            with_B = np.full(limit + 1, np.inf)
            with_B[choice.moved :] = value_B[: limit + 1 - choice.moved] + choice.value
            taken_LB[layer][with_B < next_B] = number
            next_B = np.minimum(next_B, with_B)
        value_B = next_B
    left, picked = limit, []
    for layer in reversed(range(len(choices_L))):
        choice = choices_L[layer][taken_LB[layer, left]]
        picked.append(choice)
        left -= choice.moved
    return picked[::-1]


def _experts_of_ranks(
    expert_LS: Ints, ranks: Ranks, last_expert: int
) -> np.typing.NDArray[np.bool_]:
    held_LGE = np.zeros((len(expert_LS), ranks.num_ranks, last_expert + 1), dtype=bool)
    held_LGE[np.arange(len(expert_LS))[:, None], ranks.rank_S, expert_LS] = True
    return held_LGE


def _values(problem: BalanceProblem, placement: Placement, weight_W: Floats) -> Floats:
    return np.asarray(weight_W @ _peak_times(problem, placement))


def _imbalances(problem: BalanceProblem, placement: Placement) -> Floats:
    return np.asarray(_peak_times(problem, placement).sum(axis=1) * layer_weights(problem))


def _peak_times(problem: BalanceProblem, placement: Placement) -> Floats:
    return largest_times(problem, placement.expert_LS)
