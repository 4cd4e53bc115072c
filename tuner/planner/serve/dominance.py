"""Drops ways to run an instance that another way beats in everything.

One way beats another of the same role, pool and cache layout where as many of it as take the same
devices serve as many requests a second, and each gives its first token as soon, and tokens as fast.
Between unlike splits of an instance they must serve 5 % more: closer ones the model cannot tell
apart, and they count as ties of the plan.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tuner.planner.serve.options import Option

BAND_RATIO: Final = 0.05
"""Half of the median error of the time per token."""


def undominated(options: Sequence["Option"]) -> tuple["Option", ...]:
    """Return those that none beats, in their order; of equal ones the first."""
    by_place: dict[object, list[Option]] = {}
    for option in options:
        by_place.setdefault(_place(option), []).append(option)
    kept = {id(option) for group in by_place.values() for option in _front(group)}
    return tuple(option for option in options if id(option) in kept)


def _place(option: "Option") -> object:
    own = option.degrees
    return option.role, option.site.pool.name, own.attention_tensor, own.pipeline


def _front(options: Iterable["Option"]) -> list["Option"]:
    found: list[Option] = []
    # Whoever comes later has less to beat those before it with.
    for option in sorted(options, key=lambda one: (-one.rate_per_s / one.devices, one.devices)):
        if not any(_beats(other, option) for other in found):
            found.append(option)
    return found


def _beats(one: "Option", other: "Option") -> bool:
    is_like = one.degrees == other.degrees
    least = other.rate_per_s if is_like else (1.0 + BAND_RATIO) * other.rate_per_s
    return (
        other.devices // one.devices * one.rate_per_s >= least
        and one.ttft_s <= other.ttft_s
        and one.tpot_s <= other.tpot_s
    )
