"""A cache of splits, since placements are evaluated many times.

    L layers   E experts   G ranks   S slots of a layer   P passes

A split is kept by slot, as its expert's share on the slot's rank, which is what takes little room;
those of several launches in one array.
What it was worked out from is known by a digest of the arrays.
"""

import hashlib
from collections import OrderedDict
from typing import Final

import numpy as np

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.ranks import Floats

MOST_KEPT: Final = 512
"""Splits."""
MOST_BYTES: Final = 64 * 2**20
"""Largest size of all kept splits: 500 of 58 layers of 288 slots, or 50 of ten launches each."""

_KEPT: Final[OrderedDict[bytes, Floats]] = OrderedDict()


def key_of(case: DispatchCase, *, of: str, load_LE: Floats | None = None) -> bytes:
    """Return the cache key of a split.

    Args:
        case: with its placement and ranks.
        of: the rule, and its other inputs.
        load_LE: token copies of the pass, where the rule reads them.
    """
    digest = hashlib.blake2b(f"{of} {case.placement.expert_LS.shape} {case.num_experts}".encode())
    arrays = (case.placement.expert_LS, case.ranks.slots_G, case.ranks.node_G, case.ranks.speed_G)
    for array in (*arrays, load_LE):
        digest.update(b"-" if array is None else np.ascontiguousarray(array).tobytes())
    return digest.digest()


def kept(key: bytes) -> Floats | None:
    """Return the cached split of a key, None if there is none."""
    cached = _KEPT.get(key)
    if cached is not None:
        _KEPT.move_to_end(key)
    return cached


def keep(key: bytes, share_LS: Floats) -> Floats:
    """Cache the shares of slots, the least recent ones dropped for them, and return them."""
    share_LS.setflags(write=False)
    _KEPT[key] = share_LS
    if len(_KEPT) > MOST_KEPT:
        _KEPT.popitem(last=False)
    while len(_KEPT) > 1 and sum(one.nbytes for one in _KEPT.values()) > MOST_BYTES:
        _KEPT.popitem(last=False)
    return share_LS


def by_slot(case: DispatchCase, split_LEG: Floats) -> Floats:
    """Return the share of its expert that the rank of each slot takes, `[L][S]`."""
    layer_L1 = np.arange(case.num_layers)[:, None]
    cached: Floats = split_LEG[layer_L1, case.placement.expert_LS, case.ranks.rank_S[None, :]]
    return cached


def by_rank(case: DispatchCase, share_LS: Floats) -> Floats:
    """Return the shares of each expert's token copies by rank, `[L][E][G]`, of slots' shares."""
    split_LEG = np.zeros((case.num_layers, case.num_experts, case.ranks.num_ranks))
    layer_L1 = np.arange(case.num_layers)[:, None]
    split_LEG[layer_L1, case.placement.expert_LS, case.ranks.rank_S[None, :]] = share_LS
    return split_LEG
