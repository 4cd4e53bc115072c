"""Sizes drawn at random between the measured ones: candidates for more points, and hold-out sizes.

A line is a series, or one part of it where only some axes are sizes: messages of one group shape,
tokens of one page format. Sizes are drawn log-uniformly between the smallest and the largest
measured one of their line, so that all octaves count equally. Numbers of tokens need not be round.
Widths are multiples of what the measured ones have in common, as those of models are: an H200 takes
7 times longer for a bf16 GEMM whose widths are no multiples of 8, and has no grouped one for them.

Constraints that keep the operation the same: token copies come in pairs, rotated widths
are even, head sizes are multiples of 8 (other ones have no flash kernel), numbers of query and
key-value heads are a measured pair, and the most-loaded expert holds no less than its even share,
no more times that than in any measured case, and no more tokens than the largest one measured.

Not covered: tables whose axes name ranks, arrival skew, and storage.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from profilers.records import AXES, Case, Measurement, MeasurementStatus

SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "gemm": ("m", "n", "k"),
    "grouped_gemm": ("experts", "tokens", "largest", "hidden", "ffn"),
    "attention": ("batch", "sequence", "heads", "kv_heads", "head_dim"),
    "decode_attention": ("batch", "past", "heads", "kv_heads", "head_dim"),
    "linear_scan": ("batch", "sequence"),
    "linear_update": ("batch",),
    "index_scores": ("batch", "past"),
    "memory_bound": ("rows", "width"),
    "optimizer": ("parameters",),
    "copy": ("bytes",),
    "collective": ("bytes",),
    "kv_conversion": ("tokens",),
}
"""Axes that are sizes, by operation; the others distinguish lines."""

MULTIPLES: Final[Mapping[tuple[str, str], int]] = {
    ("permute", "rows"): 2,
    ("unpermute", "rows"): 2,
    ("rotary", "width"): 2,
    ("", "head_dim"): 8,
}
"""(kind, axis) to what a size is a multiple of."""

WIDTHS: Final = frozenset({"n", "k", "hidden", "ffn", "width"})
"""Axes that a model's architecture states."""

Line = tuple[str, str, tuple[tuple[str, int], ...]]


def line_of(case: Case) -> Line:
    """The line that a case lies on, whatever its direction."""
    sizes = SIZES.get(case.operation, ())
    fixed = tuple((axis, case.axes[axis]) for axis in AXES[case.operation] if axis not in sizes)
    return case.kind, case.dtype, fixed


def listed(case: Case) -> Case:
    """The case as grids list it: forward, if it has directions."""
    return case.model_copy(update={"direction": "forward" if case.direction else ""})


def lines(rows: Sequence[Measurement]) -> Mapping[Line, tuple[Case, ...]]:
    """The measured cases of every line that sizes can be drawn on, each once, as listed."""
    by_line: dict[Line, dict[str, Case]] = {}
    for row in rows:
        case = row.case
        if row.status is MeasurementStatus.OK and case.operation in SIZES:
            forward = listed(case)
            by_line.setdefault(line_of(case), {})[forward.id] = forward
    return {line: tuple(cases.values()) for line, cases in sorted(by_line.items())}


def drawn(line: Sequence[Case], *, rng: np.random.Generator) -> Case:
    """Draw a case between the measured ones of a line."""
    first = line[0]
    axes = dict(first.axes)
    for axis in SIZES[first.operation]:
        measured = [case.axes[axis] for case in line]
        multiple = MULTIPLES.get((first.kind, axis), 1)
        if axis in WIDTHS:
            multiple = math.lcm(multiple, math.gcd(*measured))
        axes[axis] = _between(min(measured), max(measured), multiple=multiple, rng=rng)
    if first.operation == "grouped_gemm":
        largest = max(case.axes["largest"] for case in line)
        axes["tokens"] = min(axes["tokens"], largest * axes["experts"])
        axes["largest"] = min(largest, _most_loaded(line, axes, rng=rng))
    if first.operation in ("attention", "decode_attention"):
        pair = line[int(rng.integers(len(line)))].axes
        axes |= {name: pair[name] for name in ("heads", "kv_heads")}
    return first.model_copy(update={"axes": axes})


def _between(low: int, high: int, *, multiple: int, rng: np.random.Generator) -> int:
    size = math.exp(rng.uniform(math.log(max(low, 1)), math.log(max(high, 1))))
    return min(high, max(low, round(size / multiple) * multiple))


def _most_loaded(line: Sequence[Case], axes: Mapping[str, int], *, rng: np.random.Generator) -> int:
    even = axes["tokens"] / axes["experts"]
    max_skew = max(
        case.axes["largest"] * case.axes["experts"] / case.axes["tokens"] for case in line
    )
    skew = math.exp(rng.uniform(0.0, math.log(max(max_skew, 1.0))))
    return min(axes["tokens"], math.ceil(even * skew)) if axes["experts"] > 1 else axes["tokens"]
