"""The program of `layer_choices.py`, solved by CBC through PuLP.

Proves optimality and infeasibility up to CBC's tolerances, which are taken off the bound.
Exponential: the independent second opinion on layers of tens of slots, slower than `cp_sat.py`.

    L layers   W workloads   E experts   R copies of an expert, at most   G ranks   K slopes
"""

import itertools

import numpy as np
import pulp
from pulp.apis.coin_api import pulp_cbc_path

from solvers.cbc import run_cbc
from solvers.placement.balance.layer_choices import LayerBlock, SolvedBlock, solve_blocks
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.ranks import Placement
from solvers.result import Claim

SCALE = 1e4
"""The objective is at least 1: CBC's absolute tolerance of 1e-5 is then 1e-9 of it."""

RELATIVE_TOLERANCE = 1e-7
"""Taken off every bound."""


def solve(problem: BalanceProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Placement]:
    """Return CBC's best placement with a proven lower bound."""
    return solve_blocks(
        problem,
        time_limit_s=time_limit_s,
        solve_block=lambda block, limit_s: _solve_block(block, limit_s, threads),
    )


def _solve_block(block: LayerBlock, time_limit_s: float, threads: int) -> SolvedBlock:
    result = run_cbc(
        executable=pulp_cbc_path,
        write_model=_program(block).writeMPS,
        time_limit_s=time_limit_s,
        threads=threads,
    )
    bound = result.bound / SCALE * (1.0 - RELATIVE_TOLERANCE)
    if not result.status.has_solution:
        return SolvedBlock(status=result.status, copies_LEG=None, bound=bound)
    _, num_layers, num_experts, most_copies = block.cost_WLER.shape
    copies_LEG = np.zeros((num_layers, num_experts, len(block.slots_G)), dtype=np.int64)
    for layer, expert, rank in np.ndindex(*copies_LEG.shape):
        copies_LEG[layer, expert, rank] = sum(
            round(result.value_of_column.get(f"n{layer}_{expert}_{r}_{rank}", 0.0))
            for r in range(most_copies)
        )
    return SolvedBlock(status=result.status, copies_LEG=copies_LEG, bound=bound)


def _program(block: LayerBlock) -> pulp.LpProblem:
    num_workloads, num_layers, num_experts, most_copies = block.cost_WLER.shape
    num_ranks = len(block.slots_G)
    program = pulp.LpProblem("balance", pulp.LpMinimize)
    worst = program.add_variable("z", lowBound=0.0)
    program += worst
    time_WL = [
        [program.add_variable(f"t{workload}_{layer}", lowBound=0.0) for layer in range(num_layers)]
        for workload in range(num_workloads)
    ]
    for slope_W in (SCALE * block.slope_KW).tolist():
        program += worst >= pulp.lpSum(
            slope * time for slope, times in zip(slope_W, time_WL, strict=True) for time in times
        )
    moves = []
    for layer in range(num_layers):
        n_ERG = {
            (expert, r, rank): program.add_variable(
                f"n{layer}_{expert}_{r}_{rank}",
                lowBound=0,
                upBound=min(r + 1, int(block.slots_G[rank])),
                cat=pulp.LpInteger,
            )
            for expert, r, rank in np.ndindex(num_experts, most_copies, num_ranks)
        }
        for expert in range(num_experts):
            y_R = [
                program.add_variable(f"y{layer}_{expert}_{r}", cat=pulp.LpBinary)
                for r in range(most_copies)
            ]
            program += pulp.lpSum(y_R) == 1
            for r, y in enumerate(y_R):
                copies = pulp.lpSum(n_ERG[expert, r, rank] for rank in range(num_ranks))
                program += copies == (r + 1) * y
        cells = list(itertools.product(range(num_experts), range(most_copies)))
        for rank in range(num_ranks):
            slots = int(block.slots_G[rank])
            program += pulp.lpSum(n_ERG[expert, r, rank] for expert, r in cells) == slots
            for workload in range(num_workloads):
                cost_ER = (block.cost_WLER[workload, layer] / block.speed_G[rank]).tolist()
                program += time_WL[workload][layer] >= pulp.lpSum(
                    cost_ER[expert][r] * n_ERG[expert, r, rank] for expert, r in cells
                )
            if block.new_LEG is None:
                continue
            for expert in np.flatnonzero(block.new_LEG[layer, :, rank]).tolist():
                is_new = program.add_variable(f"h{layer}_{expert}_{rank}", cat=pulp.LpBinary)
                copies_held = pulp.lpSum(n_ERG[expert, r, rank] for r in range(most_copies))
                program += copies_held <= slots * is_new
                moves.append(is_new)
    if moves:
        program += pulp.lpSum(moves) <= block.most_moved
    return program
