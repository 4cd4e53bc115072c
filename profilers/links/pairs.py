"""The matrix of links: messages between every two nodes, and every two ranks of a node.

A round holds disjoint pairs that send at the same time, so N nodes cost N - 1 rounds
(profilers/links/rounds.py). Both directions of every pair are timed separately, since a bad cable,
port or limit often slows one, and alternately, so that a neighbour that is busy for a moment slows
both. The first message after a change of direction is not timed: the receiver has not posted its
receive yet, and gloo sends nothing before that, which costs one more latency each way:

    one_way     the sender sends `bytes`, the receiver replies with one element once it has all:
                t = latency both ways + bytes / bandwidth
    round_trip  a message of 8 bytes there and back, timed by the sender: twice the latency

`lanes` pairs of ranks of two nodes send side by side: with 1, only the first rank of each node
sends; more show whether they share one NIC. Rows carry the rank of the sender.

Not covered: pairs of several nodes through one switch on purpose (rounds load a fabric with half
of its nodes at once, which is what an all-to-all does).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from profilers.benchmark import Setting, TableBenchmark
from profilers.clock import HostClock
from profilers.links.rounds import Pair, rounds
from profilers.links.team import ConnectedTeam
from profilers.records import Case, Measurement, MeasurementStatus

ELEMENT_BYTES: Final = 4
ROUND_TRIP_BYTES: Final = 8
CPU_BYTES: Final = (2**16, 2**20, 2**22)
CUDA_BYTES: Final = (2**16, 2**20, 2**24, 2**28)
MOST_REPEATS: Final = 24
MOST_ROUND_TRIPS: Final = 96
"""Most round trips of one pair; the shortest counts, as on busy hosts few are undisturbed."""
WARM_UPS: Final = 2
TURN_MESSAGES: Final = 2
"""Timed messages of one direction before the other direction follows."""
TURNS_AT_ONCE: Final = 3
"""Turns of both directions, at least, before the ranks agree on whether there is time for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Pairs of ranks that send at the same time, from the first of each to the second."""

    pairs: tuple[Pair, ...]
    lanes: int

    def reversed(self) -> "Round":
        """Return the same pairs in the other direction."""
        return Round(pairs=tuple((b, a) for a, b in self.pairs), lanes=self.lanes)


def link_rounds(*, nodes: int, ranks_per_node: int) -> tuple[Round, ...]:
    """List every round in one direction: between nodes, all lanes of nodes, then inside nodes."""
    first = range(0, nodes * ranks_per_node, ranks_per_node)
    schedule = []
    for lanes in sorted({1, ranks_per_node}):
        for matches in rounds(nodes):
            pairs = tuple(
                (first[a] + lane, first[b] + lane) for a, b in matches for lane in range(lanes)
            )
            schedule.append(Round(pairs=pairs, lanes=lanes))
    for matches in rounds(ranks_per_node):
        pairs = tuple((start + a, start + b) for start in first for a, b in matches)
        schedule.append(Round(pairs=pairs, lanes=1))
    return tuple(schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBenchmark(TableBenchmark):
    """The table of links."""

    operation: str = "link"
    weight: float = 3.0
    one_rank_note: str = "one rank has no links"

    def cases(self) -> Sequence[Case]:
        """One case a round, named after its first pair; it times all pairs in both directions."""
        return tuple(
            _case(
                kind,
                size,
                link_round.pairs[0],
                lanes=link_round.lanes,
                world=self.setting.team.world,
            )
            for link_round in self._rounds()
            for kind, size in self._messages(link_round)
        )

    def _messages(self, link_round: Round) -> Iterator[tuple[str, int]]:
        if link_round.lanes == 1:
            yield "round_trip", ROUND_TRIP_BYTES
        sizes = CUDA_BYTES if self.setting.device.startswith("cuda") else CPU_BYTES
        # Side by side only messages limited by bandwidth are of interest.
        for size in sizes if link_round.lanes == 1 else sizes[-1:]:
            yield "one_way", size

    def _rounds(self) -> tuple[Round, ...]:
        team = self.setting.team
        return link_rounds(nodes=team.world // team.local_world, ranks_per_node=team.local_world)

    def measure(self, case: Case, *, budget_s: float) -> tuple[Measurement, ...]:
        team, axes = self.setting.team, case.axes
        pair = axes["sender"], axes["receiver"]
        link_round = next(
            (
                candidate
                for forward in self._rounds()
                for candidate in (forward, forward.reversed())
                if pair in candidate.pairs and candidate.lanes == axes["lanes"]
            ),
            None,
        )
        if not isinstance(team, ConnectedTeam) or axes["world"] != team.world or link_round is None:
            row = Measurement(
                case=case, status=MeasurementStatus.FAILED, error="no such pair of ranks here"
            )
            return (row,) if team.rank == 0 else ()
        mine = next((link for link in link_round.pairs if team.rank in link), None)
        back = mine[::-1] if mine is not None else None
        there_s, back_s = _timed(
            self._message(case, mine),
            self._message(case, back),
            team,
            budget_s=budget_s,
            max_repeats=MOST_ROUND_TRIPS if case.kind == "round_trip" else MOST_REPEATS,
        )
        if mine is None:
            return ()
        # The sender has timed it.
        sent, times_s = (mine, there_s) if team.rank == mine[0] else (mine[::-1], back_s)
        measured_case = _case(case.kind, axes["bytes"], sent, lanes=axes["lanes"], world=team.world)
        return (Measurement(case=measured_case, rank=team.rank, times_s=times_s),)

    def _message(self, case: Case, pair: Pair | None) -> "_Message":
        return _Message(
            pair=pair,
            rank=self.setting.team.rank,
            elements=max(1, case.axes["bytes"] // ELEMENT_BYTES),
            replies_in_full=case.kind == "round_trip",
            setting=self.setting,
        )


class _Message:
    """One rank's part in a message and its reply; a rank outside every pair has none."""

    def __init__(
        self,
        *,
        pair: Pair | None,
        rank: int,
        elements: int,
        replies_in_full: bool,
        setting: Setting,
    ) -> None:
        device = torch.device(setting.device)
        reply_elements = elements if replies_in_full else 1
        self._sent = torch.ones(elements, device=device)
        self._reply_buffer = torch.ones(reply_elements, device=device)
        self._is_cuda = device.type == "cuda"
        self.run: Callable[[], None] = _nothing
        if pair is not None:
            is_sender = rank == pair[0]
            self.run = self._send if is_sender else self._reply
            self._peer = pair[1] if is_sender else pair[0]

    def _send(self) -> None:
        dist.send(self._sent, self._peer)
        dist.recv(self._reply_buffer, self._peer)
        self._wait()

    def _reply(self) -> None:
        dist.recv(self._sent, self._peer)
        dist.send(self._reply_buffer, self._peer)
        self._wait()

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._sent.device)


