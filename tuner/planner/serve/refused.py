"""What handovers and cells would gain that the release refuses: solved as if it did not."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Final

from tuner.planner.serve.answering import Found, Question
from tuner.planner.serve.handovers import kept_by
from tuner.planner.serve.most_rate import answer_goal
from tuner.planner.serve.ranking import counted, gain_ratio, worth_of
from tuner.planner.serve.telling import refusals_of, told_of
from tuner.serve_plan import Role, ServeUnlaunchable

LEAST_GAIN_RATIO: Final = 1e-6
"""Less is the solver's tolerance."""
SAVED: Final = {"cost": "money", "rate": "time a request"}
"""What there is less of, by objective; else devices."""


def refused_handovers(question: Question, best: Found) -> Iterator[ServeUnlaunchable]:
    """Name a refused pair of prefill and decode instances whose plan would beat the best one."""
    if "disaggregated" not in question.spec.goal.modes or not _refuses(question):
        return
    free = answer_goal(question, "disaggregated", may_refuse=False)
    if free is None or free.missed:
        return
    broken = _broken(question, free)
    goal = question.spec.goal
    gained = gain_ratio(worth_of(free, goal), best, goal)
    if broken and gained > LEAST_GAIN_RATIO:
        less = SAVED.get(goal.objective, "devices")
        yield ServeUnlaunchable(
            feature=(
                f"disaggregated on {free.devices} devices, {gained:.0%} less {less}: {broken[0]}"
            ),
            gain_ratio=gained,
        )


def refused_cells(
    question: Question, best: Found, own: Found | None
) -> Iterator[ServeUnlaunchable]:
    """Name a refused cell of attention and experts that would take less than those launched.

    Args:
        question: with its cells.
        best: what was chosen.
        own: the mode's answer with cells that the release launches.
    """
    cells, goal = question.cells, question.spec.goal
    if own is None or not cells.options or not cells.refused:
        return
    every = replace(cells, options=(*cells.options, *cells.refused), refused=())
    free = answer_goal(replace(question, cells=every), "attention_expert")
    if free is None or free.missed:
        return
    broken = refusals_of(free, question)
    if broken and gain_ratio(worth_of(free, goal), own, goal) > LEAST_GAIN_RATIO:
        yield ServeUnlaunchable(
            feature=(
                f"{told_of(free)}: {counted(free.devices)}, cells that are launched take"
                f" {own.devices}; {broken[0]}"
            ),
            gain_ratio=max(gain_ratio(worth_of(free, goal), best, goal), 0.0),
        )


def _refuses(question: Question) -> bool:
    """Whether any two options that can reach each other are refused."""
    kinds = {
        (option.role, option.site.pool.name, kept_by(option)): option
        for option in question.options.options
    }.values()
    return any(
        question.hand_overs.reach(one.site, other.site) and question.hand_overs.refusals(one, other)
        for one, other in product(kinds, kinds)
        if one.role is Role.PREFILL and other.role is Role.DECODE
    )


def _broken(question: Question, free: Found) -> tuple[str, ...]:
    return tuple(
        f"{one.option.site.pool.name} to {other.option.site.pool.name}: {line}"
        for one, other in product(free.groups, free.groups)
        if one.option.role is Role.PREFILL and other.option.role is Role.DECODE
        for line in question.hand_overs.refusals(one.option, other.option)
    )
