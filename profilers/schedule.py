"""Case of a table to measure next, and its time; pure, so that rank 0 decides for all.

Order: the cases that the spec requests, then the default grid from cheap to expensive; arrival skew
starts at a few ms of work, which most steps have, and goes outwards. What the queue needs at least
(a few runs of everything) is reserved; the rest of the time is shared evenly as time for more
repeats, up to a limit beyond which other sizes add more (profilers/second_pass.py). A case that is
expected to outlast the time left is skipped and counted in the table's note. Its expected time is
that of the case of its series with the nearest cost estimate, scaled by the estimate: too much
rather than too little, as fixed costs do not grow. For `AS_A_WHOLE` it is scaled from the whole
case, as most of that is not in its rows. A skipped case is measured after all if other tables leave
time for it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from profilers.records import Case, Measurement, MeasurementStatus
from profilers.sampled_sizes import listed
from profilers.work import work

MAX_CASE_S = 1.0
"""Time for repeats of one case; a slow case takes its few repeats however long they are."""
RUNS_PER_CASE = 7.0
"""Warm-ups and the least repeats..."""
LONG_RUNS_PER_CASE = 5.0
"""...and of cases whose runs last `LONG_CASE_S`, directions together (profilers/timing.py)."""
CASE_OVERHEAD_S = 0.01
"""Seconds that a case takes beside its runs, for operands and decisions."""
LONG_CASE_S = 0.015
AS_A_WHOLE = frozenset({"checkpoint_load"})
"""Operations that take their few runs whatever the budget, and prepare longer than they run."""
TYPICAL_WORK_US = 4000
"""Work between two collectives of a typical step, in microseconds."""
FLOP_PER_BYTE = 16.0
"""Operations that take as long as moving one byte; only to order cases by cost."""

Key = tuple[str, tuple[tuple[str, int], ...], str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The next case and the seconds it may spend on repeats."""

    case: Case
    budget_s: float


