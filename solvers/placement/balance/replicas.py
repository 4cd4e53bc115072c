"""Number of copies of each expert: one by one to the expert whose copies carry most.

    L layers   E experts

After k extra copies the largest load of a copy, max_e load_e / copies_e, is as small as k extra
copies can make it: whoever is below needs ceil(load_e / T) copies of every expert, and the rule
never gives an expert more than that before the maximum has passed T. O(extra * E) a layer.
"""

import numpy as np

from solvers.placement.ranks import Floats, Ints

UNLIMITED = int(np.iinfo(np.int64).max)


def greedy_copies(load_LE: Floats, *, num_slots: int, most_copies: int = UNLIMITED) -> Ints:
    """Return the copies of each expert, `num_slots` in a layer.

    Args:
        load_LE: of every expert.
        num_slots: at least the number of experts.
        most_copies: an expert gets more only when every expert has as many.
    """
    num_layers, num_experts = load_LE.shape
    copies_LE = np.ones((num_layers, num_experts), dtype=np.int64)
    share_LE = load_LE.astype(load_LE.dtype, copy=True)
    layers_L = np.arange(num_layers)
    for _ in range(num_slots - num_experts):
        full_LE = copies_LE >= most_copies
        below_L1 = share_LE.max(axis=1, keepdims=True) + 1.0
        wanted_LE = np.where(full_LE, share_LE - below_L1, share_LE)
        expert_L = wanted_LE.argmax(axis=1)
        copies_LE[layers_L, expert_L] += 1
        share_LE[layers_L, expert_L] = load_LE[layers_L, expert_L] / copies_LE[
            layers_L, expert_L
        ].astype(load_LE.dtype)
    return copies_LE


def listed(copies_LE: Ints) -> Ints:
    """Return the experts of each layer, ascending, every one as often as it has copies, [L][S]."""
    num_layers, num_experts = copies_LE.shape
    expert_X = np.tile(np.arange(num_experts, dtype=np.int64), num_layers)
    return np.repeat(expert_X, copies_LE.ravel()).reshape(num_layers, -1)
