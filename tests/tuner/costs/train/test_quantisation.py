"""Kernels that write the linear layers' narrow type, by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.tuner.costs.train.test_zero_experts import ALONE, PLAIN
from tests.tuner.costs.train.test_zero_experts import setting as setting_of
from tuner.config.columns import Numbers, Strategies
from tuner.costs.train import parts
from tuner.costs.train.attention import attention_block
from tuner.costs.train.columns_of import hardware_of_pool, matmul_peak
from tuner.costs.train.parts import QUANTISED_BYTES, Block, BlockInputs, feed_forward, gemm
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Generation
from tuner.prices.train.constants import GemmPrecision, Software, uncalibrated
from tuner.spec.cluster import Pool

ROWS, N, K = 4096.0, 8192.0, 2048.0


def setting(strategies: Strategies, precision: GemmPrecision) -> BlockInputs:
    pool = Pool(name="p", device="gb300", devices_per_node=4)
    hardware = hardware_of_pool(find_device("gb300"), pool, precision=precision)
    constants = uncalibrated(
        Generation.BLACKWELL, precision=precision, software=Software.MEGATRON_2026
    )
    return setting_of(PLAIN, strategies, hardware=hardware, constants=constants)


SPLIT = replace(ALONE, tensor=4.0, sequence_parallel=1.0)


def test_gradients_are_quantised_before_they_are_gathered() -> None:
    narrow = setting(SPLIT, GemmPrecision.MXFP8)
    scattered = gemm(narrow, ROWS, N, K, is_scattered=True)
    whole = gemm(narrow, ROWS, N, K)
    spared_s = narrow.memory_bound_s(QUANTISED_BYTES * ROWS * N * 3 / 4)
    assert whole.backward_s - scattered.backward_s == pytest.approx(spared_s)
    assert whole.forward_s == scattered.forward_s
    # A norm before it quantises the input.
    fused = gemm(narrow, ROWS, N, K, follows_norm=True)
    input_s = narrow.memory_bound_s(QUANTISED_BYTES * ROWS * K)
    assert whole.forward_s - fused.forward_s == pytest.approx(input_s)
    # Without sequence parallelism every rank has all tokens; bf16 needs no kernel at all.
    for one in (
        setting(replace(SPLIT, sequence_parallel=0.0), GemmPrecision.MXFP8),
        setting(SPLIT, GemmPrecision.BF16),
    ):
        scattered, whole = gemm(one, ROWS, N, K, is_scattered=True), gemm(one, ROWS, N, K)
        assert scattered.backward_s == whole.backward_s


def test_the_narrowest_peak_is_that_of_the_datasheet() -> None:
    gb300, h200 = find_device("gb300"), find_device("h200-sxm")
    assert matmul_peak(gb300, GemmPrecision.NVFP4) == gb300.flop_per_s["fp4"]
    assert matmul_peak(h200, GemmPrecision.NVFP4) == h200.flop_per_s["fp8"]


def test_networks_and_attention_quantise_gradients_of_their_own_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    narrow = setting(SPLIT, GemmPrecision.MXFP8)
    model = replace(PLAIN, is_mla=0.0, q_lora_rank=0.0, kv_heads=8.0)
    narrow = replace(narrow, model=model)
    heads, tokens = model.heads / 4.0, SPLIT.tokens
    queries = heads * model.head_dim + 2.0 * (model.head_dim + model.value_dim)
    rows: tuple[tuple[str, Callable[[], Block], Numbers, Numbers], ...] = (
        ("network", lambda: feed_forward(narrow, rows=tokens, width=2048.0), 2.0 * 2048.0, 2048.0),
        ("attention", lambda: attention_block(narrow), queries, heads * model.value_dim),
    )
    for name, block, outputs, inner in rows:
        priced = block()
        with monkeypatch.context() as patch:
            patch.setattr(parts, "QUANTISED_BYTES", 0.0)
            free = block()
        gradients_s = narrow.memory_bound_s(
            QUANTISED_BYTES * tokens * (outputs + model.hidden / 4.0)
        )
        inputs_s = narrow.memory_bound_s(QUANTISED_BYTES * tokens * inner)
        assert priced.backward_s - free.backward_s == pytest.approx(gradients_s), name
        assert priced.forward_s - free.forward_s == pytest.approx(inputs_s), name
