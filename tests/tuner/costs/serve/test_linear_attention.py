"""Linear attention and sparse attention from the datasheet, and against kernels of one H200."""

from dataclasses import replace

import numpy as np
import pytest

from tests.rows import each_row
from tests.tuner.models import example_model
from tuner.costs.serve.attention import AttentionLayer
from tuner.costs.serve.decoder import (
    AttentionKind,
    DecoderAttention,
    Formats,
    decoder_of,
    linear_mixer,
)
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import ServingMachine
from tuner.prices.serve.rated_attention import PROMPT_S
from tuner.spec.linear_attention import LinearAttention, LinearName
from tuner.spec.sparse_attention import Indexer

BF16 = Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16")


def block(
    kind: LinearName, *, heads: int, key_heads: int, key_dim: int, value_dim: int, chunk: int
) -> LinearAttention:
    return LinearAttention(
        kind=kind,
        num_key_heads=key_heads,
        num_value_heads=heads,
        key_head_dim=key_dim,
        value_head_dim=value_dim,
        conv_kernel=4,
        chunk_size=chunk,
    )


def mamba2(heads: int, *, key_dim: int = 128) -> LinearAttention:
    return block(
        LinearName.MAMBA2, heads=heads, key_heads=8, key_dim=key_dim, value_dim=64, chunk=128
    )


NEXT = block(LinearName.GATED_DELTA, heads=32, key_heads=16, key_dim=128, value_dim=128, chunk=64)


def layer(attention: DecoderAttention, *, tensor: int = 1, hidden: int = 4096) -> AttentionLayer:
    return AttentionLayer(
        attention=attention,
        hidden=hidden,
        formats=BF16,
        tensor=tensor,
        machine=ServingMachine(engines=ENGINE_TRAITS, sheet=find_device("h200-sxm"), tables=None),
        software="vllm",
    )


# NVIDIA H200, torch 2.11: microseconds of mamba_ssm's selective_state_update and of
# flash-linear-attention's fused_recurrent_gated_delta_rule for 1, 8, 64 and 256 sequences.
UPDATES: list[tuple[LinearAttention, tuple[float, ...]]] = [
    (mamba2(32), (4.256, 8.320, 41.42, 157.2)),
    (mamba2(64), (4.800, 12.83, 79.46, 306.3)),
    (mamba2(128), (5.856, 22.18, 156.9, 603.4)),
    (mamba2(256, key_dim=256), (13.54, 85.20, 644.2, 2552.5)),
    (NEXT, (5.312, 14.27, 96.38, 365.8)),
]


@each_row(("linear", "measured_us"), UPDATES)
def test_states_pass_through_memory_as_on_one_h200(
    linear: LinearAttention, measured_us: tuple[float, ...]
) -> None:
    one = layer(linear_mixer(linear))
    sequences = np.array([1.0, 8.0, 64.0, 256.0])
    alone = one.machine.seconds(one.decode_ops(sequences, sequences)[0])
    assert alone * 1e6 == pytest.approx(measured_us, rel=0.25)
    # Beside it the convolution reads and writes the last three inputs of its channels, in bf16.
    conv_s = 1.5e-6 + sequences * 2 * 3 * linear.conv_channels * 2 / (0.7 * 4.8e12)
    past = np.full_like(sequences, 5000.0)
    assert one.decode_s(sequences, past) == pytest.approx(alone + conv_s)
    # States of half the width take half the bytes.
    narrow = replace(one, state_bytes=2.0)
    less_s = sequences * 2 * 2 * linear.state_elements / (0.7 * 4.8e12)
    assert alone + conv_s - narrow.decode_s(sequences, past) == pytest.approx(less_s)
    assert one.machine.estimated == {"linear_update"}


def test_a_scan_takes_what_it_took_on_one_h200() -> None:
    # mamba_ssm's mamba_chunk_scan_combined of Nemotron-3 Nano's layer, without the convolution.
    one = layer(linear_mixer(mamba2(64)))
    for tokens, measured_s in ((1024, 54.5e-6), (8192, 326.8e-6), (32768, 1255.4e-6)):
        conv_s = 1.5e-6 + tokens * 2 * 6144 * 2 / (0.7 * 4.8e12)
        found = one.prompt_s(np.array([float(tokens)]))
        assert found - conv_s == pytest.approx([measured_s], rel=0.2)


def test_ranks_share_heads_and_states() -> None:
    whole, half = (layer(linear_mixer(mamba2(64)), tensor=tensor) for tensor in (1, 2))
    assert half.linear.state_elements == whole.linear.state_elements // 2
    many = np.array([4096.0])
    assert half.decode_s(many, many) == pytest.approx(whole.decode_s(many, many) / 2, rel=0.01)
    # In: gate, x, B, C and a time step a head, 2 x 4096 + 2 x 1024 + 64. Out: 4096.
    assert whole.projection_gemms == ((10304, 4096, "bf16"), (4096, 4096, "bf16"))
    assert half.projection_gemms == ((5152, 4096, "bf16"), (4096, 2048, "bf16"))


