"""Groups of hybrid sharding (HSDP): one copy of the state on some ranks, copies side by side.

`shard_ranks` of the ranks that share the dense parameters hold one copy, neighbours first, so that
there are data x context / shard_ranks copies. Experts have as many copies on their own ranks, each
on expert_data / copies of them: both Megatron-Core (`--num-distributed-optimizer-instances`,
megatron/core/parallel_state.py) and torchtitan (`data_parallel_replicate_degree`) put whole copies
of the model side by side. Gradients are reduce-scattered inside a copy, and then all-reduced over
the ranks that hold the same shard.

Letters: none. Not covered: copies whose optimizer state is also sharded between them.
"""

import numpy as np

from tuner.config.columns import Numbers, Strategies
from tuner.costs.train.links import Group


def num_copies(strategies: Strategies) -> Numbers:
    """Copies of the sharded state; 1 where it is sharded over all ranks."""
    s = strategies
    ranks = s.data * s.context
    parts = np.where(np.greater(s.shard_ranks, 0.0), np.minimum(s.shard_ranks, ranks), ranks)
    copies: Numbers = ranks / parts
    return copies


def of_one_copy(group: Group, copies: Numbers) -> Group:
    """Ranks of the group that share one copy."""
    ranks = np.maximum(group.ranks / copies, 1.0)
    return Group(ranks=ranks, inside=np.minimum(group.inside, ranks))


def between_copies(group: Group, copies: Numbers) -> Group:
    """Ranks of the group that hold the same shard, one of each copy."""
    ranks = np.maximum(group.ranks / copies, 1.0)
    return Group(ranks=copies, inside=np.maximum(np.minimum(group.inside / ranks, copies), 1.0))
