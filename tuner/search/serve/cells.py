"""Cells: the prefill and decode instances of one machine, repeated on others.

A router pairs the instances that it knows freely, so that KV caches stay inside machines only where
all of them share one. Where NICs are slow, every machine gets equal instances behind a router of
its own, and a router in front gives each cell the same share of the requests: DistServe's placement
for clusters of low node affinity (arXiv:2401.09670, algorithm 2), whose pairs of one machine are a
cell's instances.

    k cells    the fewest that hold the rate; each solves the program of its share on one machine
    bound      the program of the whole pool, as if every pair shared a machine

Not covered: more than `MOST_CELLS`, cells that differ, and both phases of a pipeline stage on one
machine with stages on several: no described release sends a cache stage by stage to another router.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from solvers.instances.problem import InstanceObjective
from solvers.result import Status
from tuner.config.serve import Role
from tuner.search.serve.demand import Demand
from tuner.search.serve.kv_transfers import KvTransfers
from tuner.search.serve.options import Option, ServingPool
from tuner.search.serve.program import BOUND_TOLERANCE, SolvedProgram

MOST_CELLS: Final = 16
LEAST_GAIN_RATIO: Final = 0.02
"""Share of the TTFT target that transfers inside a machine must save."""

Solve = Callable[[ServingPool, Demand, bool], SolvedProgram | None]
"""Solves the program of a pool and traffic, for the most requests or those of the traffic."""


def cell_pools(
    options: tuple[Option, ...], kv_transfers: KvTransfers, demand: Demand
) -> tuple[str, ...]:
    """Return the pools of which cells save a share of the time to the first token."""
    packed, first = replace(kv_transfers, is_packed=True), dict[tuple[str, Role], Option]()
    for option in options:
        pool = option.serving_pool.pool
        if option.devices < pool.devices_per_node:
            first.setdefault((pool.name, option.role), option)
    pairs = {
        name: (sender, first[name, Role.DECODE])
        for (name, role), sender in first.items()
        if role is Role.PREFILL and (name, Role.DECODE) in first
    }
    return tuple(
        name
        for name, pair in pairs.items()
        if kv_transfers.seconds(*pair) - packed.seconds(*pair) > LEAST_GAIN_RATIO * demand.ttft_s
    )


def solve_cells(
    serving_pool: ServingPool,
    demand: Demand,
    solve: Solve,
    *,
    spare_ratio: float,
    most_rate: bool,
) -> SolvedProgram | None:
    """Solve for the fewest equal cells; None where the machines do not hold the rate.

    Args:
        serving_pool: whose machines hold a cell each.
        demand: the traffic of all.
        solve: solves one program.
        spare_ratio: capacity beyond the traffic.
        most_rate: as many requests as all machines serve.
    """
    pool = serving_pool.pool
    machine = replace(serving_pool, pool=pool.model_copy(update={"nodes": 1}))
    cell, cells = solve(machine, demand, True), min(pool.nodes, MOST_CELLS)
    if cell is None or cell.outcome.solution is None:
        return None
    if not most_rate:
        held_per_s = cell.outcome.solution.rate_per_s / (1.0 + spare_ratio)
        needed = math.ceil(demand.rate_per_s / held_per_s * (1.0 - BOUND_TOLERANCE))
        if needed > cells:
            return None
        cells = max(needed, 1)
        cell = solve(machine, replace(demand, rate_per_s=demand.rate_per_s / cells), False)
    whole = solve(serving_pool, demand, most_rate)
    if cell is None or whole is None:
        return None
    return _repeated(cell, cells=cells, bound=whole.outcome.bound)


def _repeated(cell: SolvedProgram, *, cells: int, bound: float) -> SolvedProgram | None:
    """Return one cell's instances as those of so many."""
    plan, outcome = cell.outcome.solution, cell.outcome
    if plan is None:
        return None
    is_rate = cell.program.problem.objective is InstanceObjective.RATE
    objective = outcome.objective / cells if is_rate else outcome.objective * cells
    is_open = bound < objective * (1.0 - BOUND_TOLERANCE)
    flows = tuple(flow * cells for flow in plan.flow_per_s_E)
    return SolvedProgram(
        program=replace(cell.program, cells=cells),
        outcome=replace(
            outcome,
            status=Status.FEASIBLE if is_open else outcome.status,
            objective=objective,
            bound=min(bound, objective),
            solution=replace(plan, rate_per_s=plan.rate_per_s * cells, flow_per_s_E=flows),
        ),
    )
