"""What counts of serving instances are held to, tests/solvers/contract.py."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from solvers import registry
from solvers.instances.check import devices
from solvers.instances.problem import InstanceObjective, InstancePlan, InstancesProblem
from solvers.result import Outcome, Status
from tests.solvers.contract import Contract
from tests.solvers.instances import brute_force
from tests.solvers.instances.testing import mixed_pool, tiny_problem


def draw(seed: int) -> InstancesProblem:
    """The objectives in turns."""
    number, index = divmod(seed, len(InstanceObjective))
    return tiny_problem(np.random.default_rng([number, index]), list(InstanceObjective)[index])


def _features(problem: InstancesProblem, best: Outcome[InstancePlan]) -> Iterable[str]:
    plan = best.solution
    shown = {
        f"objective {problem.objective}": True,
        "limited kinds": problem.max_kinds is not None,
        "islands": len({group.island for group in problem.groups}) > 1,
    }
    if plan is not None:
        used = [problem.columns[j] for j, count in enumerate(plan.count_J) if count]
        shown |= {
            "several classes": len(problem.share_C) > 1,
            "handed over": sum(plan.flow_per_s_E) > 0.0,
            "aggregated": plan.aggregated_per_s > 0.0,
            "both": 0.0 < plan.aggregated_per_s < plan.rate_per_s * (1.0 - 1e-9),
            "several pools": sum(number > 0 for number in devices(problem, plan)) > 1,
            "a column over two pools": len(problem.pools) > 1
            and any(min(column.devices_P) > 0 for column in used),
            "a full link": _fills_a_link(problem, plan),
        }
    return (feature for feature, is_shown in shown.items() if is_shown)


def _fills_a_link(problem: InstancesProblem, plan: InstancePlan) -> bool:
    used_K = [0.0] * len(problem.links)
    for flow, route in zip(plan.flow_per_s_E, problem.routes, strict=True):
        for link in route.links:
            used_K[link] += flow * route.request_bytes
    return any(
        used > 0.999 * link.bytes_per_s for used, link in zip(used_K, problem.links, strict=True)
    )


def _broken(problem: InstancesProblem, plan: InstancePlan) -> InstancePlan:
    """Nothing runs and everything is served."""
    return dataclasses.replace(plan, count_J=(0,) * len(problem.columns))


INSTANCES = Contract(
    family=registry.INSTANCES,
    draw=draw,
    oracle=brute_force.solve,
    first=(0, 1, 2, 4, 5, 8, 13, 16, 21, 24, 29, 32, 36, 47, 57, 71),
    count=24 * len(InstanceObjective),
    features=_features,
    expected=frozenset(
        {
            *(f"objective {objective}" for objective in InstanceObjective),
            *("limited kinds", "islands", "several classes", "handed over", "aggregated", "both"),
            *("several pools", "a column over two pools", "a full link", "optimal", "infeasible"),
        }
    ),
    often=2,
    exact=frozenset({"milp"}),
    tolerance=2e-6,
    broken=_broken,
    large=lambda: mixed_pool(objective=InstanceObjective.RATE, max_kinds=1),
    hurried={"milp": (Status.FEASIBLE, Status.UNKNOWN)},
)
