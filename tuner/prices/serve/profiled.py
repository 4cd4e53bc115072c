"""Prices of serving operations from a profile of the machine itself.

    gemm, attention, decode_attention,  the curve of the same name
    index_scores
    linear_scan, linear_update          those of the kind of linear attention, states in fp32
    moe                                 grouped_gemm of the experts that are reached on average,
                                        each with its even share of the copies

Sizes beyond the measured ones are extrapolated, and the operation is named in `estimated`. What the
profile lacks comes from the rates that it reached (tuner/devices/measured.py).

Letters: Q query points.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from profilers.interpolation import Curve
from profilers.records import AXES
from profilers.series import Series
from tuner.prices.measured import kind_in_profile
from tuner.prices.ops import BF16, Op
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.machine import ServingMachine
from tuner.prices.serve.work import even_activated


@dataclass(frozen=True, kw_only=True, eq=False)
class ProfiledMachine(ServingMachine):
    """One system with curves through what was measured on it."""

    curves: Mapping[Series, Curve]

    def measured_s(self, op: Op) -> Floats | None:
        """Wall time as measured; None where the profile lacks the operation."""
        if op.operation == "moe":
            op = grouped_experts(op)
        series = Series(op.operation, kind_in_profile(op), op.dtype or BF16, op.direction)
        curve = self.curves.get(series)
        if curve is None or "kv_fp8" in op.kind:
            return None
        columns = np.broadcast_arrays(
            *(np.asarray(op.axes[axis], dtype=np.float64) for axis in AXES[op.operation])
        )
        seconds_N, beyond_N = curve.predict(
            np.stack([column.ravel() for column in columns], axis=1)
        )
        if beyond_N.any():
            self.estimated.add(f"{op.operation} beyond the measured sizes")
        return seconds_N.reshape(columns[0].shape)


def grouped_experts(routed: Op) -> Op:
    """The experts of one rank as profilers measure them, loads even."""
    axes = routed.axes
    copies_Q = np.asarray(axes["tokens"]) * axes["top_k"] / axes["expert"]
    reached_Q = np.maximum(np.round(even_activated(routed)), 1.0)
    return Op(
        operation="grouped_gemm",
        dtype=routed.dtype,
        direction="forward",
        axes={
            "experts": reached_Q,
            "tokens": np.maximum(copies_Q, reached_Q),
            "largest": np.ceil(np.maximum(copies_Q, reached_Q) / reached_Q),
            "hidden": float(axes["hidden"]),
            "ffn": axes["ffn"] / axes["tensor"],
            "inner": (axes.get("matrices", 3.0) - 1.0) * axes["ffn"] / axes["tensor"],
        },
    )
