"""What the exact methods share: the choices of one layer, and joining layers solved separately.

    L layers   W workloads   E experts   R copies of an expert, at most   G ranks   S slots

Both formulate the same program for a block of layers:

    minimise    z
    such that   z >= sum_{w,l} slope[k, w] time[w, l]           for every slope k of the objective
                time[w, l] >= sum_{e,r} cost[w, l, e, r] / speed[g] n[l, e, r, g]     for every rank
                sum_r y[l, e, r] = 1,   sum_g n[l, e, r, g] = r y[l, e, r]
                sum_{e,r} n[l, e, r, g] = slots[g]

y says that expert e has r copies, n how many of them are on rank g. Costs are relative to the
workload's mean. Where migration is limited, h[l, e, g] is 1 for each expert new to a rank,

    sum_r n[l, e, r, g] <= slots[g] h[l, e, g],   sum of all h <= most_moved.

With one slope and no limit layers are independent: every layer is a block of its own.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerBlock:
    """Layers that are solved together, with every number of the program."""

    layers: tuple[int, ...]
    cost_WLER: Floats
    """Of one of r + 1 copies, relative to the workload's mean over all layers."""
    slope_KW: Floats
    speed_G: Floats
    slots_G: Ints
    new_LEG: Ints | None
    """1 where an expert would be new to a rank; None: nothing limits migration."""
    most_moved: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SolvedBlock:
    """The solution of one block."""

    status: Status
    copies_LEG: Ints | None
    """How many copies of an expert each rank holds."""
    bound: float


def solve_blocks(
    problem: BalanceProblem,
    *,
    time_limit_s: float,
    solve_block: Callable[[LayerBlock, float], SolvedBlock],
) -> Claim[Placement]:
    """Solve every block and join the solutions."""
    deadline_s = time.perf_counter() + time_limit_s
    least = bound(problem)
    many = problem.robust is Robust.CVAR and problem.num_workloads > MOST_WORKLOADS
    if many or problem.dispatch.is_near:
        return Claim(status=Status.UNKNOWN, solution=None, bound=least)
    rows, total, is_optimal = [], 0.0, True
    blocks = blocks_of(problem)
    for number, block in enumerate(blocks):
        share_s = (deadline_s - time.perf_counter()) / (len(blocks) - number)
        solved = solve_block(block, max(SHORTEST_RUN_S, share_s))
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


def blocks_of(problem: BalanceProblem) -> Sequence[LayerBlock]:
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
        LayerBlock(
            layers=chosen,
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
