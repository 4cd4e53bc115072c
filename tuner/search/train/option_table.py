"""The legal execution options of one kind of degrees, grouped for branch and bound.

An option is one setting of every knob. Some options need no price: overlapping a collective never
makes a step slower or larger, nor does running dispatch and combine beside other work, nor a CUDA
graph of the whole step in place of kernel launches. An option is dominated, and dropped, if another
legal one differs from it only in such a setting. The others form three levels:

    dispatch        dispatcher, overlap of its all-to-all, CUDA graphs
    no_recompute    a dispatch setting and every other knob but recomputation and chunks
    option          all knobs

Recomputation never shortens a step, so the variant without it bounds its group; the group with
every other knob at its fastest bounds the level above. A second grouping of the same options,

    recompute       a dispatch setting, recomputation and chunks, other knobs at their fastest

bounds them as well. Where a dispatch setting fits in memory without recomputation, the no-recompute
level prunes more. Where it does not fit, none of its options is faster than its first recompute
setting that fits.

Letters: T options, A axes, D dispatch settings, N groups of the no-recompute level, R groups of the
recompute level, Z stages of ZeRO.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.arrays import Ints
from tuner.config.knobs import OFFLOADS, searched
from tuner.search.train.options import (
    DISPATCH,
    DISPATCH_AXES,
    RECOMPUTE_AXES,
    Choice,
    Facts,
    OptionSpace,
)
from tuner.search.train.rules import Mask

NEVER_WORSE: Final[Mapping[str, tuple[tuple[Choice, Choice], ...]]] = {
    knob.field: knob.never_worse for knob in searched() if knob.never_worse
}
"""Pairs of a choice and another that is never worse with all else equal, by axis."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptionTable:
    """The options that are not dominated, ordered by dispatch setting and no-recompute group."""

    axes: tuple[str, ...]
    options_TA: Ints
    num_legal: int
    """Legal options, dominated ones included."""
    dispatch_DA: Ints
    """One option per dispatch setting, without recomputation; not always legal itself."""
    leading_D: tuple[int, ...]
    """Dispatch settings that no other beats in time; memory or a rule may need the rest."""
    no_recompute_NA: Ints
    """One option per no-recompute group, without recomputation; not always legal itself."""
    dispatch_of_N: Ints
    start_of_N: Ints
    count_of_N: Ints
    recompute_RA: Ints
    """One option per recompute group, other knobs at their fastest; not always legal itself."""
    min_memory_RA: Ints
    """`recompute_RA` with everything offloaded that may be; not always legal itself."""
    zero_RZ: Mask
    """ZeRO stages of each recompute group; without 0 where it has 1, which holds no more."""
    dispatch_of_R: Ints
    by_recompute_T: Ints
    """Options in the order of their recompute groups."""
    start_of_R: Ints
    count_of_R: Ints

    def columns(self, options: Ints) -> dict[str, Ints]:
        """Return options as one array per axis."""
        return {axis: options[:, index] for index, axis in enumerate(self.axes)}