@dataclass(slots=True, kw_only=True)
class TableSchedule:
    """The order of one table's cases; expected times come from its rows so far."""

    requested: Sequence[Case]
    grid: Sequence[Case]
    rows: list[Measurement]
    """Known rows; more are added as the table is measured (`add`)."""
    grid_case_s: float = MAX_CASE_S
    """Time for repeats of one case of the grid, at most."""
    is_changed: bool = field(init=False, default=False)
    """Whether rows were added."""
    _queue: list[Case] = field(init=False)
    _skipped: list[Case] = field(init=False, default_factory=list)
    _requested: set[Key] = field(init=False)
    _has_begun: bool = field(init=False, default=False)
    _seen: int = field(init=False, default=0)
    _run_s: dict[tuple[str, str], dict[float, float]] = field(init=False, default_factory=dict)
    """(kind, dtype) to cost estimate to seconds of one run, all directions; of the most expensive
    such case."""
    _case_s: dict[Key, float] = field(init=False, default_factory=dict)
    """Seconds of one run of each case, all directions."""
    _whole_s: dict[float, float] = field(init=False, default_factory=dict)
    """Cost estimate to seconds of the cases of `AS_A_WHOLE`."""

    def __post_init__(self) -> None:
        known = {key(row.case) for row in self.rows}
        requested = [case for case in distinct(self.requested) if key(case) not in known]
        self._requested = {key(case) for case in requested}
        known |= self._requested
        grid = [case for case in distinct(self.grid) if key(case) not in known]
        self._queue = sorted(requested, key=estimated_cost) + sorted(grid, key=_grid_order)

    @property
    def remaining(self) -> int:
        """Cases in the queue."""
        return len(self._queue)

    @property
    def skipped(self) -> int:
        """Cases that there was no time for."""
        return len(self._skipped)

    @property
    def skipped_ratio(self) -> float:
        """Skipped cases for each measured one."""
        self._update_run_times()
        return self.skipped / max(len(self._case_s), 1)

    def next(self, *, left_s: float) -> Step | None:
        """Choose the next step with `left_s` seconds to go; None ends the table."""
        while self._queue:
            case = self._queue.pop(0)
            needed_s = self.expected_s(case)
            if self._has_begun and (left_s <= 0.0 or needed_s > left_s):
                self._skipped.append(case)
                continue
            self._has_begun = True
            reserved_s = needed_s + sum(map(self.expected_s, self._queue))
            share_s = max(0.0, left_s - reserved_s) / (len(self._queue) + 1)
            most_s = MAX_CASE_S if key(case) in self._requested else self.grid_case_s
            return Step(case=case, budget_s=min(most_s, share_s))
        return None

    def add(self, rows: Sequence[Measurement], *, spent_s: float) -> None:
        """Add the rows of one case, of all ranks, which took `spent_s` seconds as a whole."""
        self.rows += rows
        self.is_changed = True
        for row in rows:
            if row.status is MeasurementStatus.OK and row.case.operation in AS_A_WHOLE:
                self._whole_s[estimated_cost(row.case)] = spent_s

    def next_skipped(self, *, left_s: float) -> Step | None:
        """Choose the cheapest skipped case that ends within `left_s` seconds, if any."""
        for case in sorted(self._skipped, key=estimated_cost):
            if self.expected_s(case) <= left_s:
                self._skipped.remove(case)
                return Step(case=case, budget_s=min(self.grid_case_s, left_s))
        return None

    def expected_s(self, case: Case) -> float:
        """Seconds for the fewest runs of a case; 0 while nothing of its series is known."""
        self._update_run_times()
        cost = max(estimated_cost(case), 1.0)
        if self._whole_s:
            return _scaled_s(self._whole_s, cost)
        known = self._run_s.get((case.kind, case.dtype))
        if not known:
            return 0.0
        run_s = _scaled_s(known, cost)
        return run_s * (LONG_RUNS_PER_CASE if run_s >= LONG_CASE_S else RUNS_PER_CASE)

    def cost_s(self, case: Case) -> float:
        """Seconds of the fewest runs of a case, including the time beside its runs."""
        return CASE_OVERHEAD_S + self.expected_s(case)

    def _update_run_times(self) -> None:
        """Read the rows added since the last call; of a case's ranks the first one counts."""
        for row in self.rows[self._seen :]:
            if row.status is MeasurementStatus.OK and row.rank == 0:
                series = self._run_s.setdefault((row.case.kind, row.case.dtype), {})
                cost = estimated_cost(row.case)
                # Arrival skew is stored without the work before the collective.
                worked_s = row.case.axes.get("work_us", 0) * 1e-6
                taken_s = row.median_s + worked_s
                name = key(row.case)
                self._case_s[name] = self._case_s.get(name, 0.0) + taken_s
                series[cost] = max(series.get(cost, 0.0), self._case_s[name])
        self._seen = len(self.rows)


def _scaled_s(known: Mapping[float, float], cost: float) -> float:
    """Seconds of the nearest cost estimate, scaled up to a larger one."""
    near = min(known, key=lambda known_cost: abs(math.log(max(known_cost, 1.0) / cost)))
    return known[near] * max(1.0, cost / max(near, 1.0))


def _grid_order(case: Case) -> tuple[float, float]:
    """Order the cases of a grid."""
    worked_us = case.axes.get("work_us", TYPICAL_WORK_US)
    return abs(math.log(worked_us / TYPICAL_WORK_US)), estimated_cost(case)


def estimated_cost(case: Case) -> float:
    """Estimate what a case costs, as bytes of traffic, to order cases; the same for directions."""
    sizes = tuple(sorted(case.axes.items()))
    return _estimated_cost(case.operation, case.kind, case.dtype, sizes)


@lru_cache(maxsize=65536)
def _estimated_cost(
    operation: str, kind: str, dtype: str, sizes: tuple[tuple[str, int], ...]
) -> float:
    axes = {axis: np.array([float(size)]) for axis, size in sizes}
    needed = work(operation, kind=kind, dtype=dtype, direction="forward", axes=axes)
    return float(needed.bytes[0] + needed.flop[0] / FLOP_PER_BYTE)


def key(case: Case) -> Key:
    """Identify a case up to its direction: both directions are measured together."""
    return case.kind, tuple(sorted(case.axes.items())), case.dtype, case.operation


def distinct(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Return each case once, as listed: forward if it has directions."""
    by_key: dict[Key, Case] = {}
    for case in cases:
        by_key.setdefault(key(case), listed(case))
    return tuple(by_key.values())
