"""Parameters and their bytes: published sizes of models, and ZeRO's stages by hand."""

import dataclasses

import numpy as np
import pytest

from tests.rows import each_row
from tuner.config.columns import Strategies
from tuner.config.shapes import ModelShape
from tuner.costs.train.state import padded_vocab, parameters, shard_ranks, state_bytes

LLAMA_8B = ModelShape(
    hidden=4096.0,
    heads=32.0,
    kv_heads=8.0,
    head_dim=128.0,
    value_dim=128.0,
    dense_ffn=14336.0,
    vocab=128256.0,
    dense_layers=32.0,
)
QWEN3_30B = ModelShape(
    hidden=2048.0,
    heads=32.0,
    kv_heads=4.0,
    head_dim=128.0,
    value_dim=128.0,
    vocab=151936.0,
    dense_layers=0.0,
    moe_layers=48.0,
    experts=128.0,
    top_k=8.0,
    moe_ffn=768.0,
)
DEEPSEEK_V3 = ModelShape(
    hidden=7168.0,
    heads=128.0,
    kv_heads=128.0,
    head_dim=192.0,
    value_dim=128.0,
    is_mla=1.0,
    q_lora_rank=1536.0,
    kv_lora_rank=512.0,
    rope_dim=64.0,
    dense_ffn=18432.0,
    vocab=129280.0,
    dense_layers=3.0,
    moe_layers=58.0,
    experts=256.0,
    top_k=8.0,
    moe_ffn=2048.0,
    shared_ffn=2048.0,
)
GPT_175B = ModelShape(
    hidden=12288.0,
    heads=96.0,
    kv_heads=96.0,
    head_dim=128.0,
    value_dim=128.0,
    dense_ffn=49152.0,
    is_gated=0.0,
    vocab=51200.0,
    dense_layers=96.0,
)
ALONE = Strategies(sequence=4096.0, micro_batch=1.0, num_microbatches=1.0)


@each_row(
    ("model", "billions"),
    [(LLAMA_8B, 8.03), (QWEN3_30B, 30.5), (DEEPSEEK_V3, 671.0)],
)
def test_models_have_their_published_sizes(model: ModelShape, billions: float) -> None:
    count = parameters(model, ALONE)
    layers = model.dense_layers * (count.attention + count.dense_ffn) + model.moe_layers * (
        count.attention + count.moe_outside + count.experts
    )
    assert float(layers + 2.0 * count.vocab) / 1e9 == pytest.approx(billions, rel=2e-3)


@each_row(
    ("heads", "hidden", "layers", "pipeline", "gib"),
    [
        (64.0, 6144.0, 48, 1, 45.56),
        (96.0, 12288.0, 96, 8, 45.56),
        (128.0, 20480.0, 105, 35, 31.64),
        (160.0, 25600.0, 128, 64, 32.96),
    ],
)
def test_parameters_and_optimizer_of_the_selective_recompute_paper(
    heads: float, hidden: float, layers: int, pipeline: int, gib: float
) -> None:
    # arXiv 2205.05198, figure 1: 18 bytes a parameter of the layers, TP 8, no data parallelism.
    model = ModelShape(
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden / heads,
        value_dim=hidden / heads,
        dense_ffn=4.0 * hidden,
        is_gated=0.0,
        vocab=51200.0,
        dense_layers=float(layers),
    )
    strategy = dataclasses.replace(ALONE, tensor=8.0)
    of_one = state_bytes(
        strategy, ranks=1.0, master_bytes=4.0, moments_bytes=8.0, gathers_master=1.0
    )
    count = parameters(model, strategy)
    total = float(of_one.weight + of_one.gradient + of_one.optimizer) * float(
        count.attention + count.dense_ffn
    )
    assert total * layers / pipeline / 2**30 == pytest.approx(gib, rel=1e-3)


