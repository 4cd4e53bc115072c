"""Attention of each kind, from tables of one made-up kernel each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from profilers.arrays import Arrays
from tests.tuner.kernel_tables import arrays_of, kernel_tables
from tuner.costs.serve.attention import AttentionLayer
from tuner.costs.serve.decoder import AttentionKind, DecoderAttention, Formats, linear_mixer
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import ServingMachine
from tuner.prices.serve.rated_attention import DECODE_S
from tuner.spec.linear_attention import LinearAttention, LinearName
from tuner.spec.sparse_attention import Indexer

FP8_CACHE = Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="fp8")
BF16 = Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16")
N, PAST = np.array([4.0]), np.array([100.0])
GROUPED = DecoderAttention(kind=AttentionKind.GROUPED, heads=8, kv_heads=2, head_dim=64)
LATENT = DecoderAttention(
    kind=AttentionKind.LATENT,
    heads=16,
    kv_heads=16,
    head_dim=192,
    query_rank=1536,
    kv_rank=512,
    rope_dim=64,
    value_dim=128,
)
SPARSE = replace(
    LATENT,
    kind=AttentionKind.SPARSE_LATENT,
    indexer=Indexer(num_heads=8, head_dim=128, top_k=2048),
    architecture="Sparse",
)
DELTA = linear_mixer(
    LinearAttention(
        kind=LinearName.GATED_DELTA,
        num_key_heads=2,
        num_value_heads=4,
        key_head_dim=128,
        value_head_dim=128,
        conv_kernel=4,
        chunk_size=64,
    )
)


def layer(
    attention: DecoderAttention, tables: Sequence[Arrays], *, formats: Formats = BF16
) -> AttentionLayer:
    machine = ServingMachine(
        engines=ENGINE_TRAITS, sheet=find_device("h200-sxm"), tables=kernel_tables("x", tables)
    )
    return AttentionLayer(
        attention=attention,
        hidden=4096,
        formats=formats,
        tensor=1,
        machine=machine,
        software="vllm",
    )


def decoding(time_s: float, **named: str) -> Arrays:
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 64, "window": 0}
    rows: list[tuple[Mapping[str, int], float]] = [
        ({"batch": batch, "past": past, **sizes}, time_s) for batch in (1, 64) for past in (1, 4096)
    ]
    return arrays_of("decode_attention", rows, **named)


def test_the_own_engines_kernel_counts_then_another_cache_type_then_another_engine() -> None:
    fast = decoding(1e-6, software="sglang")
    own, own_fp8 = decoding(2e-6), decoding(3e-6, kind="kv_fp8")
    for tables, formats, expected in (
        ([fast, own, own_fp8], BF16, 2e-6),
        ([fast, own, own_fp8], FP8_CACHE, 3e-6),
        ([fast, own], FP8_CACHE, 2e-6),
        ([fast], BF16, 1e-6),
    ):
        one = layer(GROUPED, tables, formats=formats)
        assert one.decode_s(N, PAST) == pytest.approx([expected])
        assert not one.machine.estimated


def test_a_prompt_beyond_the_longest_measured_grows_with_the_square() -> None:
    sizes = {"batch": 1, "heads": 8, "kv_heads": 2, "head_dim": 64}
    rows = [({"sequence": length, **sizes}, 1e-9 * length**2) for length in (128, 1024)]
    one = layer(GROUPED, [arrays_of("attention", rows)])
    assert one.prompt_s(np.array([1024.0, 4096.0])) == pytest.approx(
        [1e-9 * 1024**2, 1e-9 * 4096**2]
    )


def test_nothing_measured_is_priced_by_the_bytes_of_the_cache_and_named() -> None:
    one = layer(GROUPED, [])
    many = np.array([512.0])
    moved = 512 * 100_000 * 2 * 2 * 64 * 2
    seconds = one.decode_s(many, np.array([100_000.0]))
    assert seconds == pytest.approx([moved / (0.82 * 4.8e12) + DECODE_S], rel=1e-2)
    assert one.machine.estimated == {"decode_attention"}


def test_compressed_attention_is_the_faster_of_its_parts_and_its_module() -> None:
    def latent(kind: str, time_s: float, **named: str) -> Arrays:
        rows = [
            ({"batch": batch, "past": past, "heads": 16}, time_s)
            for batch in (1, 64)
            for past in (1, 4096)
        ]
        return arrays_of("latent_decode", rows, kind=kind, **named)

    products = [
        arrays_of("latent_product", [({"tokens": 4, "heads": 16}, 5e-6)], kind=kind)
        for kind in ("pre", "post")
    ]
    core = [latent("core", 30e-6), latent("core", 20e-6, software="sglang")]
    parts = layer(LATENT, [*core, *products])
    assert parts.decode_s(N, PAST) == pytest.approx([20e-6 + 2 * 5e-6])
    # A module includes its projections, and never takes less than its core.
    module = latent("module/gemm_bf16", 1e-3)
    projections = float(parts.projections_s(N)[0])
    whole = layer(LATENT, [*core, latent("module/gemm_bf16", projections + 25e-6), *products])
    assert whole.decode_s(N, PAST) == pytest.approx([25e-6], rel=1e-6)
    assert layer(LATENT, [*core, module, *products]).decode_s(N, PAST) == pytest.approx([30e-6])


def test_sparse_attention_is_a_module_of_its_architecture() -> None:
    sizes = [(batch, past) for batch in (1, 64) for past in (1, 4096)]
    rows = [({"batch": batch, "past": past, "heads": 16}, 7e-6) for batch, past in sizes]
    one = layer(SPARSE, [arrays_of("sparse_latent_decode", rows, kind="Sparse/kv_fp8/gemm_bf16")])
    # Only the fp8 cache was measured; it stands in.
    assert one.decode_s(N, PAST) == pytest.approx([7e-6])
    assert one.projections_s(N) == pytest.approx([0.0])


def test_a_state_is_a_convolution_and_a_recurrence() -> None:
    def part(kind: str, time_s: float) -> Arrays:
        sizes = {"sequence": 1, "key_heads": 2, "value_heads": 4}
        rows = [({"batch": batch, **sizes}, time_s) for batch in (1, 64)]
        return arrays_of("gated_delta", rows, kind=kind)

    one = layer(DELTA, [part("generation/conv", 1e-6), part("generation/recurrent", 4e-6)])
    assert one.decode_s(N, PAST) == pytest.approx([5e-6])
    alone = layer(DELTA, [part("generation/conv", 1e-6)])
    assert float(alone.decode_s(N, PAST)[0]) > 0.0
    assert alone.machine.estimated == {"linear_update"}


def test_drafts_are_checked_together_where_a_kernel_reads_the_past_once() -> None:
    one = layer(GROUPED, [decoding(2e-6)])
    many, long = np.array([256.0]), np.array([50_000.0])
    once, several = (float(one.decode_s(many, long, checked=each)[0]) for each in (1, 128))
    assert 1.01 * once < several < 128 * once
