"""The legal ways of one kind of degrees, arranged so that a search can leave most of them unpriced.

Some orders between ways need no price. Overlapping a collective never makes a step longer or
fuller, and neither does running dispatch and combine beside other work, nor a graph of the whole
step in place of launches: a way is `beaten` when another legal way differs from it in that only.
What is left is arranged in three levels:

    frame      dispatcher, a2a_overlap, cuda_graph
    keeping    a frame with everything else but what is computed again
    way        all axes

Every way of a keeping takes at least what it takes with nothing computed again, and every keeping
of a frame at least what the frame takes with everything else at its fastest. Across the keepings,

    again      a frame with what is computed again, and in how many chunks

bounds its ways as well. Where a frame fits with nothing computed again keepings tell more; where it
does not, none of its ways is faster than the first again that fits.

Letters: T ways, A axes, F frames, G keepings, H agains, Z stages of ZeRO.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.planner.analytic.axes import GRAPHS, Choice, Facts
from tuner.planner.analytic.options import Ways
from tuner.planner.analytic.rules import Ints, Mask

FRAME_AXES: Final = ("dispatcher", "a2a_overlap", "cuda_graph")
AGAIN_AXES: Final = ("recompute", "chunks")

OFFLOAD_AXES: Final = ("optimizer_offload", "activation_offload")

NEVER_WORSE: Final[Mapping[str, tuple[tuple[Choice, Choice], ...]]] = {
    "overlap_grad_reduce": ((False, True),),
    "overlap_param_gather": ((False, True),),
    "a2a_overlap": ((False, True),),
    "cuda_graph": (("none", "full_iteration"), ("partial", "full_iteration")),
}
"""By axis: a choice and another that is never worse, all else equal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WayTable:
    """Ways that no other beats by mere order, in order of frame and keeping."""

    axes: tuple[str, ...]
    ways_TA: Ints
    num_legal: int
    """Beaten ways included."""
    frame_FA: Ints
    """One way per frame, nothing computed again; not always legal itself."""
    leading_F: tuple[int, ...]
    """Frames that no other beats in time: the rest matter where memory or a rule needs them."""
    keeping_GA: Ints
    """One way per keeping, nothing computed again; not always legal itself."""
    frame_of_G: Ints
    start_of_G: Ints
    count_of_G: Ints
    again_HA: Ints
    """One way per again, with everything else at its fastest; not always legal itself."""
    lean_HA: Ints
    """One way per again with everything offloaded that may be; not always legal itself."""
    zero_HZ: Mask
    """Stages of ZeRO that an again's ways have; not 0 where there is 1, which holds no more."""
    frame_of_H: Ints
    by_again_T: Ints
    """Ways in the order of their agains."""
    start_of_H: Ints
    count_of_H: Ints

    def columns(self, ways: Ints) -> dict[str, Ints]:
        """Say rows of ways as columns by axis."""
        return {axis: ways[:, index] for index, axis in enumerate(self.axes)}


