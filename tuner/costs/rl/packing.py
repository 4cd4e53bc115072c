"""Sequences of one update divided into micro-batches of every data-parallel rank.

    first fit    sequences, the longest first, go into bins of so many tokens with room for them;
                 bins are dealt to the ranks, which all run as many
    balanced     ranks have as many tokens each, and divide them evenly into as few micro-batches as
                 stay within the budget
    counted      so many sequences a micro-batch, as long as they are

Attention of packed sequences is causal inside each, so that tokens attend to what sequences of
E[l^2] / E[l] tokens would, l of them long.

Source: NeMo-RL 0.7.0, nemo_rl/data/packing/algorithms.py (modified first-fit decreasing) and
    distributed/batched_data_dict.py (as many bins a rank); verl 0.9.1, utils/seqlen_balancing.py
    (`rearrange_micro_batches`, Karmarkar-Karp).
Letters: N sequences, B bins.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tuner.arrays import Ints
from tuner.costs.train.packing import first_fit_decreasing


class PackingRule(StrEnum):
    """Rule by which sequences become micro-batches."""

    FIRST_FIT = "first_fit"
    """Whole sequences in bins, first fit of decreasing lengths."""
    BALANCED = "balanced"
    """Equal tokens for ranks and micro-batches."""
    COUNTED = "counted"
    """A stated number of sequences, without padding."""

    @property
    def counts_sequences(self) -> bool:
        """Return whether a budget's size is a number of sequences."""
        return self is PackingRule.COUNTED


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Size of a micro-batch on one data-parallel rank."""

    rule: PackingRule
    size: int
    """Tokens of a micro-batch, or sequences where they are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatches:
    """Micro-batches of the most-loaded rank in one update."""

    count: int
    tokens: float
    """Tokens of one micro-batch, mean over the update."""
    sequence_tokens: float
    """Tokens of equal sequences whose attention costs as much."""


def pack(length_N: Ints, budget: TokenBudget, *, ranks: int) -> MicroBatches:
    """Divide the sequences of an update among ranks and micro-batches."""
    total = float(length_N.sum())
    attended = float(np.square(length_N.astype(np.float64)).sum()) / total
    match budget.rule:
        case PackingRule.COUNTED:
            count = math.ceil(len(length_N) / (ranks * budget.size))
            tokens = total / ranks / count
        case PackingRule.BALANCED:
            count = math.ceil(total / ranks / budget.size)
            tokens = total / ranks / count
        case PackingRule.FIRST_FIT:
            bins = num_bins(length_N, room=budget.size)
            count = math.ceil(bins / ranks)
            tokens = total / max(bins, ranks)
    return MicroBatches(count=count, tokens=tokens, sequence_tokens=min(attended, tokens))


def num_bins(length_N: Ints, *, room: int) -> int:
    """Return the bins of first-fit decreasing; a longer sequence has a bin to itself."""
    return len(first_fit_decreasing(np.minimum(length_N, room).tolist(), room))
