"""Load shares of near and far replicas, computed independently for the checker.

    D launches   G ranks, also as sources   R replicas of one expert, in slot order
    V streams: far ranks that took part in the same assignments before   k far ranks

`solvers/placement/dispatch/` is not used; its rule (nearest.py, launches.py) is implemented here a
second time, by another method:

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

import numpy as np

from solvers.placement.ranks import Floats, Ints, Placement, Ranks


def near_rank(source: int, hosts: list[int], nodes: list[int]) -> int | None:
    """Return the rank whose replica a source rank uses in every launch; None: it is far from all.

    Args:
        source: a rank.
        hosts: ranks of the replicas in slot order.
        nodes: node of each rank.
    """
    if len(hosts) == 1 or source in hosts:
        return source if source in hosts else hosts[0]
    if len({nodes[host] for host in hosts}) == 1:
        return None
    return next((host for host in hosts if nodes[host] == nodes[source]), None)


def expected_ratios(placement: Placement, ranks: Ranks) -> Iterator[tuple[int, int, list[float]]]:
    """Yield layer, expert and the share of its tokens that each rank expects; exact."""
    for layer, expert, hosts, near in _replicated(placement, ranks):
        users = [0.0] * ranks.num_ranks
        for used in near:
            for host in hosts if used is None else [used]:
                users[host] += 1.0 / len(hosts) if used is None else 1.0
        yield layer, expert, [count / ranks.num_ranks for count in users]


def launched_ratios(
    placement: Placement, ranks: Ranks, *, seed: int, launches: int
) -> Iterator[tuple[int, int, Floats]]:
    """Yield layer, expert and the share of its tokens that each rank takes, `[D][G]`."""
    rng = np.random.default_rng(seed)
    # Number of the stream of each rank, and of what a stream becomes by an assignment of some size.
    stream_G = [0] * ranks.num_ranks
    after: dict[tuple[int, int, int], int] = {}
    for layer, expert, hosts, near in _replicated(placement, ranks):
        users_G = Counter(used for used in near if used is not None)
        users_DG = np.tile([float(users_G[rank]) for rank in range(ranks.num_ranks)], (launches, 1))
        far = [source for source, used in enumerate(near) if used is None]
        if far:
            sizes = list(Counter(stream_G[source] for source in far).values())
            used_DR = assigned_counts(len(hosts), sizes, rng=rng, launches=launches)
            # A rank may hold two replicas.
            for place, host in enumerate(hosts):
                users_DG[:, host] += used_DR[:, place]
            for source in far:
                size = (stream_G[source], len(far), len(hosts))
                stream_G[source] = after.setdefault(size, len(after) + 1)
        yield layer, expert, users_DG / ranks.num_ranks


def assigned_counts(
    replicas: int, sizes: list[int], *, rng: np.random.Generator, launches: int
) -> Ints:
    """Return how many far ranks use each replica, `[D][R]`, given the ranks of each stream."""
    streams, far = len(sizes), sum(sizes)
    each, more = divmod(far, replicas)
    places_DVR = np.full((launches, streams, replicas), each)
    if more:
        order_DVR = rng.random((launches, streams, replicas)).argsort(axis=2)
        np.put_along_axis(places_DVR, order_DVR[:, :, :more], each + 1, axis=2)
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
) -> Iterator[tuple[int, int, list[int], list[int | None]]]:
    """Yield layer, expert, ranks of its replicas in slot order, and each source's near rank."""
    rank_S, nodes = ranks.rank_S.tolist(), ranks.node_G.tolist()
    known: dict[tuple[int, ...], list[int | None]] = {}
    for layer, expert_S in enumerate(placement.expert_LS.tolist()):
        hosts_E: dict[int, list[int]] = {}
        for rank, expert in zip(rank_S, expert_S, strict=True):
            hosts_E.setdefault(expert, []).append(rank)
        for expert in sorted(hosts_E):
            hosts = hosts_E[expert]
            if len(hosts) == 1:
                continue
            key = tuple(hosts)
            if key not in known:
                known[key] = [near_rank(source, hosts, nodes) for source in range(len(nodes))]
            yield layer, expert, hosts, known[key]
