"""Recompute what a plan is worth and name every rule it breaks; trusts no backend.

Plain Python numbers and loops on purpose: the definitions of `problem.py`, read line by line. Rows
of requests and bytes are met within `SHORTFALL_RATIO`; devices and kinds are whole numbers and met
exactly.
"""

import math
from collections.abc import Iterator

from solvers.instances.problem import (
    SHORTFALL_RATIO,
    InstanceObjective,
    InstancePlan,
    InstanceRole,
    InstancesProblem,
)


def violations(problem: InstancesProblem, plan: InstancePlan) -> tuple[str, ...]:
    """Every broken rule as one line with its numbers; empty when the plan is allowed."""
    broken_shape = tuple(_shape_violations(problem, plan))
    if broken_shape:
        return broken_shape
    return (
        *_device_violations(problem, plan),
        *_kind_violations(problem, plan),
        *_capacity_violations(problem, plan),
        *_link_violations(problem, plan),
        *_demand_violations(problem, plan),
    )


def objective(problem: InstancesProblem, plan: InstancePlan) -> float:
    """Return the cost of the plan; the formulas are in `problem.py`."""
    match problem.objective:
        case InstanceObjective.COST:
            return price_per_hour(problem, plan)
        case InstanceObjective.DEVICES:
            return float(sum(devices(problem, plan)))
        case InstanceObjective.RATE:
            return (1.0 + problem.spare_ratio) / plan.rate_per_s


def devices(problem: InstancesProblem, plan: InstancePlan) -> tuple[int, ...]:
    """Devices taken of each pool."""
    return tuple(
        sum(
            count * column.devices_P[pool]
            for count, column in zip(plan.count_J, problem.columns, strict=True)
        )
        for pool in range(len(problem.pools))
    )


def price_per_hour(problem: InstancesProblem, plan: InstancePlan) -> float:
    """Money for all instances."""
    return sum(
        count * column.price_per_hour
        for count, column in zip(plan.count_J, problem.columns, strict=True)
    )


def capacity_per_s(problem: InstancesProblem, plan: InstancePlan) -> tuple[float, ...]:
    """Requests/s that the instances of each group can serve in their role."""
    capacity_G = [0.0] * len(problem.groups)
    for count, column in zip(plan.count_J, problem.columns, strict=True):
        capacity_G[column.group] += count * column.rate_per_s
    return tuple(capacity_G)


def _shape_violations(problem: InstancesProblem, plan: InstancePlan) -> Iterator[str]:
    if len(plan.count_J) != len(problem.columns) or len(plan.flow_per_s_E) != len(problem.routes):
        yield (
            f"{len(plan.count_J)} counts and {len(plan.flow_per_s_E)} flows for "
            f"{len(problem.columns)} columns and {len(problem.routes)} routes"
        )
    for column, count in enumerate(plan.count_J):
        if count < 0:
            yield f"column {column} runs {count} instances"
    for rate in (*plan.flow_per_s_E, plan.aggregated_per_s):
        if not 0.0 <= rate < math.inf:
            yield f"{rate} requests/s are not a flow"
    if not 0.0 < plan.rate_per_s < math.inf:
        yield f"{plan.rate_per_s} requests/s are provided for, they must be more than none"


def _device_violations(problem: InstancesProblem, plan: InstancePlan) -> Iterator[str]:
    for pool, used in zip(problem.pools, devices(problem, plan), strict=True):
        if used > pool.devices:
            yield f"pool {pool.name!r} gives {used} devices, it has {pool.devices}"


def _kind_violations(problem: InstancesProblem, plan: InstancePlan) -> Iterator[str]:
    if problem.max_kinds is None:
        return
    for role, columns in problem.kinds():
        used = sum(plan.count_J[column] > 0 for column in columns)
        if used > problem.max_kinds:
            yield f"{used} kinds of {role} instances are in use, at most {problem.max_kinds}"


def _capacity_violations(problem: InstancesProblem, plan: InstancePlan) -> Iterator[str]:
    load_G = [0.0] * len(problem.groups)
    for flow, route in zip(plan.flow_per_s_E, problem.routes, strict=True):
        load_G[route.sender] += flow
        load_G[route.receiver] += flow
    capacity_G = capacity_per_s(problem, plan)
    aggregated = 0.0
    for group, load, capacity in zip(problem.groups, load_G, capacity_G, strict=True):
        if group.role is InstanceRole.AGGREGATED:
            aggregated += capacity
        elif _exceeds(load, capacity, plan):
            yield f"group {group.name!r} is handed {load} requests/s, it serves {capacity}"
    if _exceeds(plan.aggregated_per_s, aggregated, plan):
        yield (
            f"aggregated instances are given {plan.aggregated_per_s} requests/s, they serve "
            f"{aggregated}"
        )


def _link_violations(problem: InstancesProblem, plan: InstancePlan) -> Iterator[str]:
    used_K = [0.0] * len(problem.links)
    for flow, route in zip(plan.flow_per_s_E, problem.routes, strict=True):
        for link in route.links:
            used_K[link] += flow * route.request_bytes
    for link_of, used in zip(problem.links, used_K, strict=True):
        if used > link_of.bytes_per_s * (1.0 + SHORTFALL_RATIO):
            yield f"link {link_of.name!r} carries {used} bytes/s, it has {link_of.bytes_per_s}"


def _demand_violations(problem: InstancesProblem, plan: InstancePlan) -> Iterator[str]:
    for number, share in enumerate(problem.share_C):
        served = share * plan.aggregated_per_s + sum(
            flow
            for flow, route in zip(plan.flow_per_s_E, problem.routes, strict=True)
            if problem.groups[route.sender].request_class == number
        )
        demanded = share * plan.rate_per_s
        if _exceeds(demanded, served, plan):
            yield f"class {number} asks for {demanded} requests/s, {served} are served"
    if plan.rate_per_s < problem.required_per_s * (1.0 - SHORTFALL_RATIO):
        yield (
            f"{plan.rate_per_s} requests/s are provided for, {problem.required_per_s} are required"
        )


def _exceeds(load: float, capacity: float, plan: InstancePlan) -> bool:
    return load > capacity + SHORTFALL_RATIO * plan.rate_per_s