def test_projections_of_delta_rules() -> None:
    # Queries, keys, values and a gate, 2 x 2048 + 2 x 4096; decay and write strength of 32 heads.
    gated = layer(linear_mixer(NEXT), hidden=2048).projection_gemms
    assert gated == ((12288, 2048, "bf16"), (64, 2048, "bf16"), (2048, 4096, "bf16"))
    # Kimi Linear: q, k, v of 32 x 128 and two ranks of 128; write strength of 32 heads; decay and
    # gate from their ranks.
    kimi = decoder_of(example_model("kimi-linear-48b-a3b"))
    own = next(group.attention for group in kimi.layers if group.attention.linear is not None)
    assert layer(own, hidden=2304).projection_gemms == (
        (3 * 4096 + 256, 2304, "bf16"),
        (32, 2304, "bf16"),
        (8192, 128, "bf16"),
        (2304, 4096, "bf16"),
    )


def sparse(top_k: int) -> AttentionLayer:
    return layer(
        DecoderAttention(
            kind=AttentionKind.SPARSE_LATENT,
            heads=128,
            kv_heads=128,
            head_dim=192,
            query_rank=1536,
            kv_rank=512,
            rope_dim=64,
            value_dim=128,
            indexer=Indexer(num_heads=64, head_dim=128, top_k=top_k),
            architecture="DeepseekV32ForCausalLM",
        ),
        hidden=7168,
    )


def test_sparse_attention_without_a_table_looks_at_what_its_indexer_picks() -> None:
    one, many = sparse(2048), np.array([64.0])
    short, long = (float(one.decode_s(many, np.array([past]))[0]) for past in (2048.0, 65536.0))
    # 64 sequences x 63,488 more tokens: 2 x 64 x 128 fp8 operations and 132 bytes each.
    pairs = 64 * (65536 - 2048)
    more = max(pairs * 2 * 64 * 128 / (0.7 * 1979e12), pairs * 132 / (0.8 * 4.8e12))
    scored = max(64 * 2048 * 2 * 64 * 128 / (0.7 * 1979e12), 64 * 2048 * 132 / (0.8 * 4.8e12))
    assert long - short == pytest.approx(more, rel=1e-6)
    assert short > scored
    # Attention itself no longer grows; with all tokens kept it would.
    assert float(sparse(65536).decode_s(many, np.array([65536.0]))[0]) > 2.0 * long
    assert {"index_scores", "sparse_core"} <= one.machine.estimated


def test_long_prompts_of_sparse_attention_grow_with_their_scores() -> None:
    one, doubled = sparse(2048), np.array([65536.0, 131072.0])
    short_s, long_s = one.prompt_s(doubled)
    dense = layer(
        replace(one.attention, kind=AttentionKind.LATENT, indexer=None, architecture=""),
        hidden=7168,
    )
    assert 2.0 < long_s / short_s < 4.0
    assert long_s < float(dense.prompt_s(doubled)[1])


def test_chunks_are_prompts_of_their_own() -> None:
    plain = DecoderAttention(kind=AttentionKind.GROUPED, heads=40, kv_heads=8, head_dim=128)
    chunked = layer(replace(plain, window=8192, window_is_chunk=True))
    whole = layer(plain)
    one = whole.prompt_s(np.array([8192.0]))
    assert chunked.prompt_s(np.array([8192.0])) == pytest.approx(one)
    # One kernel starts for all of them.
    assert chunked.prompt_s(np.array([32768.0])) == pytest.approx(4 * one - 3 * PROMPT_S)
    many, past = np.array([64.0]), np.array([32768.0])
    assert chunked.decode_s(many, past) == pytest.approx(whole.decode_s(many, np.array([4096.0])))
    short = np.array([1000.0])
    assert chunked.decode_s(many, short) == pytest.approx(whole.decode_s(many, short))


def test_compressed_attention_reads_windows_entries_and_keys() -> None:
    """64 sequences after 131,072 tokens, of DeepSeek-V4 Flash on one H200.

    Each reads 128 tokens of 584 bytes in 43 layers, in 21 of them 512 entries and the 132 bytes of
    32,768 keys, in 20 of them 1,024 entries: 112.4 MB of 4.8 TB/s. DeepSeek-V3.2 reads 2,048 tokens
    of 656 bytes and 131,072 keys in 61 layers, ten times as much.
    """
    read = 43 * 128 * 584 + 21 * (512 * 584 + 32_768 * 132) + 20 * 1024 * 584
    sequences, past = np.array([64.0]), np.array([131_072.0])

    def decode_s(name: str) -> float:
        groups = decoder_of(example_model(name)).layers
        own = ((group.count, layer(group.attention, tensor=8)) for group in groups)
        cached = ((count, replace(one, formats=replace(BF16, kv="fp8"))) for count, one in own)
        return float(sum(count * one.decode_s(sequences, past)[0] for count, one in cached))

    flash_s = decode_s("deepseek-v4-flash")
    assert flash_s == pytest.approx(64 * read / (0.7 * 4.8e12), rel=0.15)
    assert decode_s("deepseek-v3.2") > 8 * flash_s


def test_without_a_compressor_the_past_costs_nothing() -> None:
    groups = decoder_of(example_model("deepseek-v4-flash")).layers
    past = np.array([1000.0, 131_072.0])
    for own in (group.attention for group in groups):
        short_s, long_s = layer(own).decode_s(np.array([64.0, 64.0]), past)
        assert (long_s > 2.0 * short_s) == (own.compressor is not None)
        short_s, long_s = layer(own).prompt_s(past)
        assert long_s > 50 * short_s
