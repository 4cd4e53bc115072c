"""Sequences in micro-batches, by hand."""

import numpy as np
import pytest

from tuner.costs.rl.packing import PackingRule, TokenBudget, num_bins, pack


def test_first_fit_of_decreasing_lengths_fills_bins() -> None:
    # 9 | 7 3 | 6 2: the 3 fits beside the 7, the 2 beside the 6.
    assert num_bins(np.array([2, 9, 3, 7, 6]), room=10) == 3
    # A longer sequence has a bin to itself.
    assert num_bins(np.array([15, 4]), room=10) == 2


def test_every_rank_runs_as_many_bins() -> None:
    budget = TokenBudget(rule=PackingRule.FIRST_FIT, size=10)
    micro = pack(np.array([9, 7, 3, 6, 2]), budget, ranks=2)
    assert micro.count == 2
    assert micro.tokens == pytest.approx(27.0 / 3.0)
    # Of tokens in sequences of 9, 7, 3, 6, 2: 179 / 27.
    assert micro.sequence_tokens == pytest.approx(179.0 / 27.0)


def test_balanced_micro_batches_divide_a_ranks_tokens() -> None:
    budget = TokenBudget(rule=PackingRule.BALANCED, size=10)
    micro = pack(np.array([9, 7, 3, 6, 2]), budget, ranks=2)
    # 13.5 tokens a rank: two micro-batches of 6.75.
    assert (micro.count, micro.tokens) == (2, 6.75)


def test_a_number_of_sequences_is_as_long_as_they_are() -> None:
    budget = TokenBudget(rule=PackingRule.COUNTED, size=2)
    micro = pack(np.array([9, 7, 3, 6, 2]), budget, ranks=1)
    assert (micro.count, micro.tokens) == (3, 9.0)


def test_equal_sequences_are_their_own_mean() -> None:
    for rule in (PackingRule.FIRST_FIT, PackingRule.BALANCED):
        micro = pack(np.full(64, 128), TokenBudget(rule=rule, size=512), ranks=4)
        assert (micro.count, micro.tokens, micro.sequence_tokens) == (4, 512.0, 128.0)
