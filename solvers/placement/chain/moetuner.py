"""MoETuner's two integer programs (arXiv 2502.06643), solved by CBC through PuLP.

    L layers   E experts   G ranks, and as many clusters a layer   load(l, e)   flow(l, e, f)

First, each layer by itself, experts to clusters, each of the slots of one rank:

    minimise    sum_c |T_c - mean|            T_c = sum_e load_e x[c, e],  sum_c x[c, e] = 1

Then clusters to ranks, one to one in every layer, with C = flow between clusters:

    minimise    sum_l M_l,   M_l >= sum_{g,h} C[c, d] cost[g, h] z[c, d, g, h]        all c, d
                sum_h z[c, d, g, h] = y[l, c, g],   sum_g z[c, d, g, h] = y[l + 1, d, h]

x and y are binary. The paper's cost is 1 / bandwidth, 0 on a rank. With the measure TOTAL the sum
of all terms takes the place of the M. The paper's clusters may differ in size, as long as a rank
has as many experts over all layers; engines give a rank as many slots in every layer, so clusters
do here. `solve` adds the load limits to the first program; where CBC finds nothing in a layer's
time, experts are packed longest first and swapped by load alone until the limit holds
(`swap_search.py`). The heaviest expert is put into cluster 0 where clusters are identical,
which cuts symmetry only.

The first program looks at no flow and the second cannot break clusters up, so their optima one
after the other prove nothing about the chain: the bound of `solve` is that of `bound.py`. How far
the second scales, tests/benchmarks/placement_chain.py measures.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pulp
from pulp.apis.coin_api import pulp_cbc_path

from solvers.cbc import CbcResult, run_cbc
from solvers.placement.chain import check
from solvers.placement.chain.bound import lower_bound
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.ranks import Floats, Ints, Placement, placed
from solvers.placement.swap_search import fit
from solvers.result import Claim, Status

SCALE: Final = 1e4
"""Typical cost in the models' units: CBC's absolute tolerance of 1e-5 is then 1e-9 of it."""
TOLERANCE_RATIO: Final = 1e-6
"""Share by which the model widens limits, so that CBC's tolerances exclude no legal placement."""
CLUSTER_RATIO: Final = 0.3
"""Share of the time limit for the first program, split over the layers."""
SHORTEST_RUN_S: Final = 0.05