def way_table(ways: Ways, facts: Facts, *, without_TA: Ints | None = None) -> WayTable:
    """Arrange the legal ways of degrees with these facts, without some that are legal too."""
    axes = tuple(ways.choices)
    sizes = [len(ways.choices[axis]) for axis in axes]
    legal = ways.legal(facts)
    kept, num_legal = legal[~_beaten(ways, axes, legal, sizes)], len(legal)
    if without_TA is not None:
        is_left_out = np.zeros(math.prod(sizes), dtype=np.bool_)
        is_left_out[np.ravel_multi_index(tuple(without_TA.T), sizes)] = True
        kept = kept[~is_left_out[np.ravel_multi_index(tuple(kept.T), sizes)]]
        num_legal -= len(without_TA)
    frame_at = [axes.index(axis) for axis in FRAME_AXES]
    again_at = [axes.index(axis) for axis in AGAIN_AXES]
    keeping_at = [
        *frame_at,
        *(at for at in range(len(axes)) if at not in frame_at and at not in again_at),
    ]
    code = _coded(kept, keeping_at, sizes)
    order = np.argsort(code, kind="stable")
    kept = kept[order]
    _, start, keeping_of, count = np.unique(
        code[order], return_index=True, return_inverse=True, return_counts=True
    )
    keeping_GA = kept[start]
    keeping_GA[:, again_at] = 0
    _, first, frame_of = np.unique(
        _coded(keeping_GA, frame_at, sizes), return_index=True, return_inverse=True
    )
    frame_FA = _only(keeping_GA[first], frame_at)
    _, first_T, again_of = np.unique(
        _coded(kept, [*frame_at, *again_at], sizes), return_index=True, return_inverse=True
    )
    again_HA = _only(kept[first_T], [*frame_at, *again_at])
    count_of_H = np.bincount(again_of, minlength=len(again_HA))
    lean_HA = again_HA.copy()
    for axis in OFFLOAD_AXES:
        np.maximum.at(lean_HA[:, axes.index(axis)], again_of, kept[:, axes.index(axis)])
    has_HZ = np.zeros((len(again_HA), len(ways.choices["zero_stage"])), dtype=np.bool_)
    has_HZ[again_of, kept[:, axes.index("zero_stage")]] = True
    has_HZ[:, 0] &= ~has_HZ[:, 1]
    return WayTable(
        axes=axes,
        ways_TA=kept,
        num_legal=num_legal,
        frame_FA=frame_FA,
        leading_F=_leading(ways, axes, frame_FA),
        keeping_GA=keeping_GA,
        frame_of_G=frame_of,
        start_of_G=start,
        count_of_G=count,
        again_HA=again_HA,
        lean_HA=lean_HA,
        zero_HZ=has_HZ,
        frame_of_H=frame_of[keeping_of[first_T]],
        by_again_T=np.argsort(again_of, kind="stable"),
        start_of_H=np.cumsum(count_of_H) - count_of_H,
        count_of_H=count_of_H,
    )


def _only(ways: Ints, at: list[int]) -> Ints:
    """The choices on some axes, the first choice on all others."""
    found = np.zeros_like(ways)
    found[:, at] = ways[:, at]
    return found


def _leading(ways: Ways, axes: tuple[str, ...], frame_FA: Ints) -> tuple[int, ...]:
    """Frames without another of the same dispatcher that overlaps and captures no less."""
    dispatcher, overlap, graph = (frame_FA[:, axes.index(axis)] for axis in FRAME_AXES)
    overlaps = np.array(ways.choices["a2a_overlap"], dtype=np.int64)[overlap]
    captured = np.array([GRAPHS.index(str(g)) for g in ways.choices["cuda_graph"]])[graph]
    found = []
    for frame in range(len(frame_FA)):
        no_worse = (
            (dispatcher == dispatcher[frame])
            & (overlaps >= overlaps[frame])
            & (captured >= captured[frame])
        )
        if no_worse.sum() == 1:
            found.append(frame)
    return tuple(found)


def _coded(ways_TA: Ints, at: list[int], sizes: list[int]) -> Ints:
    """One number for the choices on some axes; it orders as the choices do."""
    code = np.zeros(len(ways_TA), dtype=np.int64)
    for index in at:
        code = code * sizes[index] + ways_TA[:, index]
    return code


def _beaten(ways: Ways, axes: tuple[str, ...], legal: Ints, sizes: list[int]) -> Mask:
    """Whether another legal way differs only in a choice that is never worse."""
    radix = np.cumprod([1, *sizes[:0:-1]])[::-1]
    code = legal @ radix
    is_legal = np.zeros(math.prod(sizes), dtype=np.bool_)
    is_legal[code] = True
    found = np.zeros(len(legal), dtype=np.bool_)
    for axis, pairs in NEVER_WORSE.items():
        at = axes.index(axis)
        for worse, better in pairs:
            choices = ways.choices[axis]
            if worse not in choices or better not in choices:
                continue
            shift = (choices.index(better) - choices.index(worse)) * radix[at]
            has_worse = np.flatnonzero(legal[:, at] == choices.index(worse))
            found[has_worse] |= is_legal[code[has_worse] + shift]
    return found
