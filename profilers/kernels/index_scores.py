"""Scores of an indexer for new tokens against all tokens before them, and the choice of the best.

    score(query i, key j) = sum over heads h of w_ih relu(q_ih . k_j)      top_k keys of each query

All heads share a key. The last query sees all keys, each one before it one less; where there are
fewer keys than queries, as of entries that each merge several tokens, in proportion. Prompts are
scored in blocks of queries, so that the scores of all heads of a block fit into a cache.

On every device this is PyTorch. Engines run fp8 kernels on CUDA (DeepGEMM's fp8_mqa_logits and its
paged sibling), which no small library has; an imported table or the datasheet's formula prices
those (tuner/prices/serve/machine.py), and these rows price processors.

Source: DeepSeek-V3.2, arXiv 2512.02556, equation 1.
Not covered: the projections to queries, key and weights (GEMMs).
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from profilers.devices import DTYPES, last_cache_bytes
from profilers.kernels.autograd import UNLEARNT, Prepared, in_turns, random
from profilers.records import Case

BLOCK: Final = 2**20
"""Scores of single heads that are computed at once, at most; or those of one query of each
sequence."""


def cases(_: torch.device, __: Sequence[str]) -> tuple[Case, ...]:
    """The default grid: none, on any device; a spec asks for the sizes of its indexer."""
    return ()


def prepare(case: Case, device: torch.device) -> Prepared:
    """Build queries, weights and the cached keys."""
    axes, dtype = case.axes, DTYPES[case.dtype]
    queries = (axes["batch"], axes["sequence"], axes["heads"])
    shapes = (
        (*queries, axes["head_dim"]),
        queries,
        (axes["batch"], axes["past"], axes["head_dim"]),
    )

    def operands() -> tuple[Tensor, ...]:
        return tuple(random(*shape, dtype=dtype, device=device, grad=False) for shape in shapes)

    turns = in_turns(operands, cold_bytes=last_cache_bytes(device), num_values=UNLEARNT)
    return Prepared(
        forward=lambda: chosen(*next(turns), top_k=axes["top_k"]),
        backward=None,
    )


def chosen(queries: Tensor, weights: Tensor, keys: Tensor, *, top_k: int) -> list[Tensor]:
    """Choose the keys that each query attends to.

    Args:
        queries: [B, S, H, D].
        weights: [B, S, H].
        keys: [B, T, D].
        top_k: keys of a query; all that it sees, if those are fewer.

    Returns:
        Indices [B, Q, K] of every block of Q queries, the best first; those of tokens after a
        query only where it sees fewer than K.
    """
    batch, length, heads, width = queries.shape
    total = keys.shape[1]
    tokens = torch.arange(1, length + 1, device=keys.device)
    # Keys that a query sees; rounded up where keys are fewer, so that each sees one.
    visible = tokens + (total - length) if total >= length else -(-tokens * total // length)
    block = max(1, BLOCK // (batch * heads * total))
    picked = []
    for start in range(0, length, block):
        end = min(start + block, length)
        num_seen = total - length + end if total >= length else -(-end * total // length)
        seen = keys[:, :num_seen]
        flat = queries[:, start:end].reshape(batch, -1, width)
        of_heads = (flat @ seen.transpose(1, 2)).relu_().view(batch, end - start, heads, num_seen)
        scores = (weights[:, start:end].unsqueeze(2) @ of_heads).squeeze(2)
        if end - start > 1:
            places = torch.arange(num_seen, device=keys.device)
            scores.masked_fill_(places >= visible[start:end, None], -torch.inf)
        picked.append(scores.topk(min(top_k, num_seen), dim=-1).indices)
    return picked
