from collections.abc import Mapping

import numpy as np
import pytest

from profilers.interpolation import Bools, Curve, Floats
from profilers.series import Series
from tuner.config.shapes import Hardware
from tuner.prices.datasheet import DatasheetPrices
from tuner.prices.measured import MeasuredPrices
from tuner.prices.ops import attention, gemm, memory_bound, on_rows, trained_experts
from tuner.prices.train.constants import Constants

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
SHEET = DatasheetPrices(hardware=MACHINE, constants=Constants())


class Product:
    """A curve whose seconds are the product of its axes; nothing above 1,000 was measured."""

    def __init__(self) -> None:
        self.requested: list[int] = []

    def predict(self, axes_NA: Floats) -> tuple[Floats, Bools]:
        self.requested.append(len(axes_NA))
        return axes_NA.prod(axis=1), np.asarray((axes_NA > 1000.0).any(axis=1))


def series(operation: str, direction: str = "forward", kind: str = "") -> Series:
    return Series(operation=operation, kind=kind, dtype="bf16", direction=direction)


def measured(curves: Mapping[Series, Curve]) -> MeasuredPrices:
    return MeasuredPrices(curves=curves, fallback=SHEET)


def test_gemms_come_from_the_curve_once_per_shape() -> None:
    curve = Product()
    actual = measured({series("gemm"): curve}).seconds(gemm(np.array([2.0, 2.0, 3.0]), 5.0, 7.0))
    assert actual == pytest.approx([70.0, 70.0, 105.0])
    assert curve.requested == [2]


def test_what_the_profile_lacks_comes_from_the_datasheet_and_is_named() -> None:
    prices = measured({series("gemm"): Product()})
    assert prices.seconds(memory_bound(1e9)) == SHEET.seconds(memory_bound(1e9))
    shape = attention(
        pairs=1e6,
        batch=1.0,
        sequence=1414.0,
        heads=8.0,
        kv_heads=8.0,
        head_dim=128.0,
        value_dim=128.0,
    )
    assert prices.seconds(shape) == SHEET.seconds(shape)
    assert prices.missing == (
        "grouped_gemm bf16",
        "attention",
        "attention backward",
        "memory_bound",
    )


def test_extrapolated_shapes_are_counted() -> None:
    prices = measured({series("gemm"): Product()})
    prices.seconds(gemm(np.array([1.0, 2000.0]), 2.0, 3.0))
    assert prices.outside == {"gemm bf16 forward": 0.5}


def test_attention_is_scaled_to_the_pairs_that_are_computed() -> None:
    prices = measured({series("attention"): Product()})
    half = attention(
        pairs=0.5 * 2 * 10 * 11 / 2,
        batch=2.0,
        sequence=10.0,
        heads=4.0,
        kv_heads=1.0,
        head_dim=64.0,
        value_dim=64.0,
    )
    assert prices.seconds(half) == pytest.approx(0.5 * 2 * 10 * 4 * 1 * 64)


def test_a_gated_network_of_experts_is_measured_as_a_whole() -> None:
    curves = {series("grouped_gemm"): Product(), series("grouped_gemm", "backward"): Product()}
    prices = measured(curves)
    network = trained_experts(2.0, 3.0, hidden=5.0, ffn=7.0, inner=14.0)
    whole_s = 2 * 6 * 3 * 5 * 7
    for op, share in zip(network, (1.0, 0.5, 0.5), strict=True):
        assert prices.seconds(op) == pytest.approx(share * whole_s)
    for op in trained_experts(2.0, 3.0, hidden=5.0, ffn=7.0, inner=7.0):
        assert prices.seconds(op) == SHEET.seconds(op)


def test_no_bytes_take_no_time() -> None:
    prices = measured({series("memory_bound", kind="residual_add"): Product()})
    assert np.asarray(prices.seconds(memory_bound(np.array([0.0, 24576.0])))) == pytest.approx(
        [0.0, 4096.0]
    )


def test_kernels_on_rows_come_from_their_own_curve_else_from_their_bytes() -> None:
    flat = series("memory_bound", kind="residual_add")
    # Two reads or writes of 2 bytes forward, three backward, in rows of three passes.
    forward, backward = (
        on_rows("unpermute", 12.0, 4096.0, is_backward=is_backward) for is_backward in (False, True)
    )
    by_bytes = measured({flat: Product()})
    assert np.asarray(by_bytes.seconds(forward)) == pytest.approx(8.0 * 4096.0)
    assert np.asarray(by_bytes.seconds(backward)) == pytest.approx(12.0 * 4096.0)
    own = series("memory_bound", kind="unpermute")
    assert measured({flat: Product(), own: Product()}).seconds(forward) == 12.0 * 4096.0
    assert measured({}).seconds(forward) == SHEET.seconds(memory_bound(12.0 * 4096.0 * 4.0))
