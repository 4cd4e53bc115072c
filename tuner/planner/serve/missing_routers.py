"""What several kinds of instances would gain behind a router that the stack lacks.

Routers of prefill and decode instances, and Dynamo's frontend, know no weights: unequal instances
get as many outstanding requests each, so that small ones fill up first. Solved and simulated as if
each got requests by what it may run at once.
"""

from collections.abc import Iterator
from typing import Final

from tuner.planner.serve.most_rate import most_rate_with
from tuner.planner.serve.preference import gain_ratio, worth_of
from tuner.planner.serve.refused import LEAST_GAIN_RATIO, SAVED
from tuner.planner.serve.routers import MOST_KINDS, ROUTED, RouterChoice, has_sessions, routers_of
from tuner.planner.serve.solve_mode import Found, Question, answer_with
from tuner.planner.serve.to_plan import refusals_of, told_of
from tuner.serve_plan import ServeUnlaunchable
from tuner.spec.serving.goal import Mode
from tuner.spec.serving.manifests.routers import router_with
from tuner.spec.serving.routers import RouterPolicy

WEIGHTED: Final = RouterPolicy.WEIGHTED_LEAST_REQUESTS


def lacking_routers(question: Question, best: Found) -> Iterator[ServeUnlaunchable]:
    """Name modes whose instances would cost less behind a router with weights."""
    goal = question.spec.goal
    if has_sessions(goal):
        # Such a router would have to look for prefixes too.
        return
    for mode in sorted(ROUTED & set(goal.modes)):
        lacking = _lacking(question, mode)
        if lacking is None:
            continue
        is_apart = mode == "disaggregated"
        router = RouterChoice(
            policy=RouterPolicy.LEAST_REQUESTS,
            mixed_policy=WEIGHTED,
            decode_policy=WEIGHTED if is_apart else None,
            most_kinds=MOST_KINDS,
        )
        answered = most_rate_with if goal.objective == "rate" else answer_with
        found = answered(question, mode, router, best)
        if found is None or found.router is not router or found.missed:
            continue
        gained = gain_ratio(worth_of(found, goal), best, goal)
        if gained <= LEAST_GAIN_RATIO or refusals_of(found, question):
            continue
        roles = " of prefill and decode instances" if is_apart else ""
        less = SAVED.get(goal.objective, "devices")
        yield ServeUnlaunchable(
            feature=(
                f"{told_of(found)} behind a router with weights, {gained:.0%} less {less}:"
                f" {lacking} has no {WEIGHTED.value}{roles}"
            ),
            gain_ratio=gained,
        )


def _lacking(question: Question, mode: Mode) -> str | None:
    """Return the router of a named stack that knows no weights."""
    spec = question.spec
    for stack in routers_of(spec.goal, spec.emit, spec.cluster.pools):
        if router_with(stack, WEIGHTED, is_apart=mode == "disaggregated") is None:
            return f"{stack[0].name} {stack[0].release}"
    return None
