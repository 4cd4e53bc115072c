"""Integer program over stages counted from the end of the chain, solved by CBC through PuLP.

Stage t has t stages behind it, so the micro-batches that it holds are known before it is placed.

    minimise    sum_{t,p,l} time[p, l] z[t, p, l] + 2 sum_t hop_t + (m - 1) slowest
    such that   sum_{t,p} z[t, p, l] = 1                              every layer is placed
                z[t, p, l] <= y[t, p] <= sum_l z[t, p, l]             on used stages, none empty
                sum_p y[t, p] <= 1, sum_p y[t + 1, p] <= sum_p y[t, p]   the chain has no holes
                sum_{t' <= t, p} (z[t', p, l + 1] - z[t', p, l]) >= 0    layers keep their order
                sum_t y[t, p] <= max[p]                               the pool's devices suffice
                sum_t begins[t, p] <= 1, begins[t, p] >= y[t, p] - y[t - 1, p]   in one stretch
                slowest >= sum_{p,l} time[p, l] z[t, p, l], slowest >= hop_t
                hop_t >= hop[p, q] (y[t, p] + y[t - 1, q] - 1)        t sends to t - 1
                sum_l bytes[t, p, l] z[t, p, l] <= limit[p] y[t, p]

y and z are binary. Where no link joins two pools their pair is forbidden. Memory is exact: where
CBC's tolerance lets a stage overstep its limit, that set of layers is cut off there and the program
is re-solved. Proves optimality and infeasibility up to CBC's tolerances, which are taken off the
bound. Exponential; `exact.py` is faster, this one is the independent second opinion.

Letters: P pools, L layers, T stages counted from the end.
"""

import itertools
import math
import time

import numpy as np
import pulp
from pulp.apis.coin_api import pulp_cbc_path

from solvers.cbc import CbcResult, run_cbc
from solvers.partition import check
from solvers.partition.problem import Partition, PartitionProblem, PartitionStage
from solvers.result import Claim, Status

SCALED_OBJECTIVE = 1e4
"""Least objective in the model's units: CBC's absolute tolerance of 1e-5 is then 1e-9 of it."""

RELATIVE_TOLERANCE = 1e-7
"""Taken off every bound."""

SHORTEST_RUN_S = 0.05
"""What CBC gets even when writing the model has used up the time."""


def solve(problem: PartitionProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Partition]:
    """Return CBC's best partition with a proven lower bound on the step time."""
    deadline_s = time.perf_counter() + time_limit_s
    if not problem.max_stages:
        return Claim(status=Status.INFEASIBLE, solution=None, bound=math.inf)
    bound = float(problem.time_s_PL.min(axis=0).sum())
    scale = SCALED_OBJECTIVE / bound if bound > 0.0 else 1.0
    model = _PartitionProgram(problem, scale)
    while True:
        result = run_cbc(
            executable=pulp_cbc_path,
            write_model=model.program.writeMPS,
            time_limit_s=max(SHORTEST_RUN_S, deadline_s - time.perf_counter()),
            threads=threads,
        )
        if result.status is Status.INFEASIBLE:
            return Claim(status=Status.INFEASIBLE, solution=None, bound=math.inf)
        bound = max(bound, result.bound / scale * (1.0 - RELATIVE_TOLERANCE))
        if not result.status.has_solution:
            return Claim(status=Status.UNKNOWN, solution=None, bound=bound)
        partition = model.partition(result)
        overfull = _overfull(problem, partition)
        if not overfull:
            return Claim(status=result.status, solution=partition, bound=bound)
        if time.perf_counter() >= deadline_s:
            return Claim(status=Status.UNKNOWN, solution=None, bound=bound)
        model.forbid(partition, overfull)


def _overfull(problem: PartitionProblem, partition: Partition) -> list[int]:
    return [
        number
        for number, needed in enumerate(check.memory_bytes(problem, partition))
        if needed > problem.memory_limit_bytes_P[partition.stages[number].pool]
    ]


