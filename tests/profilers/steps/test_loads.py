"""Forced loads: exact, legal for every token, and a function of the seed alone."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.data import read_corpus, sample_sequences
from profilers.steps.loads import forced_copies, forced_experts
from profilers.steps.moe import chunks_needed, even_parts
from tests.rows import each_row

RATIOS = st.lists(st.floats(0.0, 1.0), min_size=4, max_size=12).filter(lambda row: sum(row) > 0.0)


@settings(deadline=None, max_examples=60)
@given(row=RATIOS, tokens=st.integers(1, 40), top_k=st.integers(1, 4))
def test_copies_add_up_and_no_expert_takes_a_token_twice(
    row: list[float], tokens: int, top_k: int
) -> None:
    copies = forced_copies(row, tokens=tokens, top_k=top_k)
    assert sum(copies) == tokens * top_k
    assert min(copies) >= 0
    assert max(copies) <= tokens
    experts_SK = forced_experts(copies, top_k=top_k, seed=(1, 2))
    assert np.bincount(experts_SK.ravel(), minlength=len(row)).tolist() == list(copies)
    assert all(len(set(token)) == top_k for token in experts_SK.tolist())


@settings(deadline=None, max_examples=60)
@given(row=RATIOS, tokens=st.integers(1, 40))
def test_copies_stay_within_one_of_their_share_when_no_expert_is_full(
    row: list[float], tokens: int
) -> None:
    copies = forced_copies(row, tokens=tokens, top_k=1)
    total = math.fsum(row)
    for got, share in zip(copies, row, strict=True):
        assert abs(got - tokens * share / total) < 1.0 + 1e-9


def test_copies_by_hand() -> None:
    # 16 copies: expert 0 may hold 8 of its 12.8; the other 8 are split 2 : 1 : 1.
    assert forced_copies((0.8, 0.1, 0.05, 0.05), tokens=8, top_k=2) == (8, 4, 2, 2)
    assert forced_copies((1.0, 0.0, 0.0), tokens=4, top_k=2) == (4, 2, 2)
    assert forced_copies((1 / 6,) * 6, tokens=9, top_k=2) == (3,) * 6
    # The last quota comes to 24 and a rounding error, which is no reason to look for more room.
    ratio = [weight / 34 for weight in (1, 1, 1, 2, 2, 9, 9, 9)]
    assert forced_copies(ratio, tokens=24, top_k=8) == (24,) * 8


def test_the_assignment_depends_only_on_the_seed() -> None:
    first = forced_experts((5, 3, 4), top_k=2, seed=(0, 1, 2))
    assert (first == forced_experts((5, 3, 4), top_k=2, seed=(0, 1, 2))).all()
    assert (first != forced_experts((5, 3, 4), top_k=2, seed=(0, 1, 3))).any()


@each_row(
    ("row", "message"),
    [((1.0,), "1 experts cannot take 2"), ((0.0, 0.0), "all zero"), ((1.0, -0.1), "negative")],
)
def test_impossible_loads_are_refused(row: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forced_copies(row, tokens=4, top_k=2)


# Text: the same sequence for the same step and place in the batch, whoever asks.


def test_a_sequence_does_not_depend_on_the_others() -> None:
    corpus = read_corpus()
    assert len(corpus) > 500_000

    def sample(*sequences: int, step: int = 3) -> np.ndarray:
        return sample_sequences(corpus, sequences, step=step, seed=1, length=64, vocab_size=256)

    both = sample(4, 5)
    assert both.shape == (2, 65)
    assert (both[1] == sample(5)[0]).all()
    assert (both[1] != sample(5, step=4)[0]).any()


def test_tokens_stay_inside_a_small_vocabulary_and_short_corpora_wrap() -> None:
    corpus = np.arange(200, dtype=np.uint8)
    tokens = sample_sequences(corpus, (0,), step=0, seed=0, length=199, vocab_size=16)
    assert tokens.shape == (1, 200)
    assert tokens.max() == 15


# How many chunks, and of which size.


def test_chunks_are_the_smallest_power_of_two_that_fits() -> None:
    needed = [
        chunks_needed(received, limit=100, max_chunks=8) for received in (0, 100, 101, 201, 400)
    ]
    assert needed == [1, 1, 2, 4, 4]
    assert chunks_needed(10_000, limit=100, max_chunks=8) == 8


@settings(deadline=None, max_examples=80)
@given(total=st.integers(0, 500), parts=st.integers(1, 16))
def test_parts_are_even_and_add_up(total: int, parts: int) -> None:
    sizes = even_parts(total, parts=parts)
    assert len(sizes) == parts
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
