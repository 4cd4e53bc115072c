"""The rows of `problem.py` as an integer program, solved by CBC through PuLP.

Dominated columns are removed first (`dominance.py`). COST and DEVICES are the least weight at the
required rate. For RATE a first program maximises the rate; a bound b on it bounds the objective by
(1 + spare) / b. A second one, the fewest devices at that rate, takes out idle instances.

Rates are written in units of a rate that the pools can about reach, and links in shares of what
they carry, so that CBC's tolerance on a row, 1e-7, lies far inside `SHORTFALL_RATIO`. Kinds in use
are binary columns beside the counts, where they are limited.

Proves optimality and infeasibility up to CBC's tolerances, which are taken off the bound.
Exponential in the worst case; pools of tens of devices take a fraction of a second.

Letters: J columns, G groups, P pools, E routes, C classes.
"""

import math
import time
from collections.abc import Iterable, Mapping

import pulp
from pulp.apis.coin_api import pulp_cbc_path

from solvers.cbc import run_cbc
from solvers.instances.dominance import undominated
from solvers.instances.flows import at_lower_rate, max_flow_plan
from solvers.instances.problem import InstancePlan, InstanceRole, InstancesProblem
from solvers.result import Claim, Status

SCALED_OBJECTIVE = 1e4
"""Size of the objective in the model's units; CBC's absolute tolerance of 1e-5 is 1e-9 of it."""

RELATIVE_TOLERANCE = 1e-7
"""Share of the objective's size that is taken off every bound."""

LEAST_UNIT_RATIO = 1e-5
"""Least unit of a free rate, over what the pools reach, which keeps coefficients below 1e5."""

SHORTEST_RUN_S = 0.05
"""Shortest time limit of CBC, seconds, even when writing the model has used up the time."""


def solve(
    problem: InstancesProblem, *, time_limit_s: float, threads: int = 1
) -> Claim[InstancePlan]:
    """Return CBC's best plan with a proven lower bound on the objective."""
    deadline_s = time.perf_counter() + time_limit_s
    columns = undominated(problem)
    reach_per_s = reachable_per_s(problem, columns)
    if reach_per_s == 0.0:
        return Claim(status=Status.INFEASIBLE, solution=None, bound=math.inf)

    def lightest(least_per_s: float) -> Claim[InstancePlan]:
        program = _InstanceProgram(
            problem, columns, problem.weight_J, least_per_s=least_per_s, unit_per_s=least_per_s
        )
        return program.run(time_limit_s=deadline_s - time.perf_counter(), threads=threads)

    if problem.objective.rate_is_fixed:
        return lightest(problem.least_per_s)
    unit_per_s = max(problem.least_per_s, LEAST_UNIT_RATIO * reach_per_s)
    program = _InstanceProgram(
        problem, columns, None, least_per_s=problem.least_per_s, unit_per_s=unit_per_s
    )
    fastest = program.run(time_limit_s=deadline_s - time.perf_counter(), threads=threads)
    if fastest.status is Status.INFEASIBLE:
        return fastest
    bound = (1.0 + problem.spare_ratio) / -fastest.bound if fastest.bound < 0.0 else math.inf
    plan = fastest.solution
    if plan is not None and plan.rate_per_s == 0.0:
        if fastest.status is Status.OPTIMAL:
            return Claim(status=Status.INFEASIBLE, solution=None, bound=math.inf)
        return Claim(status=Status.UNKNOWN, solution=None, bound=bound)
    if plan is not None:
        plan = lightest(plan.rate_per_s).solution or plan
    return Claim(status=fastest.status, solution=plan, bound=bound)


def reachable_per_s(problem: InstancesProblem, columns: Iterable[int]) -> float:
    """Requests/s of every pool given wholly to its fastest column: a size to scale by, no bound."""
    best_P = [0.0] * len(problem.pools)
    for number in columns:
        column, instances = problem.columns[number], problem.most_instances(number)
        for pool, devices in enumerate(column.devices_P):
            if devices:
                best_P[pool] = max(best_P[pool], instances * column.rate_per_s)
    return sum(best_P)