class _PartitionProgram:
    """The program with its columns; a resource of one solve."""

    def __init__(self, problem: PartitionProblem, scale: float) -> None:
        self.problem = problem
        self.program = pulp.LpProblem("partition", pulp.LpMinimize)
        self.stages, self.pools = range(problem.max_stages), range(problem.num_pools)
        self.layers = range(problem.num_layers)
        self.y_TP = [[self._binary(f"y{t}_{p}") for p in self.pools] for t in self.stages]
        self.z_TPL = [
            [[self._binary(f"z{t}_{p}_{layer}") for layer in self.layers] for p in self.pools]
            for t in self.stages
        ]
        self._price(scale)
        self._place()
        self._keep_order()
        self._limit_memory()

    def _binary(self, name: str) -> pulp.LpVariable:
        return self.program.add_variable(name, cat=pulp.LpBinary)

    def _price(self, scale: float) -> None:
        time_s_PL = self.problem.time_s_PL * scale
        hop_s_PP = self.problem.hop_s_PP * scale
        slowest = self.program.add_variable("slowest", lowBound=0.0)
        time_T = [
            pulp.lpSum(
                float(time_s_PL[p, layer]) * self.z_TPL[t][p][layer]
                for p in self.pools
                for layer in self.layers
            )
            for t in self.stages
        ]
        hop_T = [self.program.add_variable(f"h{t}", lowBound=0.0) for t in self.stages[1:]]
        repeats = self.problem.num_microbatches - 1
        self.program += pulp.lpSum(time_T) + 2 * pulp.lpSum(hop_T) + repeats * slowest
        for time_of_stage in time_T:
            self.program += time_of_stage <= slowest
        for t, hop in enumerate(hop_T, start=1):
            self.program += hop <= slowest
            for p, q in itertools.product(self.pools, self.pools):
                both = self.y_TP[t][p] + self.y_TP[t - 1][q]
                if np.isinf(hop_s_PP[p, q]):
                    self.program += both <= 1
                else:
                    self.program += hop >= float(hop_s_PP[p, q]) * (both - 1)

    def _place(self) -> None:
        for layer in self.layers:
            self.program += (
                pulp.lpSum(self.z_TPL[t][p][layer] for t in self.stages for p in self.pools) == 1
            )
        for t, p in itertools.product(self.stages, self.pools):
            self.program += pulp.lpSum(self.z_TPL[t][p]) >= self.y_TP[t][p]
            for layer in self.layers:
                self.program += self.z_TPL[t][p][layer] <= self.y_TP[t][p]
        for t in self.stages:
            self.program += pulp.lpSum(self.y_TP[t]) <= 1
        for p in self.pools:
            used = pulp.lpSum(self.y_TP[t][p] for t in self.stages)
            self.program += used <= self.problem.max_stages_P[p]
            begins_T = [self._binary(f"b{t}_{p}") for t in self.stages]
            self.program += pulp.lpSum(begins_T) <= 1
            for t, begins in enumerate(begins_T):
                before = self.y_TP[t - 1][p] if t else 0
                self.program += begins >= self.y_TP[t][p] - before

    def _keep_order(self) -> None:
        for t in self.stages[:-1]:
            self.program += pulp.lpSum(self.y_TP[t + 1]) <= pulp.lpSum(self.y_TP[t])
        for layer, t in itertools.product(self.layers[:-1], self.stages[:-1]):
            behind = [(u, p) for u in range(t + 1) for p in self.pools]
            later = pulp.lpSum(self.z_TPL[u][p][layer + 1] for u, p in behind)
            self.program += later >= pulp.lpSum(self.z_TPL[u][p][layer] for u, p in behind)

    def _limit_memory(self) -> None:
        problem = self.problem
        for t, p in itertools.product(self.stages, self.pools):
            limit = max(int(problem.memory_limit_bytes_P[p]), 1)
            resident_L = (
                problem.static_bytes_PL[p] + problem.in_flight(t) * problem.saved_bytes_PL[p]
            )
            share_L = (resident_L / limit).tolist()
            placed = pulp.LpAffineExpression(zip(self.z_TPL[t][p], share_L, strict=True))
            allowed = float(problem.memory_limit_bytes_P[p] > 0)
            self.program += placed <= allowed * self.y_TP[t][p]

    def partition(self, result: CbcResult) -> Partition:
        """The chain that the columns describe, first stage first."""
        value = result.value_of_column
        pools_by_stage: dict[int, list[int]] = {}
        for layer in self.layers:
            t, p = max(
                itertools.product(self.stages, self.pools),
                key=lambda place: value.get(f"z{place[0]}_{place[1]}_{layer}", 0.0),
            )
            pools_by_stage.setdefault(t, []).append(p)
        return Partition(
            stages=tuple(
                PartitionStage(pool=pools[0], layers=len(pools))
                for _, pools in sorted(pools_by_stage.items(), reverse=True)
            )
        )

    def forbid(self, partition: Partition, stages: list[int]) -> None:
        """Keep these sets of layers, and all that contain them, off these stages."""
        start, last = 0, len(partition.stages) - 1
        for number, stage in enumerate(partition.stages):
            if number in stages:
                placed = self.z_TPL[last - number][stage.pool][start : start + stage.layers]
                self.program += pulp.lpSum(placed) <= stage.layers - 1
            start += stage.layers
