import numpy as np
import pytest

from tests.tuner.models import example_model
from tuner.costs.train.columns_of import (
    StageLayers,
    hardware_of_pool,
    shape_of_model,
    stages_of_layouts,
)
from tuner.devices.catalogue import find_device
from tuner.prices.train.constants import GemmPrecision
from tuner.spec.cluster import Pool


def test_a_model_becomes_the_numbers_of_its_config() -> None:
    shape = shape_of_model(example_model("deepseek-v3"), mtp_layers=1)

    assert (shape.hidden, shape.heads, shape.vocab) == (7168.0, 128.0, 129280.0)
    assert (shape.is_mla, shape.q_lora_rank, shape.kv_lora_rank) == (1.0, 1536.0, 512.0)
    assert (shape.head_dim, shape.value_dim, shape.rope_dim) == (192.0, 128.0, 64.0)
    assert (shape.dense_layers, shape.moe_layers, shape.mtp_layers) == (3.0, 58.0, 1.0)
    assert (shape.experts, shape.top_k, shape.moe_ffn, shape.shared_ffn) == (256, 8, 2048, 2048)


def test_windows_are_a_share_of_the_layers() -> None:
    shape = shape_of_model(example_model("gpt-oss-20b"), mtp_layers=0)

    assert (shape.window, shape.windowed_ratio, shape.has_sinks) == (128.0, 0.5, 1.0)


def test_nics_of_a_machine_are_shared_and_divided_by_oversubscription() -> None:
    pool = Pool(
        name="p",
        device="h100-sxm",
        nodes=4,
        devices_per_node=8,
        nics_per_node=4,
        nic=50e9,
        oversubscription=2.0,
    )
    hardware = hardware_of_pool(find_device("h100-sxm"), pool, precision=GemmPrecision.BF16)

    # 4 NICs of 50 GB/s over 8 devices, half of it through the oversubscribed network.
    assert hardware.scale_out_bytes_per_s == pytest.approx(12.5e9)
    assert hardware.matmul_flop_per_s == pytest.approx(989.4e12)


def test_a_device_without_fp4_falls_back_to_fp8_and_then_to_bf16() -> None:
    pool = Pool(name="p", device="h100-sxm", devices_per_node=8)
    h100 = hardware_of_pool(find_device("h100-sxm"), pool, precision=GemmPrecision.NVFP4)
    a100 = hardware_of_pool(find_device("a100-80gb"), pool, precision=GemmPrecision.NVFP4)

    assert h100.matmul_flop_per_s == pytest.approx(1978.9e12)
    assert a100.matmul_flop_per_s == pytest.approx(312e12)


def test_layouts_of_different_length_are_padded_with_empty_stages() -> None:
    model = example_model("deepseek-v3")
    two = (StageLayers(layers=2, embedding=True), StageLayers(layers=59, head=True, mtp_layers=1))
    stages = stages_of_layouts(model, [two, (StageLayers(layers=61, embedding=True, head=True),)])

    # DeepSeek-V3's first three layers are dense: two on the first stage, one on the second.
    assert np.array_equal(stages.dense_SC, [[2, 3], [1, 0]])
    assert np.array_equal(stages.moe_SC, [[0, 58], [58, 0]])
    assert np.array_equal(stages.embedding_SC, [[1, 1], [0, 0]])
    assert np.array_equal(stages.head_SC, [[0, 1], [1, 0]])
    assert np.array_equal(stages.mtp_SC, [[0, 0], [1, 0]])
