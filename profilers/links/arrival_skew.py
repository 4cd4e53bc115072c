"""What ranks lose by waiting for each other: the time of a collective beyond its data.

A collective timed alone finds its ranks in step. In training each rank arrives when its own work is
done; the same work never takes equally long everywhere, caches are cold and threads asleep, and all
wait for the last. With w_r the seconds of rank r's work and T_r the time until it goes on,

    lost = mean_r T_r - mean_r w_r - t0       t0: the same tiny collective alone

T_r runs from where the rank went on after the meeting before. So what a rank that was woken late
loses counts once, in its own T_r or in that of those who wait for it at the next meeting. A
collective by itself is sometimes late as well (profilers/stalls.py). So t0 is a mean: what is lost
here comes on top of what collectives take on average.

Where ranks take turns on too few cores, w_r is what the rounds last in a long run of all ranks, as
kernels are timed there: a rank that is done early leaves its core to others, and what they gain is
no loss. Such runs and meetings come by turns, as the loss is the difference of long stretches, and
a machine that became slower between two of them would pass for one.

Outside the works that were measured, losses are as the root of the work, as a sum of many
disturbances is that know nothing of each other: the longer works of eight stored profiles of two
ranks are so foretold from the shorter ones within a factor of 1.7, each of 1.3 to 2.3, and of 3.3
on the line through the last two, each of 2.4 to 3.8 (geometric means;
tests/profilers/links/test_rendezvous.py). Works of some ms, as steps have them, are measured first
(profilers/schedule.py).

All ranks do the same number of rounds of a product and a norm, as many as last `work_us` on the
first rank. One stored repeat is the mean over a block, since the loss is rare and large rather than
steady. Model and name are ours; the effect is known as load imbalance or operating-system jitter
(Petrini et al., SC 2003).

Not covered: losses of point-to-point sends, which a pipeline's slack absorbs.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from profilers.benchmark import Setting
from profilers.links.groups import Shape, shapes
from profilers.links.team import ConnectedTeam
from profilers.records import Case, Measurement, Status
from profilers.steps.functional import rms_norm

WORK_US = (250, 1000, 4000, 16000, 64000)
BLOCK = 8
"""Meetings behind one stored repeat."""
RUNS = 4
"""Of work without meetings, at most, where ranks take turns; spread over the blocks."""
MIN_BLOCKS = 3
MAX_BLOCKS = 16
ALONE = 40
SMALLEST_LOSS_S = 1e-6
"""Losses below the clock's worth are stored as this, so that they have a logarithm."""

ROWS, WIDTH, SETS = 128, 256, 32
"""A round of some 0.1 ms on a core, on 6 MB."""

