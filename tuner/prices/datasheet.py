"""Seconds of one kernel from its shape and the device's datasheet.

Letters in formulas: m, n, k of a GEMM [m, k] x [k, n]; b sequences of s tokens. In arrays: T tiles,
C columns.

A GEMM takes what it takes alone (rated_gemm.py, as in serving), at the share of that rate which a
step sustains: `matmul_ratio` of the linear layers, `head_ratio` of the head. Prologue and epilogue
of its tiles take `extra_depth` times as long. Experts are GEMMs in groups, in one kernel.

GEMMs of dtype bf16 stay there under every recipe: those of head and router. Of an adapter's GEMM,
the rank is padded to a tile or the bytes of both wide matrices decide; in fp32 it runs on vector
units, since PyTorch does not allow TF32 for it. Attention counts the unmasked pairs, and some more
for every query that a kernel begins. Exponentials add time to the GEMMs, as if every head were
wider by a constant; the share of the peak is stated at a width of 128.

A device with fewer matrix units than its generation's others (H20) reaches more of its peak: of
causal attention of width 128 over 2,048 tokens 0.73, where H100 reaches 0.4 to 0.5
(Dao-AILab/flash-attention#1310).

Not covered: grouped GEMMs and attention of serving have kernels, and formulas, of their own
(serve/rated_experts.py, serve/rated_attention.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.config.columns import Numbers
from tuner.config.shapes import Hardware
from tuner.prices.linear_scan import scan_bytes, scan_flop
from tuner.prices.ops import BF16, FP32, SKINNY, Op
from tuner.prices.rated_gemm import rated_gemm_s, reached_share
from tuner.prices.train.constants import VECTOR_RATIO, Constants

MANY_COLUMNS: Final = 512
"""Columns beyond which distinct sizes are priced once, of which a search has few."""
_ROOTS: Final = (1.0, 2.0**0.5, 3.0**0.5, 5.0**0.5)
"""Factors whose sums with whole sizes differ wherever a size does."""

STREAM_RATIO: Final = 0.85
"""Share of the memory bandwidth that main gradients are added at. STREAM on A100 and H100 reaches
0.85 to 0.92."""


def peak_s(flop: Numbers, hardware: Hardware) -> Numbers:
    """Seconds of matrix products at the device's peak."""
    return flop / hardware.matmul_flop_per_s


def streamed_s(moved_bytes: Numbers, hardware: Hardware) -> Numbers:
    """Seconds in which a kernel streams bytes from and to memory."""
    return moved_bytes / (STREAM_RATIO * hardware.memory_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DatasheetPrices:
    """Kernels from a device's datasheet and the share of it that is reached."""

    hardware: Hardware
    constants: Constants

    def seconds(self, op: Op) -> Numbers:
        """Wall time of running it once."""
        return _FORMULAS[op.operation](self, op)

    def _gemm_s(self, op: Op) -> Numbers:
        constants = self.constants
        shape = op.axes["m"], op.axes["n"], op.axes["k"]
        if op.kind == SKINNY:
            return self._skinny_s(*shape, is_vector=op.dtype == FP32)
        if op.dtype == BF16:
            return self._tiled_s(*shape, share=constants.head_ratio, is_bf16=True)
        return self._tiled_s(*shape, share=constants.matmul_ratio)

    def _skinny_s(self, m: Numbers, n: Numbers, k: Numbers, *, is_vector: bool) -> Numbers:
        constants, machine = self.constants, self.hardware
        rank = np.minimum(np.minimum(m, n), k)
        wide = m * n * k / np.maximum(rank, 1.0)
        slower, element_bytes = (VECTOR_RATIO, 4.0) if is_vector else (1.0, 2.0)
        share = self._reached(machine.bf16_share * constants.matmul_ratio)
        rate = machine.attention_flop_per_s * share / slower
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
        share = constants.matmul_ratio * constants.grouped_ratio
        up_s, down_s = (
            self._tiled_s(*shape, axes["experts"], share=share) for shape in shapes[op.kind]
        )
        return up_s + down_s

    def _batched_gemm_s(self, op: Op) -> Numbers:
        sizes = (op.axes[name] for name in ("m", "n", "k", "batches"))
        return self._tiled_s(*sizes, share=self.constants.matmul_ratio, is_bf16=True)

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

    def _tiled_s(self, *sizes: Numbers, share: Numbers, is_bf16: bool = False) -> Numbers:
        """GEMMs of the linear layers or of bf16, at a share of the rate that they reach alone.

        Args:
            sizes: m, n and k, and of how many groups.
            share: of that rate.
            is_bf16: whether they stay in bf16.
        """
        if np.ndim(share) == 0 and np.broadcast(*sizes).size > MANY_COLUMNS:
            key_C = sum(root * size for root, size in zip(_ROOTS, sizes, strict=False))
            _, first_U, place_C = np.unique(key_C, return_index=True, return_inverse=True)
            if len(first_U) <= MANY_COLUMNS:
                few = (np.asarray(size)[first_U] if np.size(size) > 1 else size for size in sizes)
                return np.asarray(self._tiled_s(*few, share=share, is_bf16=is_bf16))[place_C]
        machine = self.hardware
        bf16, peak = machine.attention_flop_per_s, machine.matmul_flop_per_s
        peak, top = (bf16, machine.bf16_share) if is_bf16 else (peak, machine.gemm_share)
        return rated_gemm_s(
            machine,
            *sizes,
            flop_per_s=peak * self._reached(top * share),
            speedup=peak / bf16,
            depth_factor=self.constants.extra_depth,
        )


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
