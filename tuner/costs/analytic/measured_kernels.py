"""Kernels from a stored profile's measurements, in place of a datasheet's formulas.

Each operation that the profile measured is interpolated (profilers/interpolation.py), once per
distinct shape; every other one comes from the datasheet, and `missing` names it. Shapes beyond what
was measured are extrapolated, and `outside` collects what share of an operation's shapes was:

    product         gemm(m, n, k), forward; gradients are products of their own shapes
    experts         grouped_gemm(experts, tokens, largest, hidden, ffn): a gated network as a whole,
                    forward and backward; half of the backward pass is for weights
    attention       attention(batch, sequence, heads, kv_heads, head_dim), scaled by the pairs that
                    are computed and by the mean of key and value width
    memory-bound    residual_add(rows, width) of 3 passes at bf16, taken as a rate of bytes

Letters: N shapes, A axes. Not covered: measured collectives (tuner/costs/analytic/links.py),
networks of experts without a gate, the two batched products of old attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from profilers.interpolation import Curve, Series
from tuner.costs.analytic.kernels import AttentionShape, ExpertSeconds, Kernels
from tuner.costs.analytic.shapes import Numbers

WIDTH = 4096.0
"""Of the rows that memory-bound bytes are cut into."""
PASSES = 3.0
"""Of a residual addition: two reads and a write."""
BF16_BYTES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredKernels:
    """Curves of one profile, and the datasheet's formulas for the rest."""

    curves: Mapping[Series, Curve]
    fallback: Kernels
    dtype: str = "bf16"
    """Of the linear layers."""
    outside: dict[str, float] = field(default_factory=dict)
    """Filled while pricing: share of an operation's shapes beyond what was measured."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Operations that come from the datasheet."""
        wanted = {
            f"gemm {self.dtype}": _series("gemm", dtype=self.dtype),
            "gemm bf16 (head)": _series("gemm"),
            f"grouped_gemm {self.dtype}": _series("grouped_gemm", dtype=self.dtype),
            "attention": _series("attention"),
            "attention backward": _series("attention", direction="backward"),
            "memory_bound": _series("memory_bound", kind="residual_add"),
        }
        return tuple(name for name, series in wanted.items() if series not in self.curves)

    def gemm_s(self, m: Numbers, n: Numbers, k: Numbers, *, in_head: bool = False) -> Numbers:
        """One product; the head's stay in bf16."""
        series = _series("gemm", dtype="bf16" if in_head else self.dtype)
        if series not in self.curves:
            return self.fallback.gemm_s(m, n, k, in_head=in_head)
        return self._read(series, m, n, k)

    def experts_s(
        self, groups: Numbers, rows: Numbers, *, hidden: Numbers, width: Numbers, inner: Numbers
    ) -> ExpertSeconds:
        """The whole network of every expert."""
        forward = _series("grouped_gemm", dtype=self.dtype)
        backward = _series("grouped_gemm", dtype=self.dtype, direction="backward")
        is_gated = np.all(np.equal(inner, 2.0 * np.asarray(width)))
        if not is_gated or forward not in self.curves or backward not in self.curves:
            return self.fallback.experts_s(groups, rows, hidden=hidden, width=width, inner=inner)
        axes = (groups, groups * rows, rows, hidden, width)
        backward_s = self._read(backward, *axes)
        return ExpertSeconds(
            forward_s=self._read(forward, *axes), backward_s=backward_s, weight_s=0.5 * backward_s
        )

    def batched_gemm_s(self, batches: Numbers, m: Numbers, n: Numbers, k: Numbers) -> Numbers:
        """Independent products: from the datasheet."""
        return self.fallback.batched_gemm_s(batches, m, n, k)

    def attention_s(self, shape: AttentionShape) -> Numbers:
        """Flash attention's forward pass."""
        series = _series("attention")
        if series not in self.curves:
            return self.fallback.attention_s(shape)
        return self._attention_s(series, shape)

    def attention_backward_s(self, shape: AttentionShape) -> Numbers:
        """Its backward pass."""
        series = _series("attention", direction="backward")
        if series not in self.curves:
            return self.fallback.attention_backward_s(shape)
        return self._attention_s(series, shape)

    def memory_bound_s(self, moved_bytes: Numbers) -> Numbers:
        """Element-wise kernels that read and write so many bytes."""
        series = _series("memory_bound", kind="residual_add")
        if series not in self.curves:
            return self.fallback.memory_bound_s(moved_bytes)
        rows = moved_bytes / (PASSES * BF16_BYTES * WIDTH)
        return np.where(np.greater(moved_bytes, 0.0), self._read(series, rows, WIDTH), 0.0)

    def _attention_s(self, series: Series, shape: AttentionShape) -> Numbers:
        whole_s = self._read(
            series, shape.sequences, shape.sequence, shape.heads, shape.kv_heads, shape.key_dim
        )
        causal = shape.sequences * shape.sequence * (shape.sequence + 1.0) / 2.0
        width = (shape.key_dim + shape.value_dim) / (2.0 * shape.key_dim)
        return whole_s * (shape.pairs / causal) * width

    def _read(self, series: Series, *axes: Numbers) -> npt.NDArray[np.float64]:
        columns = np.broadcast_arrays(*(np.asarray(axis, dtype=np.float64) for axis in axes))
        asked_NA = np.stack([column.ravel() for column in columns], axis=1)
        distinct_NA, place_N = np.unique(asked_NA, axis=0, return_inverse=True)
        seconds_N, extrapolated_N = self.curves[series].predict(distinct_NA)
        name = f"{series.operation} {series.dtype} {series.direction}".strip()
        share = float(extrapolated_N.mean())
        self.outside[name] = max(self.outside.get(name, 0.0), share)
        found: npt.NDArray[np.float64] = seconds_N[place_N.ravel()].reshape(columns[0].shape)
        return found


def _series(
    operation: str, *, kind: str = "", dtype: str = "bf16", direction: str = "forward"
) -> Series:
    return Series(operation=operation, kind=kind, dtype=dtype, direction=direction)
