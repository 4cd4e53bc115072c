"""Seconds of one kernel from its shape and the device's datasheet.

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

GEMMs of dtype bf16 stay there under every recipe: those of head and router. Of an adapter's GEMM,
the rank is padded to a tile or the bytes of both wide matrices decide; in fp32 it runs on vector
units, since PyTorch does not allow TF32 for it. Attention counts the unmasked pairs, and some more
for every query that a kernel begins. Exponentials add time to the GEMMs, as if every head were
wider by a constant; the share of the peak is stated at a width of 128.

A device with fewer matrix units than its generation's others (H20) reaches more of its peak: of
causal attention of width 128 over 2,048 tokens 0.73, where H100 reaches 0.4 to 0.5
(Dao-AILab/flash-attention#1310).

Not covered: split-k, 2-SM tiles, alignment.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.config.columns import Numbers
from tuner.config.shapes import Hardware
from tuner.devices.datasheet import Datasheet
from tuner.prices.linear_scan import scan_bytes, scan_flop
from tuner.prices.ops import BF16, FP32, SKINNY, Op
from tuner.prices.train.constants import Constants

TILES: Final = ((256.0, 128.0, 1.0), (128.0, 128.0, 0.93), (128.0, 64.0, 0.80), (64.0, 64.0, 0.62))
"""Rows, columns, and what the tile reaches of the largest one's rate."""

_SIZES_TX = np.array(TILES)
TILE_ROWS, TILE_COLUMNS = _SIZES_TX[:, :1], _SIZES_TX[:, 1:2]
TILE_WORK = TILE_ROWS * TILE_COLUMNS / _SIZES_TX[:, 2:]

STREAM_RATIO: Final = 0.85
"""Share of the memory bandwidth that a GEMM reaches. STREAM on A100 and H100 reaches 0.85 to
0.92."""


def peak_s(flop: Numbers, hardware: Hardware) -> Numbers:
    """Seconds of matrix products at the device's peak."""
    return flop / hardware.matmul_flop_per_s


def streamed_s(moved_bytes: Numbers, hardware: Hardware) -> Numbers:
    """Seconds in which a kernel streams bytes from and to memory."""
    return moved_bytes / (STREAM_RATIO * hardware.memory_bytes_per_s)


SUSTAINED_RATIO: Final = 0.7
"""Share of the peak that GEMMs of a model sustain on devices that state none (`reached_ratio`), as
on H100 and H200."""


def reached_flop_per_s(sheet: Datasheet, units: str, ratio: float) -> float:
    """Return the operations a second of a serving kernel, by the share of the peak that it reaches.

    Args:
        sheet: the device; one whose GEMMs are stated to sustain another share than 0.7 of the peak
            reaches as much more or less here.
        units: the format that it multiplies, a key of `flop_per_s`.
        ratio: the share, on devices with all matrix units of their generation.
    """
    sustained = sheet.reached_ratio.get(units, SUSTAINED_RATIO) / SUSTAINED_RATIO
    share = reached_share(min(ratio * sustained, 1.0), sheet.matrix_ratio)
    return float(share) * sheet.flop_per_s[units]


