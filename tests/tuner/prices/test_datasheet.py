from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.config.shapes import Hardware
from tuner.devices.catalogue import find_device
from tuner.prices.datasheet import DatasheetPrices
from tuner.prices.ops import BF16, Op, attention, gemm, memory_bound, trained_experts
from tuner.prices.train.constants import Constants, GemmPrecision, Software, uncalibrated

MACHINE = Hardware(
    matmul_flop_per_s=100e12,
    attention_flop_per_s=100e12,
    compute_units=100.0,
    memory_bytes=80e9,
    memory_bytes_per_s=2e12,
    scale_up_bytes_per_s=300e9,
    domain=8.0,
    devices_per_node=8.0,
    scale_out_bytes_per_s=25e9,
)
PRICES = DatasheetPrices(
    hardware=MACHINE, constants=Constants(matmul_ratio=0.5, extra_depth=0.0, head_ratio=0.25)
)
sizes = st.integers(1, 20_000).map(float)


def test_whole_waves_of_large_tiles_run_at_the_share_of_the_peak() -> None:
    # 10 x 20 tiles of 256 x 128 on 100 units are two full waves: 2 m n k / (0.5 x 100 TFLOP/s).
    m, n, k = 2560.0, 2560.0, 4096.0
    compute_s, memory_s = 2 * m * n * k / 50e12, 2 * (m * n + m * k + n * k) / (0.77 * 2e12)
    expected = 2.1e-6 + (compute_s**4 + memory_s**4) ** 0.25
    assert PRICES.seconds(gemm(m, n, k)) == pytest.approx(expected)


def test_the_head_runs_at_its_own_share() -> None:
    m, n, k = 2560.0, 2560.0, 4096.0
    expected = 2.1e-6 + 2 * m * n * k / 25e12
    assert PRICES.seconds(gemm(m, n, k, dtype=BF16)) == pytest.approx(expected, rel=1e-4)


def test_a_shallow_product_takes_as_long_as_writing_its_result() -> None:
    # bytes 2 (8192 x 16 twice + 8192 x 8192) at 0.77 of 2 TB/s
    expected = 2.1e-6 + 2 * (2 * 8192.0 * 16.0 + 8192.0**2) / (0.77 * 2e12)
    assert PRICES.seconds(gemm(8192.0, 8192.0, 16.0)) == pytest.approx(expected, rel=0.02)


def test_a_tile_costs_its_extra_depth() -> None:
    deeper = DatasheetPrices(
        hardware=MACHINE, constants=Constants(matmul_ratio=0.5, extra_depth=4096.0 / 155.0)
    )
    assert deeper.seconds(gemm(2560.0, 2560.0, 4096.0)) == pytest.approx(
        2.0 * np.asarray(PRICES.seconds(gemm(2560.0, 2560.0, 4096.0))), rel=0.005
    )


@settings(deadline=None, max_examples=80)
@given(sizes, sizes, sizes)
def test_no_product_beats_the_peak_and_none_shrinks_by_growing(
    m: float, n: float, k: float
) -> None:
    seconds = float(PRICES.seconds(gemm(m, n, k)))
    assert seconds >= 2 * m * n * k / 50e12 * (1 - 1e-12)
    assert float(PRICES.seconds(gemm(m, n, 2 * k))) >= seconds
    assert float(PRICES.seconds(gemm(2 * m, n, k))) >= seconds


def test_many_small_experts_take_longer_than_one_large_one() -> None:
    one = trained_experts(1.0, 8192.0, hidden=4096.0, ffn=2048.0, inner=4096.0)
    many = trained_experts(64.0, 128.0, hidden=4096.0, ffn=2048.0, inner=4096.0)
    assert float(PRICES.seconds(many.forward)) > float(PRICES.seconds(one.forward))
    assert PRICES.seconds(one.weights) == pytest.approx(PRICES.seconds(one.inputs), rel=0.2)


def of_width(width: float) -> Op:
    return attention(
        pairs=1e6,
        batch=1.0,
        sequence=1414.0,
        heads=8.0,
        kv_heads=8.0,
        head_dim=width,
        value_dim=width,
        queries=1414.0,
    )


