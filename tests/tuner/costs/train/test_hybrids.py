"""Hybrids: parameters, FLOPs, bytes and seconds of linear attention, latent experts and windows."""

from dataclasses import replace

import numpy as np
import pytest

from tests.rows import each_row
from tests.tuner.costs.train.test_zero_experts import setting as setting_of
from tests.tuner.models import example_model
from tuner.config.columns import Strategies
from tuner.config.shapes import Hardware, ModelShape
from tuner.costs.train.activations import activation_bytes
from tuner.costs.train.attention import attention_core
from tuner.costs.train.columns_of import StageLayers, hardware_of_pool, stages_of_layouts
from tuner.costs.train.columns_of import shape_of_model as to_shape
from tuner.costs.train.linear_attention import linear_block
from tuner.costs.train.state import parameters
from tuner.costs.train.step import price_step
from tuner.costs.train.units import unit_costs
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Generation
from tuner.prices.datasheet import DatasheetPrices
from tuner.prices.linear_scan import scan_bytes, scan_flop
from tuner.prices.ops import linear_scan, memory_bound
from tuner.prices.train.collectives import ALL_TO_ALL_STARTS
from tuner.prices.train.constants import GemmPrecision, Software, uncalibrated
from tuner.spec.accounting import forward_flop_per_token, num_parameters, state_bytes_per_sequence
from tuner.spec.cluster import Pool
from tuner.spec.model import ModelSpec

HYBRIDS = (
    "nemotron-3-nano",
    "nemotron-3-super",
    "nemotron-h-56b",
    "qwen3-next-80b-a3b",
    "qwen3.5-397b-a17b",
    "kimi-linear-48b-a3b",
    "deepseek-v3.2",
    "deepseek-v4-flash",
    "llama-4-maverick",
)
NANO_SCAN = {"heads": 64.0, "key_heads": 8.0, "key_dim": 128.0, "value_dim": 64.0, "chunk": 128.0}


def h200(precision: GemmPrecision = GemmPrecision.BF16) -> Hardware:
    pool = Pool(name="p", device="h200-sxm", devices_per_node=8)
    return hardware_of_pool(find_device("h200-sxm"), pool, precision=precision)


@each_row("name", HYBRIDS)
def test_one_device_holds_the_parameters_of_the_model(name: str) -> None:
    """Norms, biases, convolutions and decays are the small difference."""
    model = example_model(name)
    shape, alone = (
        to_shape(model, mtp_layers=0),
        Strategies(sequence=1.0, micro_batch=1.0, num_microbatches=1.0),
    )
    own = parameters(shape, alone)
    total = shape.dense_layers * (own.dense_mixer + own.dense_ffn) + 2.0 * own.vocab
    total += shape.moe_layers * (own.moe_mixer + own.moe_outside + own.experts)
    assert float(total) == pytest.approx(num_parameters(model), rel=2e-3)


MAMBA2 = {"is_delta": 0.0, "decays_channels": 0.0}
GATED_DELTA = {"is_delta": 1.0, "decays_channels": 0.0}
KDA = {"is_delta": 1.0, "decays_channels": 1.0}
DELTA_SCAN = {"key_heads": 1.0, "key_dim": 128.0, "value_dim": 128.0, "chunk": 64.0}


def test_a_scan_by_hand() -> None:
    # Nemotron-3 Nano: 8 groups x 2 x 128 x 128, and 64 heads x (2 x 128 x 64 + 4 x 128 x 64).
    assert scan_flop(**NANO_SCAN, **MAMBA2) == 8 * 32768 + 64 * (16384 + 32768)
    # Qwen3-Next, a head: 64 x (6 x 128 + 4 x 128), 6 x 128 x 128, and a third of 64 x 64.
    delta = {"heads": 1.0, **DELTA_SCAN}
    assert scan_flop(**delta, **GATED_DELTA) == pytest.approx(64 * 1280 + 98304 + 64 * 64 / 3)


