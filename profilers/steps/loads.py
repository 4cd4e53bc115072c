"""Turn shares of the token copies into whole copies per expert: the loads a forced step has.

Free of torch, so that a planner predicts exactly the loads that the step will run with.

Letters: E experts, S tokens of one sequence, K experts per token.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

ROW_BLOCK: Final = 16
"""Rows that an expert multiplies together in bf16 on processors (profilers/steps/experts.py): few
enough shapes for oneDNN to keep the kernels of, which keeps 1,024."""


def whole_blocks(rows: int) -> int:
    """Round rows up to whole blocks; fewer than a block stay as they are."""
    return rows if rows <= ROW_BLOCK else -(-rows // ROW_BLOCK) * ROW_BLOCK


def forced_copies(load_ratio_row: Sequence[float], *, tokens: int, top_k: int) -> tuple[int, ...]:
    """Split the `tokens * top_k` copies of one sequence over the experts by largest remainder.

    An expert takes a token at most once, so no expert gets more than `tokens` copies; what it
    would get beyond goes to the others by their shares, and evenly when those have none.
    Ties go to the lower expert.

    Raises:
        ValueError: fewer than `top_k` experts, a negative share, or shares that are all zero.
    """
    if len(load_ratio_row) < top_k:
        raise ValueError(f"{len(load_ratio_row)} experts cannot take {top_k} copies of a token")
    if min(load_ratio_row) < 0.0 or not sum(load_ratio_row) > 0.0:
        raise ValueError("load ratios must not be negative, nor all zero")
    shares = [float(share) for share in load_ratio_row]
    wanted = tokens * top_k
    full: set[int] = set()
    open_experts = list(range(len(shares)))
    quota: dict[int, float] = {}
    # All experts are full where each takes every token.
    while open_experts:
        quota = _quotas(shares, open_experts, wanted - tokens * len(full))
        over = {expert for expert in open_experts if quota[expert] > tokens}
        if not over:
            break
        full |= over
        open_experts = [expert for expert in open_experts if expert not in over]
    copies = [
        tokens if expert in full else math.floor(quota[expert]) for expert in range(len(shares))
    ]
    rest = [
        (-(quota[expert] - copies[expert]), expert)
        for expert in open_experts
        if copies[expert] < tokens
    ]
    heapq.heapify(rest)
    for _ in range(wanted - sum(copies)):
        _, expert = heapq.heappop(rest)
        copies[expert] += 1
    return tuple(copies)


def forced_experts(copies: Sequence[int], *, top_k: int, seed: Sequence[int]) -> NDArray[np.int64]:
    """Assign the copies of one sequence to its tokens, K distinct experts each: [S, K].

    Copies sorted by expert are dealt out round-robin, token t getting t, t + S, t + 2S, ...; two
    of them cannot be one expert's, which holds at most S. Then the tokens are shuffled by `seed`.
    """
    dealt_KS = np.repeat(np.arange(len(copies)), copies).reshape(top_k, -1)
    shuffled: NDArray[np.int64] = np.random.default_rng(list(seed)).permutation(dealt_KS.T)
    return shuffled


def _quotas(shares: Sequence[float], open_experts: Sequence[int], copies: int) -> dict[int, float]:
    total = math.fsum(shares[expert] for expert in open_experts)
    if total == 0.0:
        return dict.fromkeys(open_experts, copies / len(open_experts))
    # Multiplied before it is divided, so that a share of exactly 1 / E gives a whole quota.
    return {expert: copies * shares[expert] / total for expert in open_experts}
