"""The most that given instances can serve, and a cut that proves it.

With the counts fixed the rows of `problem.py` are a linear program in the flows,

    maximise r   such that   sum of y through g <= capacity[g],  a <= capacity[aggregated],
                             sum_e bytes[e] y_e / capacity[k] <= 1,
                             share[c] (r - a) - sum_e y_e <= 0,  all at least 0

solved by the simplex method on a dense table with Bland's rule: all limits are at least 0, so that
nothing flowing is a basis to start from, and with tens of rows a table is the fastest way.

Its prices give a cut that holds for all counts (weak duality): with a price p on each group, q on
each link, u on aggregated instances and v on each class such that p[sender] + p[receiver] + bytes
q >= v of the sender's class, u >= sum_c share[c] v[c] and sum_c share[c] v[c] >= 1,

    r <= sum_j p[group of j] rate[j] n_j + sum_k q[k] capacity[k]

Prices from the table are raised until these conditions hold, so rounding cannot make a cut false.

Letters: J columns, G groups, E routes, K links, C classes; I rows, N variables of the program.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.instances.problem import InstancePlan, InstanceRole, InstancesProblem

Floats = npt.NDArray[np.float64]

PRICE_TOLERANCE = 1e-12
"""Least gain with which a variable enters, in a program whose numbers are about 1."""

PIVOT_TOLERANCE = 1e-10
"""Largest entry of the table that is taken for rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Inequality for all counts: requests/s <= sum of `slope_J` times counts + `constant`."""

    slope_J: tuple[float, ...]
    constant: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFlow:
    """Most requests that given counts serve, with the plan and the cut that prove it."""

    plan: InstancePlan
    cut: Cut
    """Cut that these counts meet with equality, up to rounding."""


def max_flow_plan(problem: InstancesProblem, count_J: tuple[int, ...]) -> ServedFlow:
    """Route as many requests as the instances and links can serve; pools are ignored."""
    capacity_G = np.zeros(len(problem.groups))
    for count, column in zip(count_J, problem.columns, strict=True):
        capacity_G[column.group] += count * column.rate_per_s
    unit_per_s = float(capacity_G.max()) or 1.0
    rows_IN, limit_I = _rows(problem, capacity_G / unit_per_s, unit_per_s)
    value_N, price_I = _most_of_last(rows_IN, limit_I)
    plan = InstancePlan(
        count_J=count_J,
        flow_per_s_E=tuple((value_N[:-2] * unit_per_s).tolist()),
        aggregated_per_s=float(value_N[-2]) * unit_per_s,
        rate_per_s=float(value_N[-1]) * unit_per_s,
    )
    return ServedFlow(plan=plan, cut=_cut(problem, price_I, unit_per_s))


def at_lower_rate(plan: InstancePlan, rate_per_s: float) -> InstancePlan:
    """Return the same instances at a rate that is no higher."""
    factor = min(1.0, rate_per_s / plan.rate_per_s)
    return InstancePlan(
        count_J=plan.count_J,
        flow_per_s_E=tuple(flow * factor for flow in plan.flow_per_s_E),
        aggregated_per_s=plan.aggregated_per_s * factor,
        rate_per_s=plan.rate_per_s * factor,
    )


def first_cuts(problem: InstancesProblem) -> tuple[Cut, ...]:
    """Every class must be prefilled and everything decoded, the links ignored."""
    cuts = []
    for number, share in enumerate(problem.share_C):
        slope_J = [0.0] * len(problem.columns)
        for j, column in enumerate(problem.columns):
            group = problem.groups[column.group]
            if group.role is InstanceRole.AGGREGATED:
                slope_J[j] = column.rate_per_s
            elif group.role is InstanceRole.PREFILL and group.request_class == number:
                slope_J[j] = column.rate_per_s / share
        cuts.append(Cut(slope_J=tuple(slope_J), constant=0.0))
    decode_J = tuple(
        0.0 if problem.role_of(j) is InstanceRole.PREFILL else column.rate_per_s
        for j, column in enumerate(problem.columns)
    )
    return (*cuts, Cut(slope_J=decode_J, constant=0.0))


def _rows(
    problem: InstancesProblem, capacity_G: Floats, unit_per_s: float
) -> tuple[Floats, Floats]:
    """Rows of groups, links and classes, in this order; variables: flows, aggregated, rate."""
    groups, links, classes = len(problem.groups), len(problem.links), len(problem.share_C)
    rows_IN = np.zeros((groups + links + classes, len(problem.routes) + 2))
    limit_I = np.concatenate([capacity_G, np.ones(links), np.zeros(classes)])
    together = _aggregated(problem)
    if together:  # as if all were in the first of the groups; the others' rows stay empty
        rows_IN[together[0], -2] = 1.0
        limit_I[together[0]] = capacity_G[together].sum()
    for number, route in enumerate(problem.routes):
        rows_IN[[route.sender, route.receiver], number] = 1.0
        for link in route.links:
            bytes_per_s = problem.links[link].bytes_per_s
            rows_IN[groups + link, number] += route.request_bytes * unit_per_s / bytes_per_s
        rows_IN[groups + links + problem.groups[route.sender].request_class, number] = -1.0
    for number, share in enumerate(problem.share_C):
        rows_IN[groups + links + number, -1] = share
        rows_IN[groups + links + number, -2] = -share if together else 0.0
    return rows_IN, limit_I


def _aggregated(problem: InstancesProblem) -> list[int]:
    return [g for g, group in enumerate(problem.groups) if group.role is InstanceRole.AGGREGATED]


def _most_of_last(rows_IN: Floats, limit_I: Floats) -> tuple[Floats, Floats]:
    """Maximise the last variable; return the values and the rows' prices."""
    num_rows, num_variables = rows_IN.shape
    table = np.hstack([rows_IN, np.eye(num_rows), limit_I[:, None]])
    gain = np.zeros(num_variables + num_rows + 1)
    gain[num_variables - 1] = -1.0
    basis_I = np.arange(num_variables, num_variables + num_rows)
    while (gaining := np.flatnonzero(gain[:-1] < -PRICE_TOLERANCE)).size:
        entering = int(gaining[0])
        able = np.flatnonzero(table[:, entering] > PIVOT_TOLERANCE)
        steps = table[able, -1] / table[able, entering]
        tied = able[steps <= steps.min() + PRICE_TOLERANCE]
        leaving = int(tied[basis_I[tied].argmin()])
        table[leaving] /= table[leaving, entering]
        factor_I = table[:, entering].copy()
        factor_I[leaving] = 0.0
        table -= np.outer(factor_I, table[leaving])
        gain -= gain[entering] * table[leaving]
        basis_I[leaving] = entering
    value = np.zeros(num_variables + num_rows)
    value[basis_I] = np.maximum(table[:, -1], 0.0)
    return value[:num_variables], np.maximum(gain[num_variables:-1], 0.0)


def _cut(problem: InstancesProblem, price_I: Floats, unit_per_s: float) -> Cut:
    groups, links = len(problem.groups), len(problem.links)
    price_G = price_I[:groups].copy()
    price_K = price_I[groups : groups + links] / [
        link.bytes_per_s / unit_per_s for link in problem.links
    ]
    price_C = price_I[groups + links :] / float(price_I[groups + links :] @ problem.share_C)
    together = _aggregated(problem)
    price_G[together] = 1.0
    for route in problem.routes:
        paid = price_G[route.sender] + price_G[route.receiver]
        paid += route.request_bytes * sum(price_K[link] for link in route.links)
        worth = price_C[problem.groups[route.sender].request_class]
        price_G[route.sender] += max(0.0, worth - paid)
    slope_J = tuple(float(price_G[column.group]) * column.rate_per_s for column in problem.columns)
    bytes_per_s_K = np.array([link.bytes_per_s for link in problem.links])
    return Cut(slope_J=slope_J, constant=float(price_K @ bytes_per_s_K))