def test_bytes_of_a_scan_by_hand() -> None:
    # A head of Qwen3-Next: 22 x 128 of keys, 12 x 128 of values, 6 x 64 of scores, and states.
    assert scan_bytes(heads=1.0, **DELTA_SCAN, **GATED_DELTA) == 2816 + 1536 + 384 + 1024
    # One of Kimi Linear has decays of 128 channels, and a second matrix of scores.
    assert scan_bytes(heads=1.0, **DELTA_SCAN, **KDA) == 5760 + 28 * 128 + 6 * 64


def test_state_bytes_by_hand() -> None:
    # 23 layers x (64 heads x 128 x 64 in fp32, 3 x (4096 + 2 x 8 x 128) in bf16).
    nano = state_bytes_per_sequence(example_model("nemotron-3-nano"))
    assert nano == 23 * (64 * 128 * 64 * 4 + 3 * 6144 * 2)
    # 36 layers x (32 heads x 128 x 128 in fp32, 3 x (2 x 2048 + 4096) in bf16).
    qwen = state_bytes_per_sequence(example_model("qwen3-next-80b-a3b"))
    assert qwen == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert state_bytes_per_sequence(example_model("mixtral-8x7b")) == 0.0


@each_row(
    ("name", "billions", "tokens"),
    [
        # Megatron-Bridge prints 84.73 GFLOP a token with two heads more for multi-token prediction
        # (3 x 2 x 4096 x 131072 each) and two layers of attention and experts; 22.28 for Nano, of
        # which 1.5 are a Mamba-2 width that Nano does not have (5376 instead of 4096).
        ("nemotron-3-nano", 20.78, 8192),
        ("nemotron-3-super", 76.3, 8192),
    ],
)
def test_flop_of_a_token_by_hand(name: str, billions: float, tokens: int) -> None:
    flop = forward_flop_per_token(example_model(name), sequence_length=tokens)
    assert 3.0 * flop.total / 1e9 == pytest.approx(billions, rel=0.02)


MEGATRON = uncalibrated(
    Generation.HOPPER, precision=GemmPrecision.BF16, software=Software.MEGATRON_2026
)


def test_a_scan_takes_what_one_h200_took() -> None:
    """mamba_ssm's kernels on 4 x 8,192 tokens of Nemotron-3 Nano: 1.248 and 4.314 ms."""
    prices = DatasheetPrices(hardware=h200(), constants=MEGATRON)
    scan = linear_scan(kind="mamba2", batch=4.0, sequence=8192.0, **NANO_SCAN, **MAMBA2)
    assert prices.seconds(scan) == pytest.approx(1.248e-3, rel=0.06)
    assert prices.seconds(replace(scan, direction="backward")) == pytest.approx(4.314e-3, rel=0.06)
    # flash-linear-attention's on as many of Qwen3-Next, 32 heads and 16 of keys: 2.171 ms.
    delta = linear_scan(
        kind="gated_delta",
        batch=4.0,
        sequence=8192.0,
        heads=32.0,
        **(DELTA_SCAN | {"key_heads": 16.0}),
        **GATED_DELTA,
    )
    assert prices.seconds(delta) == pytest.approx(2.171e-3, rel=0.05)
    # Of Kimi Linear, with the kernels of PyTorch that computed decays beside it: 5.247, 16.79 ms.
    kda = linear_scan(
        kind="kda",
        batch=4.0,
        sequence=8192.0,
        heads=32.0,
        **(DELTA_SCAN | {"key_heads": 32.0}),
        **KDA,
    )
    decays = 4.0 * 8192.0 * 32.0 * 128.0
    forward_s = prices.seconds(kda) + prices.seconds(memory_bound(30.0 * decays))
    assert forward_s == pytest.approx(5.247e-3, rel=0.15)
    backward_s = prices.seconds(replace(kda, direction="backward"))
    backward_s += prices.seconds(memory_bound(26.0 * decays))
    assert backward_s == pytest.approx(16.79e-3, rel=0.25)


