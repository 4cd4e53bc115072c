"""Replica counts, then a tabu search of every layer towards its lower bound, all layers at once.

    L layers   W workloads   N layers still searched   G ranks   S slots

Start: copies one by one to the largest share over all workloads (an expert that is hot for one of
them needs copies, whatever the mean says), packed largest first (`packing.py`). A step takes, for
the workloads in turn, the most-loaded rank of every layer and makes the swap that leaves the least
potential (`moves.py`), even if that is more than before; an expert that left a rank may not return
for some steps (Glover, ORSA J. Computing 1(3), 1989). Every few steps one overwrite is made that
lowers the potential, which changes how many copies experts have. The best placement seen is kept.

One swap costs O(W K S) a layer with K slots a rank, a few array operations for all layers
together. A layer rests when it is within `GOOD_ENOUGH_RATIO` of its bound, or has not improved for
`PATIENCE_STEPS`. Worst case and CVaR weigh the workloads by the slope of the objective, averaged
over rounds (the subgradient method), so that layers may be searched one by one.

Workloads that differ much get two more beside them, which stand for unseen ones (`unseen.py`); the
copies then go to the largest share of the mean.

What a layer does depends on its own numbers and the step alone: equal problems give equal plans for
any number of threads, as long as the time limit does not end the search. `starts.py`
says where it starts, and is the method that users name.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from solvers.placement.balance.bound import layer_bounds
from solvers.placement.balance.copies import start_placement
from solvers.placement.balance.moves import best_overwrite, best_swap
from solvers.placement.balance.objective import layer_weights, robust_slope
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.balance.state import Singles, State
from solvers.placement.balance.unseen import with_unseen
from solvers.placement.ranks import Floats, Ints, Placement

GOOD_ENOUGH_RATIO = 1e-4
"""A layer within this of its bound is left alone: recorded loads are not known better."""

MOST_STEPS = 40_000
"""Search steps of each layer, at most."""

PATIENCE_STEPS = 3_000
PATIENCE_STEPS_PER_SLOT = 50
"""Steps without a better placement after which a layer rests, per slot of the layer; at most
`PATIENCE_STEPS`."""

LIMIT_RATIO = 0.2
"""The potential's limit lies here between the bound (0) and the best value so far (1)."""

TENURE_STEPS = 8
"""An expert stays out of a rank it left for one to two times this; less where little can move."""

OVERWRITE_EVERY = 20
OVERWRITE_CANDIDATES = 48

ROUND_STEPS = 200
"""Steps after which sums are made anew and workloads weighed again."""

SEARCH_RATIO = 0.96
"""Share of the time limit for search steps; the rest is for the step in progress, joining the
layers and the bound."""

MOST_CELLS = 2**20
"""Largest array of one step; more layers are searched in turns."""

SEED = 0


