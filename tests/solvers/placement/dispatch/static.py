"""The engine's own tables of static dispatch, an oracle of `launches.py`.

Every rank works the assignment of replicas to far ranks out by itself, from a stream of the same
seed that has advanced by the experts which are far from *this* rank only, layer by layer and expert
by expert, and uses its own entry of it. Ranks whose streams agree use entries of one assignment.

Source:  SGLang 0.5.23, `--ep-dispatch-algorithm static` with an all-to-all backend
         (sglang/srt/eplb/expert_location.py; the seed is 42). With that seed and all decoder
         layers in the case the loads are the engine's own (tests/tuner/engines/placement).
Method:  ranks of one stream are advanced together and separated where they first differ.
Valid:   sources hold the same shares of an expert's tokens in every pass.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.launches import FAR, nearest_H
from solvers.placement.ranks import Floats, Ints, Ranks

ENGINE_SEED: Final = 42


def rank_loads(case: DispatchCase) -> Floats:
    """Return token copies of each rank, `[P][L][G]`."""
    return np.asarray(np.einsum("ple,leg->plg", case.load_PLE, split(case)))


def split(case: DispatchCase) -> Floats:
    """Return the share of each expert's token copies that each rank draws, `[L][E][G]`."""
    split_LEG = (case.copies_LEG > 0).astype(np.float64)
    for layer, expert, target_H in targets(case):
        users_G = np.bincount(target_H, minlength=case.ranks.num_ranks)
        split_LEG[layer, expert] = users_G / case.ranks.num_ranks
    return split_LEG


def targets(case: DispatchCase) -> Iterator[tuple[int, int, Ints]]:
    """Yield, for each replicated expert, the rank whose replica each source rank uses."""
    streams = Streams(case.seed, num_ranks=case.ranks.num_ranks)
    for layer, expert_S in enumerate(case.placement.expert_LS):
        for expert in np.flatnonzero(np.bincount(expert_S) > 1).tolist():
            host_R = case.ranks.rank_S[np.flatnonzero(expert_S == expert)]
            yield layer, expert, host_R[_replica_H(host_R, ranks=case.ranks, streams=streams)]


def _replica_H(host_R: Ints, *, ranks: Ranks, streams: "Streams") -> Ints:
    replica_H = nearest_H(host_R, ranks=ranks)
    far = np.flatnonzero(replica_H == FAR).tolist()
    if far:
        entry_of = {source: entry for entry, source in enumerate(far)}
        for sources, stream in streams.of(far):
            replicas = _assigned(len(host_R), sources=len(far), stream=stream)
            for source in sources:
                replica_H[source] = replicas[entry_of[source]]
    return replica_H


def _assigned(replicas: int, *, sources: int, stream: random.Random) -> Sequence[int]:
    each, left = divmod(sources, replicas)
    order = list(range(replicas)) * each
    order += stream.sample(range(replicas), k=left)
    stream.shuffle(order)
    return order


class Streams:
    """A stream of each rank; ranks that have drawn for the same experts share one."""

    def __init__(self, seed: int, *, num_ranks: int) -> None:
        self._streams = [random.Random(seed)]
        self._stream_of = [0] * num_ranks
        self._members = [set(range(num_ranks))]

    def of(self, drawing: Sequence[int]) -> Iterator[tuple[list[int], random.Random]]:
        """Yield the ranks that draw now by the stream that they share, apart from the others."""
        by_stream: dict[int, list[int]] = {}
        for rank in drawing:
            by_stream.setdefault(self._stream_of[rank], []).append(rank)
        for number, sharing in by_stream.items():
            if len(sharing) < len(self._members[number]):
                number = self._part(number, sharing)
            yield sharing, self._streams[number]

    def _part(self, number: int, leaving: Sequence[int]) -> int:
        copy = random.Random()
        copy.setstate(self._streams[number].getstate())
        self._members[number].difference_update(leaving)
        self._streams.append(copy)
        self._members.append(set(leaving))
        for rank in leaving:
            self._stream_of[rank] = len(self._streams) - 1
        return len(self._streams) - 1