def step(shape: ModelShape, model: ModelSpec, **more: float) -> float:
    hardware = h200()
    strategies = Strategies(sequence=4096.0, micro_batch=1.0, num_microbatches=4.0, **more)
    layout = [StageLayers(layers=model.num_layers, embedding=True, head=True)]
    stages = stages_of_layouts(model, [layout])
    return float(np.ravel(price_step(shape, strategies, hardware, MEGATRON, stages).step_s)[0])


def test_a_layer_is_the_average_of_its_kind() -> None:
    """Qwen3-Next's layers are 36 of one mixer and 12 of the other, behind the same experts."""
    shape = to_shape(example_model("qwen3-next-80b-a3b"), mtp_layers=0)
    only = [replace(shape, moe_attention=share, moe_linear=1.0 - share) for share in (1.0, 0.0)]
    # A device so slow that no launch is waited for.
    slow = replace(h200(), matmul_flop_per_s=1e13, attention_flop_per_s=1e13)
    strategies = Strategies(sequence=4096.0, micro_batch=4.0, num_microbatches=1.0, expert=8.0)
    mixed, attention, linear = (
        unit_costs(one, strategies, slow, MEGATRON).moe for one in (shape, *only)
    )
    for name in ("forward_s", "backward_s", "parameters"):
        both = 0.25 * getattr(attention, name) + 0.75 * getattr(linear, name)
        assert float(getattr(mixed, name)) == pytest.approx(float(both), rel=1e-3)
    saved = [
        float(activation_bytes(one, strategies, cp_output_copy_ratio=0.0).moe.saved)
        for one in (shape, *only)
    ]
    assert saved[0] == pytest.approx(0.25 * saved[1] + 0.75 * saved[2], rel=1e-9)


def test_ranks_of_a_sequence_send_it_for_heads() -> None:
    """Nano on 8,192 tokens of a rank, two to a sequence: half of what it projects, and of y."""
    own = uncalibrated(
        Generation.HOPPER, precision=GemmPrecision.BF16, software=Software.MEGATRON_2026
    )
    own = replace(own, collective_s=0.0, hop_s=0.0, all_to_all_ratio=1.0)
    bus = find_device("h200-sxm").scale_up_bytes_per_s * own.scale_up_ratio
    nano = to_shape(example_model("nemotron-3-nano"), mtp_layers=0)
    linear = replace(nano, dense_attention=0.0, dense_linear=1.0)
    for context, repeated in ((1.0, 0.0), (2.0, 0.0), (16.0, 8.0)):
        # Gate and values of 64 heads of 64, B and C of 8 groups of 128, 64 time steps; ranks beyond
        # the 8 groups have copies of one.
        elements = 2 * 4096 + 2 * 128 * (8 + repeated) + 64 + 4096
        sent = 2.0 * 8192.0 * elements * (context - 1.0) / context
        strategies = Strategies(
            sequence=8192.0 * context, micro_batch=1.0, num_microbatches=1.0, context=context
        )
        hardware = replace(h200(), domain=16.0)
        setting = setting_of(linear, strategies, hardware=hardware, constants=own)
        block = linear_block(setting)
        assert float(block.context_s) == pytest.approx(sent / bus)
        assert float(block.context_backward_s) == pytest.approx(sent / bus)
    # A rank of two has the whole sequence of half the heads: as many operations as before.
    kda = to_shape(example_model("kimi-linear-48b-a3b"), mtp_layers=0)
    shared = Strategies(sequence=16384.0, micro_batch=1.0, num_microbatches=1.0, context=2.0)
    block = linear_block(setting_of(kda, shared, hardware=hardware, constants=own))
    # KDA: q, k, v of 32 heads of 128, write strengths, decays of 128, gate; and the output.
    sent = 2.0 * 8192.0 * (3 * 4096 + 32 + 4096 + 4096 + 4096) / 2.0
    assert float(block.context_s) == pytest.approx(sent / bus)
    # All-to-alls have a fixed cost: five of Mamba-2 and one back, of a delta rule one and one.
    late = replace(own, collective_s=1.0)
    for name, count in (("nemotron-3-nano", 6), ("qwen3-next-80b-a3b", 2)):
        shape = to_shape(example_model(name), mtp_layers=0)
        setting = setting_of(shape, strategies, hardware=hardware, constants=late)
        expected = ALL_TO_ALL_STARTS * count
        assert float(linear_block(setting).context_s) == pytest.approx(expected, rel=0.01)


