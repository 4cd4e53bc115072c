"""Attention to a part of the past: indexers that pick tokens, compressors that merge them.

    indexer                 every earlier token has a small key; a query attends to the top_k best
                            (DeepSeek sparse attention, DeepSeek-V3.2)
    compressor              a learned weighted mean of r tokens is one entry, key and value at once;
                            a query attends to all entries that ended before it (heavily compressed
                            attention, HCA, of DeepSeek-V4)
    compressor + indexer    entries overlap, each a mean of 2 r tokens out of two series, and a
                            query attends to the top_k best (compressed sparse attention, CSA)

Layers with a compressor attend to a window of single tokens, too. A compressor keeps the keys and
gates of tokens whose entry is open, in fp32 as engines do: s r rows of 2 s d elements, where s = 2
with an indexer and 1 without.

    h hidden size     d width of a key    r tokens of an entry    s series    q query low rank
    n_i, d_i          heads and width of an indexer

Sources: DeepSeek-V3.2, arXiv 2512.02556; classes DeepseekV4HCACompressor, DeepseekV4CSACompressor
and DeepseekV4Indexer of transformers 5.24 (sections 2.3.1 and 2.3.2 of the DeepSeek-V4 report);
vLLM 0.33.0, models/deepseek_v4/compressor.py (`CompressorStateCache`).
"""

from typing import Any

import numpy as np

from profilers.records import Record
from tuner.spec.linear_attention import Width

_Numbers = Any
"""A number or an array of numbers."""


class Indexer(Record):
    """Indexer of sparse attention, which picks what a query attends to."""

    num_heads: Width
    """Heads that score tokens or entries; all share one key."""
    head_dim: Width
    """Width of the key and of a head."""
    top_k: Width
    """Tokens or entries that a query attends to."""


class Compressor(Record):
    """Compressor of tokens to entries, beside a window of single tokens (DeepSeek-V4)."""

    ratio: Width
    """Tokens that one entry stands for."""
    indexer: Indexer | None = None
    """Indexer that picks entries, which then overlap; None: a query attends to all of them."""

    @property
    def series(self) -> int:
        """Keys of each token: one for its own entry, and one for the next where they overlap."""
        return 1 if self.indexer is None else 2

    def outputs(self, width: int) -> int:
        """Outputs of the projections of the hidden state to entries of that width: keys, gates."""
        return 2 * self.series * width

    def state_elements(self, width: int) -> int:
        """Elements of the open entries of one sequence, those of the indexer's keys included."""
        rows = self.series * self.ratio
        keys = width if self.indexer is None else width + self.indexer.head_dim
        return rows * self.outputs(keys)

    def kept(self, tokens: _Numbers) -> _Numbers:
        """Entries that a query behind so many tokens attends to."""
        return np.minimum(tokens // self.ratio, self._most)

    def mean_kept(self, sequence: _Numbers) -> _Numbers:
        """Entries that a query attends to, averaged over the positions of a sequence."""
        return mean_entries(sequence, ratio=self.ratio, limit=self._most)

    @property
    def _most(self) -> float:
        return float("inf") if self.indexer is None else self.indexer.top_k


def mean_entries(sequence: _Numbers, *, ratio: _Numbers, limit: _Numbers) -> _Numbers:
    """Entries that end before a query and that it attends to, averaged over its positions.

    Position t of 1..S has t // r entries. Entry j of m = min(limit, S // r) is seen from position
    r j on, so that the sum is m (S + 1) - r m (m + 1) / 2. Of numbers or of arrays.
    """
    seen = np.minimum(sequence // ratio, limit)
    return seen * (sequence + 1 - ratio * (seen + 1) / 2) / sequence


def indexer_weights(indexer: Indexer | None, *, query_rank: int, hidden: int) -> int:
    """Count the matrices of an indexer over tokens: q n_i d_i + h (d_i + n_i); 0 without one."""
    if indexer is None:
        return 0
    return (
        _scorer_weights(indexer, query_rank=query_rank, hidden=hidden) + hidden * indexer.head_dim
    )


def indexer_queries_weights(indexer: Indexer | None, *, query_rank: int) -> int:
    """Count the matrix of an indexer's queries: q n_i d_i; 0 without one."""
    return 0 if indexer is None else query_rank * indexer.num_heads * indexer.head_dim


def compressor_weights(
    compressor: Compressor | None, *, head_dim: int, query_rank: int, hidden: int
) -> int:
    """Count the matrices of a compressor: 2 s h d, and 2 s h d_i + q n_i d_i + h n_i to pick."""
    if compressor is None:
        return 0
    indexer = compressor.indexer
    merged = hidden * compressor.outputs(head_dim)
    if indexer is None:
        return merged
    keys = hidden * compressor.outputs(indexer.head_dim)
    return merged + keys + _scorer_weights(indexer, query_rank=query_rank, hidden=hidden)


def compressor_parameters(
    compressor: Compressor | None, *, head_dim: int, query_rank: int, hidden: int
) -> int:
    """Count a compressor: matrices, s r d position biases and a norm of d; likewise to pick."""
    if compressor is None:
        return 0
    keys = head_dim + (0 if compressor.indexer is None else compressor.indexer.head_dim)
    vectors = keys * (compressor.series * compressor.ratio + 1)
    return vectors + compressor_weights(
        compressor, head_dim=head_dim, query_rank=query_rank, hidden=hidden
    )


def _scorer_weights(indexer: Indexer, *, query_rank: int, hidden: int) -> int:
    return indexer_queries_weights(indexer, query_rank=query_rank) + hidden * indexer.num_heads
