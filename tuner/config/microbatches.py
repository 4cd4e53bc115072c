"""Split of the micro-batches of a global batch over the data-parallel replicas of a step.

M micro-batches over D replicas are `M // D` for each or one more, so that a step takes as long as
its most-loaded replica needs for ceil(M / D). In a pipeline the replicas that an expert group spans
run equal numbers, with M a multiple of their count: a pipeline runs no empty micro-batches, and
experts would wait for tokens that never come (profilers/steps/config.py).
"""

from typing import Any

import numpy as np


def most_microbatches(global_batch_size: Any, *, micro_batch: Any, data: Any) -> Any:
    """Return the micro-batches of the most-loaded replica, for numbers or arrays."""
    return -(-global_batch_size // (micro_batch * data))


def spanned_replicas(*, ranks: Any, group: Any) -> Any:
    """Return the fewest consecutive replicas that consist of whole expert groups.

    Args:
        ranks: ranks of a replica on one stage.
        group: ranks of an expert group.
    """
    return group // np.gcd(ranks, group)


def split_microbatches(total: int, *, replicas: int, equal: int = 1) -> tuple[int, ...]:
    """Return the micro-batches of each replica, the largest first.

    Args:
        total: of all replicas, a multiple of `equal`.
        replicas: a multiple of `equal`.
        equal: replicas in a row with equal counts.
    """
    least, more = divmod(total // equal, replicas // equal)
    return tuple(least + (replica // equal < more) for replica in range(replicas))
