"""An integer program of every layer, solved by OR-Tools' CP-SAT; for layers of tens of slots.

    L layers   W workloads   E experts   R copies of an expert, at most   G ranks   K slopes

The program of a block of layers is

    minimise    z
    such that   z >= sum_{w,l} slope[k, w] time[w, l]           for every slope k of the objective
                time[w, l] >= sum_{e,r} cost[w, l, e, r] / speed[g] n[l, e, r, g]     for every rank
                sum_r y[l, e, r] = 1,   sum_g n[l, e, r, g] = r y[l, e, r]
                sum_{e,r} n[l, e, r, g] = slots[g]

y says that expert e has r copies, n how many of them are on rank g. Costs are relative to the
workload's mean. Where migration is limited, h[l, e, g] is 1 for each expert new to a rank,

    sum_r n[l, e, r, g] <= slots[g] h[l, e, g],   sum of all h <= most_moved.

With one slope and no limit layers are independent: every layer is a block of its own.

Costs and slopes become multiples of 1e-8, rounded *down*, so that the solver's bound is a valid
lower bound. An objective is at least 1, so that moves it by about 1e-8 a slot and layer; only where
64 bits would overflow is the unit of cost coarser. Proves optimality within that, and
infeasibility. One thread and a fixed seed give the same result every time, unless the time limit
ends the search.
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from solvers.cp_sat import run_cp_sat
from solvers.placement.balance.bound import bound
from solvers.placement.balance.objective import cost_of, layer_weights, slopes
from solvers.placement.balance.problem import BalanceProblem, Robust
from solvers.placement.ranks import Floats, Ints, Placement
from solvers.result import Claim, Status

MOST_WORKLOADS = 6
"""CVaR has as many slopes as orders of workloads; more return UNKNOWN, and so does any dispatch but
an even split, whose shares depend on where replicas are."""

SHORTEST_RUN_S = 0.05
"""What a block gets even when the others have used up the time."""

COST_UNIT = 1e-8
SLOPES = 10**8
LARGEST_TIME = 2**34
"""In units; times the slopes it is below 2 ** 62."""

Variables = dict[tuple[int, int, int, int], cp_model.IntVar]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LayerBlock:
    """Layers that are solved together, with every number of the program."""

    cost_WLER: Floats
    """Cost of one copy of an expert that has r + 1, over the workload's mean summed over layers."""
    slope_KW: Floats
    speed_G: Floats
    slots_G: Ints
    new_LEG: Ints | None
    """1 where an expert would be new to a rank; None: nothing limits migration."""
    most_moved: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SolvedBlock:
    """The solution of one block."""

    status: Status
    copies_LEG: Ints | None
    """How many copies of an expert each rank holds."""
    bound: float


def solve(problem: BalanceProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Placement]:
    """Return CP-SAT's best placement with a proven lower bound: every block, joined."""
    deadline_s = time.perf_counter() + time_limit_s
    least = bound(problem)
    many = problem.robust is Robust.CVAR and problem.num_workloads > MOST_WORKLOADS
    if many or problem.dispatch.is_near:
        return Claim(status=Status.UNKNOWN, solution=None, bound=least)
    rows, total, is_optimal = [], 0.0, True
    blocks = _blocks(problem)
    for number, block in enumerate(blocks):
        share_s = (deadline_s - time.perf_counter()) / (len(blocks) - number)
        solved = _solve_block(block, max(SHORTEST_RUN_S, share_s), threads)
        if solved.status is Status.INFEASIBLE:
            return Claim(status=Status.INFEASIBLE, solution=None, bound=math.inf)
        if solved.copies_LEG is None:
            return Claim(status=Status.UNKNOWN, solution=None, bound=least)
        rows += [_row(copies_EG) for copies_EG in solved.copies_LEG]
        total += solved.bound
        is_optimal &= solved.status is Status.OPTIMAL
    return Claim(
        status=Status.OPTIMAL if is_optimal else Status.FEASIBLE,
        solution=Placement(expert_LS=np.stack(rows)),
        bound=max(total, least),
    )


def _blocks(problem: BalanceProblem) -> Sequence[_LayerBlock]:
    """Divide the layers as far as they are independent."""
    slope_KW = np.stack(slopes(problem))
    copies_R = np.arange(1, problem.ranks.num_slots - problem.num_experts + 2)
    cost_WLER = cost_of(problem.load_WLE[..., None] / copies_R, problem.active_load)
    cost_WLER = cost_WLER * layer_weights(problem)[:, None, None, None]
    is_separable = len(slope_KW) == 1 and problem.migration is None
    layers = range(problem.num_layers)
    new_LEG, most_moved = None, 0
    if problem.migration is not None:
        shape_LEG = (problem.num_layers, problem.num_experts, problem.ranks.num_ranks)
        new_LEG = np.ones(shape_LEG, dtype=np.int64)
        row_L1 = np.arange(problem.num_layers)[:, None]
        new_LEG[row_L1, problem.migration.current.expert_LS, problem.ranks.rank_S] = 0
        most_moved = problem.migration.most_moved
    return [
        _LayerBlock(
            cost_WLER=cost_WLER[:, chosen],
            slope_KW=slope_KW,
            speed_G=problem.ranks.speed_G,
            slots_G=problem.ranks.slots_G,
            new_LEG=new_LEG,
            most_moved=most_moved,
        )
        for chosen in ([(layer,) for layer in layers] if is_separable else [tuple(layers)])
    ]


def _row(copies_EG: Ints) -> Ints:
    experts_E = np.arange(len(copies_EG))
    return np.concatenate([np.repeat(experts_E, copies_E) for copies_E in copies_EG.T])


def _solve_block(block: _LayerBlock, time_limit_s: float, threads: int) -> _SolvedBlock:
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
        return _SolvedBlock(status=status, copies_LEG=None, bound=bound)
    _, num_layers, num_experts, _ = block.cost_WLER.shape
    copies_LEG = np.zeros((num_layers, num_experts, len(block.slots_G)), dtype=np.int64)
    for (layer, expert, _, rank), n in n_LERG.items():
        copies_LEG[layer, expert, rank] += solver.value(n)
    return _SolvedBlock(status=status, copies_LEG=copies_LEG, bound=bound)


def _place(model: cp_model.CpModel, block: _LayerBlock) -> Variables:
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


def _limit_moves(model: cp_model.CpModel, block: _LayerBlock, n_LERG: Variables) -> None:
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


def _longest(block: _LayerBlock) -> float:
    """No imbalance is above this."""
    slots_over_speed = float((block.slots_G / block.speed_G).max())
    return float(block.cost_WLER.max(axis=(2, 3)).sum(axis=1).max()) * slots_over_speed


def _minimise(
    model: cp_model.CpModel, block: _LayerBlock, n_LERG: Variables, *, unit: float, most: int
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