def build_option_table(
    options: OptionSpace, facts: Facts, *, without_TA: Ints | None = None
) -> OptionTable:
    """Group the legal options of degrees with these facts, without those of `without_TA`."""
    axes = tuple(options.choices)
    sizes = [len(options.choices[axis]) for axis in axes]
    legal = options.legal(facts)
    kept, num_legal = legal[~_is_dominated(options, axes, legal, sizes)], len(legal)
    if without_TA is not None:
        is_left_out = np.zeros(math.prod(sizes), dtype=np.bool_)
        is_left_out[np.ravel_multi_index(tuple(without_TA.T), sizes)] = True
        kept = kept[~is_left_out[np.ravel_multi_index(tuple(kept.T), sizes)]]
        num_legal -= len(without_TA)
    dispatch_at = [axes.index(axis) for axis in DISPATCH_AXES]
    recompute_at = [axes.index(axis) for axis in RECOMPUTE_AXES]
    no_recompute_at = [
        *dispatch_at,
        *(at for at in range(len(axes)) if at not in dispatch_at and at not in recompute_at),
    ]
    code = _encode(kept, no_recompute_at, sizes)
    order = np.argsort(code, kind="stable")
    kept = kept[order]
    _, start, no_recompute_of, count = np.unique(
        code[order], return_index=True, return_inverse=True, return_counts=True
    )
    no_recompute_NA = kept[start]
    no_recompute_NA[:, recompute_at] = 0
    _, first, dispatch_of = np.unique(
        _encode(no_recompute_NA, dispatch_at, sizes), return_index=True, return_inverse=True
    )
    dispatch_DA = _keep_axes(no_recompute_NA[first], dispatch_at)
    _, first_T, recompute_of = np.unique(
        _encode(kept, [*dispatch_at, *recompute_at], sizes), return_index=True, return_inverse=True
    )
    recompute_RA = _keep_axes(kept[first_T], [*dispatch_at, *recompute_at])
    count_of_R = np.bincount(recompute_of, minlength=len(recompute_RA))
    min_memory_RA = recompute_RA.copy()
    for axis in OFFLOADS:
        np.maximum.at(min_memory_RA[:, axes.index(axis)], recompute_of, kept[:, axes.index(axis)])
    has_RZ = np.zeros((len(recompute_RA), len(options.choices["zero_stage"])), dtype=np.bool_)
    has_RZ[recompute_of, kept[:, axes.index("zero_stage")]] = True
    has_RZ[:, 0] &= ~has_RZ[:, 1]
    return OptionTable(
        axes=axes,
        options_TA=kept,
        num_legal=num_legal,
        dispatch_DA=dispatch_DA,
        leading_D=_leading_dispatch(options, axes, dispatch_DA),
        no_recompute_NA=no_recompute_NA,
        dispatch_of_N=dispatch_of,
        start_of_N=start,
        count_of_N=count,
        recompute_RA=recompute_RA,
        min_memory_RA=min_memory_RA,
        zero_RZ=has_RZ,
        dispatch_of_R=dispatch_of[no_recompute_of[first_T]],
        by_recompute_T=np.argsort(recompute_of, kind="stable"),
        start_of_R=np.cumsum(count_of_R) - count_of_R,
        count_of_R=count_of_R,
    )


def _keep_axes(options: Ints, at: list[int]) -> Ints:
    """Keep the choices on some axes, and take the first choice on all others."""
    kept = np.zeros_like(options)
    kept[:, at] = options[:, at]
    return kept


def _leading_dispatch(
    options: OptionSpace, axes: tuple[str, ...], dispatch_DA: Ints
) -> tuple[int, ...]:
    """Dispatch settings that no other covers: as good or better in what is never worse."""
    ranks_DA = np.stack(
        [
            np.array([knob.choices.index(choice) for choice in options.choices[knob.field]])[
                dispatch_DA[:, axes.index(knob.field)]
            ]
            for knob in DISPATCH
        ],
        axis=1,
    )
    is_ordered_A = np.array([bool(knob.never_worse) for knob in DISPATCH])
    leading = []
    for dispatch, ranks_A in enumerate(ranks_DA):
        no_worse = np.where(is_ordered_A, ranks_DA >= ranks_A, ranks_DA == ranks_A).all(axis=1)
        if no_worse.sum() == 1:
            leading.append(dispatch)
    return tuple(leading)


def _encode(options_TA: Ints, at: list[int], sizes: list[int]) -> Ints:
    """Encode the choices on some axes as one number; it orders as the choices do."""
    code = np.zeros(len(options_TA), dtype=np.int64)
    for index in at:
        code = code * sizes[index] + options_TA[:, index]
    return code


def _is_dominated(
    options: OptionSpace, axes: tuple[str, ...], legal: Ints, sizes: list[int]
) -> Mask:
    """Return whether another legal option differs only in a choice that is never worse."""
    radix = np.cumprod([1, *sizes[:0:-1]])[::-1]
    code = legal @ radix
    is_legal = np.zeros(math.prod(sizes), dtype=np.bool_)
    is_legal[code] = True
    is_dominated = np.zeros(len(legal), dtype=np.bool_)
    for axis, pairs in NEVER_WORSE.items():
        at = axes.index(axis)
        for worse, better in pairs:
            choices = options.choices[axis]
            if worse not in choices or better not in choices:
                continue
            shift = (choices.index(better) - choices.index(worse)) * radix[at]
            has_worse = np.flatnonzero(legal[:, at] == choices.index(worse))
            is_dominated[has_worse] |= is_legal[code[has_worse] + shift]
    return is_dominated
