"""The benchmark of collectives: every kind over every group shape, timed by its slowest rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from profilers.benchmark import Benchmark, Setting, TableBenchmark
from profilers.clock import MAX_LOOPS, Clock
from profilers.devices import is_out_of_memory
from profilers.links.arrival_skew import ArrivalSkewBenchmark
from profilers.links.collectives import BUILDERS, Run, prepare
from profilers.links.every_rank import EveryRankBenchmark
from profilers.links.groups import Shape, shapes
from profilers.links.pairs import PairBenchmark
from profilers.links.team import ConnectedTeam
from profilers.pace import Pace
from profilers.records import Case, Measurement, MeasurementStatus
from profilers.team import Team
from profilers.timing import measure

CPU_BYTES = tuple(2**power for power in (10, 13, 16, 18, 20, 22, 24, 26))
CUDA_BYTES = tuple(2**power for power in (10, 14, 17, 20, 22, 24, 26, 28, 30))


def benchmarks(setting: Setting) -> tuple[Benchmark, ...]:
    """The tables of peers, links, collectives and arrival skew; empty for a single rank."""
    return (
        EveryRankBenchmark(setting=setting),
        PairBenchmark(setting=setting),
        CollectiveBenchmark(setting=setting),
        ArrivalSkewBenchmark(setting=setting),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveBenchmark(TableBenchmark):
    """The table of collectives."""

    operation: str = "collective"
    weight: float = 4.0
    refined_axes: tuple[str, ...] = ("bytes",)
    one_rank_note: str = "one rank has no links"

    def cases(self) -> Sequence[Case]:
        world = self.setting.team.world
        sizes = CUDA_BYTES if self.setting.device.startswith("cuda") else CPU_BYTES
        return tuple(
            Case(
                operation="collective",
                kind=kind,
                axes={
                    "bytes": size,
                    "ranks": shape.ranks,
                    "stride": shape.stride,
                    "world": world,
                },
            )
            for shape in shapes(world)
            for kind in kinds_of(shape, world=world)
            for size in sizes
        )

    def measure(self, case: Case, *, budget_s: float) -> tuple[Measurement, ...]:
        team = self.setting.team
        if not isinstance(team, ConnectedTeam):
            return (_ended(case, status=MeasurementStatus.FAILED, error="one rank has no links"),)
        if case.axes["world"] != team.world:
            error = f"a job of {team.world} ranks cannot measure one of {case.axes['world']}"
            return _once(team, _ended(case, status=MeasurementStatus.FAILED, error=error))
        try:
            run, error, status = self._prepared(case, team), "", MeasurementStatus.OK
        except (RuntimeError, MemoryError, ValueError) as problem:
            status = (
                MeasurementStatus.OUT_OF_MEMORY
                if is_out_of_memory(problem)
                else MeasurementStatus.FAILED
            )
            run, error = _nothing, " ".join(str(problem).split())[:200]
        # A collective needs every rank: if one cannot take part, none does.
        (anybody_failed,) = team.slowest_s([float(status is not MeasurementStatus.OK)])
        if anybody_failed:
            status = MeasurementStatus.FAILED if status is MeasurementStatus.OK else status
            return _once(team, _ended(case, status=status, error=error or "a peer failed"))
        clock = TeamClock(team=team, clock=self.setting.clock)
        # The clock synchronises the ranks; of the pace only the length of a repeat is left.
        pace = Pace(repeat_s=self.setting.pace.repeat_s)
        times_s = measure(run, clock=clock, budget_s=budget_s, pace=pace)
        return _once(team, Measurement(case=case, times_s=times_s))

    def _prepared(self, case: Case, team: ConnectedTeam) -> Run:
        shape = Shape(ranks=case.axes["ranks"], stride=case.axes["stride"])
        device, size = torch.device(self.setting.device), case.axes["bytes"]
        return prepare(case.kind, size=size, group=team.group(shape), device=device)


class TeamClock:
    """A clock on which every repeat takes as long as on the slowest rank.

    It reads the same on every rank, the time spent included, so decisions by it (how often to
    repeat, when to stop) are the same everywhere.
    """

    def __init__(self, *, team: Team, clock: Clock) -> None:
        self._team = team
        self._clock = clock
        self._spent_s = 0.0

    def now_s(self) -> float:
        return self._spent_s

    def mark(self) -> object:
        return self._clock.mark()

    def between_s(self, pairs: Sequence[tuple[object, object]]) -> tuple[float, ...]:
        slowest_s = self._team.slowest_s(self._clock.between_s(pairs))
        self._spent_s += sum(slowest_s)
        return slowest_s

    def hold(self, seconds: float) -> None:
        """Nothing: every repeat begins when the slowest rank has queued it."""

    @property
    def most_queued(self) -> int:
        return MAX_LOOPS

    def page_faults(self) -> int:
        """Always 0: ranks that left out different repeats would not repeat equally often."""
        return 0


def kinds_of(shape: Shape, *, world: int) -> tuple[str, ...]:
    """Kinds worth measuring: sending is the same over any ring, so only over the smallest."""
    smallest = min(candidate.ranks for candidate in shapes(world))
    return tuple(kind for kind in BUILDERS if kind != "send_recv" or shape.ranks == smallest)


def _once(team: Team, row: Measurement) -> tuple[Measurement, ...]:
    return (row,) if team.rank == 0 else ()


def _ended(case: Case, *, status: MeasurementStatus, error: str) -> Measurement:
    return Measurement(case=case, status=status, error=error)


def _nothing() -> None:
    """Stands for the run of a rank that could not prepare; never called."""
