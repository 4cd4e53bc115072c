"""Seconds of one kernel on one device, from its shape: GEMMs, attention, memory-bound kernels.

Letters in formulas: m, n, k of a GEMM [m, k] x [k, n]; b sequences of s tokens. In arrays: T tiles,
C columns.

A GEMM is cut into tiles, and tiles run in waves over the device's compute units:

    waves = mean of max(tiles / units, 1) and its ceiling
    seconds = waves * units * 2 * tile * (k + k0) / (peak * ratio * derate(tile))

over the best of four tiles, and never less than the bytes at 85 % of the memory bandwidth. The mean
lies between a persistent kernel that splits the last wave and one that does not; k0 is the time of
a tile's prologue and epilogue in elements of k at bf16, so it is more elements of a faster type.
The form is that of NVIDIA's "Matrix Multiplication Background User's Guide" (tile and wave
quantisation); derates and the mean are ours.

Attention counts the unmasked pairs. Exponentials add time to the GEMMs, as if every head were wider
by a constant; the share of the peak is stated at a width of 128.

Not covered: split-k, 2-SM tiles, alignment.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np

from tuner.config.columns import Numbers
from tuner.costs.train.constants import Constants
from tuner.costs.train.shapes import Hardware

TILES: Final = ((256.0, 128.0, 1.0), (128.0, 128.0, 0.93), (128.0, 64.0, 0.80), (64.0, 64.0, 0.62))
"""Rows, columns, and what the tile reaches of the largest one's rate."""

_SIZES_TX = np.array(TILES)
TILE_ROWS, TILE_COLUMNS = _SIZES_TX[:, :1], _SIZES_TX[:, 1:2]
TILE_WORK = TILE_ROWS * TILE_COLUMNS / _SIZES_TX[:, 2:]

STREAM_RATIO: Final = 0.85
"""Of the memory bandwidth that a GEMM reaches. STREAM on A100 and H100 reaches 0.85 to 0.92."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionShape:
    """Shape of one rank's attention over a micro-batch."""

    pairs: Numbers
    """Pairs of query and key that are computed, per head, all sequences together."""
    sequences: Numbers
    sequence: Numbers
    """Tokens of one."""
    heads: Numbers
    kv_heads: Numbers
    key_dim: Numbers
    value_dim: Numbers


class ExpertSeconds(NamedTuple):
    """Grouped GEMMs of a feed-forward network of several experts."""

    forward_s: Numbers
    backward_s: Numbers
    """Both gradients."""
    weight_s: Numbers
    """Of the backward pass, the gradient of the weights."""


