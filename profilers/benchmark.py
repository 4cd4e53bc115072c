"""The interface of a suite: one benchmark for each table that it fills.

A suite is a function from the `Setting` to its benchmarks. The coordinator decides which case comes
next and how long it may take; a benchmark lists its default cases and measures one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from profilers.clock import Clock
from profilers.pace import BY_ITSELF, Pace
from profilers.records import Case, Measurement
from profilers.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Device, types, ranks, clock and folder with which a suite measures."""

    device: str
    """Device name in torch: `cpu`, `cuda:0`."""
    dtypes: tuple[str, ...]
    """Types of the matrix operations; memory-bound ones add fp32."""
    team: Team
    clock: Clock
    directory: Path
    """Folder in which storage is measured."""
    pace: Pace = BY_ITSELF
    """Pace at which the ranks of a host repeat their runs."""


class Benchmark(Protocol):
    """Measures the cases of one table."""

    @property
    def operation(self) -> str:
        """The table's name, a key of `AXES`."""

    @property
    def weight(self) -> float:
        """Return the share of the time for this table, relative to the other tables' weights."""

    @property
    def refined_axes(self) -> tuple[str, ...]:
        """Axes along which sizes may be added between the measured ones."""

    def cases(self) -> Sequence[Case]:
        """The default grid; a case with both directions is listed once, as forward."""

    def note(self) -> str:
        """A remark for readers of the table; often empty."""

    def measure(self, case: Case, *, budget_s: float) -> tuple[Measurement, ...]:
        """Measure one case on this rank, together with the others; every rank calls it.

        A case that fails or does not fit in memory is a row too, with its status.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TableBenchmark:
    """Fields and remark that the benchmarks of all suites share."""

    setting: Setting
    operation: str
    weight: float = 1.0
    refined_axes: tuple[str, ...] = ()
    one_rank_note: str = ""
    """Remark where a single rank measures nothing."""

    def note(self) -> str:
        return self.one_rank_note if self.setting.team.world == 1 else ""


Suite = Callable[[Setting], Sequence[Benchmark]]
