"""Activation bytes against the tables that Megatron-LM's authors publish.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv
2205.05198: the table of section 4, and the memory of the first stage in section 6. In units of
s b h bytes a layer keeps, with t tensor ranks, a heads and 16-bit activations,

    tensor parallel                        10 + 24 / t + 5 a s / (h t)
    and sequence parallel                  (34 + 5 a s / h) / t
    tensor parallel, attention recomputed  10 + 24 / t
    both                                   34 / t
    everything recomputed                  2

The model counts norms' scales too, 8 bytes per token, so figures agree to a few in 10^4.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tuner.config.columns import Strategies
from tuner.config.shapes import ModelShape
from tuner.costs.train.activations import activation_bytes
from tuner.costs.train.in_flight import warmup_in_flight

GIB = 2.0**30

GPT_22B = {"heads": 64.0, "hidden": 6144.0, "layers": 48, "pipeline": 1, "chunks": 1, "batch": 4.0}
GPT_175B = {
    "heads": 96.0,
    "hidden": 12288.0,
    "layers": 96,
    "pipeline": 8,
    "chunks": 3,
    "batch": 1.0,
}
GPT_530B = {
    "heads": 128.0,
    "hidden": 20480.0,
    "layers": 105,
    "pipeline": 35,
    "chunks": 3,
    "batch": 1.0,
}
GPT_1T = {
    "heads": 160.0,
    "hidden": 25600.0,
    "layers": 128,
    "pipeline": 64,
    "chunks": 1,
    "batch": 1.0,
}


def _model(case: dict[str, Any]) -> ModelShape:
    hidden, heads = case["hidden"], case["heads"]
    return ModelShape(
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden / heads,
        value_dim=hidden / heads,
        dense_ffn=4.0 * hidden,
        is_gated=0.0,
        vocab=51200.0,
        dense_layers=case["layers"],
    )


def _strategy(case: dict[str, Any], **changes: float) -> Strategies:
    plain = Strategies(
        sequence=2048.0,
        micro_batch=case["batch"],
        num_microbatches=1000.0,
        tensor=8.0,
        sequence_parallel=0.0,
        has_flash_attention=0.0,
        dropout=1.0,
    )
    return dataclasses.replace(plain, **changes)


def _saved(case: dict[str, Any], **changes: float) -> float:
    kept = activation_bytes(_model(case), _strategy(case, **changes), cp_output_copy_ratio=0.0)
    return float(kept.dense.saved)


@each_row(
    ("changes", "expected"),
    [
        ({}, 10 + 24 / 8 + 5 * 64 * 2048 / 6144 / 8),
        ({"sequence_parallel": 1.0}, (34 + 5 * 64 * 2048 / 6144) / 8),
        ({"recompute_core_attention": 1.0}, 10 + 24 / 8),
        ({"sequence_parallel": 1.0, "recompute_core_attention": 1.0}, 34 / 8),
        ({"recompute_full": 1.0}, 2.0),
        ({"tensor": 1.0}, 34 + 5 * 64 * 2048 / 6144),
    ],
)
def test_every_row_of_the_published_table(changes: dict[str, float], expected: float) -> None:
    unit = 2048.0 * 4.0 * 6144.0
    assert _saved(GPT_22B, **changes) / unit == pytest.approx(expected, rel=1e-3)


@each_row(
    ("case", "without_gib", "with_both_gib"),
    [
        (GPT_22B, 59.25, 9.56),
        (GPT_175B, 66.84, 12.35),
        (GPT_530B, 114.02, 23.08),
        (GPT_1T, 131.25, 26.56),
    ],
)
def test_published_bytes_of_the_first_stage(
    case: dict[str, Any], without_gib: float, with_both_gib: float
) -> None:
    ranks, chunks = int(case["pipeline"]), int(case["chunks"])
    counts = warmup_in_flight(
        ranks, chunks, microbatches=np.array([1000.0]), zero_bubble=np.array([0.0])
    )
    layers = float(counts[:, 0, 0].sum()) * case["layers"] / (ranks * chunks)
    assert layers * _saved(case) / GIB == pytest.approx(without_gib, rel=1e-3)
    both = {"sequence_parallel": 1.0, "recompute_core_attention": 1.0}
    assert layers * _saved(case, **both) / GIB == pytest.approx(with_both_gib, rel=1e-3)


def test_outputs_that_are_freed_are_not_counted() -> None:
    # Section 6: s b h elements per micro-batch in flight, 2.73 GiB on the first of 35 stages.
    kept = activation_bytes(_model(GPT_530B), _strategy(GPT_530B), cp_output_copy_ratio=0.0)
    assert 35 * float(kept.boundary) / GIB == pytest.approx(2.73, abs=0.005)


def test_flash_attention_keeps_no_square() -> None:
    # The quadratic part goes, 4 bytes per token and head come.
    without = _saved(GPT_22B, has_flash_attention=1.0, dropout=0.0)
    assert without == 2048 * 4 * (6144 * (8 + 24 / 8) + 8 + 4 * 64 / 8)
    longer = _saved(GPT_22B, has_flash_attention=1.0, dropout=0.0, sequence=4096.0)
    assert longer == pytest.approx(2.0 * without)


MOE = ModelShape(
    hidden=1024.0,
    heads=16.0,
    kv_heads=4.0,
    head_dim=64.0,
    value_dim=64.0,
    vocab=32000.0,
    dense_layers=0.0,
    moe_layers=8.0,
    experts=32.0,
    top_k=4.0,
    moe_ffn=512.0,
    shared_ffn=256.0,
)
TOKENS = 2048.0


def _moe(**changes: float) -> tuple[float, float, float]:
    plain = Strategies(sequence=TOKENS, micro_batch=1.0, num_microbatches=8.0, expert=8.0)
    kept = activation_bytes(MOE, dataclasses.replace(plain, **changes), cp_output_copy_ratio=0.0)
    return float(kept.moe.saved), float(kept.moe.recomputed), float(kept.moe.gradients)


def test_a_layer_of_experts_worked_by_hand() -> None:
    # Per token: residuals and norm outputs 4 * 1024 * 2, scales 8, q k v and output
    # (16 + 4) * 128 * 2, log-sum-exp 64, router 4 * 32 + 8 * 4, shared 3 * 256 * 2,
    # 4 copies of (1024 + 3 * 512) * 2.
    per_token = 8192 + 8 + 5120 + 64 + 160 + 1536 + 4 * 5120
    assert _moe()[0] == TOKENS * per_token


def test_ranks_beyond_the_key_value_heads_keep_one_each() -> None:
    wide = Strategies(
        sequence=TOKENS, micro_batch=1.0, num_microbatches=8.0, tensor=8.0, expert=8.0
    )
    four, eight, sixteen = (
        activation_bytes(
            dataclasses.replace(MOE, kv_heads=heads), wide, cp_output_copy_ratio=0.0
        ).moe.saved
        for heads in (4.0, 8.0, 16.0)
    )
    assert four == eight
    # one more key and value of width 64 on each of 8 ranks, 2 bytes a number
    assert sixteen - eight == TOKENS * (64 + 64) * 2


def test_the_most_loaded_rank_keeps_more_copies() -> None:
    assert _moe(expert_imbalance_p99=1.5)[0] - _moe()[0] == pytest.approx(TOKENS * 2 * 5120)


def test_recomputed_modules_come_back_one_layer_at_a_time() -> None:
    saved, recomputed, _ = _moe(recompute_moe=1.0)
    whole = _moe()[0]
    assert recomputed == whole - saved == TOKENS * (160 + 1536 + 4 * 5120)
    assert whole - _moe(recompute_moe_act=1.0)[0] == TOKENS * 4 * 512 * 2
    assert whole - _moe(recompute_shared_experts=1.0)[0] == TOKENS * 1536
    assert whole - _moe(recompute_layernorm=1.0)[0] == TOKENS * 2 * 2048
    assert whole - _moe(recompute_core_attention=1.0)[0] == TOKENS * 64
    assert _moe(recompute_full=1.0)[0] == TOKENS * 2048


def test_chunks_leave_a_share_of_the_copies_as_in_memfine() -> None:
    # arXiv 2511.21431, figures of table 4: active bytes are A + B / c.
    recomputed = [_moe(recompute_full=1.0, chunks=float(count))[1] for count in (1, 2, 4)]
    assert recomputed[0] - recomputed[1] == pytest.approx(2.0 * (recomputed[1] - recomputed[2]))
    assert recomputed[0] - recomputed[1] == pytest.approx(TOKENS * 4 * 5120 / 2)
    assert _moe(chunks=2.0)[0] == _moe()[0] - TOKENS * 4 * 5120


def test_expert_tensor_ranks_gather_copies_and_split_widths() -> None:
    assert _moe(expert_tensor=2.0)[0] - _moe()[0] == TOKENS * 4 * 1024 * 2


def test_fp8_halves_the_inputs_that_linear_layers_keep() -> None:
    # Norm output before attention, product of shared and of routed experts, copies; the core's
    # output is kept a second time for the projection behind it.
    less = 1024 + 256 + 4 * (1024 + 512) - 1024
    assert _moe()[0] - _moe(linear_bytes=1.0)[0] == TOKENS * less


def test_every_second_product_is_kept_by_torchtitan() -> None:
    # arXiv 2410.06511, section 2.2.2; here the block's input, q, v, the core's output, log-sum-exp,
    # router, up of the shared expert, the copies that arrived and those that came back.
    local = 2048 + 2048 + 4 * 128 + 2048 + 64 + 160 + 2 * 256
    assert _moe(recompute_by_op=1.0)[0] == TOKENS * (local + 2 * 4 * 2048)
    # Without expert parallelism no all-to-all returns anything.
    assert _moe(recompute_by_op=1.0, expert=1.0)[0] == TOKENS * local


def test_copies_are_kept_to_multiply_them_by_their_scores() -> None:
    strategy = Strategies(sequence=TOKENS, micro_batch=1.0, num_microbatches=8.0, expert=8.0)
    of_deepep = dataclasses.replace(strategy, is_deepep=1.0)

    def kept(at: Strategies, scored_bytes: float) -> float:
        layer = activation_bytes(MOE, at, cp_output_copy_ratio=0.0, scored_bytes=scored_bytes).moe
        return float(layer.saved)

    # 4 copies of 1,024 in fp32; DeepEP multiplies in bf16.
    assert kept(strategy, 4.0) - kept(strategy, 0.0) == TOKENS * 4 * 1024 * 4
    assert kept(of_deepep, 4.0) - kept(of_deepep, 0.0) == TOKENS * 4 * 1024 * 2
    by_op = dataclasses.replace(strategy, recompute_by_op=1.0)
    assert kept(by_op, 4.0) == kept(by_op, 0.0)


def test_a_compiled_layer_does_not_keep_its_last_product() -> None:
    # A bf16 number of the residual a token, in dense layers alone; experts' are not kept at all.
    at = dataclasses.replace(_strategy(GPT_530B), recompute_by_op=1.0)
    model = dataclasses.replace(_model(GPT_530B), is_gated=1.0)
    eager, compiled = (
        activation_bytes(model, at, cp_output_copy_ratio=0.0, last_gemm_ratio=ratio)
        for ratio in (1.0, 0.0)
    )
    own = at.tokens / (at.tensor if at.sequence_parallel else 1.0)
    assert eager.dense.saved - compiled.dense.saved == own * model.hidden * 2
    assert eager.moe.saved == compiled.moe.saved


@settings(deadline=None, max_examples=40)
@given(
    micro_batch=st.integers(1, 8),
    tensor=st.sampled_from([1.0, 2.0, 4.0]),
    context=st.sampled_from([1.0, 2.0, 8.0]),
    full=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_bytes_are_proportional_to_the_batch_and_columns_agree_with_numbers(
    micro_batch: int, tensor: float, context: float, full: float
) -> None:
    one = Strategies(
        sequence=TOKENS,
        micro_batch=1.0,
        num_microbatches=8.0,
        tensor=tensor,
        context=context,
        recompute_full=full,
    )
    many = dataclasses.replace(one, micro_batch=np.array([1.0, float(micro_batch)]))
    single = activation_bytes(MOE, one, cp_output_copy_ratio=1.0)
    columns = activation_bytes(MOE, many, cp_output_copy_ratio=1.0)
    for name in ("saved", "recomputed", "gradients"):
        expected = np.array([1.0, micro_batch]) * float(getattr(single.moe, name))
        assert np.allclose(getattr(columns.moe, name), expected)