class Kernels(Protocol):
    """Times of kernels; all arguments are numbers or arrays of one entry per column."""

    def gemm_s(self, m: Numbers, n: Numbers, k: Numbers, *, in_head: bool = False) -> Numbers:
        """One GEMM; the head's stay in bf16."""

    def experts_s(
        self, groups: Numbers, rows: Numbers, *, hidden: Numbers, width: Numbers, inner: Numbers
    ) -> ExpertSeconds:
        """[rows, hidden] x [hidden, inner] and [rows, width] x [width, hidden] of each expert."""

    def batched_gemm_s(self, batches: Numbers, m: Numbers, n: Numbers, k: Numbers) -> Numbers:
        """Independent GEMMs of attention's precision, in one kernel."""

    def attention_s(self, shape: AttentionShape) -> Numbers:
        """Flash attention's forward pass."""

    def attention_backward_s(self, shape: AttentionShape) -> Numbers:
        """Its backward pass."""

    def memory_bound_s(self, moved_bytes: Numbers) -> Numbers:
        """Element-wise kernels that read and write so many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DatasheetKernels:
    """Kernels from a device's datasheet and the share of it that is reached."""

    hardware: Hardware
    constants: Constants

    def gemm_s(self, m: Numbers, n: Numbers, k: Numbers, *, in_head: bool = False) -> Numbers:
        """One GEMM; the head's stay in bf16."""
        own, machine = self.constants, self.hardware
        if in_head:
            return self._tiled_s(1.0, m, n, k, machine.attention_flop_per_s * own.head_ratio, 1.0)
        rate = machine.matmul_flop_per_s * own.matmul_ratio
        return self._tiled_s(1.0, m, n, k, rate, self._speedup)

    def experts_s(
        self, groups: Numbers, rows: Numbers, *, hidden: Numbers, width: Numbers, inner: Numbers
    ) -> ExpertSeconds:
        """Six grouped GEMMs: two forward, two for input and two for weight gradients."""
        own = self.constants
        rate = self.hardware.matmul_flop_per_s * own.matmul_ratio * own.grouped_ratio
        seconds = [
            self._tiled_s(groups, *shape, rate, self._speedup)
            for shape in (
                *((rows, inner, hidden), (rows, hidden, width)),
                *((rows, hidden, inner), (rows, width, hidden)),
                *((inner, hidden, rows), (hidden, width, rows)),
            )
        ]
        weight_s = seconds[4] + seconds[5]
        return ExpertSeconds(
            forward_s=seconds[0] + seconds[1],
            backward_s=seconds[2] + seconds[3] + weight_s,
            weight_s=weight_s,
        )

    def batched_gemm_s(self, batches: Numbers, m: Numbers, n: Numbers, k: Numbers) -> Numbers:
        """Independent GEMMs of attention's precision, in one kernel."""
        rate = self.hardware.attention_flop_per_s * self.constants.matmul_ratio
        return self._tiled_s(batches, m, n, k, rate, 1.0)

    def attention_s(self, shape: AttentionShape) -> Numbers:
        """Two GEMMs over the unmasked pairs: 2 pairs heads (d_qk + d_v) operations."""
        widths = shape.key_dim + shape.value_dim
        flop = 2.0 * shape.pairs * shape.heads * self._widened(widths, 2.0)
        return flop / (self.hardware.attention_flop_per_s * self.constants.attention_ratio)

    def attention_backward_s(self, shape: AttentionShape) -> Numbers:
        """Five GEMMs: recomputed scores, gradients of queries, keys, scores and values."""
        own = self.constants
        rate = self.hardware.attention_flop_per_s * own.attention_ratio
        widths = 3.0 * shape.key_dim + 2.0 * shape.value_dim
        flop = 2.0 * shape.pairs * shape.heads * self._widened(widths, 5.0)
        return flop / (rate * own.attention_backward_ratio)

    def _widened(self, widths: Numbers, gemms: float) -> Numbers:
        # Exponentials cost as much as additional width; ratios are stated at width 128.
        more = gemms * self.constants.softmax_width
        return (widths + more) * (gemms * 128.0) / (gemms * 128.0 + more)

    def memory_bound_s(self, moved_bytes: Numbers) -> Numbers:
        """Bytes at the datasheet's bandwidth times the factor that kernels need."""
        return moved_bytes * (self.constants.memory_factor / self.hardware.memory_bytes_per_s)

    @property
    def _speedup(self) -> Numbers:
        """Rate of the linear layers over bf16's; bytes per element shrink by the same factor."""
        return self.hardware.matmul_flop_per_s / self.hardware.attention_flop_per_s

    def _tiled_s(
        self,
        groups: Numbers,
        m: Numbers,
        n: Numbers,
        k: Numbers,
        rate: Numbers,
        speedup: Numbers,
    ) -> Numbers:
        units = self.hardware.compute_units
        depth = (2.0 * units) * (k + self.constants.extra_depth * speedup) / rate
        tiles_TC = groups * np.ceil(m / TILE_ROWS) * np.ceil(n / TILE_COLUMNS)
        full_TC = np.maximum(tiles_TC / units, 1.0)
        waves_TC = 0.5 * (full_TC + np.ceil(full_TC))
        best = np.min(waves_TC * TILE_WORK, axis=0)
        moved_bytes = 2.0 * groups * ((m * k + k * n) / speedup + m * n)
        floor = moved_bytes / (STREAM_RATIO * self.hardware.memory_bytes_per_s)
        seconds = np.maximum(best * depth, floor)
        all_numbers = np.ndim(depth) == np.ndim(floor) == 0
        return float(seconds[0]) if all_numbers else seconds
