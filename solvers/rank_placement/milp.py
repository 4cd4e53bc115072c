"""Integer program over nodes and cells, solved by CBC through PuLP; for small clusters.

    minimise    slowest_pipeline + slowest_sums
    such that   sum_n y[n, r, s] = 1, sum_{r,s} y[n, r, s] <= 1
                y[n, r, s] = 0 where stage s does not fit node n
                x[e, u, v] >= 0 for each pair e of cells that communicate:
                    sum_v x[e, u, v] = y[u, source of e],  sum_u x[e, u, v] = y[v, target of e]
                a2a[b, s] >= bytes[s] sum_{e from r,u,v} x[e, u, v] / w[u, v]  each r of b
                computing[r, s] = sum_n stage_s[n] y[n, r, s] + a2a[b, s]
                peak[r] >= computing[r, s]
                slowest_pipeline >= sum_s computing[r, s] + (m - 1) peak[r]
                                    + rounds sum_{e in r,u,v} hop_s[u, v] x[e, u, v]
                ring[s], far[s] >= volume[s] sum_{u,v} x[e, u, v] / w[u, v]  each link e of theirs
                slowest_sums >= ring[s] + far[s]

y is binary; with it the transport x of a pair is the product of both ends. Where all nodes are used
the rotation of the blocks is fixed by putting node 0 into the first. Proves optimality and
infeasibility up to CBC's tolerances, which are taken off the bound; beyond some ten nodes the time
limit usually ends it, and `annealing.py` replaces a placement that is no better.

Letters: N nodes, R pipelines, S stages, B pipelines of a block.
"""

import itertools
import time

import numpy as np
import numpy.typing as npt
import pulp
from pulp.apis.coin_api import pulp_cbc_path

from solvers.cbc import CbcResult, run_cbc
from solvers.rank_placement import annealing, check
from solvers.rank_placement.bound import lower_bound_s
from solvers.rank_placement.problem import RankPlacement, RankPlacementProblem
from solvers.result import Claim, Status

SCALED_OBJECTIVE = 1e4
"""Least objective in the model's units: CBC's absolute tolerance of 1e-5 is then 1e-9 of it."""

RELATIVE_TOLERANCE = 1e-7
"""Taken off every bound."""

SHORTEST_RUN_S = 0.05
"""What CBC gets even when writing the model has used up the time."""

START_SHARE = 0.25
"""Of the time, for a placement to fall back on."""

Cell = tuple[int, int]
Seconds = npt.NDArray[np.float64]


def solve(
    problem: RankPlacementProblem, *, time_limit_s: float, threads: int = 1
) -> Claim[RankPlacement]:
    """Return CBC's best placement with a proven lower bound on the step time."""
    deadline_s = time.perf_counter() + time_limit_s
    start = annealing.solve(problem, time_limit_s=START_SHARE * time_limit_s)
    if start.solution is None or start.status is Status.OPTIMAL:
        return start
    bound = lower_bound_s(problem)
    scale = SCALED_OBJECTIVE / bound if bound > 0.0 else 1.0
    model = _model(problem, scale)
    result = run_cbc(
        executable=pulp_cbc_path,
        write_model=model.writeMPS,
        time_limit_s=max(SHORTEST_RUN_S, deadline_s - time.perf_counter()),
        threads=threads,
    )
    bound = max(bound, result.bound / scale * (1.0 - RELATIVE_TOLERANCE))
    start_s = check.objective(problem, start.solution)
    if not result.status.has_solution:
        return Claim(status=Status.FEASIBLE, solution=start.solution, bound=min(bound, start_s))
    placement = _placement(problem, result)
    placement_s = check.objective(problem, placement)
    if placement_s >= start_s:
        placement, placement_s = start.solution, start_s
    return Claim(status=result.status, solution=placement, bound=min(bound, placement_s))


