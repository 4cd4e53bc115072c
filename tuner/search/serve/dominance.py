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
    degrees = option.degrees
    return option.role, option.serving_pool.pool.name, degrees.attention_tensor, degrees.pipeline


def _front(options: Iterable["Option"]) -> list["Option"]:
    front: list[Option] = []
    # A later option cannot dominate an earlier one.
    for option in sorted(
        options,
        key=lambda candidate: (-candidate.rate_per_s / candidate.devices, candidate.devices),
    ):
        if not any(_beats(kept, option) for kept in front):
            front.append(option)
    return front


def _beats(kept: "Option", option: "Option") -> bool:
    is_like = kept.degrees == option.degrees
    least = option.rate_per_s if is_like else (1.0 + BAND_RATIO) * option.rate_per_s
    return (
        option.devices // kept.devices * kept.rate_per_s >= least
        and kept.ttft_s <= option.ttft_s
        and kept.tpot_s <= option.tpot_s
    )
