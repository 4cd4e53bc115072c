from collections.abc import Mapping

import numpy as np
import pytest

from profilers.interpolation import Bools, Curve, Floats
from profilers.series import Series
from tuner.costs.train.constants import Constants
from tuner.costs.train.kernels import AttentionShape, DatasheetKernels
from tuner.costs.train.measured_kernels import MeasuredKernels
from tuner.costs.train.shapes import Hardware

MACHINE = Hardware(
    matmul_flop_per_s=100e12,
    attention_flop_per_s=100e12,
    compute_units=100.0,
    memory_bytes=80e9,
    memory_bytes_per_s=2e12,
    scale_up_bytes_per_s=400e9,
    domain=8.0,
    devices_per_node=8.0,
    scale_out_bytes_per_s=50e9,
)
SHEET = DatasheetKernels(hardware=MACHINE, constants=Constants())


class Product:
    """A curve whose seconds are the product of its axes; nothing above 1,000 was measured."""

    def __init__(self) -> None:
        self.requested: list[int] = []

    def predict(self, axes_NA: Floats) -> tuple[Floats, Bools]:
        self.requested.append(len(axes_NA))
        return axes_NA.prod(axis=1), np.asarray((axes_NA > 1000.0).any(axis=1))


def series(operation: str, direction: str = "forward", kind: str = "") -> Series:
    return Series(operation=operation, kind=kind, dtype="bf16", direction=direction)


def measured(curves: Mapping[Series, Curve]) -> MeasuredKernels:
    return MeasuredKernels(curves=curves, fallback=SHEET)


def test_gemms_come_from_the_curve_once_per_shape() -> None:
    curve = Product()
    kernels = measured({series("gemm"): curve})
    actual = kernels.gemm_s(np.array([2.0, 2.0, 3.0]), 5.0, 7.0)
    assert actual == pytest.approx([70.0, 70.0, 105.0])
    assert curve.requested == [2]


def test_what_the_profile_lacks_comes_from_the_datasheet_and_is_named() -> None:
    kernels = measured({series("gemm"): Product()})
    assert kernels.memory_bound_s(1e9) == SHEET.memory_bound_s(1e9)
    shape = AttentionShape(
        pairs=1e6,
        sequences=1.0,
        sequence=1414.0,
        heads=8.0,
        kv_heads=8.0,
        key_dim=128.0,
        value_dim=128.0,
    )
    assert kernels.attention_s(shape) == SHEET.attention_s(shape)
    assert kernels.missing == (
        "grouped_gemm bf16",
        "attention",
        "attention backward",
        "memory_bound",
    )


def test_extrapolated_shapes_are_counted() -> None:
    kernels = measured({series("gemm"): Product()})
    kernels.gemm_s(np.array([1.0, 2000.0]), 2.0, 3.0)
    assert kernels.outside == {"gemm bf16 forward": 0.5}


def test_attention_is_scaled_to_the_pairs_that_are_computed() -> None:
    kernels = measured({series("attention"): Product()})
    half = AttentionShape(
        pairs=0.5 * 2 * 10 * 11 / 2,
        sequences=2.0,
        sequence=10.0,
        heads=4.0,
        kv_heads=1.0,
        key_dim=64.0,
        value_dim=64.0,
    )
    assert kernels.attention_s(half) == pytest.approx(0.5 * 2 * 10 * 4 * 1 * 64)


def test_a_gated_network_of_experts_is_measured_as_a_whole() -> None:
    curves = {series("grouped_gemm"): Product(), series("grouped_gemm", "backward"): Product()}
    kernels = measured(curves)
    actual = kernels.experts_s(2.0, 3.0, hidden=5.0, width=7.0, inner=14.0)
    assert actual.forward_s == pytest.approx(2 * 6 * 3 * 5 * 7)
    assert actual.weight_s == pytest.approx(0.5 * np.asarray(actual.backward_s))
    ungated = kernels.experts_s(2.0, 3.0, hidden=5.0, width=7.0, inner=7.0)
    assert ungated == SHEET.experts_s(2.0, 3.0, hidden=5.0, width=7.0, inner=7.0)


def test_no_bytes_take_no_time() -> None:
    kernels = measured({series("memory_bound", kind="residual_add"): Product()})
    assert np.asarray(kernels.memory_bound_s(np.array([0.0, 24576.0]))) == pytest.approx(
        [0.0, 4096.0]
    )
