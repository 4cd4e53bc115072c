"""Static dispatch: each source rank sends an expert's tokens to one replica, chosen once a launch.

    D launches   H source ranks, H = G   R replicas of one expert, in slot order
    P passes   L layers   G ranks   S slots

Engines with an all-to-all backend use near replicas first. A rank that holds the expert keeps its
tokens: its first replica takes them. Otherwise the first replica on its node does, where that
narrows the choice: not where all replicas are on that node. An expert of one replica is near to
every rank. Sources without a near replica are *far* from it: with k of them, each of r replicas
serves k // r, k % r replicas drawn at random serve one more, and the order is shuffled. Every rank
works the assignment out by itself, from a stream of the same seed that has advanced by the experts
which are far from *this* rank only, layer by layer and expert by expert, and uses its own entry of
it. What that uses up of a stream depends on how many replicas go to how many ranks: ranks with the
same assignments behind them share the next one, and are taken as independent of the others. Many
launches are drawn at once.

Source:  SGLang 0.5.23, `--ep-dispatch-algorithm static` with an all-to-all backend
         (sglang/srt/eplb/expert_location.py); the table that each rank keeps holds near replicas
         only, so that `static`, `dynamic` and `lp` share what is near.
Differs: streams also meet where others happen to have used up as many numbers, which is left
         out: the engine's launches scatter a few per cent less. Numbers are numpy's: a placement is
         worth what it does over launches, and none of these is one that an engine makes.
Valid:   every source rank sends as many tokens to each expert.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np

from solvers.placement.dispatch.case import DispatchCase, split_loads
from solvers.placement.ranks import Floats, Ints, Placement, Ranks

FAR: Final = -1

LAUNCHES: Final = 10
"""Launches that passes are divided among; as many as batches of passes are compared."""

MOST_KEPT: Final = 32
"""Tables that are cached: of 16 launches of 58 layers of 288 slots 2 MB each."""


def loads(case: DispatchCase) -> Floats:
    """Return token copies of each rank, `[P][L][G]`, neighbouring passes in launches of their own.

    Different cases have independent launches only where their seeds differ.
    """
    parts = np.array_split(case.load_PLE, min(LAUNCHES, len(case.load_PLE)))
    return np.concatenate(
        [
            split_loads(replace(case, load_PLE=load_PLE), share_LS)
            for load_PLE, share_LS in zip(parts, splits(case, launches=len(parts)), strict=True)
        ]
    )


def splits(case: DispatchCase, *, launches: int) -> Floats:
    """Return the shares of slots in each launch, `[D][L][S]`, drawn from the case's seed."""
    return launched_shares(case.placement, case.ranks, seed=case.seed, launches=launches)


@lru_cache(maxsize=MOST_KEPT)
def launched_shares(placement: Placement, ranks: Ranks, *, seed: int, launches: int) -> Floats:
    """Return the share of its expert's tokens that every slot takes in each launch, `[D][L][S]`."""
    share_DLS = np.ones((launches, *placement.expert_LS.shape))
    rng = np.random.default_rng(seed)
    for layer, slot_R, replica_DH in targets(placement, ranks=ranks, rng=rng, launches=launches):
        uses_DHR = replica_DH[:, :, None] == np.arange(len(slot_R))
        share_DLS[:, layer, slot_R] = uses_DHR.mean(axis=1)
    share_DLS.setflags(write=False)
    return share_DLS


def targets(
    placement: Placement, *, ranks: Ranks, rng: np.random.Generator, launches: int
) -> Iterator[tuple[int, Ints, Ints]]:
    """Yield layer, slots of an expert and which of them each source rank uses, `[D][H]`.

    Experts of one replica are left out: all sources use it.
    """
    past_H = np.zeros(ranks.num_ranks, dtype=np.int64)
    past_after: dict[tuple[int, int, int], int] = {}
    rank_S = ranks.rank_S
    for layer, expert_S in enumerate(placement.expert_LS):
        order_S = np.argsort(expert_S, kind="stable")
        starts = np.flatnonzero(np.diff(expert_S[order_S], prepend=-1))
        for slot_R in np.split(order_S, starts[1:]):
            if len(slot_R) == 1:
                continue
            near_H = nearest_H(rank_S[slot_R], ranks=ranks)
            far_X = np.flatnonzero(near_H == FAR)
            replica_DH = np.tile(near_H, (launches, 1))
            if len(far_X):
                past_X, stream_X = np.unique(past_H[far_X], return_inverse=True)
                replica_DH[:, far_X] = _assigned(len(slot_R), stream_X, rng=rng, launches=launches)
                steps = [(past, len(far_X), len(slot_R)) for past in past_X.tolist()]
                after = [past_after.setdefault(step, len(past_after) + 1) for step in steps]
                past_H[far_X] = np.array(after)[stream_X]
            yield layer, slot_R, replica_DH


def nearest_H(host_R: Ints, *, ranks: Ranks) -> Ints:
    """Return, for each source rank, the position in `host_R` of its near replica, or `FAR`.

    Args:
        host_R: ranks of the replicas in slot order; one that holds two occurs twice.
        ranks: all of them, with their nodes.
    """
    if len(host_R) == 1:
        return np.zeros(ranks.num_ranks, dtype=np.int64)
    near_H = np.full(ranks.num_ranks, FAR, dtype=np.int64)
    host_node_R = ranks.node_G[host_R]
    if (host_node_R != host_node_R[0]).any():
        first_N = np.full(ranks.num_nodes, FAR, dtype=np.int64)
        # Written from the last replica to the first, so that the first one stays.
        first_N[host_node_R[::-1]] = np.arange(len(host_R))[::-1]
        near_H = first_N[ranks.node_G]
    near_H[host_R[::-1]] = np.arange(len(host_R))[::-1]
    return near_H


def _assigned(replicas: int, stream_X: Ints, *, rng: np.random.Generator, launches: int) -> Ints:
    """Assign replicas to the X far ranks, every stream in its own order, `[D][X]`."""
    far, streams = len(stream_X), int(stream_X.max()) + 1
    rounds = np.tile(np.arange(replicas), (launches * streams, far // replicas))
    # Which replicas get one more is drawn, then who gets which.
    more = rng.permuted(np.tile(np.arange(replicas), (launches * streams, 1)), axis=1)
    order = rng.permuted(np.concatenate((rounds, more[:, : far % replicas]), axis=1), axis=1)
    return np.asarray(order.reshape(launches, streams, far)[:, stream_X, np.arange(far)])
