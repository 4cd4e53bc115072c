"""What ranks lose by waiting for each other: the time of a collective beyond its data.

A collective timed alone finds its ranks in step. In training each rank arrives when its own work is
done; the same work never takes equally long everywhere, caches are cold and threads asleep, and all
wait for the last. Per repeat, with w_r the seconds of rank r's work and T the time until all met,

    lost = max_r T_r - mean_r w_r - t0        t0: the same tiny collective alone

A collective by itself is sometimes late as well (profilers/stalls.py). So t0 is a mean: what is
lost here comes on top of what collectives take on average.

Where ranks take turns on too few cores, w_r is what the rounds last in a long run of all ranks, as
kernels are timed there: a rank that is done early leaves its core to others, and what they gain is
no loss.

All ranks do the same number of rounds of a product and a norm, as many as last `work_us` on the
first rank. One stored repeat is the mean over a block, since the loss is rare and large rather than
steady. Model and name are ours; the effect is known as load imbalance or operating-system jitter
(Petrini et al., SC 2003).

Not covered: losses of point-to-point sends, which a pipeline's slack absorbs.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from profilers.bench import Setting
from profilers.links.groups import Shape, shapes
from profilers.links.team import ConnectedTeam
from profilers.records import Case, Measurement, Status
from profilers.steps.functional import rms_norm

WORK_US = (250, 1000, 4000, 16000, 64000)
BLOCK = 8
"""Meetings behind one stored repeat."""
TURNS = 5
"""Times as long as a repeat of a kernel, for the round that stands in for work."""
MIN_BLOCKS = 3
MAX_BLOCKS = 16
ALONE = 40
SMALLEST_LOSS_S = 1e-6
"""Losses below the clock's worth are stored as this, so that they have a logarithm."""

ROWS, WIDTH, SETS = 256, 512, 8

Round = Callable[[], object]
Seen = tuple[float, list[float], list[float]]
"""One rank's t0, its seconds of work before each meeting, and both together."""


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
        device = torch.device(self.setting.device)
        group = team.group(Shape(ranks=axes["ranks"], stride=axes["stride"]))
        one_round = _round(device)
        team.barrier()
        round_s = _round_s(one_round, device, at_least_s=TURNS * self.setting.repeat_s)
        rounds = team.decided(max(1, round(axes["work_us"] * 1e-6 / round_s)))
        meetings = BLOCK * num_blocks(budget_s, meeting_s=axes["work_us"] * 1e-6)
        alone_s = statistics.fmean(_meet(ALONE, 0, one_round, group, device)[1])
        work_s, total_s = _meet(meetings, rounds, one_round, group, device)
        if self.setting.takes_turns:
            work_s = [rounds * round_s] * meetings
        seen = team.gathered((alone_s, work_s, total_s))
        if team.rank != 0:
            return ()
        return (Measurement(case=case, times_s=block_means(lost_seconds(seen))),)


def lost_seconds(seen: Sequence[Seen]) -> list[float]:
    """What each meeting lost, from what every rank saw."""
    baseline_s = max(alone_s for alone_s, _, _ in seen)
    works = zip(*(work_s for _, work_s, _ in seen), strict=True)
    totals = zip(*(total_s for _, _, total_s in seen), strict=True)
    return [
        max(total_s) - statistics.fmean(work_s) - baseline_s
        for work_s, total_s in zip(works, totals, strict=True)
    ]


def block_means(lost_s: Sequence[float]) -> tuple[float, ...]:
    """Mean loss of every block of meetings, positive; their mean is that of all meetings."""
    starts = range(0, len(lost_s), BLOCK)
    means_s = [statistics.fmean(lost_s[start : start + BLOCK]) for start in starts]
    positive_s = [max(SMALLEST_LOSS_S, mean_s) for mean_s in means_s]
    share = max(SMALLEST_LOSS_S, statistics.fmean(means_s)) / statistics.fmean(positive_s)
    return tuple(max(SMALLEST_LOSS_S, share * mean_s) for mean_s in positive_s)


def num_blocks(budget_s: float, *, meeting_s: float) -> int:
    """How many blocks of meetings the budget allows."""
    affordable = int(budget_s / (BLOCK * max(meeting_s, 1e-4)))
    return min(MAX_BLOCKS, max(MIN_BLOCKS, affordable))


def _meet(
    meetings: int, rounds: int, one_round: Round, group: dist.ProcessGroup, device: torch.device
) -> tuple[list[float], list[float]]:
    """Work and meet again and again; seconds of the work, and of both, on this rank."""
    token = torch.zeros(1, device=device)
    dist.all_reduce(token, group=group)
    work_s, total_s = [], []
    for _ in range(meetings):
        start = time.perf_counter()
        for _ in range(rounds):
            one_round()
        _synchronize(device)
        arrived = time.perf_counter()
        dist.all_reduce(token, group=group)
        _synchronize(device)
        work_s.append(arrived - start)
        total_s.append(time.perf_counter() - start)
    return work_s, total_s


def _round_s(one_round: Round, device: torch.device, *, at_least_s: float) -> float:
    """Seconds of a round in a run of at least 50 and of so many seconds."""
    tries = 50
    for _ in range(tries):
        one_round()
    _synchronize(device)
    done, lasted_s, start = 0, 0.0, time.perf_counter()
    while done == 0 or lasted_s < at_least_s:
        for _ in range(tries):
            one_round()
        _synchronize(device)
        done, lasted_s = done + tries, time.perf_counter() - start
    return lasted_s / done


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


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
