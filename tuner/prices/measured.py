"""Kernels from a stored profile's measurements, in place of a datasheet's formulas.

Each operation that the profile measured is interpolated (profilers/interpolation.py), once per
distinct shape (cached in `known`); every other one comes from the datasheet and is named in
`missing`. Shapes outside the measured range are extrapolated; `outside` gives their share by
operation:

    GEMM            gemm(m, n, k), forward; gradients are GEMMs of their own shapes
    experts         grouped_gemm(experts, tokens, largest, hidden, ffn): a gated network as a whole,
                    forward and backward; half of the backward pass is for weights
    attention       attention(batch, sequence, heads, kv_heads, head_dim), scaled by the pairs that
                    are computed and by the mean of key and value width
    linear scans    linear_scan(batch, sequence, heads, key_heads, key_dim, value_dim, chunk)
    memory-bound    residual_add(rows, width) of 3 passes at bf16, taken as a rate of bytes; or of
                    its own kind, where an operation states one and the profile has it

The memory-bound curve is tabulated a quarter octave apart and made monotonic: it is evaluated at
more sizes than any other.

Letters: N prices, D distinct shapes of them, A axes, T tabulated sizes. Not covered: measured
collectives (tuner/prices/train/measured_links.py), experts without a gate, the two batched GEMMs
of attention without FlashAttention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np
import numpy.typing as npt

from profilers.interpolation import Curve
from profilers.records import AXES
from profilers.series import Series
from tuner.config.columns import Numbers
from tuner.prices.ops import BF16, Op, Prices

WIDTH = 4096.0
"""Elements of the rows that the bytes of memory-bound operations are divided into."""
PASSES = 3.0
"""Passes over memory of a residual addition: two reads and a write."""
BF16_BYTES = 2.0
FLAT_KIND = "residual_add"
"""Memory-bound operation that stands for all of them."""
LOG_ROWS_T = np.arange(-10.0, 34.0, 0.25)
"""Binary logarithms of the rows at which the memory-bound curve is tabulated."""

LARGEST_CODE = 2**62
Key = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredPrices:
    """Curves of one profile, and the datasheet's formulas for other operations."""

    curves: Mapping[Series, Curve]
    fallback: Prices
    dtype: str = "bf16"
    """Number format of the linear layers, as the profile names it."""
    stretch: float = 1.0
    """Factor on extrapolated seconds, for a sensitivity test."""
    extrapolation_counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Filled while pricing, by operation: extrapolated shapes, and all shapes."""
    known: dict[Series, dict[Key, tuple[float, bool]]] = field(default_factory=dict)
    """Filled while pricing: seconds of every shape, and whether extrapolated."""
    tables: dict[Series, tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]] = field(
        default_factory=dict
    )
    """Filled while pricing: logarithms of seconds at `LOG_ROWS_T`, and whether extrapolated."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Operations that come from the datasheet."""
        wanted = {
            f"gemm {self.dtype}": Series("gemm", "", self.dtype, "forward"),
            "gemm bf16 (head)": Series("gemm", "", BF16, "forward"),
            f"grouped_gemm {self.dtype}": Series("grouped_gemm", "", self.dtype, "forward"),
            "attention": Series("attention", "", BF16, "forward"),
            "attention backward": Series("attention", "", BF16, "backward"),
            "memory_bound": Series("memory_bound", FLAT_KIND, BF16, "forward"),
        }
        return tuple(name for name, series in wanted.items() if series not in self.curves)

    @property
    def outside(self) -> Mapping[str, float]:
        """Share of extrapolated shapes, by operation."""
        counts = self.extrapolation_counts.items()
        return {name: beyond / total for name, (beyond, total) in counts if beyond}

    def seconds(self, op: Op) -> Numbers:
        """Wall time of running it once."""
        series = self._series(op)
        if op.operation == "memory_bound" and op.kind and series not in self.curves:
            op = replace(op, kind="", direction="forward")
            series = self._series(op)
        axes = op.axes
        if series not in self.curves or not self._has_network(op):
            return self.fallback.seconds(op)
        match op.operation:
            case "memory_bound" if not op.kind:
                return self._memory_bound_s(series, axes["bytes"])
            case "attention":
                causal = axes["batch"] * axes["sequence"] * (axes["sequence"] + 1.0) / 2.0
                width = (axes["head_dim"] + axes["value_dim"]) / (2.0 * axes["head_dim"])
                whole_s = self._read(series, *(axes[axis] for axis in AXES["attention"]))
                return whole_s * (axes["pairs"] / causal) * width
            case "grouped_gemm":
                tokens = axes["experts"] * axes["largest"]
                rest = (axes[axis] for axis in ("largest", "hidden", "ffn"))
                network_s = self._read(series, axes["experts"], tokens, *rest)
                # Measured backward passes are of both gradients.
                return network_s if op.direction == "forward" else 0.5 * network_s
            case _:
                sizes = [axes[axis] for axis in AXES[op.operation]]
                # A model whose layers all have experts has dense networks of width 0.
                if not np.any(reduce(np.minimum, sizes) > 0.0):
                    return 0.0
                return self._read(series, *sizes)

    def _has_network(self, op: Op) -> bool:
        """Return whether an operation is not of experts, or of gated ones measured both ways."""
        if op.operation != "grouped_gemm":
            return True
        both = {
            self._series(op)._replace(direction=direction) for direction in ("forward", "backward")
        }
        return both <= self.curves.keys() and has_gate(op)

    def _series(self, op: Op) -> Series:
        return Series(op.operation, kind_in_profile(op), op.dtype or self.dtype, op.direction)

    def _memory_bound_s(self, series: Series, moved_bytes: Numbers) -> Numbers:
        log_s_T, beyond_T = self._table(series)
        rows, _ = bytes_to_rows(moved_bytes)
        log_rows = np.log2(np.maximum(rows, 2.0 ** LOG_ROWS_T[0]))
        seconds = np.exp(np.interp(log_rows, LOG_ROWS_T, log_s_T))
        # A quarter octave to either side of a size that is inside counts as inside.
        is_beyond = np.interp(log_rows, LOG_ROWS_T, beyond_T.astype(np.float64)) >= 1.0
        is_nonempty = rows > 0.0
        self._note(series, is_beyond[is_nonempty])
        return np.where(is_nonempty, np.where(is_beyond, seconds * self.stretch, seconds), 0.0)

    def _table(self, series: Series) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        if series not in self.tables:
            rows_T = 2.0**LOG_ROWS_T
            axes_TA = np.stack([rows_T, np.full_like(rows_T, WIDTH)], axis=1)
            seconds_T, beyond_T = self.curves[series].predict(axes_TA)
            self.tables[series] = np.log(np.maximum.accumulate(seconds_T)), beyond_T
        return self.tables[series]

    def _read(self, series: Series, *axes: Numbers) -> npt.NDArray[np.float64]:
        columns = [np.asarray(axis, dtype=np.float64) for axis in axes]
        shape = np.broadcast_shapes(*(column.shape for column in columns))
        keys, place_N = _distinct(columns, shape)
        known = self.known.setdefault(series, {})
        unknown = [key for key in keys if key not in known]
        if unknown:
            seconds_D, beyond_D = self.curves[series].predict(np.array(unknown))
            priced = zip(seconds_D.tolist(), beyond_D.tolist(), strict=True)
            known.update(zip(unknown, priced, strict=True))
        pairs = [known[key] for key in keys]
        seconds_D = np.array([pair[0] for pair in pairs])
        beyond_D = np.array([pair[1] for pair in pairs])
        self._note(series, beyond_D)
        stretched_D = np.where(beyond_D, seconds_D * self.stretch, seconds_D)
        read: npt.NDArray[np.float64] = stretched_D[place_N].reshape(shape)
        return read

    def _note(self, series: Series, beyond_D: npt.NDArray[np.bool_]) -> None:
        name = f"{series.operation} {series.dtype} {series.direction}".strip()
        beyond, total = self.extrapolation_counts.get(name, (0, 0))
        self.extrapolation_counts[name] = beyond + int(beyond_D.sum()), total + beyond_D.size