def search(
    problem: BalanceProblem,
    *,
    time_limit_s: float,
    threads: int = 1,
    most_steps: int = MOST_STEPS,
    start: Placement | None = None,
    caution: float = 0.0,
) -> Placement:
    """Search from a start; the limit on migration is ignored.

    Args:
        problem: to be placed.
        time_limit_s: for the search and its answer.
        threads: that search different layers.
        most_steps: of every layer; the same plan comes back when this ends the search.
        start: a legal placement; None takes the largest-first rule's.
        caution: deviations above the mean at which a rank is evaluated, where dispatch is random.
    """
    deadline_s = time.perf_counter() + SEARCH_RATIO * time_limit_s
    inner = with_unseen(problem)
    bound_WL = layer_bounds(inner)
    begin = start_placement(inner, for_each=inner is problem) if start is None else start
    parts = _parts(inner, begin, bound_WL, threads, caution)
    weight_W, slope_W = layer_weights(inner), inner.weight_W.copy()
    best, best_value = begin, np.inf
    with ThreadPoolExecutor(max_workers=threads) as pool:
        for step in range(0, most_steps, ROUND_STEPS):
            weight_WL = (slope_W * weight_W)[:, None] * bound_WL
            steps = range(step, min(step + ROUND_STEPS, most_steps))
            jobs = [pool.submit(_round, part, weight_WL, steps, deadline_s) for part in parts]
            is_open = max(job.result() for job in jobs)
            time_LW = np.concatenate([part.best_time_LW for part in parts])
            imbalance_W = (time_LW.T * bound_WL).sum(axis=1) * weight_W
            slope_now_W = _slope(problem, inner, imbalance_W)
            if (value := float(imbalance_W @ slope_now_W)) < best_value:
                best_LS = np.concatenate([part.best_LS for part in parts])
                best, best_value = Placement(expert_LS=best_LS), value
            if time.perf_counter() >= deadline_s or not is_open:
                break
            slope_W += (slope_now_W - slope_W) / (2 + step // ROUND_STEPS)
    return best


def _parts(
    problem: BalanceProblem, start: Placement, bound_WL: Floats, threads: int, caution: float
) -> list[State]:
    """Divide the layers: as many parts as threads, more where one step would be too large."""
    ranks = problem.ranks
    cells = problem.num_workloads * int(ranks.slots_G.max()) * ranks.num_slots
    most_layers = max(1, MOST_CELLS // cells)
    num_parts = max(min(threads, problem.num_layers), -(-problem.num_layers // most_layers))
    return [
        State.of(problem, start, layer_L=layer_L, bound_WL=bound_WL, caution=caution)
        for layer_L in np.array_split(np.arange(problem.num_layers), num_parts)
    ]


def _round(state: State, weight_WL: Floats, steps: range, deadline_s: float) -> bool:
    """Make the steps of one round; return whether any layer is worth more of them."""
    weight_LW = weight_WL[:, state.layer_L].T
    state.price(np.arange(len(state.layer_L)))
    best_L = (state.best_time_LW * weight_LW).sum(axis=1)
    done_L = (1.0 + GOOD_ENOUGH_RATIO) * weight_LW.sum(axis=1)
    total_W = weight_WL.sum(axis=1)
    relevant_W = np.flatnonzero(total_W > 0.0)
    patience = min(PATIENCE_STEPS, PATIENCE_STEPS_PER_SLOT * state.problem.ranks.num_slots)
    potential_W = (total_W / total_W.sum()).astype(np.float32)
    for step in steps:
        is_open_L = (best_L > done_L) & (step - state.improved_L < patience)
        chosen_N = np.flatnonzero(is_open_L)
        if not len(chosen_N):
            return False
        if time.perf_counter() >= deadline_s:
            break
        workload = int(relevant_W[step % len(relevant_W)])
        _step(state, chosen_N, workload, potential_W, step)
        time_NW = state.largest_NW(chosen_N)
        value_N = (time_NW * weight_LW[chosen_N]).sum(axis=1)
        is_better_N = value_N < best_L[chosen_N]
        better_N = chosen_N[is_better_N]
        best_L[better_N] = value_N[is_better_N]
        state.best_time_LW[better_N] = time_NW[is_better_N]
        state.best_LS[better_N] = state.expert_LS[better_N]
        state.improved_L[better_N] = step
    return True


def _step(state: State, chosen_N: Ints, workload: int, weight_W: Singles, step: int) -> None:
    """Relieve the rank that is most loaded for one workload, in every chosen layer."""
    rng, problem = np.random.default_rng((SEED, step)), state.problem
    rank_N = state.peak_NWG(chosen_N)[:, workload].argmax(axis=1)
    limit_NW = (1.0 + LIMIT_RATIO * (state.best_time_LW[chosen_N] - 1.0)).astype(np.float32)
    tenure = int(np.clip(problem.num_experts * problem.ranks.num_ranks // 32, 1, TENURE_STEPS))
    jitter_L = rng.integers(0, tenure + 1, problem.num_layers)
    until_N = step + 1 + tenure + jitter_L[state.layer_L[chosen_N]]
    overwrites = step % OVERWRITE_EVERY == OVERWRITE_EVERY - 1
    if overwrites:
        draw_C3 = rng.random((OVERWRITE_CANDIDATES, 3))
        slot_N, partner_N, change_N = best_overwrite(
            state, chosen_N, rank_N, limit_NW=limit_NW, weight_W=weight_W, draw_C3=draw_C3
        )
        is_made_N = change_N < 0.0
    else:
        slot_N, partner_N, change_N = best_swap(
            state, chosen_N, rank_N, limit_NW=limit_NW, weight_W=weight_W, step=step
        )
        is_made_N = np.isfinite(change_N)
    make = state.overwrite if overwrites else state.swap
    make(*(of_N[is_made_N] for of_N in (chosen_N, slot_N, partner_N, until_N)))


def _slope(problem: BalanceProblem, inner: BalanceProblem, imbalance_W: Floats) -> Floats:
    """Return the weight of each imbalance in the objective; unseen workloads keep their own."""
    known, slope_W = problem.num_workloads, inner.weight_W.copy()
    slope_W[:known] = robust_slope(problem, imbalance_W[:known]) * inner.weight_W[:known].sum()
    return slope_W