class _InstanceProgram:
    """The least weight at a rate, or the most rate where nothing weighs; a resource of one run."""

    def __init__(
        self,
        problem: InstancesProblem,
        columns: tuple[int, ...],
        weight_J: tuple[float, ...] | None,
        *,
        least_per_s: float,
        unit_per_s: float,
    ) -> None:
        self.problem, self.columns, self.weight_J = problem, columns, weight_J
        self.least_per_s, self.unit_per_s = least_per_s, unit_per_s
        self.program = pulp.LpProblem("instances", pulp.LpMinimize)
        self.count_J = {
            j: self.program.add_variable(
                f"n{j}", lowBound=0, upBound=problem.most_instances(j), cat=pulp.LpInteger
            )
            for j in columns
        }
        self.flow_E = [
            self.program.add_variable(f"y{e}", lowBound=0.0) for e in range(len(problem.routes))
        ]
        self.aggregated = self.program.add_variable("a", lowBound=0.0)
        least = least_per_s / unit_per_s
        self.rate = self.program.add_variable(
            "r", lowBound=least, upBound=None if weight_J is None else least
        )
        self._price()
        self._serve()
        self._share_pools()
        self._limit_kinds()

    def _price(self) -> None:
        if self.weight_J is None:
            self.size = self.unit_per_s
            self.program += -SCALED_OBJECTIVE * self.rate
            return
        self.size = max(self.weight_J[j] for j in self.columns)
        scale = SCALED_OBJECTIVE / self.size
        weighed = [(count, self.weight_J[j] * scale) for j, count in self.count_J.items()]
        self.program += pulp.LpAffineExpression(weighed)

    def _serve(self) -> None:
        problem, routes = self.problem, self.problem.routes
        for number, group in enumerate(problem.groups):
            if group.role is not InstanceRole.AGGREGATED:
                through = [
                    flow
                    for flow, route in zip(self.flow_E, routes, strict=True)
                    if number in (route.sender, route.receiver)
                ]
                self.program += pulp.lpSum(through) <= self._capacity({number})
        together = {
            g for g, group in enumerate(problem.groups) if group.role is InstanceRole.AGGREGATED
        }
        self.program += self.aggregated <= self._capacity(together)
        for number, share in enumerate(problem.share_C):
            of_class = [
                flow
                for flow, route in zip(self.flow_E, routes, strict=True)
                if problem.groups[route.sender].request_class == number
            ]
            self.program += pulp.lpSum(of_class) + share * self.aggregated == share * self.rate
        for number, link in enumerate(problem.links):
            occupied = [
                (flow, times * route.request_bytes * self.unit_per_s / link.bytes_per_s)
                for flow, route in zip(self.flow_E, routes, strict=True)
                if (times := route.links.count(number))
            ]
            self.program += pulp.LpAffineExpression(occupied) <= 1

    def _capacity(self, groups: set[int]) -> pulp.LpAffineExpression:
        # At a fixed rate no instance serves more than all of it, which keeps every number near 1.
        most_per_s = math.inf if self.weight_J is None else self.unit_per_s
        members = [
            (count, min(self.problem.columns[j].rate_per_s, most_per_s) / self.unit_per_s)
            for j, count in self.count_J.items()
            if self.problem.columns[j].group in groups
        ]
        return pulp.LpAffineExpression(members)

    def _share_pools(self) -> None:
        for number, pool in enumerate(self.problem.pools):
            taken = [
                (count, self.problem.columns[j].devices_P[number])
                for j, count in self.count_J.items()
            ]
            self.program += pulp.LpAffineExpression(taken) <= pool.devices

    def _limit_kinds(self) -> None:
        problem = self.problem
        if problem.max_kinds is None:
            return
        for _, columns in problem.kinds():
            used = []
            for j in columns:
                if j in self.count_J:
                    in_use = self.program.add_variable(f"u{j}", cat=pulp.LpBinary)
                    self.program += self.count_J[j] <= problem.most_instances(j) * in_use
                    used.append(in_use)
            self.program += pulp.lpSum(used) <= problem.max_kinds

    def run(self, *, time_limit_s: float, threads: int) -> Claim[InstancePlan]:
        """Solve; the claim is about the weight, or about the rate below zero."""
        result = run_cbc(
            executable=pulp_cbc_path,
            write_model=self.program.writeMPS,
            time_limit_s=max(SHORTEST_RUN_S, time_limit_s),
            threads=threads,
        )
        if result.status is Status.INFEASIBLE:
            return Claim(status=result.status, solution=None, bound=math.inf)
        plan = self._plan(result.value_of_column) if result.status.has_solution else None
        bound = result.bound * self.size / SCALED_OBJECTIVE
        bound -= RELATIVE_TOLERANCE * max(abs(bound), self.unit_per_s * (self.weight_J is None))
        return Claim(status=result.status, solution=plan, bound=bound)

    def _plan(self, value: Mapping[str, float]) -> InstancePlan:
        counts = [0] * len(self.problem.columns)
        for j in self.columns:
            counts[j] = round(value.get(f"n{j}", 0.0))
        plan = max_flow_plan(self.problem, tuple(counts)).plan
        return plan if self.weight_J is None else at_lower_rate(plan, self.least_per_s)