Round = Callable[[], object]
Seen = tuple[float, Sequence[float], Sequence[float]]
"""One rank's t0, and of each block the mean seconds of work before a meeting, and of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousBench:
    """The table of losses by the work between two meetings and the group that meets."""

    setting: Setting
    operation: str = "rendezvous"
    weight: float = 1.5
    refined_axes: tuple[str, ...] = ()

    def note(self) -> str:
        return "one rank waits for nobody" if self.setting.team.world == 1 else ""

    def cases(self) -> Sequence[Case]:
        world = self.setting.team.world
        return tuple(
            Case(
                operation="rendezvous",
                axes={
                    "work_us": work_us,
                    "ranks": shape.ranks,
                    "stride": shape.stride,
                    "world": world,
                },
            )
            for shape in shapes(world)
            for work_us in WORK_US
        )

    def measure(self, case: Case, *, budget_s: float) -> tuple[Measurement, ...]:
        team, axes = self.setting.team, case.axes
        if not isinstance(team, ConnectedTeam) or axes["world"] != team.world:
            row = Measurement(case=case, status=Status.FAILED, error="no such group of ranks here")
            return (row,) if team.rank == 0 else ()
        party = _Party(
            group=team.group(Shape(ranks=axes["ranks"], stride=axes["stride"])),
            device=torch.device(self.setting.device),
            team=team,
        )
        wanted_s, takes_turns = axes["work_us"] * 1e-6, self.setting.takes_turns
        round_s = party.round_s(at_least_s=self.setting.repeat_s)
        rounds = team.decided(max(1, round(wanted_s / round_s)))
        alone_s = party.meetings_s(ALONE, rounds=0)[1]
        blocks = num_blocks(budget_s, meeting_s=(2.0 if takes_turns else 1.0) * wanted_s)
        work_s, total_s = [], []
        for number in range(blocks):
            if takes_turns and number % math.ceil(blocks / RUNS) == 0:
                run_s = max(self.setting.repeat_s, BLOCK * wanted_s)
                round_s = party.round_s(at_least_s=run_s)
            block = party.meetings_s(BLOCK, rounds=rounds)
            work_s.append(rounds * round_s if takes_turns else block[0])
            total_s.append(block[1])
        seen = team.gathered((alone_s, work_s, total_s))
        if team.rank != 0:
            return ()
        return (Measurement(case=case, times_s=positive(lost_seconds(seen))),)


def lost_seconds(seen: Sequence[Seen]) -> list[float]:
    """What a meeting of each block lost, from what every rank saw."""
    baseline_s = statistics.fmean(alone_s for alone_s, _, _ in seen)
    works = zip(*(work_s for _, work_s, _ in seen), strict=True)
    totals = zip(*(total_s for _, _, total_s in seen), strict=True)
    return [
        statistics.fmean(total_s) - statistics.fmean(work_s) - baseline_s
        for work_s, total_s in zip(works, totals, strict=True)
    ]


def positive(lost_s: Sequence[float]) -> tuple[float, ...]:
    """Make losses of blocks positive that are differences of noise; their mean stays."""
    positive_s = [max(SMALLEST_LOSS_S, one_s) for one_s in lost_s]
    share = max(SMALLEST_LOSS_S, statistics.fmean(lost_s)) / statistics.fmean(positive_s)
    return tuple(max(SMALLEST_LOSS_S, share * one_s) for one_s in positive_s)


def num_blocks(budget_s: float, *, meeting_s: float) -> int:
    """How many blocks of meetings the budget allows."""
    affordable = int(budget_s / (BLOCK * max(meeting_s, 1e-4)))
    return min(MAX_BLOCKS, max(MIN_BLOCKS, affordable))


class _Party:
    """Those who meet, and their work."""

    def __init__(
        self, *, group: dist.ProcessGroup, device: torch.device, team: ConnectedTeam
    ) -> None:
        self._group = group
        self._device = device
        self._team = team
        self._round = _round(device)
        self._token = torch.zeros(1, device=device)

    def meetings_s(self, count: int, *, rounds: int) -> tuple[float, float]:
        """Work and meet so often; this rank's mean seconds of the work, and of both."""
        self._meet()
        start = now = time.perf_counter()
        work_s = 0.0
        for _ in range(count):
            self._work(rounds)
            work_s += time.perf_counter() - now
            self._meet()
            now = time.perf_counter()
        return work_s / count, (now - start) / count

    def round_s(self, *, at_least_s: float) -> float:
        """Seconds of a round where all ranks of the job work, in a run of so many seconds."""
        self._team.barrier()
        tries = 50
        self._work(tries)
        done, lasted_s, start = 0, 0.0, time.perf_counter()
        while done == 0 or lasted_s < at_least_s:
            self._work(tries)
            done, lasted_s = done + tries, time.perf_counter() - start
        self._team.barrier()
        return lasted_s / done

    def _work(self, rounds: int) -> None:
        for _ in range(rounds):
            self._round()
        self._synchronize()

    def _meet(self) -> None:
        dist.all_reduce(self._token, group=self._group)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _round(device: torch.device) -> Round:
    """A product and a norm on operands that take turns, so that a core's own cache is cold."""
    dtype = torch.bfloat16
    sets = itertools.cycle(
        [
            (
                torch.randn(ROWS, WIDTH, device=device).to(dtype),
                torch.randn(WIDTH, WIDTH, device=device).to(dtype),
                torch.ones(WIDTH, device=device, dtype=dtype),
            )
            for _ in range(SETS)
        ]
    )

    def run() -> object:
        x, weight, scale = next(sets)
        return rms_norm(x @ weight, scale, epsilon=1e-5)

    return run