def _model(problem: RankPlacementProblem, scale: float) -> pulp.LpProblem:
    R, S = problem.pipelines, problem.stages
    repeats = problem.num_microbatches - 1
    model = pulp.LpProblem("rank_placement", pulp.LpMinimize)
    pipeline = model.add_variable("pipeline", lowBound=0.0)
    sums = model.add_variable("sums", lowBound=0.0)
    model += pipeline + sums
    y = _cells(model, problem)
    slowness_NN = scale / problem.bytes_per_s_NN
    hop_s_NN = problem.rounds * problem.hop_bytes * (slowness_NN + slowness_NN.T)
    stage_s_N = (problem.stage_s_N * scale).tolist()
    all_to_all = _all_to_all_variables(model, y, problem, slowness_NN)
    for r in range(R):
        peak = model.add_variable(f"peak{r}", lowBound=0.0)
        computing = [
            pulp.LpAffineExpression(zip(y[r, s], stage_s_N, strict=True))
            + all_to_all[r // problem.block, s]
            for s in range(S)
        ]
        for of_stage in computing:
            model += of_stage <= peak
        hops = [_carried(model, y, (r, s), (r, s + 1), hop_s_NN) for s in range(S - 1)]
        model += pulp.lpSum(computing) + repeats * peak + pulp.lpSum(hops) <= pipeline
    for s in range(S):
        bytes_by_stride = {problem.block: float(problem.block_gradients_S[s])}
        bytes_by_stride[1] = bytes_by_stride.get(1, 0.0) + float(problem.gradient_bytes_S[s])
        rings = [
            _rings(model, y, s, volume_NN=summed * slowness_NN, stride=stride, pipelines=R)
            for stride, summed in bytes_by_stride.items()
            if summed > 0.0 and stride < R
        ]
        model += pulp.lpSum(rings) <= sums
    return model


def _cells(
    model: pulp.LpProblem, problem: RankPlacementProblem
) -> dict[Cell, list[pulp.LpVariable]]:
    """Columns that say which node runs which stage of which pipeline, and their rows."""
    R, S, nodes = problem.pipelines, problem.stages, range(problem.num_nodes)
    y = {
        (r, s): [model.add_variable(_name(n, r, s), cat=pulp.LpBinary) for n in nodes]
        for r, s in itertools.product(range(R), range(S))
    }
    for (_, s), y_N in y.items():
        model += pulp.lpSum(y_N) == 1
        for too_small in np.flatnonzero(problem.memory_limit_bytes_N < problem.stage_bytes_S[s]):
            model += y_N[too_small] == 0
    for n in nodes:
        model += pulp.lpSum(y_N[n] for y_N in y.values()) <= 1
    if problem.num_nodes == problem.num_used_nodes:
        first = itertools.product(range(problem.block), range(S))
        model += pulp.lpSum(y[cell][0] for cell in first) == 1
    return y


def _all_to_all_variables(
    model: pulp.LpProblem,
    y: dict[Cell, list[pulp.LpVariable]],
    problem: RankPlacementProblem,
    slowness_NN: Seconds,
) -> dict[Cell, pulp.LpVariable]:
    """Seconds of each block's all-to-all, by block and stage."""
    block = problem.block
    seconds = {}
    for b, s in itertools.product(range(problem.pipelines // block), range(problem.stages)):
        seconds[b, s] = model.add_variable(f"all_to_all{b}_{s}", lowBound=0.0)
        sent_NN = float(problem.all_to_all_S[s]) * slowness_NN
        rows = range(b * block, (b + 1) * block)
        for r in rows if sent_NN.any() and block > 1 else ():
            sent = [_carried(model, y, (r, s), (to, s), sent_NN, "a") for to in rows if to != r]
            model += pulp.lpSum(sent) <= seconds[b, s]
    return seconds


def _rings(
    model: pulp.LpProblem,
    y: dict[Cell, list[pulp.LpVariable]],
    stage: int,
    *,
    volume_NN: Seconds,
    stride: int,
    pipelines: int,
) -> pulp.LpVariable:
    """Seconds of the slowest of a stage's rings that take each `stride`-th node."""
    slowest = model.add_variable(f"ring{stage}_{stride}", lowBound=0.0)
    members = pipelines // stride
    volume_NN = 2.0 * (members - 1) / members * volume_NN
    for r in range(pipelines):
        target = ((r + stride) % pipelines, stage)
        model += _carried(model, y, (r, stage), target, volume_NN, f"g{stride}") <= slowest
    return slowest


def _carried(
    model: pulp.LpProblem,
    y: dict[Cell, list[pulp.LpVariable]],
    source: Cell,
    target: Cell,
    cost_NN: Seconds,
    what: str = "x",
) -> pulp.LpAffineExpression:
    """The cost between the nodes of two cells; `what` names the transport in the model."""
    nodes = range(len(cost_NN))
    label = what + "_".join(str(number) for number in (*source, *target))
    x = {
        (u, v): model.add_variable(f"{label}_{u}_{v}", lowBound=0.0)
        for u, v in itertools.permutations(nodes, 2)
    }
    for u in nodes:
        model += pulp.lpSum(x[u, v] for v in nodes if v != u) == y[source][u]
        model += pulp.lpSum(x[v, u] for v in nodes if v != u) == y[target][u]
    return pulp.LpAffineExpression((column, float(cost_NN[pair])) for pair, column in x.items())


def _name(node: int, pipeline: int, stage: int) -> str:
    return f"y{node}_{pipeline}_{stage}"


def _placement(problem: RankPlacementProblem, result: CbcResult) -> RankPlacement:
    value = result.value_of_column
    return RankPlacement(
        node_RS=tuple(
            tuple(
                max(
                    range(problem.num_nodes),
                    key=lambda node: value.get(_name(node, pipeline, stage), 0.0),
                )
                for stage in range(problem.stages)
            )
            for pipeline in range(problem.pipelines)
        )
    )