def _timed(
    there: _Message, back: _Message, team: ConnectedTeam, *, budget_s: float, max_repeats: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Send in both directions alternately until the slowest pair has spent the budget."""
    clock = HostClock()
    for _ in range(WARM_UPS):
        there.run()
        back.run()
    there_s, back_s = list[float](), list[float]()
    team.barrier()
    start_s, spent_s = clock.now_s(), 0.0
    while not there_s or (spent_s < budget_s and len(there_s) < max_repeats):
        for _ in range(TURNS_AT_ONCE):
            for message, times_s in ((there, there_s), (back, back_s)):
                message.run()
                times_s += [_once(message, clock) for _ in range(TURN_MESSAGES)]
        (spent_s,) = team.slowest_s([clock.now_s() - start_s])
    return tuple(there_s), tuple(back_s)


def _once(message: _Message, clock: HostClock) -> float:
    start_s = clock.now_s()
    message.run()
    return clock.now_s() - start_s


def _case(kind: str, size: int, pair: Pair, *, lanes: int, world: int) -> Case:
    axes = {
        "bytes": size,
        "sender": pair[0],
        "receiver": pair[1],
        "lanes": lanes,
        "world": world,
    }
    return Case(operation="link", kind=kind, axes=axes)


def _nothing() -> None:
    """Do nothing, as ranks outside every pair of the round."""
