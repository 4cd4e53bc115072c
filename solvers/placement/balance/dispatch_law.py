"""Load shares of near and far replicas, computed independently for the checker.

    D launches   L layers   S slots   G ranks, also as sources   R replicas of one expert
    V streams: far ranks that took part in the same assignments before   k far ranks

`solvers/placement/dispatch/` is not used; its rule (launches.py) is implemented here a second time,
by another method:

    near, and the mean of far ones    exact: a far rank uses each of R replicas with chance 1 / R
    far ones of one launch            counts, not orders: of k far ranks each replica gets k // R,
                                      k mod R of them one more; the n ranks of one stream get n of
                                      these k places, drawn without replacement, replica by replica
                                      (multivariate hypergeometric), streams independently

With one stream, or as many replicas as far ranks in it, the counts are exact as well. Two streams
coincide again after as many assignments of the same sizes.

Differs: the engine's streams also meet where other assignments have used up as many numbers. EPLB's
         placements of 58 layers of 256 experts on 8, 32 and 64 ranks are within 0.25 % of their
         mean over 16 to 32 of the engine's launches, all within two standard errors;
         tests/solvers/placement/balance/test_dispatch_law.py holds smaller ones to 4 of them and
         0.2 %.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import numpy as np

from solvers.placement.ranks import Floats, Ints, Placement, Ranks

MOST_KEPT: Final = 6
"""Placements whose launches are cached; 32 of 58 layers of 288 slots take 4 MB."""


@lru_cache(maxsize=MOST_KEPT)
def slot_ratios(placement: Placement, ranks: Ranks, *, seed: int | None, launches: int) -> Floats:
    """Return the share of its expert's tokens that every slot takes, `[D][L][S]`.

    Without a seed it is the expected one in every launch.
    """
    ratio_DLS = np.ones((launches, *placement.expert_LS.shape))
    rng = np.random.default_rng(seed)
    # Number of the stream of each rank, and of what a stream becomes by an assignment of some size.
    stream_G = [0] * ranks.num_ranks
    after: dict[tuple[int, int, int], int] = {}
    for layer, slots, near in _replicated(placement, ranks):
        far = [source for source, place in enumerate(near) if place is None]
        users_R = [float(near.count(place)) for place in range(len(slots))]
        users_DR = np.tile(users_R, (launches, 1))
        if seed is None:
            users_DR += len(far) / len(slots)
        elif far:
            sizes = list(Counter(stream_G[source] for source in far).values())
            users_DR += assigned_counts(len(slots), sizes, rng=rng, launches=launches)
            for source in far:
                size = (stream_G[source], len(far), len(slots))
                stream_G[source] = after.setdefault(size, len(after) + 1)
        ratio_DLS[:, layer, slots] = users_DR / ranks.num_ranks
    return ratio_DLS


def near_place(source: int, hosts: list[int], nodes: list[int]) -> int | None:
    """Return which of the replicas a rank uses in every launch; None: it is far from all.

    Args:
        source: a rank.
        hosts: ranks of the replicas in slot order.
        nodes: node of each rank.
    """
    if len(hosts) == 1 or source in hosts:
        return hosts.index(source) if source in hosts else 0
    places = [place for place, host in enumerate(hosts) if nodes[host] == nodes[source]]
    return places[0] if 0 < len(places) < len(hosts) else None


def assigned_counts(
    replicas: int, sizes: list[int], *, rng: np.random.Generator, launches: int
) -> Ints:
    """Return how many far ranks use each replica, `[D][R]`, given the ranks of each stream."""
    streams, far = len(sizes), sum(sizes)
    per_replica, more = divmod(far, replicas)
    places_DVR = np.full((launches, streams, replicas), per_replica)
    if more:
        order_DVR = rng.random((launches, streams, replicas)).argsort(axis=2)
        np.put_along_axis(places_DVR, order_DVR[:, :, :more], per_replica + 1, axis=2)
    if streams == 1:
        return np.asarray(places_DVR[:, 0])
    to_draw_DV = np.tile(np.array(sizes), (launches, 1))
    others_DV = np.full((launches, streams), far)
    counts_DR = np.zeros((launches, replicas), dtype=np.int64)
    for replica in range(replicas - 1):
        mine_DV = places_DVR[:, :, replica]
        others_DV = others_DV - mine_DV
        drawn_DV = rng.hypergeometric(mine_DV, others_DV, to_draw_DV)
        counts_DR[:, replica] = drawn_DV.sum(axis=1)
        to_draw_DV = to_draw_DV - drawn_DV
    counts_DR[:, -1] = to_draw_DV.sum(axis=1)
    return counts_DR


def _replicated(
    placement: Placement, ranks: Ranks
) -> Iterator[tuple[int, list[int], list[int | None]]]:
    """Yield layer, slots of an expert's replicas, and which of them is near to each source."""
    rank_S, nodes = ranks.rank_S.tolist(), ranks.node_G.tolist()
    for layer, expert_S in enumerate(placement.expert_LS.tolist()):
        slots_E: dict[int, list[int]] = {}
        for slot, expert in enumerate(expert_S):
            slots_E.setdefault(expert, []).append(slot)
        for _, slots in sorted(slots_E.items()):
            if len(slots) > 1:
                hosts = [rank_S[slot] for slot in slots]
                yield layer, slots, [near_place(rank, hosts, nodes) for rank in range(len(nodes))]
