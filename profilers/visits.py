"""The rows of a table, out of all visits to its cases.

Of several visits to one case count, for each direction by itself,

    of collectives             the repeats of all: to wait now and then is theirs
                               (profilers/stalls.py)
    where a sentinel looked    the repeats of all but the slowest third of them: what it saw is
                               taken out, too much or too little, and what it did not see makes slow
    of others                  the repeats of the visit whose slowest rank was the fastest

Of 176 kernels on a busy host, three visits without the slowest lay within 9.4 % of their median in
nine of ten cases, all three within 9.7 %; with a process of ours at work beside, within 12.4 and
19.0 %. The fastest alone, within 10.9 %, is 7 % lower than a single visit, so that sizes visited
more often would come out faster (`python tests/benchmarks/disturbed_kernels.py --seed 3`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from profilers.records import Measurement, Status
from profilers.sampled_sizes import listed
from profilers.sentinel import power_of
from profilers.series import BY_GROUP

Name = tuple[str, int]
"""Id of a case, and a rank."""

SAME_RATIO = 0.01
"""Undisturbed machines differ by so much from one reading to the next."""
SLOWEST_OF = 3
"""Visits: one of so many is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What a step brought."""

    rows: Sequence[Measurement]
    """Of all ranks."""
    quickest_s: float = 0.0
    """What the sentinel takes undisturbed, as far as it was known by then (profilers/sentinel.py);
    0: nobody looked."""
    slowness: float = 1.0
    """How many times longer than undisturbed it took, which is taken out of the rows."""


@dataclass(slots=True, kw_only=True)
class Visits:
    """What all visits to one table brought by now."""

    rows: list[Measurement]
    """What counts, an earlier run's to begin with; grows and changes."""
    quickest_s: float = field(init=False, default=0.0)
    """What a sentinel took undisturbed, to which what it looked at is brought; 0: none looked. An
    earlier run's rows stay as they are until they are visited again."""
    is_changed: bool = field(init=False, default=False)
    """Whether anything came."""
    gains: dict[str, float] = field(init=False, default_factory=dict)
    """Ids of cases, as listed, that were visited again to what the last visit brought: ln of what
    counted before over what counts now; where a sentinel looked, over what that visit alone took,
    and 0 where it took longer."""
    slowness: list[float] = field(init=False, default_factory=list)
    """Of the visits at which a sentinel looked."""
    _places: dict[Name, int] = field(init=False)
    """To its row."""
    _looked_at: dict[Name, list[Measurement]] = field(init=False, default_factory=dict)
    """To the visits at which a sentinel looked."""

    def __post_init__(self) -> None:
        self._places = {(row.case.id, row.rank): place for place, row in enumerate(self.rows)}

    def add(self, visit: Visit) -> None:
        """Take the rows of one visit."""
        self.is_changed = True
        if visit.quickest_s:
            self.rescale(visit.quickest_s)
            self.slowness.append(visit.slowness)
        turned: dict[str, list[Measurement]] = {}
        for row in visit.rows:
            turned.setdefault(row.case.id, []).append(row)
        before_s = self._counting_s(visit.rows)
        for rows in turned.values():
            self._take(rows, is_looked_at=visit.quickest_s > 0.0)
        now_s = self._counting_s(visit.rows)
        if visit.quickest_s:
            now_s = min(before_s, _seconds(visit.rows))
        if 0.0 < before_s < math.inf and 0.0 < now_s < math.inf:
            self.gains[listed(visit.rows[0].case).id] = math.log(before_s / now_s)

    def rescale(self, quickest_s: float) -> None:
        """Bring what a sentinel looked at to another idea of what it takes undisturbed.

        A machine that was disturbed from the start turns out to be quicker than it looked.
        """
        ratio = quickest_s / self.quickest_s if self.quickest_s else 1.0
        if self.quickest_s and abs(ratio - 1.0) < SAME_RATIO:
            return
        self.quickest_s = quickest_s
        ratio **= power_of(self.rows[0].case.operation) if self.rows else 1.0
        self.slowness = [one / ratio for one in self.slowness]
        for name, visits in self._looked_at.items():
            if not visits:
                continue
            visits[:] = [_scaled(row, ratio) for row in visits]
            self.rows[self._places[name]] = _most(visits)
            self.is_changed = True

    def _take(self, rows: Sequence[Measurement], *, is_looked_at: bool) -> None:
        """Take the rows of one direction of a case, of all ranks."""
        names = [(row.case.id, row.rank) for row in rows]
        is_new = not all(name in self._places for name in names)
        if is_new:
            self._places |= {name: len(self.rows) + n for n, name in enumerate(names)}
            self.rows += rows
        before = [self.rows[self._places[name]] for name in names]
        if is_looked_at:
            now = []
            for name, known, row in zip(names, before, rows, strict=True):
                visits = self._known_visits(name, known)
                if row.status is Status.OK and not is_new:
                    visits.append(row)
                now.append(_most(visits) if visits else row)
        elif rows[0].case.operation in BY_GROUP and not is_new:
            now = [_together((known, row)) for known, row in zip(before, rows, strict=True)]
        else:
            now = list(rows) if _slowest_s(rows) < _slowest_s(before) else before
        for name, row in zip(names, now, strict=True):
            self.rows[self._places[name]] = row

    def _known_visits(self, name: Name, known: Measurement) -> list[Measurement]:
        """Return the visits to a case at which a sentinel looked; an earlier run's row is one."""
        worked = [known] if known.status is Status.OK else []
        return self._looked_at.setdefault(name, worked)

    def _counting_s(self, rows: Sequence[Measurement]) -> float:
        """Seconds that count by now for the cases of these rows; 0 where one is unknown."""
        places = [self._places.get((row.case.id, row.rank)) for row in rows]
        known = [self.rows[place] for place in places if place is not None]
        return _seconds(known) if len(known) == len(rows) else 0.0


def _most(visits: Sequence[Measurement]) -> Measurement:
    """Repeats of all visits that worked, less the slowest third."""
    ordered = sorted(visits, key=lambda row: row.expected_s)
    return _together(ordered[: len(ordered) - len(ordered) // SLOWEST_OF])


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


def _seconds(rows: Sequence[Measurement]) -> float:
    """Seconds of all directions and ranks together; endless where one failed."""
    return sum(row.expected_s if row.status is Status.OK else math.inf for row in rows)
