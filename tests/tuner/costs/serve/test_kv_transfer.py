"""Bytes and seconds of a KV transfer, computed by hand."""

import pytest

from profilers.kv_transfer.shards import CacheDegrees
from profilers.records import Case, Measurement
from tests.expect import present
from tests.profilers.testing import fake_profile
from tests.rows import each_row
from tests.tuner.models import example_model
from tuner.costs.serve.kv_transfer import (
    KvPath,
    cache_shape,
    conversion_bytes_per_s,
    rank_kv_bytes,
    whole_s,
)
from tuner.errors import OutsideProfileError
from tuner.prices.profile import ProfilePrices
from tuner.spec.accounting import kv_bytes_per_token

ONE = CacheDegrees()


DEEPSEEK = example_model("deepseek-v3")


def test_deepseek_keeps_576_elements_a_token_and_layer() -> None:
    # 61 layers x 576 x 2 bytes; 4096 tokens are 288 MB
    actual = rank_kv_bytes(DEEPSEEK, prefill=ONE, decode=ONE, tokens=4096, bytes_per_element=2.0)
    assert actual.whole == 61 * 576 * 2 * 4096
    assert cache_shape(DEEPSEEK).is_latent


def test_windowed_layers_keep_their_window_only() -> None:
    spec = example_model("gpt-oss-120b")
    windowed = sum(spec.windowed)
    assert 0 < windowed < spec.num_layers
    window = present(spec.attention.sliding_window)
    each = 2 * spec.attention.num_kv_heads * spec.attention.head_dim
    kept = windowed * window + (spec.num_layers - windowed) * 5000
    whole = rank_kv_bytes(spec, prefill=ONE, decode=ONE, tokens=5000, bytes_per_element=1.0)
    assert whole.peak_rank == pytest.approx(each * kept)


MIXTRAL = example_model("mixtral-8x7b")


@each_row(
    ("prefill", "decode", "sent", "received"),
    [
        (1, 1, 1.0, 1.0),
        (4, 1, 0.25, 1.0),
        (1, 4, 1.0, 0.25),
        (4, 8, 0.25, 0.125),
        # 8 heads on 16 ranks: every other rank has a copy and sends nothing, all receive
        (16, 8, 0.125, 0.125),
        (8, 16, 0.25, 0.125),
    ],
)
def test_the_most_loaded_ranks_of_a_gqa_cache(
    prefill: int, decode: int, sent: float, received: float
) -> None:
    whole = 100 * kv_bytes_per_token(MIXTRAL, bytes_per_element=2.0)
    actual = rank_kv_bytes(
        MIXTRAL,
        prefill=CacheDegrees(tensor=prefill),
        decode=CacheDegrees(tensor=decode),
        tokens=100,
        bytes_per_element=2.0,
    )
    assert actual.sent == pytest.approx(sent * whole)
    assert actual.received == pytest.approx(received * whole)


def test_every_decode_rank_receives_a_whole_latent() -> None:
    whole = 128 * kv_bytes_per_token(DEEPSEEK, bytes_per_element=1.0)
    actual = rank_kv_bytes(
        DEEPSEEK,
        prefill=CacheDegrees(tensor=8),
        decode=CacheDegrees(tensor=4),
        tokens=128,
        bytes_per_element=1.0,
    )
    assert actual.received == pytest.approx(whole)
    assert actual.sent == pytest.approx(4 * whole / 8)
    assert actual.whole == pytest.approx(4 * whole)


def test_a_pipeline_shares_layers() -> None:
    actual = rank_kv_bytes(
        MIXTRAL, prefill=CacheDegrees(pipeline=2), decode=ONE, tokens=10, bytes_per_element=2.0
    )
    assert actual.sent == pytest.approx(actual.received / 2)


