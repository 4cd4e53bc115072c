"""What a suite offers to the session: benches, one for each table that it fills.

A suite is a function from the `Setting` to its benches. The session decides which case comes next
and how long it may take; a bench only knows how to list its default cases and to measure one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from profilers.records import Case, Measurement
from profilers.sentinel import Sentinel
from profilers.team import Team
from profilers.timing import TURNS_S, Agreed, Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how a suite measures."""

    device: str
    """As torch names it: `cpu`, `cuda:0`."""
    dtypes: tuple[str, ...]
    """Types of the matrix operations; memory-bound ones add fp32."""
    team: Team
    clock: Clock
    directory: Path
    """Where storage is measured."""
    takes_turns: bool = False
    """A host has more ranks than cores, so that they run in turns."""
    sentinel: Sentinel | None = None
    """Who sees how fast the machine is, where a rank is alone on a processor."""

    @property
    def repeat_s(self) -> float:
        """How long a repeat has to last at least."""
        return TURNS_S if self.takes_turns else 0.0

    @property
    def agreed(self) -> Agreed:
        """How ranks keep in step while they time a kernel; each by itself where they do not.

        Accelerators share no memory. Ranks that share cores would find them taken all the time, as
        they are not in a step, where some wait for messages while others compute.
        """
        has_own_core = self.device == "cpu" and not self.takes_turns
        return self.team.slowest_s if has_own_core and self.team.world > 1 else tuple


class Bench(Protocol):
    """One table in the making."""

    @property
    def operation(self) -> str:
        """The table's name, a key of `AXES`."""

    @property
    def weight(self) -> float:
        """Its share of the time, relative to the other tables'."""

    @property
    def refined_axes(self) -> tuple[str, ...]:
        """Axes along which points may be added between the measured ones."""

    def cases(self) -> Sequence[Case]:
        """The default grid; directions that come together are listed once, as forward."""

    def note(self) -> str:
        """What a reader of the table must know; often nothing."""

    def measure(self, case: Case, *, budget_s: float) -> tuple[Measurement, ...]:
        """Measure one case on this rank, together with the others; called by every rank.

        A case that fails or does not fit is a row too, with its status.
        """


Suite = Callable[[Setting], Sequence[Bench]]
