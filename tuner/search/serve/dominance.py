"""Drops instance options that another one dominates.

One option dominates another of the same role, pool and cache layout where, on the same devices, it
serves as many requests a second at no longer TTFT and TPOT. Between different layouts it must serve
5 % more: closer ones are within the model's error and count as ties of the plan.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tuner.search.serve.options import Option

BAND_RATIO: Final = 0.05
"""Half of the median error of the time per token."""


def drop_dominated(options: Sequence["Option"]) -> tuple["Option", ...]:
    """Return those that none dominates, in their order; of equal ones the first."""
    by_place: dict[object, list[Option]] = {}
    for option in options:
        by_place.setdefault(_place(option), []).append(option)
    kept = {id(option) for group in by_place.values() for option in _front(group)}
    return tuple(option for option in options if id(option) in kept)


def _place(option: "Option") -> object:
    own = option.degrees
    return option.role, option.serving_pool.pool.name, own.attention_tensor, own.pipeline


def _front(options: Iterable["Option"]) -> list["Option"]:
    front: list[Option] = []
    # A later option cannot dominate an earlier one.
    for option in sorted(options, key=lambda one: (-one.rate_per_s / one.devices, one.devices)):
        if not any(_beats(other, option) for other in front):
            front.append(option)
    return front


def _beats(one: "Option", other: "Option") -> bool:
    is_like = one.degrees == other.degrees
    least = other.rate_per_s if is_like else (1.0 + BAND_RATIO) * other.rate_per_s
    return (
        other.devices // one.devices * one.rate_per_s >= least
        and one.ttft_s <= other.ttft_s
        and one.tpot_s <= other.tpot_s
    )
