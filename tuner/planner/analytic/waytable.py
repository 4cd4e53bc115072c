"""The legal ways of one kind of degrees, arranged so that a search can leave most of them unpriced.

Some orders between ways need no price. Overlapping a collective never makes a step longer or
fuller, and neither does running dispatch and combine beside other work, nor a graph of the whole
step in place of launches: a way is `beaten` when another legal way differs from it in that only.
What is left is arranged in three levels:

    frame      dispatcher, a2a_overlap, cuda_graph
    keeping    a frame with everything else but what is computed again
    way        all axes

Every way of a keeping takes at least what it takes with nothing computed again, and every keeping
of a frame at least what the frame takes with everything else at its fastest.

Letters: T ways, A axes, F frames, G keepings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.planner.analytic.axes import GRAPHS, Choice, Facts
from tuner.planner.analytic.rules import Ints, Mask
from tuner.planner.analytic.ways import Ways

FRAME_AXES: Final = ("dispatcher", "a2a_overlap", "cuda_graph")
AGAIN_AXES: Final = ("recompute", "chunks")

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
    """Before beaten ways were left out."""
    frame_FA: Ints
    """One way per frame, nothing computed again; not always legal itself."""
    leading_F: tuple[int, ...]
    """Frames that no other beats in time: the rest matter where memory or a rule needs them."""
    keeping_GA: Ints
    """One way per keeping, nothing computed again; not always legal itself."""
    frame_of_G: Ints
    start_of_G: Ints
    count_of_G: Ints

    def columns(self, ways: Ints) -> dict[str, Ints]:
        """Say rows of ways as columns by axis."""
        return {axis: ways[:, index] for index, axis in enumerate(self.axes)}


def way_table(ways: Ways, facts: Facts) -> WayTable:
    """Arrange the legal ways of degrees with these facts."""
    axes = tuple(ways.choices)
    sizes = [len(ways.choices[axis]) for axis in axes]
    legal = ways.legal(facts)
    kept = legal[~_beaten(ways, axes, legal, sizes)]
    frame_at = [axes.index(axis) for axis in FRAME_AXES]
    again_at = [axes.index(axis) for axis in AGAIN_AXES]
    keeping_at = [
        *frame_at,
        *(at for at in range(len(axes)) if at not in frame_at and at not in again_at),
    ]
    code = _coded(kept, keeping_at, sizes)
    order = np.argsort(code, kind="stable")
    kept = kept[order]
    _, start, count = np.unique(code[order], return_index=True, return_counts=True)
    keeping_GA = kept[start]
    keeping_GA[:, again_at] = 0
    _, first, frame_of = np.unique(
        _coded(keeping_GA, frame_at, sizes), return_index=True, return_inverse=True
    )
    frame_FA = np.zeros((len(first), len(axes)), dtype=np.int64)
    frame_FA[:, frame_at] = keeping_GA[first][:, frame_at]
    return WayTable(
        axes=axes,
        ways_TA=kept,
        num_legal=len(legal),
        frame_FA=frame_FA,
        leading_F=_leading(ways, axes, frame_FA),
        keeping_GA=keeping_GA,
        frame_of_G=frame_of,
        start_of_G=start,
        count_of_G=count,
    )


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
    found = np.zeros(len(legal), dtype=np.bool_)
    for axis, pairs in NEVER_WORSE.items():
        at = axes.index(axis)
        for worse, better in pairs:
            choices = ways.choices[axis]
            if worse not in choices or better not in choices:
                continue
            shift = (choices.index(better) - choices.index(worse)) * radix[at]
            has_worse = legal[:, at] == choices.index(worse)
            found |= has_worse & np.isin(code + shift, code)
    return found
