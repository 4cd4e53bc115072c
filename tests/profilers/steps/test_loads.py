"""Forced loads: exact, legal for every token, and a function of the seed alone."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.loads import forced_copies, forced_experts
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


def test_what_a_full_expert_cannot_take_goes_to_the_others_by_their_shares() -> None:
    # 16 copies: expert 0 may hold 8 of its 12.8; the other 8 are split 2 : 1 : 1.
    assert forced_copies((0.8, 0.1, 0.05, 0.05), tokens=8, top_k=2) == (8, 4, 2, 2)


def test_experts_without_a_share_are_used_when_the_others_are_full() -> None:
    assert forced_copies((1.0, 0.0, 0.0), tokens=4, top_k=2) == (4, 2, 2)


def test_uniform_loads_are_uniform() -> None:
    assert forced_copies((1 / 6,) * 6, tokens=9, top_k=2) == (3,) * 6


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


def test_every_expert_takes_every_token_where_a_token_takes_every_expert() -> None:
    # The last quota comes to 24 and a rounding error, which is no reason to look for more room.
    ratio = [weight / 34 for weight in (1, 1, 1, 2, 2, 9, 9, 9)]
    assert forced_copies(ratio, tokens=24, top_k=8) == (24,) * 8
