"""What several kinds of instances would gain behind a weighted router that the stack lacks.

Routers of prefill and decode instances, and Dynamo's frontend, know no weights: unequal instances
get as many outstanding requests each, so that small ones fill up first. Solved and simulated as if
each got requests by what it may run at once.
"""

from collections.abc import Iterator
from typing import Final

from tuner.engines.serve_rules.routers import router_with
from tuner.plans.serve import ServeUnlaunchable
from tuner.search.serve.most_rate import solve_behind
from tuner.search.serve.preference import gain_ratio, objective_value
from tuner.search.serve.refused import LEAST_GAIN_RATIO, SAVED
from tuner.search.serve.routers import (
    MOST_KINDS,
    ROUTED,
    RouterChoice,
    has_sessions,
    stack_routers,
)
from tuner.search.serve.solve_mode import ModeSolution, ServeProblem
from tuner.search.serve.to_plan import describe_solution, solution_refusals
from tuner.spec.serving.goal import Mode
from tuner.spec.serving.routers import RouterPolicy
from tuner.units import format_ratio

WEIGHTED: Final = RouterPolicy.WEIGHTED_LEAST_REQUESTS


def missing_routers(problem: ServeProblem, best: ModeSolution) -> Iterator[ServeUnlaunchable]:
    """Name modes whose instances would cost less behind a router with weights."""
    goal = problem.spec.goal
    if has_sessions(goal):
        # Such a router would have to look for prefixes too.
        return
    for mode in sorted(ROUTED & set(goal.modes)):
        lacking = _lacking(problem, mode)
        if lacking is None:
            continue
        is_disaggregated = mode == "disaggregated"
        router = RouterChoice(
            policy=RouterPolicy.LEAST_REQUESTS,
            mixed_policy=WEIGHTED,
            decode_policy=WEIGHTED if is_disaggregated else None,
            most_kinds=MOST_KINDS,
        )
        solution = solve_behind(problem, mode, router, best)
        if solution is None or solution.router is not router or solution.missed:
            continue
        gained = gain_ratio(objective_value(solution, goal), best, goal)
        if gained <= LEAST_GAIN_RATIO or solution_refusals(solution, problem):
            continue
        roles = " of prefill and decode instances" if is_disaggregated else ""
        less = SAVED.get(goal.objective, "devices")
        yield ServeUnlaunchable(
            feature=(
                f"{describe_solution(solution)} behind a router with weights,"
                f" {format_ratio(gained, digits=0)} less"
                f" {less}: {lacking} has no {WEIGHTED.value}{roles}"
            ),
            gain_ratio=gained,
        )


def _lacking(problem: ServeProblem, mode: Mode) -> str | None:
    """Return the router of a named stack that knows no weights."""
    spec = problem.spec
    for stack in stack_routers(spec.goal, spec.emit, spec.cluster.pools):
        if router_with(stack, WEIGHTED, is_disaggregated=mode == "disaggregated") is None:
            return f"{stack[0].name} {stack[0].release}"
    return None
