"""Sizes that a profile should hold, and operations that no profiler measures.

A plan that is made with `NotedPrices` notes every operation whose price it looks up, whatever the
stack; sizes that many candidates share come first.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import Final

import numpy as np

from profilers.records import AXES, MEASURED_DTYPES, Case
from profilers.series import Series
from tuner.config.columns import Numbers
from tuner.prices.measured import bytes_to_rows, has_gate, kind_in_profile
from tuner.prices.ops import BF16, Op, Prices

MOST_SIZES: Final = 256
"""Largest number of sizes listed for one operation, kind, dtype and pass."""
MOST_LENGTHS: Final = 16
"""Largest number of sizes listed for operands of the same widths, spread over those looked up; a
profile interpolates between them."""
LENGTHS: Final[Mapping[str, tuple[str, ...]]] = {
    "gemm": ("m",),
    "grouped_gemm": ("tokens", "largest"),
    "attention": ("batch", "sequence"),
    "decode_attention": ("batch", "past"),
    "memory_bound": ("rows",),
    "linear_scan": ("batch", "sequence"),
    "linear_update": ("batch",),
    "index_scores": ("batch", "sequence", "past"),
}
"""Axes that follow the tokens of a step; the others are widths of the model."""

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedSizes:
    """Sizes that planning a spec looks up."""

    cases: tuple[Case, ...]
    """Sizes that a profiler can measure, the most used first."""
    unmeasured: tuple[str, ...] = ()
    """Operations that none measures, e.g. `gemm fp8`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookups:
    """Operations that were looked up; filled while pricing."""

    num_uses: dict[Series, Counter[Sizes]] = field(default_factory=dict)
    """Lookups of each tuple of sizes, by series; kernels with a backward pass are measured in both
    directions and listed as forward."""
    unmeasured: set[str] = field(default_factory=set)

    def note(self, op: Op, *, dtype: str = BF16) -> None:
        """Count the sizes of an operation, one per configuration.

        Args:
            op: that is looked up.
            dtype: of the linear layers, as a profile names it.
        """
        dtype = op.dtype or dtype
        axes = _measured_axes(op)
        if axes is None or dtype not in MEASURED_DTYPES:
            self.unmeasured.add(f"{op.operation} {dtype}")
            return
        columns = np.broadcast_arrays(*(np.asarray(axes[axis]) for axis in AXES[op.operation]))
        sizes_NA = np.stack([np.ceil(column).ravel() for column in columns], axis=1)
        # A window of 0 is none; anything else of size 0 is not run.
        is_size_A = np.array([axis != "window" for axis in AXES[op.operation]])
        used_NA = sizes_NA[(sizes_NA[:, is_size_A] > 0).all(axis=1)].astype(np.int64)
        unique_UA, uses_U = np.unique(used_NA, axis=0, return_counts=True)
        series = Series(op.operation, kind_in_profile(op), dtype, "forward" if op.direction else "")
        counted = self.num_uses.setdefault(series, Counter())
        for sizes, uses in zip(unique_UA.tolist(), uses_U.tolist(), strict=True):
            counted[tuple(sizes)] += uses

    def wanted(self) -> WantedSizes:
        """Return the sizes that were looked up, those of the most used widths first."""
        return WantedSizes(cases=tuple(self._cases()), unmeasured=tuple(sorted(self.unmeasured)))

    def _cases(self) -> Iterator[Case]:
        for series, counted in self.num_uses.items():
            for sizes in islice(_spread(series.operation, counted), MOST_SIZES):
                yield Case(
                    operation=series.operation,
                    kind=series.kind,
                    dtype=series.dtype,
                    direction="forward" if series.direction else "",
                    axes=dict(zip(AXES[series.operation], sizes, strict=True)),
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedPrices:
    """Prices from another model, with a record of the operations looked up."""

    source: Prices
    lookups: Lookups
    dtype: str = BF16
    """Number format of the linear layers, as a profile names it."""

    def seconds(self, op: Op) -> Numbers:
        """Wall time of running it once."""
        self.lookups.note(op, dtype=self.dtype)
        return self.source.seconds(op)


def _spread(operation: str, counted: Counter[Sizes]) -> Iterator[Sizes]:
    """Yield some sizes of all widths, the most used widths first."""
    is_width = [axis not in LENGTHS[operation] for axis in AXES[operation]]
    num_uses: Counter[Sizes] = Counter()
    sizes_by_widths: dict[Sizes, list[Sizes]] = {}
    for sizes, uses in counted.items():
        widths = tuple(compress(sizes, is_width))
        num_uses[widths] += uses
        sizes_by_widths.setdefault(widths, []).append(sizes)
    for widths, _ in num_uses.most_common():
        yield from _spread_lengths(operation, sizes_by_widths[widths])


def _spread_lengths(operation: str, every: list[Sizes]) -> Iterator[Sizes]:
    """Yield the sizes that lie nearest to equal steps in the logarithm of the tokens."""
    is_length = [axis in LENGTHS[operation] for axis in AXES[operation]]
    every = sorted(every, key=lambda sizes: (math.prod(compress(sizes, is_length)), sizes))
    log_N = np.log([math.prod(compress(sizes, is_length)) for sizes in every])
    steps = np.linspace(log_N[0], log_N[-1], MOST_LENGTHS)
    nearest = np.abs(log_N[None, :] - steps[:, None]).argmin(axis=1)
    yield from (every[place] for place in np.unique(nearest))


def _measured_axes(op: Op) -> dict[str, Numbers] | None:
    """Sizes of an operation as profilers measure it; None where none does."""
    axes = op.axes
    match op.operation:
        case "gemm" | "attention":
            return dict(axes)
        case "linear_scan" | "linear_update" if op.kind:
            return {axis: axes[axis] for axis in AXES[op.operation]}
        case "index_scores":
            return {axis: axes[axis] for axis in AXES["index_scores"]}
        case "decode_attention" if not op.kind:
            return dict(axes)
        case "memory_bound" if op.kind:
            return {axis: axes[axis] for axis in AXES["memory_bound"]}
        case "memory_bound":
            rows, width = bytes_to_rows(axes["bytes"])
            return {"rows": rows, "width": width}
        case "grouped_gemm" if has_gate(op):
            return {**axes, "tokens": axes["experts"] * axes["largest"]}
        case _:
            return None
