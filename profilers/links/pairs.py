"""The matrix of links: messages between every two nodes, and every two ranks of a node.

A round holds disjoint pairs that send at the same time, so that N nodes cost N - 1 rounds
(profilers/links/rounds.py). Of every pair both directions are timed apart, since a bad cable, port
or limit often slows one, and in turn, so that a neighbour who is busy for a moment slows both. The
first message after a turn is not timed: who receives has not said yet that it is ready, and gloo
sends nothing before it has, which costs a latency more each way:

    one_way     the sender sends `bytes`, the receiver answers with one element once it has all:
                t = latency both ways + bytes / bandwidth
    round_trip  a message of 8 bytes there and back, timed by the sender: twice the latency

`lanes` pairs of ranks of two nodes send side by side: 1 is the first rank of each node alone, more
say whether they share one card. Rows carry the rank of the sender.

Not covered: pairs of several nodes through one switch on purpose (rounds load a fabric with half
of its nodes at once, which is what an all-to-all does).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from profilers.benchmark import Setting
from profilers.links.rounds import Pair, rounds
from profilers.links.team import ConnectedTeam
from profilers.records import Case, Measurement, Status
from profilers.timing import HostClock

ELEMENT_BYTES: Final = 4
ROUND_TRIP_BYTES: Final = 8
CPU_BYTES: Final = (2**16, 2**20, 2**22)
CUDA_BYTES: Final = (2**16, 2**20, 2**24, 2**28)
MOST_REPEATS: Final = 24
MOST_ROUND_TRIPS: Final = 96
"""Of which the shortest counts: beside busy hosts few of them are undisturbed."""
WARM_UPS: Final = 2
TURN_MESSAGES: Final = 2
"""Timed messages of one direction before the other has its turn."""
TURNS_AT_ONCE: Final = 3
"""Of both directions, at least; then the ranks agree on whether there is time for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Pairs of ranks that send at the same time, from the first of each to the second."""

    pairs: tuple[Pair, ...]
    lanes: int

    def reversed(self) -> "Meeting":
        """The same pairs in the other direction."""
        return Meeting(pairs=tuple((b, a) for a, b in self.pairs), lanes=self.lanes)


def meetings(*, nodes: int, ranks_per_node: int) -> tuple[Meeting, ...]:
    """List every round in one direction: between nodes, all lanes of nodes, then inside nodes."""
    first = range(0, nodes * ranks_per_node, ranks_per_node)
    found = []
    for lanes in sorted({1, ranks_per_node}):
        for met in rounds(nodes):
            pairs = tuple(
                (first[a] + lane, first[b] + lane) for a, b in met for lane in range(lanes)
            )
            found.append(Meeting(pairs=pairs, lanes=lanes))
    for met in rounds(ranks_per_node):
        pairs = tuple((start + a, start + b) for start in first for a, b in met)
        found.append(Meeting(pairs=pairs, lanes=1))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBench:
    """The table of links."""

    setting: Setting
    operation: str = "link"
    weight: float = 3.0
    refined_axes: tuple[str, ...] = ()

    def note(self) -> str:
        return "one rank has no links" if self.setting.team.world == 1 else ""

    def cases(self) -> Sequence[Case]:
        """One case a round, named after its first pair; measuring it fills all, both ways."""
        return tuple(
            _case(kind, size, meeting.pairs[0], lanes=meeting.lanes, world=self.setting.team.world)
            for meeting in self._meetings()
            for kind, size in self._messages(meeting)
        )

    def _messages(self, meeting: Meeting) -> Iterator[tuple[str, int]]:
        if meeting.lanes == 1:
            yield "round_trip", ROUND_TRIP_BYTES
        sizes = CUDA_BYTES if self.setting.device.startswith("cuda") else CPU_BYTES
        # Side by side only what is limited by bandwidth is of interest.
        for size in sizes if meeting.lanes == 1 else sizes[-1:]:
            yield "one_way", size

    def _meetings(self) -> tuple[Meeting, ...]:
        team = self.setting.team
        return meetings(nodes=team.world // team.local_world, ranks_per_node=team.local_world)

    def measure(self, case: Case, *, budget_s: float) -> tuple[Measurement, ...]:
        team, axes = self.setting.team, case.axes
        pair = axes["sender"], axes["receiver"]
        meeting = next(
            (
                each
                for one in self._meetings()
                for each in (one, one.reversed())
                if pair in each.pairs and each.lanes == axes["lanes"]
            ),
            None,
        )
        if not isinstance(team, ConnectedTeam) or axes["world"] != team.world or meeting is None:
            row = Measurement(case=case, status=Status.FAILED, error="no such pair of ranks here")
            return (row,) if team.rank == 0 else ()
        mine = next((each for each in meeting.pairs if team.rank in each), None)
        back = mine[::-1] if mine is not None else None
        there_s, back_s = _timed(
            self._message(case, mine),
            self._message(case, back),
            team,
            budget_s=budget_s,
            most=MOST_ROUND_TRIPS if case.kind == "round_trip" else MOST_REPEATS,
        )
        if mine is None:
            return ()
        # Whoever sends has the time of it.
        sent, times_s = (mine, there_s) if team.rank == mine[0] else (mine[::-1], back_s)
        own = _case(case.kind, axes["bytes"], sent, lanes=axes["lanes"], world=team.world)
        return (Measurement(case=own, rank=team.rank, times_s=times_s),)

    def _message(self, case: Case, pair: Pair | None) -> "_Message":
        return _Message(
            pair=pair,
            rank=self.setting.team.rank,
            elements=max(1, case.axes["bytes"] // ELEMENT_BYTES),
            answers_in_full=case.kind == "round_trip",
            setting=self.setting,
        )


class _Message:
    """One rank's part in a message and its answer; a rank outside every pair has none."""

    def __init__(
        self,
        *,
        pair: Pair | None,
        rank: int,
        elements: int,
        answers_in_full: bool,
        setting: Setting,
    ) -> None:
        device = torch.device(setting.device)
        answer = elements if answers_in_full else 1
        self._sent = torch.ones(elements, device=device)
        self._answer = torch.ones(answer, device=device)
        self._is_cuda = device.type == "cuda"
        self.run: Callable[[], None] = _nothing
        if pair is not None:
            is_sender = rank == pair[0]
            self.run = self._ask if is_sender else self._reply
            self._peer = pair[1] if is_sender else pair[0]

    def _ask(self) -> None:
        dist.send(self._sent, self._peer)
        dist.recv(self._answer, self._peer)
        self._wait()

    def _reply(self) -> None:
        dist.recv(self._sent, self._peer)
        dist.send(self._answer, self._peer)
        self._wait()

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._sent.device)


def _timed(
    there: _Message, back: _Message, team: ConnectedTeam, *, budget_s: float, most: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Send there and back in turn, until the slowest pair of the round has spent the budget."""
    clock = HostClock()
    for _ in range(WARM_UPS):
        there.run()
        back.run()
    there_s, back_s = list[float](), list[float]()
    team.barrier()
    start_s, spent_s = clock.now_s(), 0.0
    while not there_s or (spent_s < budget_s and len(there_s) < most):
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
    """What a rank outside every pair of the round does."""
