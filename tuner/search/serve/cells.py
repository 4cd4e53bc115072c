"""Cells: the prefill and decode instances of one machine or a few, repeated on others.

A router pairs its instances freely, so that KV caches stay inside machines only where
all of them share one. Where NICs are slow, every machine gets equal instances behind a router of
its own, and a router in front gives each cell the same share of the requests: DistServe's placement
for clusters of low node affinity (arXiv:2401.09670, algorithm 2), whose pairs on a machine are a
cell here.

Models too large for both roles on one machine get cells of n machines: every instance has n
pipeline stages, stage i on machine i. A cache then goes from stage i to stage i inside machine i,
and only hidden states cross the NICs. An instance takes equal parts of a cell's machines, so
instances fit if their devices sum to at most the cell's.

    c cells    the fewest that serve the rate; one program is solved, for a cell's share
    bound      the program of the whole pool, as if every pair shared its machines

Stages are spread only if the connector sends each stage to the same stage of an equal pipeline:
sglang 0.5.23, where rank k of decode asks rank k of prefill and nobody else (`target_pp_ranks` of
srt/disaggregation/common/conn.py, `_resolve_rank_mapping`; sgl-project/sglang pull 14265, tested
with two stages each in test/registered/distributed/test_disaggregation_pp.py), and stages fill
the `--nnodes` machines in order, on the visible devices of each (srt/entrypoints/engine.py,
`_calculate_rank_ranges`). vLLM's NIXL connectors refuse stages for decode, which are "not planned"
(vllm-project/vllm pull 45880).

Not covered: more than `MOST_CELLS`, cells that differ, several stages of an instance on one
machine of a larger cell, spread stages where a machine holds both roles, and their points on the
front (front.py), whose instances have stages on as few machines as hold them.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from solvers.instances.problem import InstanceObjective
from solvers.result import Status
from tuner.catalog.serve_rules.kv_cache import PipelineRule
from tuner.config.serve import Role
from tuner.search.serve.demand import Demand
from tuner.search.serve.kv_transfers import KvTransfers
from tuner.search.serve.options import Option, ServingPool
from tuner.search.serve.program import BOUND_TOLERANCE, SolvedProgram
from tuner.spec.serving.spec import ServeSpec

MOST_CELLS: Final = 16
"""Most cells of a plan: each needs a router of its own behind the one in front."""
LEAST_GAIN_RATIO: Final = 0.02
"""Share of the TTFT target that transfers inside a machine must save."""
_STAGE_TO_STAGE: Final = PipelineRule.EQUAL_OR_DECODE_ONE
"""Rule of connectors that send a stage's cache to the same stage alone, given equal pipelines."""

Solve = Callable[[ServingPool, Demand, bool], SolvedProgram | None]
"""Solver of a pool's program; true asks for the most requests, false for the demand's."""


def pools_to_spread(
    options: tuple[Option, ...], serving_pools: tuple[ServingPool, ...], spec: ServeSpec
) -> tuple[ServingPool, ...]:
    """Return the pools whose machines hold both roles only if stages of instances are spread."""
    least: dict[tuple[str, Role], float] = {}
    for option in options:
        key = option.serving_pool.pool.name, option.role
        least[key] = min(option.devices, least.get(key, math.inf))
    return tuple(
        serving_pool
        for serving_pool in serving_pools
        for pool, release in [(serving_pool.pool, spec.releases[serving_pool.pool.name])]
        if pool.nodes > 1 and release.node_links
        if any(rules.pipeline is _STAGE_TO_STAGE for rules in release.transfers)
        if sum(least.get((pool.name, role), math.inf) for role in (Role.PREFILL, Role.DECODE))
        > pool.devices_per_node
    )


def cell_pools(
    options: tuple[Option, ...], kv_transfers: KvTransfers, demand: Demand
) -> tuple[tuple[str, int], ...]:
    """Return pools, and machines of a cell, whose packing saves enough of the TTFT's target."""
    packed = replace(kv_transfers, is_packed=True)
    option_of: dict[tuple[str, int, Role], Option] = {}
    for option in options:
        pool, nodes = option.serving_pool.pool, option.degrees.stage_machines
        if option.devices < nodes * pool.devices_per_node:
            option_of.setdefault((pool.name, nodes, option.role), option)
    pairs = {
        (name, nodes): (sender, option_of[name, nodes, Role.DECODE])
        for (name, nodes, role), sender in option_of.items()
        if role is Role.PREFILL and (name, nodes, Role.DECODE) in option_of
    }
    return tuple(
        cell
        for cell, pair in pairs.items()
        if kv_transfers.seconds(*pair) - packed.seconds(*pair) > LEAST_GAIN_RATIO * demand.ttft_s
    )


def solve_cells(
    serving_pool: ServingPool,
    demand: Demand,
    solve: Solve,
    *,
    nodes: int,
    spare_ratio: float,
    most_rate: bool,
) -> SolvedProgram | None:
    """Solve equal cells, the fewest for the rate or, if `most_rate`, all; None: no room.

    Args:
        serving_pool: pool to divide into cells.
        demand: traffic of the pool.
        solve: solver of one program.
        nodes: machines of a cell.
        spare_ratio: capacity beyond the traffic.
        most_rate: whether the request rate is maximised instead.
    """
    pool = serving_pool.pool
    machines = replace(serving_pool, pool=pool.model_copy(update={"nodes": nodes}))
    cell = solve(machines, demand, True)
    num_cells = min(pool.nodes // nodes, MOST_CELLS)
    if cell is None or cell.outcome.solution is None:
        return None
    if not most_rate:
        held_per_s = cell.outcome.solution.rate_per_s / (1.0 + spare_ratio)
        needed = math.ceil(demand.rate_per_s / held_per_s * (1.0 - BOUND_TOLERANCE))
        if needed > num_cells:
            return None
        num_cells = max(needed, 1)
        cell = solve(machines, replace(demand, rate_per_s=demand.rate_per_s / num_cells), False)
    whole = solve(serving_pool, demand, most_rate)
    if cell is None or whole is None:
        return None
    return _repeated(cell, num_cells=num_cells, bound=whole.outcome.bound)


def _repeated(cell: SolvedProgram, *, num_cells: int, bound: float) -> SolvedProgram | None:
    """Return the program of so many equal cells, from one's."""
    plan, outcome = cell.outcome.solution, cell.outcome
    if plan is None:
        return None
    is_rate = cell.program.problem.objective is InstanceObjective.RATE
    objective = outcome.objective / num_cells if is_rate else outcome.objective * num_cells
    is_open = bound < objective * (1.0 - BOUND_TOLERANCE)
    flows = tuple(flow * num_cells for flow in plan.flow_per_s_E)
    return SolvedProgram(
        program=replace(cell.program, cells=num_cells),
        outcome=replace(
            outcome,
            status=Status.FEASIBLE if is_open else outcome.status,
            objective=objective,
            bound=min(bound, objective),
            solution=replace(plan, rate_per_s=plan.rate_per_s * num_cells, flow_per_s_E=flows),
        ),
    )