def kind_in_profile(op: Op) -> str:
    """Return the kind of the measured rows that price an operation."""
    if op.operation == "memory_bound":
        return op.kind or FLAT_KIND
    return op.kind if op.operation in ("linear_scan", "linear_update") else ""


def has_gate(op: Op) -> bool:
    """Return whether the experts of a `grouped_gemm` have a gate, as those that are measured."""
    return bool(np.all(np.equal(op.axes["inner"], 2.0 * np.asarray(op.axes["ffn"]))))


def bytes_to_rows(moved_bytes: Numbers) -> tuple[npt.NDArray[np.float64], float]:
    """Return rows and width of the residual addition that moves so many bytes."""
    return np.asarray(moved_bytes, dtype=np.float64) / (PASSES * BF16_BYTES * WIDTH), WIDTH


def _distinct(
    columns: Sequence[npt.NDArray[np.float64]], shape: tuple[int, ...]
) -> tuple[list[Key], npt.NDArray[np.intp]]:
    """Return the distinct shapes and which of them every price has."""
    code: npt.NDArray[np.intp] = np.zeros(shape, dtype=np.intp)
    num_codes = 1
    for column in columns:
        if column.size > 1:
            values, index = np.unique(column, return_inverse=True)
            if num_codes * len(values) > LARGEST_CODE:
                code = np.unique(code, return_inverse=True)[1].reshape(shape)
                num_codes = code.size
            code = code * len(values) + np.broadcast_to(index.reshape(column.shape), shape)
            num_codes *= len(values)
    _, first, place_N = np.unique(code.ravel(), return_index=True, return_inverse=True)
    distinct = [np.broadcast_to(column, shape).ravel()[first].tolist() for column in columns]
    return list(zip(*distinct, strict=True)), place_N.ravel()
