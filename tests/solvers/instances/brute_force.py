"""Try every count of every column: the oracle for tests on tiny instances.

What given counts can serve at most is a linear program in the flows, solved here in fractions by
the simplex method with Bland's rule, so that nothing is rounded. Proves its answer by exhaustion,
so the time limit is not looked at.

Letters: J columns, E routes.
"""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

from solvers.instances import check
from solvers.instances.problem import InstancePlan, InstanceRole, InstancesProblem
from solvers.result import Claim, Status

Row = list[Fraction]


def solve(
    problem: InstancesProblem, *, time_limit_s: float, threads: int = 1
) -> Claim[InstancePlan]:
    """Return the best allowed plan, or the proof that there is none."""
    best, best_objective = None, math.inf
    for plan in plans(problem):
        value = check.objective(problem, plan)
        if value < best_objective:
            best, best_objective = plan, value
    status = Status.INFEASIBLE if best is None else Status.OPTIMAL
    return Claim(status=status, solution=best, bound=best_objective)


def plans(problem: InstancesProblem) -> Iterator[InstancePlan]:
    """Every plan that is allowed, serving all that it can or, at a fixed rate, the demand."""
    every = (range(problem.most_instances(j) + 1) for j in range(len(problem.columns)))
    for counts in itertools.product(*every):
        if not _fit(problem, counts):
            continue
        plan = max_flow_plan(problem, counts)
        if plan.rate_per_s == 0.0 or plan.rate_per_s < problem.least_per_s:
            continue
        if problem.objective.rate_is_fixed:
            plan = _at_lower_rate(plan, min(1.0, problem.required_per_s / plan.rate_per_s))
        if not check.violations(problem, plan):
            yield plan


def _fit(problem: InstancesProblem, counts: tuple[int, ...]) -> bool:
    return all(
        sum(
            count * column.devices_P[p]
            for count, column in zip(counts, problem.columns, strict=True)
        )
        <= pool.devices
        for p, pool in enumerate(problem.pools)
    )


def max_flow_plan(problem: InstancesProblem, counts: tuple[int, ...]) -> InstancePlan:
    """What these instances serve at most, the pools and kinds not looked at."""
    capacity_G = [Fraction(0)] * len(problem.groups)
    for count, column in zip(counts, problem.columns, strict=True):
        capacity_G[column.group] += count * Fraction(column.rate_per_s)
    routes, num_columns = problem.routes, len(problem.routes) + 2
    at_aggregated, at_rate = num_columns - 2, num_columns - 1
    rows: list[tuple[Row, Fraction]] = []
    aggregated = Fraction(0)
    for number, group in enumerate(problem.groups):
        if group.role is InstanceRole.AGGREGATED:
            aggregated += capacity_G[number]
            continue
        row = [Fraction(number in (route.sender, route.receiver)) for route in routes]
        rows.append(([*row, Fraction(0), Fraction(0)], capacity_G[number]))
    rows.append(([Fraction(n == at_aggregated) for n in range(num_columns)], aggregated))
    for number, link in enumerate(problem.links):
        row = [Fraction(route.request_bytes) * route.links.count(number) for route in routes]
        rows.append(([*row, Fraction(0), Fraction(0)], Fraction(link.bytes_per_s)))
    for number, share in enumerate(problem.share_C):
        of_class = [problem.groups[r.sender].request_class == number for r in routes]
        row = [Fraction(-int(one)) for one in of_class]
        rows.append(([*row, Fraction(-share), Fraction(share)], Fraction(0)))
    flows = [float(flow) for flow in _largest_of_column(rows, at_rate)]
    return InstancePlan(
        count_J=counts,
        flow_per_s_E=tuple(flows[: len(routes)]),
        aggregated_per_s=flows[at_aggregated],
        rate_per_s=flows[at_rate],
    )


def _at_lower_rate(plan: InstancePlan, factor: float) -> InstancePlan:
    return InstancePlan(
        count_J=plan.count_J,
        flow_per_s_E=tuple(flow * factor for flow in plan.flow_per_s_E),
        aggregated_per_s=plan.aggregated_per_s * factor,
        rate_per_s=plan.rate_per_s * factor,
    )


def _largest_of_column(rows: list[tuple[Row, Fraction]], wanted: int) -> Row:
    """Maximise one column of `row x <= limit, x >= 0`, limits at least 0, the optimum finite."""
    num_columns, num_rows = len(rows[0][0]), len(rows)
    table = [
        [*row, *(Fraction(i == j) for j in range(num_rows)), limit]
        for i, (row, limit) in enumerate(rows)
    ]
    gain = [Fraction(-int(n == wanted)) for n in range(num_columns + num_rows + 1)]
    basis = [num_columns + i for i in range(num_rows)]
    while (entering := next((n for n, g in enumerate(gain[:-1]) if g < 0), None)) is not None:
        leaving = min(
            (i for i in range(num_rows) if table[i][entering] > 0),
            key=lambda i: (table[i][-1] / table[i][entering], basis[i]),
        )
        pivot = [value / table[leaving][entering] for value in table[leaving]]
        for line in (*table[:leaving], *table[leaving + 1 :], gain):
            factor = line[entering]
            line[:] = [value - factor * by for value, by in zip(line, pivot, strict=True)]
        table[leaving] = pivot
        basis[leaving] = entering
    value_of = {column: line[-1] for column, line in zip(basis, table, strict=True)}
    return [value_of.get(n, Fraction(0)) for n in range(num_columns)]