def test_a_ring_begins_its_queries_at_every_step_and_sparse_attention_once() -> None:
    for name, steps in (("mixtral-8x7b", 4.0), ("deepseek-v3.2", 1.0)):
        shape = to_shape(example_model(name), mtp_layers=0)

        def core_s(context: float, keys: float, shape: ModelShape = shape) -> float:
            strategies = Strategies(
                sequence=8192.0, micro_batch=1.0, num_microbatches=1.0, context=context
            )
            constants = replace(MEGATRON, extra_keys=keys)
            setting = setting_of(shape, strategies, hardware=h200(), constants=constants)
            return float(attention_core(setting, launches=0.0).forward_s)

        # Beyond what the pairs cost, of which a rank of four has a quarter.
        per_rank_s = core_s(4.0, 200.0) - core_s(4.0, 0.0)
        whole_s = core_s(1.0, 200.0) - core_s(1.0, 0.0)
        assert core_s(4.0, 0.0) == pytest.approx(core_s(1.0, 0.0) / 4.0)
        assert per_rank_s == pytest.approx(whole_s * steps / 4.0)


def test_models_of_attention_alone_have_shares_of_one() -> None:
    shape = to_shape(example_model("mixtral-8x7b"), mtp_layers=0)
    assert (shape.moe_attention, shape.moe_linear, shape.dense_network) == (1.0, 0.0, 1.0)
    assert not shape.has_linear
    assert float(shape.expert_hidden) == shape.hidden


def test_repeated_prediction_layers_have_one_set_of_weights() -> None:
    shape = to_shape(example_model("nemotron-3-super"), mtp_layers=2)
    strategies = Strategies(sequence=4096.0, micro_batch=1.0, num_microbatches=1.0, expert=8.0)
    each, once = (
        unit_costs(replace(shape, mtp_is_repeated=repeated), strategies, h200(), MEGATRON).mtp
        for repeated in (0.0, 1.0)
    )
    for name in ("parameters", "expert_parameters", "trained", "expert_trained"):
        assert float(getattr(once, name)) == pytest.approx(0.5 * float(getattr(each, name)))
    assert float(once.forward_s) == float(each.forward_s)


def test_latent_experts_cost_less_to_multiply_and_to_send() -> None:
    model = example_model("nemotron-3-super")
    shape = to_shape(model, mtp_layers=0)
    wide = replace(shape, moe_latent=0.0)
    spread = {"data": 8.0, "expert": 8.0, "is_hybridep": 1.0}
    assert step(shape, model, **spread) < 0.8 * step(wide, model, **spread)
    own = [
        parameters(one, Strategies(sequence=1.0, micro_batch=1.0, num_microbatches=1.0))
        for one in (shape, wide)
    ]
    assert float(own[0].experts) == pytest.approx(float(own[1].experts) / 4.0)


SPARSE = to_shape(example_model("deepseek-v3.2"), mtp_layers=0)


def test_sparse_and_chunked_attention_save_what_is_not_attended_to() -> None:
    long = Strategies(sequence=131072.0, micro_batch=1.0, num_microbatches=1.0)
    short = replace(long, sequence=2048.0)

    def attention_s(shape: ModelShape, strategies: Strategies) -> float:
        return float(np.ravel(unit_costs(shape, strategies, h200(), MEGATRON).dense.forward_s)[0])

    dense = replace(SPARSE, index_heads=0.0, index_dim=0.0, index_top_k=0.0)
    assert attention_s(SPARSE, long) < 0.5 * attention_s(dense, long)
    # A sequence as short as what is picked gains nothing and pays for the indexer.
    assert attention_s(SPARSE, short) > attention_s(dense, short)
    chunked = to_shape(example_model("llama-4-maverick"), mtp_layers=0)
    whole = replace(chunked, windowed_ratio=0.0)
    assert attention_s(chunked, long) < 0.6 * attention_s(whole, long)
    assert attention_s(chunked, short) == pytest.approx(attention_s(whole, short), rel=1e-6)