Choices = list[list[pulp.LpVariable]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProgramSolution:
    """The solution of one program."""

    status: Status
    """The worst over the layers."""
    number_LE: Ints | None
    """Cluster of each expert, or rank of each cluster; None: some layer has no solution."""
    bound: float
    """Bound on the program's own objective; as a claim's where there is no solution."""


def solve(problem: ChainProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Placement]:
    """Return the placement of both programs with equal clusters, if CBC finds one in time."""
    deadline_s = time.perf_counter() + time_limit_s
    clusters = balanced_clusters(
        problem, time_limit_s=CLUSTER_RATIO * time_limit_s, threads=threads
    )
    if clusters.number_LE is None:
        return Claim(status=clusters.status, solution=None, bound=clusters.bound)
    ranks = clusters_to_ranks(
        problem,
        clusters.number_LE,
        time_limit_s=max(SHORTEST_RUN_S, deadline_s - time.perf_counter()),
        threads=threads,
    )
    unknown: Claim[Placement] = Claim(status=Status.UNKNOWN, solution=None, bound=-math.inf)
    if ranks.number_LE is None:
        return unknown
    solution = placed(np.take_along_axis(ranks.number_LE, clusters.number_LE, axis=1))
    if check.violations(problem, solution):
        return unknown
    bound = min(lower_bound(problem, time_limit_s=1.0), check.objective(problem, solution))
    return Claim(status=Status.FEASIBLE, solution=solution, bound=bound)


def balanced_clusters(
    problem: ChainProblem, *, time_limit_s: float, threads: int = 1
) -> ProgramSolution:
    """Solve the first program: the cluster of each expert, and what its sum is at least."""
    each_s = max(SHORTEST_RUN_S, time_limit_s / problem.num_layers)
    rows, bound, worst = [], 0.0, Status.OPTIMAL
    for layer, load_E in enumerate(problem.load_LE):
        scale = SCALE / float(load_E.sum()) if load_E.any() else 1.0
        limit = None if problem.most_load_L is None else problem.most_load_L[layer : layer + 1]
        model, x = _cluster_model(load_E * scale, problem.ranks.slots_G, limit, scale)
        result = _solve_with_cbc(model, each_s, threads)
        if result.status is Status.INFEASIBLE:
            return ProgramSolution(status=result.status, number_LE=None, bound=math.inf)
        if result.status is not Status.OPTIMAL:
            worst = Status.FEASIBLE
        number_E = _chosen(x, result)
        if not result.status.has_solution:
            fitted_1E = fit(load_E[None], problem.ranks, limit)
            if fitted_1E is None:
                return ProgramSolution(status=Status.UNKNOWN, number_LE=None, bound=-math.inf)
            number_E = fitted_1E[0]
        rows.append(number_E)
        bound += max(0.0, result.bound / scale * (1.0 - TOLERANCE_RATIO))
    return ProgramSolution(status=worst, number_LE=np.array(rows), bound=bound)


def clusters_to_ranks(
    problem: ChainProblem, cluster_LE: Ints, *, time_limit_s: float, threads: int = 1
) -> ProgramSolution:
    """Solve the second program: the rank of each cluster, and what its objective is at least."""
    flow_TCC = cluster_flows(problem, cluster_LE)
    largest = float(problem.cost_GG.max()) * float(flow_TCC.max(initial=0.0))
    scale = SCALE / largest if largest > 0.0 else 1.0
    model, y = _rank_model(problem, flow_TCC * scale)
    result = _solve_with_cbc(model, time_limit_s, threads)
    if not result.status.has_solution:
        return ProgramSolution(status=result.status, number_LE=None, bound=-math.inf)
    number_LC = np.array([_chosen(list(zip(*y_CG, strict=True)), result) for y_CG in y])
    bound = max(0.0, result.bound / scale * (1.0 - TOLERANCE_RATIO))
    return ProgramSolution(status=result.status, number_LE=number_LC, bound=bound)


def cluster_flows(problem: ChainProblem, cluster_LE: Ints) -> Floats:
    """Return flow_TCC: tokens between the clusters of consecutive layers."""
    in_LCE = cluster_LE[:, None, :] == np.arange(problem.ranks.num_ranks)[None, :, None]
    in_LCE = in_LCE.astype(np.float64)
    return np.asarray(in_LCE[:-1] @ problem.flow_TEE @ in_LCE[1:].transpose(0, 2, 1))


def _cluster_model(
    load_E: Floats, slots_G: Ints, limit: Floats | None, scale: float
) -> tuple[pulp.LpProblem, Choices]:
    mean = float(load_E.sum()) / len(slots_G)
    experts, clusters = range(len(load_E)), range(len(slots_G))
    model = pulp.LpProblem("clusters", pulp.LpMinimize)
    x = [[model.add_variable(f"x{c}_{e}", cat=pulp.LpBinary) for e in experts] for c in clusters]
    deviation = [model.add_variable(f"u{c}", lowBound=0.0) for c in clusters]
    model += pulp.lpSum(deviation)
    for e in experts:
        model += pulp.lpSum(x[c][e] for c in clusters) == 1
    for c in clusters:
        tokens = pulp.LpAffineExpression(zip(x[c], load_E.tolist(), strict=True))
        model += tokens - mean <= deviation[c]
        model += mean - tokens <= deviation[c]
        model += pulp.lpSum(x[c]) == int(slots_G[c])
        if limit is not None:
            model += tokens <= float(limit[0]) * scale * (1.0 + TOLERANCE_RATIO)
    if (slots_G == slots_G[0]).all():
        model += x[0][int(np.argmax(load_E))] == 1
    return model, x


def _rank_model(problem: ChainProblem, flow_TCC: Floats) -> tuple[pulp.LpProblem, list[Choices]]:
    ranks, slots_G = range(problem.ranks.num_ranks), problem.ranks.slots_G
    model, paid = pulp.LpProblem("ranks", pulp.LpMinimize), []
    y = [
        [[model.add_variable(f"y{layer}_{c}_{g}", cat=pulp.LpBinary) for g in ranks] for c in ranks]
        for layer in range(problem.num_layers)
    ]
    for pair, c, d in np.argwhere(flow_TCC > 0.0).tolist():
        name = f"{pair}_{c}_{d}"
        z = [[model.add_variable(f"z{name}_{g}_{h}", lowBound=0.0) for h in ranks] for g in ranks]
        for g in ranks:
            model += pulp.lpSum(z[g]) == y[pair][c][g]
            model += pulp.lpSum(z[h][g] for h in ranks) == y[pair + 1][d][g]
        costs = (flow_TCC[pair, c, d] * problem.cost_GG).ravel().tolist()
        terms = zip((variable for row in z for variable in row), costs, strict=True)
        paid.append((pair, pulp.LpAffineExpression(terms)))
    if problem.measure is Measure.TOTAL:
        model += pulp.lpSum(term for _, term in paid)
    else:
        maxima = [model.add_variable(f"M{pair}", lowBound=0.0) for pair in range(len(flow_TCC))]
        model += pulp.lpSum(maxima)
        for pair, term in paid:
            model += term <= maxima[pair]
    for y_CG in y:
        for number in ranks:
            model += pulp.lpSum(y_CG[number]) == 1
            model += pulp.lpSum(y_CG[c][number] for c in ranks) == 1
        for c, g in np.argwhere(slots_G[:, None] != slots_G).tolist():
            model += y_CG[c][g] == 0
    return model, y


def _solve_with_cbc(model: pulp.LpProblem, time_limit_s: float, threads: int) -> CbcResult:
    return run_cbc(
        executable=pulp_cbc_path,
        write_model=model.writeMPS,
        time_limit_s=time_limit_s,
        threads=threads,
    )


def _chosen(of_number: Sequence[Sequence[pulp.LpVariable]], result: CbcResult) -> Ints:
    """Return for each column of choices the row that CBC set to one."""
    value = result.value_of_column
    chosen = np.array([[value.get(variable.name, 0.0) for variable in row] for row in of_number])
    return np.asarray(chosen.argmax(axis=0), dtype=np.int64)
