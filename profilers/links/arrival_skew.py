"""Arrival skew: what ranks lose by waiting for each other at a collective, beyond its data.

A collective timed in isolation finds its ranks in step. In training each rank arrives when its own
work is done; equal work never takes equally long everywhere, caches are cold and threads asleep,
and all wait for the last rank. With w_r the seconds of rank r's work and T_r the time until it goes
on,

    lost = mean_r T_r - mean_r w_r - t0       t0: the same tiny collective in isolation

T_r starts when the rank went on after the collective before, so the loss of a rank that was woken
late counts once, in its own T_r or in that of the ranks that wait for it at the next collective. A
collective in isolation is sometimes late as well (profilers/stalls.py). So t0 is a mean: the loss
comes on top of what collectives take on average.

Where ranks take turns on too few cores, w_r is what the rounds last in a long run of all ranks, as
kernels are timed there: a rank that is done early leaves its core to others, and what they gain is
no loss. Such runs alternate with blocks of collectives, as the loss is the difference of long
stretches, and a machine that became slower between two of them would look like one.

Outside the measured works, losses grow with the root of the work, as a sum of many independent
disturbances does: the longer works of eight stored profiles of two ranks are predicted from the
shorter ones within a factor of 1.7, each of 1.3 to 2.3, and of 3.3 on the line through the last
two, each of 2.4 to 3.8 (geometric means; tests/profilers/links/test_arrival_skew.py). Works of some
ms, as steps have them, are measured first (profilers/schedule.py).

All ranks run the same number of rounds of a GEMM and a norm, as many as last `work_us` on the first
rank. One stored repeat is the mean over a block, since the loss is rare and large rather than
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

from profilers.benchmark import TableBenchmark
from profilers.links.groups import Shape, shapes
from profilers.links.team import ConnectedTeam
from profilers.records import Case, Measurement, MeasurementStatus
from profilers.steps.functional import rms_norm

WORK_US = (250, 1000, 4000, 16000, 64000)
BLOCK = 8
"""Collectives behind one stored repeat."""
RUNS = 4
"""Runs of work without collectives, at most, where ranks take turns; spread over the blocks."""
MIN_BLOCKS = 3
MAX_BLOCKS = 16
BASELINE_REPEATS = 40
SMALLEST_LOSS_S = 1e-6
"""Losses below the clock's resolution are stored as this, so that they have a logarithm."""

ROWS, WIDTH, SETS = 128, 256, 32
"""A round of some 0.1 ms on a core, on 6 MB."""

Round = Callable[[], object]
RankTimes = tuple[float, Sequence[float], Sequence[float]]
"""One rank's t0, and of each block the mean seconds of work before a collective, and of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalSkewBenchmark(TableBenchmark):
    """The table of arrival skew by the work between two collectives and the group."""

    operation: str = "rendezvous"
    weight: float = 1.5
    one_rank_note: str = "one rank waits for nobody"

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
            row = Measurement(
                case=case, status=MeasurementStatus.FAILED, error="no such group of ranks here"
            )
            return (row,) if team.rank == 0 else ()
        synchronised = _SynchronisedGroup(
            group=team.group(Shape(ranks=axes["ranks"], stride=axes["stride"])),
            device=torch.device(self.setting.device),
            team=team,
        )
        wanted_s, takes_turns = axes["work_us"] * 1e-6, self.setting.pace.shares_cores
        round_s = synchronised.round_s(at_least_s=self.setting.pace.repeat_s)
        rounds = team.decided(max(1, round(wanted_s / round_s)))
        isolated_s = synchronised.intervals_s(BASELINE_REPEATS, rounds=0)[1]
        blocks = num_blocks(budget_s, interval_s=(2.0 if takes_turns else 1.0) * wanted_s)
        work_s, total_s = [], []
        for number in range(blocks):
            if takes_turns and number % math.ceil(blocks / RUNS) == 0:
                run_s = max(self.setting.pace.repeat_s, BLOCK * wanted_s)
                round_s = synchronised.round_s(at_least_s=run_s)
            block = synchronised.intervals_s(BLOCK, rounds=rounds)
            work_s.append(rounds * round_s if takes_turns else block[0])
            total_s.append(block[1])
        by_rank = team.gathered((isolated_s, work_s, total_s))
        if team.rank != 0:
            return ()
        return (Measurement(case=case, times_s=positive(lost_seconds(by_rank))),)


def lost_seconds(by_rank: Sequence[RankTimes]) -> list[float]:
    """Return the seconds that a collective of each block lost, from the times of every rank."""
    baseline_s = statistics.fmean(isolated_s for isolated_s, _, _ in by_rank)
    works = zip(*(work_s for _, work_s, _ in by_rank), strict=True)
    totals = zip(*(total_s for _, _, total_s in by_rank), strict=True)
    return [
        statistics.fmean(total_s) - statistics.fmean(work_s) - baseline_s
        for work_s, total_s in zip(works, totals, strict=True)
    ]


def positive(lost_s: Sequence[float]) -> tuple[float, ...]:
    """Make losses of blocks positive that are differences of noise; their mean stays."""
    positive_s = [max(SMALLEST_LOSS_S, one_s) for one_s in lost_s]
    share = max(SMALLEST_LOSS_S, statistics.fmean(lost_s)) / statistics.fmean(positive_s)
    return tuple(max(SMALLEST_LOSS_S, share * one_s) for one_s in positive_s)


def num_blocks(budget_s: float, *, interval_s: float) -> int:
    """Return how many blocks of collectives the budget allows."""
    affordable = int(budget_s / (BLOCK * max(interval_s, 1e-4)))
    return min(MAX_BLOCKS, max(MIN_BLOCKS, affordable))


class _SynchronisedGroup:
    """One group of ranks, and their work between collectives."""

    def __init__(
        self, *, group: dist.ProcessGroup, device: torch.device, team: ConnectedTeam
    ) -> None:
        self._group = group
        self._device = device
        self._team = team
        self._round = _round(device)
        self._token = torch.zeros(1, device=device)

    def intervals_s(self, count: int, *, rounds: int) -> tuple[float, float]:
        """Work and synchronise so often; this rank's mean seconds of the work, and of both."""
        self._all_reduce()
        start = now = time.perf_counter()
        work_s = 0.0
        for _ in range(count):
            self._work(rounds)
            work_s += time.perf_counter() - now
            self._all_reduce()
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

    def _all_reduce(self) -> None:
        dist.all_reduce(self._token, group=self._group)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _round(device: torch.device) -> Round:
    """A GEMM and a norm on operands that take turns, so that a core's own cache is cold."""
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