def test_seconds_by_hand() -> None:
    direct = KvPath(network_bytes_per_s=1e9, latency_s=0.001)
    assert whole_s(2e9, path=direct) == pytest.approx(2.001)
    host = KvPath(
        network_bytes_per_s=1e9,
        latency_s=0.001,
        device_to_host_bytes_per_s=2e9,
        host_to_device_bytes_per_s=4e9,
        conversion_bytes_per_s=1e9,
    )
    assert whole_s(2e9, path=host) == pytest.approx(0.001 + 2 + 1 + 2 + 0.5)


@each_row(
    "rates",
    [
        {"network_bytes_per_s": 0.0, "latency_s": 0.0},
        {"network_bytes_per_s": 1.0, "latency_s": -1.0},
        {"network_bytes_per_s": 1.0, "latency_s": 0.0, "conversion_bytes_per_s": -1.0},
    ],
)
def test_rates_that_cannot_be_are_refused(rates: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="rates must be positive"):
        KvPath(**rates)


def measured(tokens: int, seconds: float) -> Measurement:
    axes = {"tokens": tokens, "heads": 8, "width": 128, "page_from": 16, "page_to": 64}
    case = Case(
        operation="kv_conversion",
        kind="nhd_hnd",
        dtype="bf16",
        axes={**axes, "tensor_from": 1, "tensor_to": 1},
    )
    return Measurement(case=case, times_s=(seconds,))


def test_a_measured_conversion_prices_the_transfer() -> None:
    # Mixtral: 8 heads of 128, keys and values in bf16 are 4096 bytes a token and layer.
    rows = [measured(tokens, tokens * 4096 / 2e9) for tokens in (256, 1024, 4096)]
    table = ProfilePrices.from_profile(fake_profile(rows))

    def rate(kind: str) -> float:
        return conversion_bytes_per_s(
            table,
            example_model("mixtral-8x7b"),
            tokens=1024,
            kind=kind,
            dtype="bf16",
            bytes_per_element=2.0,
            pages=(16, 64),
            tensors=(1, 1),
        )

    assert rate("nhd_hnd") == pytest.approx(2e9, rel=1e-6)
    with pytest.raises(OutsideProfileError):
        rate("hnd_hnd")


def test_states_move_once_and_keys_of_some_layers_with_every_token() -> None:
    # Nemotron-3 Nano: 6,144 bytes a token, and 49,082,368 of a state, halved by two ranks.
    spec, state = example_model("nemotron-3-nano"), 23 * (64 * 128 * 64 * 4 + 3 * 6144 * 2)
    for tokens in (1, 1000):
        moved = rank_kv_bytes(
            spec,
            prefill=CacheDegrees(tensor=2),
            decode=ONE,
            tokens=tokens,
            bytes_per_element=2.0,
        )
        assert moved.whole == moved.received == pytest.approx(6144 * tokens + state)
        assert moved.sent == pytest.approx(moved.whole / 2)


def test_indexers_move_a_key_and_chunks_their_last_one() -> None:
    sparse = rank_kv_bytes(
        example_model("deepseek-v3.2"), prefill=ONE, decode=ONE, tokens=10, bytes_per_element=2.0
    )
    assert sparse.whole == pytest.approx(10 * 61 * (576 * 2 + 132))
    # Llama-4 Scout: 36 of 48 layers see chunks of 8,192 tokens, of which 10,000 leave 1,808.
    chunked = rank_kv_bytes(
        example_model("llama-4-scout"),
        prefill=ONE,
        decode=ONE,
        tokens=10_000,
        bytes_per_element=2.0,
    )
    assert chunked.whole == pytest.approx((12 * 10_000 + 36 * 1808) * 2 * 8 * 128 * 2)
    # DeepSeek-V4: windows of 128, 2,500 entries of 4 tokens with a key, 78 of 128; open entries.
    merged = rank_kv_bytes(
        example_model("deepseek-v4-flash"),
        prefill=ONE,
        decode=ONE,
        tokens=10_000,
        bytes_per_element=1.0,
    )
    entries = 21 * 2500 * (584 + 132) + 20 * 78 * 584
    assert merged.whole == pytest.approx(
        43 * 128 * 584 + entries + 4 * (21 * 8 * 2560 + 20 * 128 * 1024)
    )