def test_attention_reaches_its_share_at_a_width_of_128() -> None:
    # 2 GEMMs of 2 x 10^6 pairs x 8 heads x 128 operations, and 200 more pairs for each of 1,414
    # queries; backward 5 of them at 0.8 of it
    forward = 4 * (1e6 + 200 * 1414) * 8 * 128 / (0.40 * 100e12)
    assert PRICES.seconds(of_width(128.0)) == pytest.approx(forward)
    backward = replace(of_width(128.0), direction="backward")
    assert PRICES.seconds(backward) == pytest.approx(2.5 * forward / 0.8)


def test_twice_as_many_exponentials_take_half_their_time() -> None:
    # At a width of 128 exponentials are as long as 48 of 128 + 48 (softmax_width).
    faster = replace(PRICES, hardware=replace(PRICES.hardware, exponential_ratio=2.0))
    ratio = float(faster.seconds(of_width(128.0))) / float(PRICES.seconds(of_width(128.0)))
    assert ratio == pytest.approx((128 + 24) / (128 + 48))
    # NVIDIA's figure for Blackwell Ultra is that of the catalogue.
    gb200, gb300 = find_device("gb200-nvl72"), find_device("gb300-nvl72")
    assert (gb200.exponential_ratio, gb300.exponential_ratio) == (1.0, 2.0)


def test_fewer_matrix_units_reach_more_of_their_peak() -> None:
    # An H20 of Dao-AILab/flash-attention#1310: 2 x 2,048 tokens, 16 heads of width 128, causal, in
    # 0.319 ms: 107.8 of 148 TFLOP/s.
    sheet = find_device("h20-sxm")
    machine = replace(
        MACHINE,
        attention_flop_per_s=sheet.flop_per_s["bf16"],
        compute_units=float(sheet.compute_units),
        matrix_ratio=sheet.matrix_ratio,
    )
    constants = uncalibrated(
        sheet.generation, precision=GemmPrecision.BF16, software=Software.MEGATRON_2025
    )
    prices = DatasheetPrices(hardware=machine, constants=constants)
    tokens = 2048.0
    op = replace(
        of_width(128.0),
        axes={**of_width(128.0).axes, "pairs": tokens**2, "queries": 2 * tokens, "heads": 16.0},
    )
    assert prices.seconds(op) == pytest.approx(0.319e-3, rel=0.05)
    assert find_device("h20-3e").matrix_ratio == sheet.matrix_ratio < 1.0


def test_narrow_heads_spend_more_time_per_operation() -> None:
    narrow = float(PRICES.seconds(of_width(64.0)))
    wide = float(PRICES.seconds(of_width(128.0)))
    assert 0.5 * wide < narrow < wide


def test_memory_bound_work_takes_its_bytes_times_the_factor() -> None:
    assert PRICES.seconds(memory_bound(2e9)) == pytest.approx(1.2e-3)


def test_faster_types_pay_the_same_time_per_tile_and_read_fewer_bytes() -> None:
    double = DatasheetPrices(
        hardware=Hardware(
            **{
                **{name: getattr(MACHINE, name) for name in MACHINE.__dataclass_fields__},
                "matmul_flop_per_s": 200e12,
            }
        ),
        constants=Constants(matmul_ratio=0.5, extra_depth=100.0 / 155.0),
    )
    single = DatasheetPrices(
        hardware=MACHINE, constants=Constants(matmul_ratio=0.5, extra_depth=100.0 / 155.0)
    )
    big = (2560.0, 2560.0, 4000.0)
    # (4000 + 200) elements at twice the rate against (4000 + 100), and the same start
    ratio = (float(double.seconds(gemm(*big))) - 2.1e-6) / (
        float(single.seconds(gemm(*big))) - 2.1e-6
    )
    assert ratio == pytest.approx(4200 / 4100 / 2, rel=0.005)


def test_columns_that_repeat_sizes_are_priced_as_each_alone() -> None:
    tokens, widths = np.repeat([512.0, 4096.0, 8191.5], 400), np.tile([1024.0, 7168.0], 600)
    columns = np.asarray(PRICES.seconds(gemm(tokens, widths, 4096.0)))
    for place in (0, 401, 1199):
        alone = PRICES.seconds(gemm(float(tokens[place]), float(widths[place]), 4096.0))
        assert columns[place] == pytest.approx(alone, rel=1e-12)
