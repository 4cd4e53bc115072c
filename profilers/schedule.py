"""What to measure next within a table, and for how long; pure, so that rank 0 can decide for all.

Order: the cases somebody asked for, then the default grid from cheap to dear, but meetings from
those after some ms of work outwards, which steps have most of. What the queue needs
at least (a few runs of everything) is set aside; what is left beyond that is shared evenly as time
for more repeats, up to a limit where other sizes would tell more (profilers/second_pass.py). A case
that is expected to outlast all that is left is skipped and counted in the table's note.
Expectations come from the case of the same series that is nearest in price, scaled up by the price:
too much rather than too little, as fixed costs do not grow. A skipped case is measured after all
where other tables leave time for it.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from profilers.records import Case, Measurement, Status
from profilers.sampled_sizes import listed
from profilers.visits import Visit, Visits
from profilers.work import work

MAX_CASE_S = 1.0
"""Time for repeats of one case; a slow case takes its few repeats however long they are."""
RUNS_PER_CASE = 7.0
"""Warm-ups and the fewest repeats..."""
LONG_RUNS_PER_CASE = 5.0
"""...and of cases whose runs last `LONG_CASE_S`, directions together (profilers/timing.py)."""
VISIT_S = 0.01
"""What a visit takes at least: operands, decisions, repeats of a run that takes no time."""
LONG_CASE_S = 0.015
USUAL_WORK_US = 4000
"""Between two meetings of a step."""
FLOP_PER_BYTE = 16.0
"""Only to order cases by price: how many operations take as long as moving one byte."""

Key = tuple[str, tuple[tuple[str, int], ...], str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The next case and the seconds it may spend on repeats."""

    case: Case
    budget_s: float


@dataclass(slots=True, kw_only=True)
class Plan:
    """The course of one table; it learns from the rows it is given."""

    asked: Sequence[Case]
    grid: Sequence[Case]
    rows: list[Measurement]
    """What is known already; grows as the table is measured (`add`)."""
    grid_case_s: float = MAX_CASE_S
    """Time for repeats of one case of the grid, at most."""
    visits: Visits = field(init=False)
    """What they brought."""
    _queue: list[Case] = field(init=False)
    _skipped: list[Case] = field(init=False, default_factory=list)
    _asked: set[Key] = field(init=False)
    _begun: bool = field(init=False, default=False)
    _seen: int = field(init=False, default=0)
    _run_s: dict[tuple[str, str], dict[float, float]] = field(init=False, default_factory=dict)
    """(kind, dtype) to price to seconds of one run, all directions; of the dearest such case."""
    _case_s: dict[Key, float] = field(init=False, default_factory=dict)
    """Seconds of one run of each case, all directions."""

    def __post_init__(self) -> None:
        known = {key(row.case) for row in self.rows}
        asked = [case for case in distinct(self.asked) if key(case) not in known]
        self._asked = {key(case) for case in asked}
        known |= self._asked
        grid = [case for case in distinct(self.grid) if key(case) not in known]
        self._queue = sorted(asked, key=price) + sorted(grid, key=_turn)
        self.visits = Visits(rows=self.rows)

    @property
    def left(self) -> int:
        """Cases in the queue."""
        return len(self._queue)

    @property
    def skipped(self) -> int:
        """Cases that there was no time for."""
        return len(self._skipped)

    @property
    def slowness(self) -> float:
        """How many times longer than undisturbed visits took, in the mean; not in the rows."""
        return statistics.fmean(self.visits.slowness) if self.visits.slowness else 1.0

    @property
    def lacking_ratio(self) -> float:
        """Cases that were skipped for each one that is known."""
        self._learn()
        return self.skipped / max(len(self._case_s), 1)

    def next(self, *, left_s: float) -> Step | None:
        """Choose the next step with `left_s` seconds to go; None ends the table."""
        while self._queue:
            case = self._queue.pop(0)
            needed_s = self.expected_s(case)
            if self._begun and (left_s <= 0.0 or needed_s > left_s):
                self._skipped.append(case)
                continue
            self._begun = True
            set_aside_s = needed_s + sum(map(self.expected_s, self._queue))
            share_s = max(0.0, left_s - set_aside_s) / (len(self._queue) + 1)
            most_s = MAX_CASE_S if key(case) in self._asked else self.grid_case_s
            return Step(case=case, budget_s=min(most_s, share_s))
        return None

    def add(self, visit: Visit) -> None:
        """Take the rows of one visit to a case."""
        self.visits.add(visit)

    def late(self, *, left_s: float) -> Step | None:
        """Take up the cheapest case that was skipped and ends within `left_s` seconds, if any."""
        for case in sorted(self._skipped, key=price):
            if self.expected_s(case) <= left_s:
                self._skipped.remove(case)
                return Step(case=case, budget_s=min(self.grid_case_s, left_s))
        return None

    def expected_s(self, case: Case) -> float:
        """Seconds for the fewest runs of a case; 0 while nothing of its series is known."""
        self._learn()
        known = self._run_s.get((case.kind, case.dtype))
        if not known:
            return 0.0
        wanted = max(price(case), 1.0)
        near = min(known, key=lambda other: abs(math.log(max(other, 1.0) / wanted)))
        run_s = known[near] * max(1.0, wanted / max(near, 1.0))
        return run_s * (LONG_RUNS_PER_CASE if run_s >= LONG_CASE_S else RUNS_PER_CASE)

    def cost_s(self, case: Case) -> float:
        """Seconds that a short visit to a case takes, with what it takes beside its runs."""
        return VISIT_S + self.expected_s(case)

    def _learn(self) -> None:
        """Take note of the rows that arrived since; of a case's ranks the first one counts."""
        for row in self.rows[self._seen :]:
            if row.status is Status.OK and row.rank == 0:
                series = self._run_s.setdefault((row.case.kind, row.case.dtype), {})
                at = price(row.case)
                # A meeting stores what was lost at it; the work before it takes time as well.
                worked_s = row.case.axes.get("work_us", 0) * 1e-6
                taken_s = row.median_s * self.slowness + worked_s
                name = key(row.case)
                self._case_s[name] = self._case_s.get(name, 0.0) + taken_s
                series[at] = max(series.get(at, 0.0), self._case_s[name])
        self._seen = len(self.rows)


def _turn(case: Case) -> tuple[float, float]:
    """Order the cases of a grid."""
    worked_us = case.axes.get("work_us", USUAL_WORK_US)
    return abs(math.log(worked_us / USUAL_WORK_US)), price(case)


def price(case: Case) -> float:
    """Order cases by what they will cost, in bytes' worth of work; directions cost alike."""
    sizes = tuple(sorted(case.axes.items()))
    return _price(case.operation, case.kind, case.dtype, sizes)


@lru_cache(maxsize=65536)
def _price(operation: str, kind: str, dtype: str, sizes: tuple[tuple[str, int], ...]) -> float:
    axes = {axis: np.array([float(size)]) for axis, size in sizes}
    needed = work(operation, kind=kind, dtype=dtype, direction="forward", axes=axes)
    return float(needed.bytes[0] + needed.flop[0] / FLOP_PER_BYTE)


def key(case: Case) -> Key:
    """Identify a case up to its direction: both directions are measured together."""
    return case.kind, tuple(sorted(case.axes.items())), case.dtype, case.operation


def distinct(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Each case once, as it is listed: forward where it has directions."""
    found: dict[Key, Case] = {}
    for case in cases:
        found.setdefault(key(case), listed(case))
    return tuple(found.values())
