"""Static dispatch: each source rank sends an expert's tokens to one replica, chosen once a launch.

    D launches   H source ranks, H = G   R replicas of one expert, in slot order
    P passes   L layers   E experts   G ranks   S slots

A near replica serves a source (nearest.py). The other sources are far: with k of them, each of r
replicas serves k // r, k % r replicas drawn at random serve one more, and the order is shuffled.
Every rank works the assignment out by itself, from a stream of the same seed that has advanced by
the experts which are far from *this* rank only, layer by layer and expert by expert, and uses its
own entry of it. What that uses up of a stream depends on how many replicas go to how many ranks:
ranks with the same assignments behind them share the next one, and are taken as independent of the
others. Many launches are drawn at once.

Source:  SGLang 0.5.23, `--ep-dispatch-algorithm static` with an all-to-all backend
         (sglang/srt/eplb/expert_location.py).
Differs: streams also meet where others happen to have used up as many numbers, which is left
         out: the engine's launches scatter a few per cent less. Numbers are numpy's: a placement is
         worth what it does over launches, and none of these is one that an engine makes.
Valid:   every source rank sends as many tokens to each expert.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from solvers.placement.dispatch.case import DispatchCase, split_loads
from solvers.placement.dispatch.kept import by_rank, keep, kept, key_of
from solvers.placement.dispatch.nearest import FAR, nearest_H
from solvers.placement.ranks import Floats, Ints, Placement, Ranks

LAUNCHES: Final = 10
"""Launches that passes are divided among; as many as batches of passes are compared."""


def loads(case: DispatchCase) -> Floats:
    """Return token copies of each rank, `[P][L][G]`, neighbouring passes in launches of their own.

    Different cases have independent launches only where their seeds differ.
    """
    parts = np.array_split(case.load_PLE, min(LAUNCHES, len(case.load_PLE)))
    return np.concatenate(
        [
            split_loads(replace(case, load_PLE=load_PLE), split_LEG)
            for load_PLE, split_LEG in zip(parts, splits(case, launches=len(parts)), strict=True)
        ]
    )


def splits(case: DispatchCase, *, launches: int) -> Iterator[Floats]:
    """Yield the share of each expert's tokens that each rank takes in each launch, `[L][E][G]`.

    Launches are drawn from the case's seed.
    """
    key = key_of(case, of=f"static {case.seed} {launches}")
    share_DLS = kept(key)
    if share_DLS is None:
        rank_S = case.ranks.rank_S
        share_DLS = np.ones((launches, *case.placement.expert_LS.shape))
        rng = np.random.default_rng(case.seed)
        for layer, expert, target_DH in targets(
            case.placement, ranks=case.ranks, rng=rng, launches=launches
        ):
            users_DG = users(target_DH, ranks=case.ranks)
            slots = np.flatnonzero(case.placement.expert_LS[layer] == expert)
            share_DLS[:, layer, slots] = users_DG[:, rank_S[slots]]
        keep(key, share_DLS)
    for share_LS in share_DLS:
        yield by_rank(case, share_LS)


def targets(
    placement: Placement, *, ranks: Ranks, rng: np.random.Generator, launches: int
) -> Iterator[tuple[int, int, Ints]]:
    """Yield layer, expert and the rank whose replica each source rank uses, `[D][H]`.

    Experts of one replica are left out: all sources use it.
    """
    past_H = np.zeros(ranks.num_ranks, dtype=np.int64)
    past_after: dict[tuple[int, int, int], int] = {}
    near_of: dict[bytes, tuple[Ints, Ints]] = {}
    for layer, expert, host_R in replicated(placement, ranks=ranks):
        hosts = host_R.tobytes()
        if hosts not in near_of:
            near_H = nearest_H(host_R, ranks=ranks)
            near_of[hosts] = near_H, np.flatnonzero(near_H == FAR)
        near_H, far_X = near_of[hosts]
        replica_DH = np.tile(near_H, (launches, 1))
        if len(far_X):
            past_X = past_H[far_X].tolist()
            stream_of = {past: stream for stream, past in enumerate(sorted(set(past_X)))}
            stream_X = np.array([stream_of[past] for past in past_X])
            replica_DH[:, far_X] = _assigned(len(host_R), stream_X, rng=rng, launches=launches)
            for rank in far_X.tolist():
                step = (int(past_H[rank]), len(far_X), len(host_R))
                past_H[rank] = past_after.setdefault(step, len(past_after) + 1)
        yield layer, expert, host_R[replica_DH]


def users(target_DH: Ints, *, ranks: Ranks) -> Floats:
    """Return the share of source ranks that use each rank, `[D][G]`."""
    launches, sources = target_DH.shape
    cell_DH = target_DH + ranks.num_ranks * np.arange(launches)[:, None]
    count = np.bincount(cell_DH.ravel(), minlength=launches * ranks.num_ranks)
    return np.asarray(count.reshape(launches, ranks.num_ranks) / sources)


def expected_shares(placement: Placement, *, ranks: Ranks) -> Iterator[tuple[int, int, Floats]]:
    """Yield layer, expert and the share of its tokens that each rank expects, `[G]`.

    Experts of one replica are left out, and all ranks send equally many tokens.
    """
    for layer, expert, host_R in replicated(placement, ranks=ranks):
        near_H = nearest_H(host_R, ranks=ranks)
        is_near_H = near_H != FAR
        users_G = np.bincount(host_R[near_H[is_near_H]], minlength=ranks.num_ranks).astype(float)
        np.add.at(users_G, host_R, np.count_nonzero(~is_near_H) / len(host_R))
        yield layer, expert, users_G / ranks.num_ranks


def replicated(placement: Placement, *, ranks: Ranks) -> Iterator[tuple[int, int, Ints]]:
    """Yield layer, expert and the ranks of its replicas in slot order, in the engine's order."""
    rank_S = ranks.rank_S
    for layer, expert_S in enumerate(placement.expert_LS):
        order_S = np.argsort(expert_S, kind="stable")
        starts = np.flatnonzero(np.diff(expert_S[order_S], prepend=-1))
        for slots in np.split(order_S, starts[1:]):
            if len(slots) > 1:
                yield layer, int(expert_S[slots[0]]), rank_S[slots]


def _assigned(replicas: int, stream_X: Ints, *, rng: np.random.Generator, launches: int) -> Ints:
    """Assign replicas to the X far ranks, every stream in its own order, `[D][X]`."""
    far = len(stream_X)
    # Any one place of a shuffled order holds each replica with equal chances.
    chosen_DX = rng.integers(replicas, size=(launches, far))
    size_V = np.bincount(stream_X)
    shared_V = np.flatnonzero(size_V > 1)
    if len(shared_V):
        rows = launches * len(shared_V)
        rounds = np.tile(np.arange(replicas), (rows, far // replicas))
        # Which replicas get one more is drawn, then who gets which.
        more = rng.permuted(np.tile(np.arange(replicas), (rows, 1)), axis=1)
        order = rng.permuted(np.concatenate((rounds, more[:, : far % replicas]), axis=1), axis=1)
        order_DVX = order.reshape(launches, len(shared_V), far)
        place_V = np.cumsum(size_V > 1) - 1
        shared_X = np.flatnonzero(size_V[stream_X] > 1)
        chosen_DX[:, shared_X] = order_DVX[:, place_V[stream_X[shared_X]], shared_X]
    return chosen_DX