def test_what_deepseek_v4_keeps_of_a_token_by_hand() -> None:
    shape = to_shape(example_model("deepseek-v4-flash"), mtp_layers=1)
    alone = Strategies(sequence=4096.0, micro_batch=1.0, num_microbatches=1.0)
    # Twice 4 streams, the input mixed from them and the output; two norms and their scales.
    around = 2 * (4 + 2) * 4096 * 2 + 2 * 4096 * 2 + 8
    # Queries and output of 64 x 512, rank and key before and after their norms, 8 groups of 1,024,
    # the log-sum-exp.
    attention = 2 * 32_768 * 2 + 2 * (1024 + 512) * 2 + 8192 * 2 + 64 * 4
    # Keys and gates of entries (and of indexers), queries and weights of 64 heads of 128, and 512
    # chosen entries.
    merged = (21 * ((4 * 640 + 64 * 129) * 2 + 512 * 8) + 20 * 2 * 512 * 2) / 43
    # Scores of 256 experts, 6 copies of 4,096 in and 2,048 wide, a shared expert.
    experts = 256 * 4 + 6 * 8 + 6 * (4096 * 2 + 2048 * 6) + 2048 * 6
    kept = activation_bytes(shape, alone, cp_output_copy_ratio=0.0)
    assert float(kept.moe.saved) == pytest.approx(4096 * (around + attention + merged + experts))
    # All four streams pass between stages, and are all that full recomputation keeps.
    assert float(kept.boundary) == 4096 * 4 * 4096 * 2
    full = activation_bytes(shape, replace(alone, recompute_full=1.0), cp_output_copy_ratio=0.0)
    assert float(full.moe.saved) == float(kept.boundary)


def test_what_an_indexer_keeps_of_a_token_by_hand() -> None:
    """DeepSeek-V3.2: queries of 64 heads of 128, their weights, one key; 2,048 chosen tokens."""
    dense = replace(SPARSE, index_heads=0.0)
    for more, elements in (({}, 64 * 128 + 64 + 128), ({"adapter_rank": 16.0}, 0)):
        strategies = Strategies(
            sequence=4096.0, micro_batch=1.0, num_microbatches=1.0, tensor=8.0, **more
        )
        kept = [
            float(activation_bytes(one, strategies, cp_output_copy_ratio=0.0).moe.saved)
            for one in (SPARSE, dense)
        ]
        assert kept[0] - kept[1] == pytest.approx(4096 * (2 * elements + 2048 * 8))


def test_compressors_and_streams_take_time() -> None:
    shape = to_shape(example_model("deepseek-v4-flash"), mtp_layers=1)
    long = Strategies(sequence=131072.0, micro_batch=1.0, num_microbatches=1.0, expert=8.0)
    short = replace(long, sequence=4096.0)

    def costs(shape: ModelShape, strategies: Strategies, kind: str) -> float:
        return float(
            np.ravel(getattr(unit_costs(shape, strategies, h200(), MEGATRON), kind).forward_s)[0]
        )

    # Entries and scores, but not projections, grow with the sequence; the layer of multi-token
    # prediction has neither.
    alone, plain = shape.without_compressors, replace(shape, streams=1.0)
    for one, more in ((short, 1.05), (long, 1.3)):
        assert costs(shape, one, "moe") > more * costs(alone, one, "moe")
        assert costs(shape, one, "mtp") == pytest.approx(costs(alone, one, "mtp"), rel=1e-9)
    # 15 elements of 4,096 more at each of two sites, in bf16.
    more_s = costs(shape, long, "moe") - costs(plain, long, "moe")
    assert more_s == pytest.approx(131072 * 2 * 15 * 4096 * 2 / 4.8e12, rel=0.5)
