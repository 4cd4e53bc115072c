"""Main gradients, all-to-alls and launches of experts: hand-worked, and beside B200's kernels.

Measured figures: MooreThreads/SimuMax, v1.2, configs/system/b200_bf16_ceperm.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.tuner.costs.train.test_zero_experts import HARDWARE, setting
from tests.tuner.models import example_model
from tuner.config.columns import Strategies
from tuner.config.shapes import ModelShape
from tuner.costs.train.calibration import Regime, constants_of, shipped
from tuner.costs.train.columns_of import hardware_of_pool, shape_of_model
from tuner.costs.train.experts import moe_blocks
from tuner.costs.train.parts import Block, trained
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Generation
from tuner.prices.datasheet import DatasheetPrices
from tuner.prices.ops import Op, trained_experts, trained_gemm
from tuner.prices.train.collectives import Group, all_gather_s, all_to_all_s
from tuner.prices.train.constants import GemmPrecision, Software, uncalibrated
from tuner.spec.cluster import Pool

B200 = find_device("b200-sxm")
EIGHT_B200 = hardware_of_pool(
    B200, Pool(name="p", device=B200.name, devices_per_node=8), precision=GemmPrecision.BF16
)
BLACKWELL = uncalibrated(
    Generation.BLACKWELL, precision=GemmPrecision.BF16, software=Software.MEGATRON_2025
)
ALONE = Strategies(sequence=4096.0, micro_batch=1.0, num_microbatches=1.0)
EXPERTS = (
    # Experts, tokens of one, hidden, width; shares of 2,250 TFLOP/s of both GEMMs' gradients of
    # inputs, and of weights that add to fp32.
    (20.0, 1232.0, 5120.0, 1536.0, (0.4215, 0.3891), (0.3276, 0.3198)),
    (32.0, 1024.0, 7168.0, 2048.0, (0.4355, 0.4301), (0.2888, 0.2744)),
    (64.0, 512.0, 7168.0, 2048.0, (0.4046, 0.2942), (0.2192, 0.2145)),
    (256.0, 128.0, 7168.0, 2048.0, (0.2264, 0.1513), (0.0775, 0.0801)),
)
PEAK = 2250e12


@dataclass(frozen=True, kw_only=True)
class Stated:
    """Prices that were measured, the same for every gradient."""

    by_direction: Mapping[str, float]

    def seconds(self, op: Op) -> float:
        return self.by_direction[op.kind if op.operation == "grouped_gemm" else "inputs"]


def test_gradients_that_are_added_to_fp32_take_what_b200_took() -> None:
    for experts, rows, hidden, ffn, of_inputs, of_weights in EXPERTS:
        flop = [2.0 * rows * experts * size for size in (2.0 * ffn * hidden, ffn * hidden)]
        inputs_s, weights_s = (
            sum(work / PEAK / share for work, share in zip(flop, shares, strict=True))
            for shares in (of_inputs, of_weights)
        )
        prices = Stated(by_direction={"": 0.0, "inputs": inputs_s, "weights": inputs_s})
        own = replace(
            setting(_nano(), ALONE, hardware=EIGHT_B200, constants=BLACKWELL), prices=prices
        )
        network = trained_experts(experts, rows, hidden=hidden, ffn=ffn, inner=2.0 * ffn)
        priced_s = added_to_s(trained(own, network))
        assert priced_s == pytest.approx(weights_s, rel=0.2)
        # Nothing is added to where nothing is kept; every piece adds to the whole gradient.
        kept = replace(own, strategies=replace(ALONE, gradient_bytes=0.0))
        assert added_to_s(trained(kept, network)) == pytest.approx(inputs_s)
        assert added_to_s(trained(own, network, pieces=2.0)) == pytest.approx(2.0 * priced_s)
        # Neither where another's modules keep it, nor of frozen weights.
        for others in (
            replace(ALONE, eager_modules=1.0),
            replace(ALONE, adapter_rank=16.0, adapts_q=1.0),
        ):
            block = trained(replace(own, strategies=others), network)
            assert float(block.accumulation_s) == 0.0
    # Llama-3 70B's first linear layer: 1.06 as long as the gradient of its inputs.
    prices = Stated(by_direction={"inputs": 2.0 * 4096 * 57344 * 8192 / PEAK / 0.4829})
    dense = replace(
        setting(_nano(), ALONE, hardware=EIGHT_B200, constants=BLACKWELL), prices=prices
    )
    block = trained(dense, trained_gemm(4096.0, 57344.0, 8192.0))
    assert added_to_s(block) / float(block.forward_s) == pytest.approx(1.06, abs=0.03)


def test_collectives_of_eight_b200_start_as_slowly_as_measured() -> None:
    for ranks in (2.0, 4.0, 8.0):
        group = Group(ranks=ranks, inside=ranks)
        gathered_s = float(all_gather_s(0.0, group, EIGHT_B200, BLACKWELL))
        assert gathered_s == pytest.approx(23.1e-6 + 9.2e-6 * (ranks - 1.0), rel=0.03)
        # 58, 41 and 51 us for 2, 4 and 8 ranks.
        exchanged_s = float(all_to_all_s(0.0, 0.0, group, EIGHT_B200, BLACKWELL))
        assert exchanged_s == pytest.approx(50e-6, rel=0.15)
    group, large = Group(ranks=8.0, inside=8.0), 8e9
    # 651 and 577 GB/s of 900.
    gathered_s = float(all_gather_s(large * 8.0 / 7.0, group, EIGHT_B200, BLACKWELL))
    exchanged_s = float(all_to_all_s(large, 0.0, group, EIGHT_B200, BLACKWELL))
    assert large / gathered_s == pytest.approx(651e9, rel=0.05)
    assert large / exchanged_s == pytest.approx(577e9, rel=0.05)


def test_hybridep_gathers_maps_of_tokens_to_experts() -> None:
    spread = replace(ALONE, expert=8.0, data=8.0, is_deepep=1.0)
    hybrid = replace(spread, is_deepep=0.0, is_hybridep=1.0)
    own = BLACKWELL
    of_deepep, of_hybrid = (
        moe_blocks(setting(_nano(), each, hardware=EIGHT_B200, constants=own))[1].expert_s
        for each in (spread, hybrid)
    )
    # A byte for each of 8 x 4,096 tokens and 128 experts, gathered and read; half by pass.
    map_bytes = 8.0 * 4096.0 * 128.0
    gathered_s = 7.0 / 8.0 * map_bytes / (B200.scale_up_bytes_per_s * own.scale_up_ratio)
    read_s = map_bytes * float(own.memory_factor) / B200.memory_bytes_per_s
    assert float(of_hybrid) - float(of_deepep) == pytest.approx(0.5 * (gathered_s + read_s))
    alone = setting(_nano(), replace(ALONE, is_hybridep=1.0), hardware=EIGHT_B200, constants=own)
    assert float(moe_blocks(alone)[1].expert_s) == 0.0


def test_experts_in_bf16_launch_their_gemms_alone() -> None:
    spread = replace(ALONE, expert=8.0, data=8.0)
    narrow = replace(HARDWARE, matmul_flop_per_s=2.0 * HARDWARE.attention_flop_per_s)
    bf16, fp8 = (
        moe_blocks(setting(_nano(), spread, hardware=each))[0] for each in (HARDWARE, narrow)
    )
    assert bf16.expert_launches == pytest.approx(0.5 * fp8.expert_launches)
    assert bf16.launches == fp8.launches
    # Projections into the latent width and out of it are launched like a network without it.
    wide = replace(_nano(), moe_latent=1024.0)
    latent = moe_blocks(setting(wide, spread))[0]
    own = setting(wide, spread).constants
    assert float(latent.launches - bf16.launches) == pytest.approx(0.5 * own.dense_launches)


def added_to_s(block: Block) -> float:
    return float(block.weight_s + block.accumulation_s)


def _nano() -> ModelShape:
    return shape_of_model(example_model("nemotron-3-nano"), mtp_layers=0)


def test_grouped_gemms_of_pytorch_take_what_b200_took() -> None:
    """torch._grouped_mm and both gradients in bf16, torchao 0.14, prototype/moe_training."""
    regime = Regime(
        device=B200.name,
        generation=Generation.BLACKWELL,
        precision=GemmPrecision.BF16,
        software=Software.TORCH_FSDP,
        family="torchtitan",
        model_kind="experts",
    )
    prices = DatasheetPrices(hardware=EIGHT_B200, constants=constants_of([regime], shipped()))
    for experts, hidden, ffn, measured_s in (
        (4.0, 5120.0, 8192.0, 39.19e-3),
        (8.0, 5120.0, 8192.0, 37.70e-3),
        (1.0, 7168.0, 2048.0, 13.06e-3),
    ):
        both = trained_experts(experts, 128e3 / experts, hidden=hidden, ffn=ffn, inner=ffn)
        priced_s = sum(float(np.ravel(prices.seconds(op))[0]) for op in both) / 2.0
        assert priced_s == pytest.approx(measured_s, rel=0.12)