@each_row(
    ("stage", "expected"),
    [(0.0, 18.0), (1.0, 6.0 + 12.0 / 8), (2.0, 2.0 + 16.0 / 8), (3.0, 16.0 / 8)],
)
def test_each_zero_stage_shards_one_thing_more(stage: float, expected: float) -> None:
    strategy = dataclasses.replace(ALONE, data=8.0, zero_stage=stage)
    of_one = state_bytes(
        strategy, ranks=8.0, master_bytes=4.0, moments_bytes=8.0, gathers_master=1.0
    )
    assert float(of_one.weight + of_one.gradient + of_one.optimizer) == expected


def test_a_16_bit_shard_lies_beside_the_master_unless_layers_gather_casts_of_it() -> None:
    def of_one(weight: float, *, gathers_master: float, offload: float = 0.0) -> float:
        strategy = dataclasses.replace(
            ALONE,
            data=8.0,
            zero_stage=3.0,
            weight_bytes=weight,
            gradient_bytes=weight,
            optimizer_offload=offload,
        )
        state = state_bytes(
            strategy,
            ranks=8.0,
            master_bytes=4.0,
            moments_bytes=8.0,
            gathers_master=gathers_master,
        )
        return 8.0 * float(state.weight + state.gradient + state.optimizer)

    assert of_one(2.0, gathers_master=0.0) == 2.0 + 2.0 + 4.0 + 8.0
    assert of_one(2.0, gathers_master=1.0) == 2.0 + 4.0 + 8.0
    # In host memory: master and moments. fp32 parameters are their own master.
    assert of_one(2.0, gathers_master=0.0, offload=1.0) == 2.0 + 2.0
    assert of_one(4.0, gathers_master=0.0) == of_one(4.0, gathers_master=1.0) == 4.0 + 4.0 + 8.0


def test_optimizer_state_in_host_memory_leaves_the_device() -> None:
    strategy = dataclasses.replace(ALONE, optimizer_offload=0.75)
    of_one = state_bytes(
        strategy, ranks=1.0, master_bytes=4.0, moments_bytes=8.0, gathers_master=1.0
    )
    assert float(of_one.optimizer) == 3.0


def test_experts_are_sharded_over_the_ranks_that_hold_the_same() -> None:
    # 64 devices of a stage: TP 2, CP 2, DP 16; EP 8, ETP 2 leave 4 replicas of an expert.
    strategy = dataclasses.replace(
        ALONE, tensor=2.0, context=2.0, data=16.0, expert=8.0, expert_tensor=2.0
    )
    dense, experts = shard_ranks(strategy)
    assert (float(dense), float(experts)) == (32.0, 4.0)
    hybrid = dataclasses.replace(strategy, shard_ranks=8.0)
    # Four copies of everything: each rank of an expert's four holds one.
    assert [float(ranks) for ranks in shard_ranks(hybrid)] == [8.0, 1.0]


def test_tensor_ranks_split_matrices_but_not_the_router() -> None:
    one, four = (
        parameters(DEEPSEEK_V3, dataclasses.replace(ALONE, tensor=tensor, expert_tensor=etp))
        for tensor, etp in ((1.0, 1.0), (4.0, 2.0))
    )
    assert four.dense_ffn == one.dense_ffn / 4.0
    assert four.experts == one.experts / 2.0
    router = 7168.0 * 256.0
    assert four.moe_outside - router == (one.moe_outside - router) / 4.0
    low_ranks = 7168.0 * (1536.0 + 512.0 + 64.0) + 2.0 * 7168.0
    assert float(four.attention - low_ranks) == pytest.approx(
        float(one.attention - low_ranks) / 4.0
    )


def test_vocabularies_are_padded_to_blocks_of_every_rank() -> None:
    padded = padded_vocab(LLAMA_8B, dataclasses.replace(ALONE, tensor=np.array([1.0, 8.0])))
    assert np.asarray(padded).tolist() == [128256.0, 129024.0]
