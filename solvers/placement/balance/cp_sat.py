"""The program of `layer_choices.py` in integers, solved by OR-Tools' CP-SAT.

Costs and slopes become multiples of 1e-8, rounded *down*, so that the solver's bound is a valid
lower bound. An objective is at least 1, so that moves it by about 1e-8 a slot and layer; only where
64 bits would overflow is the unit of cost coarser. Proves optimality within that, and
infeasibility. One thread and a fixed seed give the same result every time, unless the time limit
ends the search. For small layers: tens of slots.

    L layers   W workloads   E experts   R copies of an expert, at most   G ranks   K slopes
"""

import itertools

import numpy as np
from ortools.sat.python import cp_model

from solvers.cp_sat import run_cp_sat
from solvers.placement.balance.layer_choices import LayerBlock, SolvedBlock, solve_blocks
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.ranks import Placement
from solvers.result import Claim

COST_UNIT = 1e-8
SLOPES = 10**8
LARGEST_TIME = 2**34
"""In units; times the slopes it is below 2 ** 62."""

Variables = dict[tuple[int, int, int, int], cp_model.IntVar]


def solve(problem: BalanceProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Placement]:
    """Return CP-SAT's best placement with a proven lower bound."""
    return solve_blocks(
        problem,
        time_limit_s=time_limit_s,
        solve_block=lambda block, limit_s: _solve_block(block, limit_s, threads),
    )


def _solve_block(block: LayerBlock, time_limit_s: float, threads: int) -> SolvedBlock:
    model = cp_model.CpModel()
    n_LERG = _place(model, block)
    _limit_moves(model, block, n_LERG)
    most = _longest(block)
    unit = max(COST_UNIT, most / LARGEST_TIME)
    _minimise(model, block, n_LERG, unit=unit, most=int(most / unit) + 1)
    status, solver = run_cp_sat(
        model, time_limit_s=time_limit_s, threads=threads, other_method="local_search"
    )
    bound = solver.best_objective_bound * unit
    if not status.has_solution:
        return SolvedBlock(status=status, copies_LEG=None, bound=bound)
    _, num_layers, num_experts, _ = block.cost_WLER.shape
    copies_LEG = np.zeros((num_layers, num_experts, len(block.slots_G)), dtype=np.int64)
    for (layer, expert, _, rank), n in n_LERG.items():
        copies_LEG[layer, expert, rank] += solver.value(n)
    return SolvedBlock(status=status, copies_LEG=copies_LEG, bound=bound)


def _place(model: cp_model.CpModel, block: LayerBlock) -> Variables:
    """Every expert has some number of copies, every slot holds one of them."""
    _, num_layers, num_experts, most_copies = block.cost_WLER.shape
    ranks = range(len(block.slots_G))
    n_LERG: Variables = {}
    for layer, expert in itertools.product(range(num_layers), range(num_experts)):
        y_R = [model.new_bool_var(f"y{layer}_{expert}_{r}") for r in range(most_copies)]
        model.add_exactly_one(y_R)
        for r, rank in itertools.product(range(most_copies), ranks):
            n_LERG[layer, expert, r, rank] = model.new_int_var(
                0, min(r + 1, int(block.slots_G[rank])), f"n{layer}_{expert}_{r}_{rank}"
            )
        for r, y in enumerate(y_R):
            copies = sum(n_LERG[layer, expert, r, rank] for rank in ranks)
            model.add(copies == (r + 1) * y)
    for layer, rank in itertools.product(range(num_layers), ranks):
        copies_held = sum(
            n_LERG[layer, expert, r, rank]
            for expert in range(num_experts)
            for r in range(most_copies)
        )
        model.add(copies_held == int(block.slots_G[rank]))
    return n_LERG


def _limit_moves(model: cp_model.CpModel, block: LayerBlock, n_LERG: Variables) -> None:
    if block.new_LEG is None:
        return
    most_copies = block.cost_WLER.shape[3]
    moves = []
    for layer, expert, rank in np.argwhere(block.new_LEG).tolist():
        is_new = model.new_bool_var(f"h{layer}_{expert}_{rank}")
        copies_held = sum(n_LERG[layer, expert, r, rank] for r in range(most_copies))
        model.add(copies_held <= int(block.slots_G[rank]) * is_new)
        moves.append(is_new)
    model.add(sum(moves) <= block.most_moved)


def _longest(block: LayerBlock) -> float:
    """No imbalance is above this."""
    slots_over_speed = float((block.slots_G / block.speed_G).max())
    return float(block.cost_WLER.max(axis=(2, 3)).sum(axis=1).max()) * slots_over_speed


def _minimise(
    model: cp_model.CpModel, block: LayerBlock, n_LERG: Variables, *, unit: float, most: int
) -> None:
    num_workloads, num_layers, num_experts, most_copies = block.cost_WLER.shape
    cells = list(itertools.product(range(num_experts), range(most_copies)))
    time_W = []
    for workload in range(num_workloads):
        times = []
        for layer in range(num_layers):
            most_loaded = model.new_int_var(0, most, f"t{workload}_{layer}")
            times.append(most_loaded)
            for rank, speed in enumerate(block.speed_G.tolist()):
                cost_ER = np.floor(block.cost_WLER[workload, layer] / speed / unit)
                cost_X = cost_ER.astype(np.int64).ravel().tolist()
                n_X = [n_LERG[layer, expert, r, rank] for expert, r in cells]
                model.add(most_loaded >= cp_model.LinearExpr.weighted_sum(n_X, cost_X))
        time_W.append(sum(times))
    worst = model.new_int_var(0, most, "z")
    for slope_W in block.slope_KW:
        weights = np.floor(slope_W * SLOPES).astype(np.int64).tolist()
        model.add(SLOPES * worst >= sum(w * time for w, time in zip(weights, time_W, strict=True)))
    model.minimize(worst)
