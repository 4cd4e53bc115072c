"""The rows of a table, out of all visits to its cases.

Of several visits to one case count, for each direction by itself,

    of collectives             the repeats of all: to wait now and then is theirs
                               (profilers/stalls.py)
    where a sentinel looked    the repeats of all but the slowest third of them: what it saw is
                               taken out, too much or too little, and what it did not see makes slow
    of others                  the repeats of the visit whose slowest rank was the fastest

Of 128 kernels on a busy host, two looks of three visits each, of which the slowest was left out,
differed by 8 % at the 90th percentile, and by 9 % with all three; the fastest visits do so as well,
but the more there are, the lower they lie: 4 % for two visits, 6 % for three
(`python tests/benchmarks/disturbed_kernels.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from profilers.records import Measurement, Status
from profilers.series import BY_GROUP

SAME_RATIO = 0.01
"""Undisturbed machines differ by so much from one reading to the next."""
SLOWEST_SHARE = 3
"""Of so many visits one is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What a step brought."""

    rows: Sequence[Measurement]
    """Of all ranks."""
    quickest_s: float = 0.0
    """What the sentinel takes undisturbed, as far as it was known by then (profilers/sentinel.py);
    0: nobody looked."""
    slowness: float = 1.0
    """How many times slower the machine was, which is taken out of the rows."""


@dataclass(slots=True, kw_only=True)
class Visits:
    """What all visits brought by now."""

    rows: list[Measurement]
    """What counts; grows and changes."""
    slowness: list[float] = field(init=False, default_factory=list)
    """Of the visits at which a sentinel looked."""
    _places: dict[tuple[str, int], int] = field(init=False)
    """(id of a case, rank) to its row."""
    _looked_at: dict[tuple[str, int], list[Measurement]] = field(init=False, default_factory=dict)
    """To the visits at which a sentinel looked, all brought to `_quickest_s`."""
    _quickest_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._places = {(row.case.id, row.rank): place for place, row in enumerate(self.rows)}

    def add(self, visit: Visit) -> None:
        """Take the rows of one visit."""
        if visit.quickest_s:
            self.slowness.append(visit.slowness)
            self.rescale(visit.quickest_s)
        turned: dict[str, list[Measurement]] = {}
        for row in visit.rows:
            turned.setdefault(row.case.id, []).append(row)
            if visit.quickest_s and row.status is Status.OK:
                self._looked_at.setdefault((row.case.id, row.rank), []).append(row)
        for rows in turned.values():
            self._take(rows, is_looked_at=visit.quickest_s > 0.0)

    def rescale(self, quickest_s: float) -> None:
        """Bring what a sentinel looked at to another idea of what it takes undisturbed.

        A machine that was disturbed from the start turns out to be quicker than it looked.
        """
        ratio = quickest_s / self._quickest_s if self._quickest_s else 1.0
        if self._quickest_s and abs(ratio - 1.0) < SAME_RATIO:
            return
        self._quickest_s = quickest_s
        for at, visits in self._looked_at.items():
            visits[:] = [_scaled(row, ratio) for row in visits]
            self._put(_most(visits), at=self._places[at])

    def _take(self, rows: Sequence[Measurement], *, is_looked_at: bool) -> None:
        """Take the rows of one direction of a case, of all ranks."""
        names = [(row.case.id, row.rank) for row in rows]
        if not all(name in self._places for name in names):
            for name, row in zip(names, rows, strict=True):
                self._places[name] = len(self.rows)
                self.rows.append(row)
            return
        before = [self.rows[self._places[name]] for name in names]
        if rows[0].case.operation in BY_GROUP:
            now = [_together((one, other)) for one, other in zip(before, rows, strict=True)]
        elif is_looked_at and all(name in self._looked_at for name in names):
            now = [_most(self._looked_at[name]) for name in names]
        else:
            now = list(rows) if _slowest_s(rows) < _slowest_s(before) else before
        for name, row in zip(names, now, strict=True):
            self._put(row, at=self._places[name])

    def _put(self, row: Measurement, *, at: int) -> None:
        self.rows[at] = row


def _most(visits: Sequence[Measurement]) -> Measurement:
    """Repeats of all visits that worked, less the slowest third."""
    ordered = sorted(visits, key=lambda row: row.expected_s)
    return _together(ordered[: len(ordered) - len(ordered) // SLOWEST_SHARE])


def _together(visits: Sequence[Measurement]) -> Measurement:
    """Repeats of all visits that worked; the first visit where none did."""
    worked = [row for row in visits if row.status is Status.OK]
    if not worked:
        return visits[0]
    times_s = tuple(time_s for row in worked for time_s in row.times_s)
    return worked[0].model_copy(update={"times_s": times_s})


def _scaled(row: Measurement, ratio: float) -> Measurement:
    return row.model_copy(update={"times_s": tuple(ratio * time_s for time_s in row.times_s)})


def _slowest_s(rows: Sequence[Measurement]) -> float:
    """Seconds of the slowest rank; endless where one failed."""
    return max(row.expected_s if row.status is Status.OK else math.inf for row in rows)