def reached_share(ratio: Numbers, matrix_ratio: Numbers) -> Numbers:
    """Return the share of its peak that a device with so many fewer matrix units reaches.

    What a kernel does beside its matmuls takes as long as there, so it is less of the whole.
    """
    return ratio / (ratio + (1.0 - ratio) * matrix_ratio)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DatasheetPrices:
    """Kernels from a device's datasheet and the share of it that is reached."""

    hardware: Hardware
    constants: Constants

    def seconds(self, op: Op) -> Numbers:
        """Wall time of running it once."""
        return _FORMULAS[op.operation](self, op)

    def _gemm_s(self, op: Op) -> Numbers:
        constants, machine = self.constants, self.hardware
        shape = op.axes["m"], op.axes["n"], op.axes["k"]
        if op.kind == SKINNY:
            return self._skinny_s(*shape, is_vector=op.dtype == FP32)
        if op.dtype == BF16:
            rate = machine.attention_flop_per_s * self._reached(constants.head_ratio)
            return self._tiled_s(1.0, *shape, rate, 1.0)
        rate = machine.matmul_flop_per_s * self._reached(constants.matmul_ratio)
        return self._tiled_s(1.0, *shape, rate, self._speedup)

    def _skinny_s(self, m: Numbers, n: Numbers, k: Numbers, *, is_vector: bool) -> Numbers:
        constants, machine = self.constants, self.hardware
        rank = np.minimum(np.minimum(m, n), k)
        wide = m * n * k / np.maximum(rank, 1.0)
        slower, element_bytes = (VECTOR_RATIO, 4.0) if is_vector else (1.0, 2.0)
        rate = machine.attention_flop_per_s * self._reached(constants.matmul_ratio) / slower
        moved_s = constants.memory_factor * element_bytes * wide / machine.memory_bytes_per_s
        return np.maximum(2.0 * wide * np.maximum(rank, SKINNY_TILE) / rate, moved_s)

    def _experts_s(self, op: Op) -> Numbers:
        """Two grouped GEMMs, in the forward pass and for either gradient."""
        constants, axes = self.constants, op.axes
        rows, inner, hidden, ffn = (axes[name] for name in ("largest", "inner", "hidden", "ffn"))
        shapes = {
            "": ((rows, inner, hidden), (rows, hidden, ffn)),
            "inputs": ((rows, hidden, inner), (rows, ffn, hidden)),
            "weights": ((inner, hidden, rows), (hidden, ffn, rows)),
        }
        ratio = constants.matmul_ratio * constants.grouped_ratio
        rate = self.hardware.matmul_flop_per_s * self._reached(ratio)
        up_s, down_s = (
            self._tiled_s(axes["experts"], *shape, rate, self._speedup) for shape in shapes[op.kind]
        )
        return up_s + down_s

    def _batched_gemm_s(self, op: Op) -> Numbers:
        rate = self.hardware.attention_flop_per_s * self._reached(self.constants.matmul_ratio)
        batches, m, n, k = (op.axes[name] for name in ("batches", "m", "n", "k"))
        return self._tiled_s(batches, m, n, k, rate, 1.0)

    def _attention_s(self, op: Op) -> Numbers:
        """Two GEMMs over the unmasked pairs: 2 pairs heads (d_qk + d_v) operations.

        Five in the backward pass: recomputed scores, gradients of queries, keys, scores and values.
        Every query that a kernel begins costs `extra_keys` more pairs.
        """
        constants, axes = self.constants, op.axes
        rate = self.hardware.attention_flop_per_s * self._reached(constants.attention_ratio)
        if op.direction == "forward":
            flop_per_pair = self._widened(axes["head_dim"] + axes["value_dim"], 2.0)
        else:
            flop_per_pair = self._widened(3.0 * axes["head_dim"] + 2.0 * axes["value_dim"], 5.0)
            rate = rate * constants.attention_backward_ratio
        extra_keys = constants.extra_keys * self.hardware.matrix_ratio
        pairs = axes["pairs"] + extra_keys * axes["queries"]
        return 2.0 * pairs * axes["heads"] * flop_per_pair / rate

    def _linear_scan_s(self, op: Op) -> Numbers:
        """FLOPs at attention's rate and bytes at that of element-wise kernels, one after the other.

        The backward pass computes the chunks again and has two gradients of every product.
        """
        constants, axes = self.constants, dict(op.axes)
        tokens = axes.pop("batch") * axes.pop("sequence")
        rate = self.hardware.attention_flop_per_s * self._reached(constants.attention_ratio)
        factor = constants.memory_factor / self.hardware.memory_bytes_per_s
        forward_s = tokens * (scan_flop(**axes) / rate + scan_bytes(**axes) * factor)
        return forward_s * (1.0 if op.direction == "forward" else SCAN_BACKWARD)

    def _memory_bound_s(self, op: Op) -> Numbers:
        """Bytes at the datasheet's bandwidth times the factor that kernels need."""
        factor = self.constants.memory_factor / self.hardware.memory_bytes_per_s
        return op.axes["bytes"] * factor

    def _widened(self, widths: Numbers, gemms: float) -> Numbers:
        # Exponentials cost as much as additional width; ratios are stated at width 128, for devices
        # with as many exponentials as their generation has.
        more = gemms * self.constants.softmax_width
        on_device = more / self.hardware.exponential_ratio
        return (widths + on_device) * (gemms * 128.0) / (gemms * 128.0 + more)

    def _reached(self, ratio: Numbers) -> Numbers:
        """Share of the peak where matrix units are fewer than the generation's."""
        return reached_share(ratio, self.hardware.matrix_ratio)

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
        extra_depth = self.constants.extra_depth * self.hardware.matrix_ratio
        depth = (2.0 * units) * (k + extra_depth * speedup) / rate
        tiles_TC = groups * np.ceil(m / TILE_ROWS) * np.ceil(n / TILE_COLUMNS)
        full_TC = np.maximum(tiles_TC / units, 1.0)
        waves_TC = 0.5 * (full_TC + np.ceil(full_TC))
        best = np.min(waves_TC * TILE_WORK, axis=0)
        moved_bytes = 2.0 * groups * ((m * k + k * n) / speedup + m * n)
        floor = streamed_s(moved_bytes, self.hardware)
        seconds = np.maximum(best * depth, floor)
        all_numbers = np.ndim(depth) == np.ndim(floor) == 0
        return float(seconds[0]) if all_numbers else seconds


VECTOR_RATIO: Final = 15.0
"""Ratio of the bf16 peak to that of fp32 on vector units: 312 / 19.5 TFLOP/s on A100, 989 / 67 on
H100."""
SKINNY_TILE: Final = 32.0
"""Columns of the narrowest tile of a GEMM: a rank below is padded to it."""

SCAN_BACKWARD: Final = 3.5
"""Seconds of a scan's backward pass over those of its forward pass: 4.31 against 1.25 ms for 32,768
tokens of Nemotron-3 Nano's Mamba-2 layer on one H200 (mamba_ssm at e9594ce, Triton 3.6)."""

_FORMULAS: Final[Mapping[str, Callable[[DatasheetPrices, Op], Numbers]]] = {
    "gemm": DatasheetPrices._gemm_s,
    "grouped_gemm": DatasheetPrices._experts_s,
    "batched_gemm": DatasheetPrices._batched_gemm_s,
    "attention": DatasheetPrices._attention_s,
    "linear_scan": DatasheetPrices._linear_scan_s,
    "memory_bound": DatasheetPrices._memory_bound_s,
}
