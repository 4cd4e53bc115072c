"""Answers one mode where the goal is the most requests a second that the pools serve.

The question is DistServe's (arXiv:2401.09670): goodput of given devices under targets. For every
variant of a mode (solve_mode.py) the integer program with the rate as its objective chooses
instances, as if no request waited: its rate is the bound. The traffic is simulated with these
instances, and bisection finds the largest rate at which every target holds, to `RATE_STEP` of it
and no nearer than that to what the instances can serve, where queues have no end.

A program sees no waiting, so others are tried beside it: with more spare capacity of prefill, and
without instances that come near a missed target by themselves. Instances are left where their
capacity, or the simulation of a rate just above the best, says that they serve no more.

Not covered: closed loops, whose rate follows from their number; attention and experts apart, which
no program chooses.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from tuner.planner.serve.islands import capacity_per_s
from tuner.planner.serve.program import ROLES, Solved, Spare
from tuner.planner.serve.routers import RouterChoice
from tuner.planner.serve.simulation import Group, Played
from tuner.planner.serve.solve_mode import (
    MOST_PLAYED,
    Found,
    Question,
    answer,
    groups_of,
    least_spare,
    play,
    routers_for,
    solved_variants,
    solved_with,
    tightened,
    with_hits_left,
)
from tuner.serve_plan import Role
from tuner.spec.serving.goal import Mode

RATE_STEP: Final = 0.01
"""Of the rate that is found: a higher one misses a target."""
LEAST_RATIO: Final = 1.0 / 64.0
"""Of what instances could serve: where the targets do not hold here, they are missed."""
PREFILL_SPARES: Final = (0.25, 0.5, 1.0)
"""Of prefill instances that are tried, above the goal's own."""


def answer_goal(question: Question, mode: Mode, *, may_refuse: bool = True) -> Found | None:
    """Answer a mode by the goal's objective.

    Args:
        question: everything that counts.
        mode: to be answered.
        may_refuse: leave out handovers that the engine's release refuses.
    """
    if question.spec.goal.objective == "rate":
        return most_rate(question, mode, may_refuse=may_refuse)
    return answer(question, mode, may_refuse=may_refuse)


def most_rate(question: Question, mode: Mode, *, may_refuse: bool = True) -> Found | None:
    """Find the instances that serve the most; what misses a target at any rate says so."""

    def behind_routers(asked: Question) -> Found | None:
        found: Found | None = None
        for router in routers_for(asked.spec, mode):
            found = most_rate_with(asked, mode, router, found, may_refuse=may_refuse)
        return found

    return with_hits_left(question, mode, behind_routers)


def most_rate_with(
    question: Question,
    mode: Mode,
    router: RouterChoice,
    before: Found | None,
    *,
    may_refuse: bool = True,
) -> Found | None:
    """Find the instances that serve the most with one way to route.

    Args:
        question: everything that counts.
        mode: to be answered.
        router: how requests are spread.
        before: found so far; returned where nothing serves more.
        may_refuse: leave out handovers that the engine's release refuses.
    """
    least = least_spare(question)
    first = solved_variants(question, mode, least, router=router, may_refuse=may_refuse)
    if not first:
        return before
    best = before
    for variant, solved in first[:MOST_PLAYED]:
        one = _served(variant, solved, least, router, above_per_s=_rate(best))
        if one is None:
            continue
        best = _better(best, one)
        for other, spare in _tries(variant, one, mode):
            again = solved_with(other, mode, spare, router=router, may_refuse=may_refuse)
            if again is not None:
                best = _better(best, _served(other, again, spare, router, above_per_s=_rate(best)))
    if best is None:
        return None
    bounds = [solved.outcome.bound for _, solved in first]
    bounds += [] if before is None else [before.bound]
    return replace(best, bound=min(bounds), covered_kinds=router.most_kinds)


def at_rate(question: Question, rate_per_s: float) -> Question:
    """Return the question with that rate of an open load."""
    goal = question.spec.goal
    traffic = goal.traffic.model_copy(update={"rate": rate_per_s})
    spec = replace(question.spec, goal=goal.model_copy(update={"traffic": traffic}))
    return replace(question, spec=spec, demand=replace(question.demand, rate_per_s=rate_per_s))


def _tries(question: Question, base: Found, mode: Mode) -> Iterator[tuple[Question, Spare]]:
    """Yield other questions and spare capacities, the first that was answered left out."""
    if not base.eased:
        return  # It serves what its program says, and no other serves more.
    least = least_spare(question)
    spares = [least]
    if Role.PREFILL in ROLES[mode]:
        spares += [
            replace(least, prefill_ratio=ratio)
            for ratio in PREFILL_SPARES
            if ratio > least.prefill_ratio
        ]
    for other in (question, *tightened(question, base.eased)):
        yield from ((other, spare) for spare in spares if (other, spare) != (question, least))


def _better(best: Found | None, other: Found | None) -> Found | None:
    if best is None or (other is not None and _rate(other) > _rate(best)):
        return other
    return best


def _rate(found: Found | None) -> float:
    return 0.0 if found is None or found.rate_per_s is None else found.rate_per_s


def _served(
    question: Question,
    solved: Solved,
    spare: Spare,
    router: RouterChoice,
    *,
    above_per_s: float,
) -> Found | None:
    """Simulate instances at rates up to what they could serve; None where that is no more.

    What misses a target at every rate is returned without one where nothing is known yet.
    """
    mode, groups = solved.program.mode, groups_of(solved)
    most = _capacity(question, solved, groups)
    low = above_per_s * (1.0 + RATE_STEP) or LEAST_RATIO * most
    if low > most:
        return None
    known: dict[float, Played] = {}
    missed: dict[float, tuple[str, ...]] = {}
    for rate in _bisected(low, most, known):
        played = play(at_rate(question, rate), mode, groups, router=router)
        late = played.missed(question.spec.goal.slo)
        if late:
            missed[rate] = late
        else:
            known[rate] = played
    rate = max(known, default=low)
    if rate not in known and above_per_s:
        return None
    return Found(
        solved=solved,
        groups=groups,
        played=known.get(rate) or play(at_rate(question, rate), mode, groups, router=router),
        spare=spare,
        missed=missed.get(rate, ()),
        cut=question.cut,
        router=router,
        eased=missed[min(missed)] if missed else (),
        rate_per_s=rate if rate in known else None,
    )


def _bisected(low: float, high: float, known: Mapping[float, Played]) -> Iterator[float]:
    """Yield both ends, then middles; whoever simulates them notes those that hold."""
    yield low
    if low not in known or high == low:
        return
    yield high
    while high not in known and high - low > RATE_STEP * low:
        middle = 0.5 * (low + high)
        yield middle
        low, high = (middle, high) if middle in known else (low, middle)


def _capacity(question: Question, solved: Solved, groups: tuple[Group, ...]) -> float:
    """Requests a second up to which instances are tried: a step less than all they could serve."""
    plan = solved.outcome.solution
    assert plan is not None  # as the program was answered
    most = capacity_per_s(groups)
    if solved.program.problem.links:
        most = min(most, plan.rate_per_s)
    return most / (1.0 + RATE_STEP) / (1.0 + question.spec.goal.spare_ratio)
