"""MemFine's published figures (arXiv 2511.21431, its table of memory and throughput).

DeepSeek-V3 cut to 16 (model I) and 8 layers (II), s = 4096, h = 7168, a = 128, g_e = 2048, top-8 of
256 experts, bf16. Methods: M1 no chunks, M2 always 8 chunks, M3 the count chosen at run time, which
the paper gives as 2 for its figures. All with full recomputation; GB are 1e9 bytes.
"""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.memfine import (
    LayerShape,
    active_bytes,
    chunks_for,
    fit_active,
    largest_received,
    sets_in_flight,
    stored_bytes,
)
from tests.rows import each_row

GB = 1e9
# (model, method, chunks, static GB, active GB, total GB)
PUBLISHED = (
    ("I", "M1", 1, 43.0, 22.9, 65.9),
    ("I", "M2", 8, 43.0, 3.7, 46.7),
    ("I", "M3", 2, 43.0, 11.9, 54.9),
    ("II", "M1", 1, 39.5, 22.9, 62.4),
    ("II", "M2", 8, 39.5, 3.7, 43.2),
    ("II", "M3", 2, 39.5, 11.9, 51.4),
)
SHAPE = LayerShape(
    hidden=7168,
    query_heads=128,
    kv_heads=128,
    head_dim=128,
    experts=256,
    expert_ffn=2048,
    sequence_tokens=4096,
)


def _fitted() -> tuple[float, float]:
    rows = [row for row in PUBLISHED if row[0] == "I" and row[1] in ("M1", "M2")]
    return fit_active([row[2] for row in rows], [row[4] * GB for row in rows])


def test_two_rows_of_the_table_give_both_numbers() -> None:
    # B (1 - 1/8) = 22.9 - 3.7, so B = 19.2 * 8 / 7 = 21.943 and A = 22.9 - B = 0.957.
    constant, divided = _fitted()
    assert constant / GB == pytest.approx(0.957, abs=5e-4)
    assert divided / GB == pytest.approx(21.943, abs=5e-4)
    assert active_bytes(constant, divided, chunks=2) / GB == pytest.approx(11.93, abs=5e-3)


@each_row("row", PUBLISHED)
def test_every_published_row_follows(row: tuple[str, str, int, float, float, float]) -> None:
    _, _, chunks, static, active, total = row
    constant, divided = _fitted()
    predicted = active_bytes(constant, divided, chunks=chunks) / GB
    assert predicted == pytest.approx(active, abs=0.05)  # the last digit printed
    assert static + predicted == pytest.approx(total, abs=0.05)


@each_row(
    ("head_dim", "expected"),
    # 2 * 4096 * (5 * 7168 + 3 * 128 * h_d + 256) = 698.4 MB and 899.7 MB.
    [(128, 0.70), (192, 0.90)],
)
def test_the_equation_s_own_constant_lies_beside_the_fitted_one(
    head_dim: int, expected: float
) -> None:
    shape = replace(SHAPE, head_dim=head_dim)
    own = stored_bytes(shape, received=0.0, in_flight=sets_in_flight("recomputed"))
    assert own / GB == pytest.approx(expected, abs=5e-3)
    assert own < _fitted()[0]


def test_the_divided_part_is_about_600_thousand_copies() -> None:
    # 2 * (2 * 7168 + 2 * 2048) = 36864 bytes a copy; 57 % of the 8 * 32 * 4096 there can be.
    assert SHAPE.bytes_per_received_copy == 36864
    copies = _fitted()[1] / SHAPE.bytes_per_received_copy
    assert copies == pytest.approx(595_000, rel=1e-3)
    assert copies < 8 * 32 * 4096


def test_the_chosen_counts_bound_the_usable_share_of_64_gb() -> None:
    # Two chunks in both models: one would not fit, so 54.9 / 64 <= alpha < 62.4 / 64.
    received = _fitted()[1] / SHAPE.bytes_per_received_copy
    by_alpha = {}
    for alpha in (0.86, 0.97, 0.98):
        limits = {
            static: largest_received(
                SHAPE, usable_bytes=alpha * 64 * GB, static_bytes=static * GB, in_flight=1
            )
            for static in (43.0, 39.5)
        }
        by_alpha[alpha] = [chunks_for(received, largest=limits[static]) for static in limits]
    assert by_alpha == {0.86: [2, 2], 0.97: [2, 2], 0.98: [2, 1]}


@each_row(("received", "expected"), [(1.0, 1), (100.0, 1), (100.1, 2), (300.0, 4), (401.0, 8)])
def test_the_smallest_bin_that_fits_is_chosen(received: float, expected: int) -> None:
    assert chunks_for(received, largest=100.0) == expected


def test_more_than_the_largest_bin_is_refused() -> None:
    with pytest.raises(ValueError, match="9 chunks are needed, at most 8"):
        chunks_for(801.0, largest=100.0)


def test_a_device_without_room_for_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes too few"):
        largest_received(SHAPE, usable_bytes=43.5 * GB, static_bytes=43.0 * GB, in_flight=1)


def test_sets_in_flight_are_counted_three_ways() -> None:
    # p = 4, v = 1, r = 0: the paper's 4 + 4 - 0 - 1 = 7, plain 1F1B's 4, recomputed 1.
    ways = [sets_in_flight(way, pipeline_ranks=4) for way in ("paper", "plain_1f1b", "recomputed")]
    assert ways == [7, 4, 1]
    assert sets_in_flight("paper", pipeline_ranks=4, pipeline_rank=3, chunks_per_rank=2) == 5


@given(
    constant=st.floats(1e6, 1e11),
    divided=st.floats(1e6, 1e11),
    chunks=st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), min_size=2, max_size=6, unique=True),
)
@settings(deadline=None, max_examples=60)
def test_the_fit_finds_what_made_the_numbers(
    constant: float, divided: float, chunks: list[int]
) -> None:
    active = [active_bytes(constant, divided, chunks=count) for count in chunks]
    result = fit_active(chunks, active)
    for count in (1, 2, 4, 8):
        expected = active_bytes(constant, divided, chunks=count)
        assert math.isclose(active_bytes(*result, chunks=count), expected, rel_tol=1e-6)


@given(received=st.floats(1.0, 1e6), static=st.floats(0.0, 40.0))
@settings(deadline=None, max_examples=60)
def test_the_limit_is_where_the_equation_fills_the_memory(received: float, static: float) -> None:
    limit = largest_received(SHAPE, usable_bytes=64 * GB, static_bytes=static * GB, in_flight=2)
    filled = static * GB + stored_bytes(SHAPE, received=limit, in_flight=2)
    assert filled == pytest.approx(64 * GB)
    chunks = math.ceil(received / limit)
    one_chunk = stored_bytes(SHAPE, received=received, in_flight=2, chunks=chunks)
    assert static * GB + one_chunk <= 64 * GB * (1 + 1e-12)


def test_one_chunk_count_determines_nothing() -> None:
    with pytest.raises(ValueError, match="do not determine"):
        fit_active([2, 2], [1.0, 1.0])
