"""What handovers would gain that the engine's release refuses: solved as if it did not."""

from collections.abc import Iterator
from itertools import product
from typing import Final

from tuner.planner.serve.answering import Found, Question, answer
from tuner.serve_plan import Role, ServeUnlaunchable

LEAST_GAIN_RATIO: Final = 1e-6
"""Less is the solver's tolerance."""


def refused_handovers(question: Question, best: Found) -> Iterator[ServeUnlaunchable]:
    """Name a refused pair of prefill and decode instances whose plan would beat the best one."""
    if "disaggregated" not in question.spec.goal.modes or not _refuses(question):
        return
    free = answer(question, "disaggregated", may_refuse=False)
    if free is None or free.missed:
        return
    broken = _broken(question, free)
    gain_ratio = 1.0 - _worth(free, question) / max(_worth(best, question), 1e-9)
    if broken and gain_ratio > LEAST_GAIN_RATIO:
        less = "money" if question.spec.goal.objective == "cost" else "devices"
        yield ServeUnlaunchable(
            feature=(
                f"disaggregated on {free.devices} devices, {gain_ratio:.0%} less {less}:"
                f" {broken[0]}"
            ),
            gain_ratio=gain_ratio,
        )


def _refuses(question: Question) -> bool:
    """Whether any two options that can reach each other are refused."""
    kinds = {
        (option.role, option.site.pool.name, option.degrees.attention_tensor): option
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


def _worth(found: Found, question: Question) -> float:
    """What the goal wants least of: money an hour, or devices."""
    if question.spec.goal.objective != "cost":
        return float(found.devices)
    return sum(
        group.count * group.option.devices * (group.option.site.pool.price_per_device_hour or 0.0)
        for group in found.groups
    )
