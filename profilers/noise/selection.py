"""Which rows of a table count when its cases were measured in several sessions.

A session is a few repeats of a case in a row; then the profiler goes on to another case. Of several
sessions of one case count, for each direction by itself,

    collectives              the repeats of all: occasional waits belong to them
                             (profilers/stalls.py)
    cases with a sentinel    the repeats of all but the slowest third of the sessions: its
                             correction may be too large or too small, and what it did not see makes
                             a session slow
    other cases              the repeats of the session whose slowest rank was the fastest

Of 176 kernels on a busy host, three sessions without the slowest lay within 9.4 % of their median
in nine of ten cases, all three within 9.7 %; beside a busy process of ours, within 12.4 and 19.0 %.
The fastest session alone, within 10.9 %, is 7 % below a single session, so sizes measured in more
sessions would come out faster (`python tests/benchmarks/disturbed_kernels.py --seed 3`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from profilers.noise.sentinel import slowdown_exponent
from profilers.records import Measurement, MeasurementStatus
from profilers.sampled_sizes import listed
from profilers.series import BY_GROUP

RowKey = tuple[str, int]
"""Id of a case, and a rank."""

SAME_RATIO = 0.01
"""Readings on an undisturbed machine differ by this much."""
SESSIONS_PER_DROPPED = 3
"""Of so many sessions the slowest one does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSession:
    """What one session of a case measured."""

    rows: Sequence[Measurement]
    """Of all ranks."""
    undisturbed_s: float = 0.0
    """Seconds of the sentinel's work undisturbed, as known by then; 0: no sentinel was read."""
    slowdown: float = 1.0
    """How many times longer than undisturbed the session took; it is taken out of the rows."""


@dataclass(slots=True, kw_only=True)
class RowSelection:
    """The rows of one table that count, out of all sessions so far."""

    rows: list[Measurement]
    """Those that count, an earlier run's to begin with; rows are added and replaced."""
    undisturbed_s: float = field(init=False, default=0.0)
    """Seconds of the sentinel's work undisturbed that all rows with a sentinel are scaled to; 0
    without one. An earlier run's rows are not scaled until they are measured again."""
    is_changed: bool = field(init=False, default=False)
    """Whether a session was added or a row scaled."""
    gains: dict[str, float] = field(init=False, default_factory=dict)
    """Ids of cases, as listed, that were measured again, with the gain of the last session: ln of
    the time that counted before over the one that counts now; with a sentinel, over the time of
    that session itself, and 0 if it took longer."""
    slowdowns: list[float] = field(init=False, default_factory=list)
    """Of the sessions with a sentinel."""
    _places: dict[RowKey, int] = field(init=False)
    """Indices into `rows`."""
    _with_sentinel: dict[RowKey, list[Measurement]] = field(init=False, default_factory=dict)
    """The rows of every session with a sentinel."""

    def __post_init__(self) -> None:
        self._places = {(row.case.id, row.rank): place for place, row in enumerate(self.rows)}

    def add(self, session: CaseSession) -> None:
        """Add the rows of one session."""
        self.is_changed = True
        if session.undisturbed_s:
            self.rescale(session.undisturbed_s)
            self.slowdowns.append(session.slowdown)
        directions: dict[str, list[Measurement]] = {}
        for row in session.rows:
            directions.setdefault(row.case.id, []).append(row)
        before_s = self._selected_s(session.rows)
        for rows in directions.values():
            self._add_direction(rows, has_sentinel=session.undisturbed_s > 0.0)
        now_s = self._selected_s(session.rows)
        if session.undisturbed_s:
            now_s = min(before_s, _total_s(session.rows))
        if 0.0 < before_s < math.inf and 0.0 < now_s < math.inf:
            self.gains[listed(session.rows[0].case).id] = math.log(before_s / now_s)

    def rescale(self, undisturbed_s: float) -> None:
        """Scale the rows with a sentinel to a better estimate of its undisturbed time.

        A machine that was disturbed from the start turns out to be faster than it looked.
        """
        ratio = undisturbed_s / self.undisturbed_s if self.undisturbed_s else 1.0
        if self.undisturbed_s and abs(ratio - 1.0) < SAME_RATIO:
            return
        self.undisturbed_s = undisturbed_s
        ratio **= slowdown_exponent(self.rows[0].case.operation) if self.rows else 1.0
        self.slowdowns = [one / ratio for one in self.slowdowns]
        for key, sessions in self._with_sentinel.items():
            if not sessions:
                continue
            sessions[:] = [_scaled(row, ratio) for row in sessions]
            self.rows[self._places[key]] = _without_slowest(sessions)
            self.is_changed = True

    def _add_direction(self, rows: Sequence[Measurement], *, has_sentinel: bool) -> None:
        """Add the rows of one direction of a case, of all ranks."""
        keys = [(row.case.id, row.rank) for row in rows]
        is_new = not all(key in self._places for key in keys)
        if is_new:
            self._places |= {key: len(self.rows) + n for n, key in enumerate(keys)}
            self.rows += rows
        before = [self.rows[self._places[key]] for key in keys]
        if has_sentinel:
            now = []
            for key, known, row in zip(keys, before, rows, strict=True):
                sessions = self._known_sessions(key, known)
                if row.status is MeasurementStatus.OK and not is_new:
                    sessions.append(row)
                now.append(_without_slowest(sessions) if sessions else row)
        elif rows[0].case.operation in BY_GROUP and not is_new:
            now = [_merged((known, row)) for known, row in zip(before, rows, strict=True)]
        else:
            now = list(rows) if _slowest_s(rows) < _slowest_s(before) else before
        for key, row in zip(keys, now, strict=True):
            self.rows[self._places[key]] = row

    def _known_sessions(self, key: RowKey, known: Measurement) -> list[Measurement]:
        """Rows of the sessions of a case with a sentinel; an earlier run's row counts as one."""
        successful = [known] if known.status is MeasurementStatus.OK else []
        return self._with_sentinel.setdefault(key, successful)

    def _selected_s(self, rows: Sequence[Measurement]) -> float:
        """Seconds that count so far for the cases of these rows; 0 if one is unknown."""
        places = [self._places.get((row.case.id, row.rank)) for row in rows]
        known = [self.rows[place] for place in places if place is not None]
        return _total_s(known) if len(known) == len(rows) else 0.0


def _without_slowest(sessions: Sequence[Measurement]) -> Measurement:
    """Repeats of all successful sessions but the slowest third."""
    ordered = sorted(sessions, key=lambda row: row.expected_s)
    return _merged(ordered[: len(ordered) - len(ordered) // SESSIONS_PER_DROPPED])


def _merged(sessions: Sequence[Measurement]) -> Measurement:
    """Repeats of all successful sessions; the first session if all failed."""
    successful = [row for row in sessions if row.status is MeasurementStatus.OK]
    if not successful:
        return sessions[0]
    times_s = tuple(time_s for row in successful for time_s in row.times_s)
    return successful[0].model_copy(update={"times_s": times_s})


def _scaled(row: Measurement, ratio: float) -> Measurement:
    return row.model_copy(update={"times_s": tuple(ratio * time_s for time_s in row.times_s)})


def _slowest_s(rows: Sequence[Measurement]) -> float:
    """Seconds of the slowest rank; infinite if one failed."""
    return max(row.expected_s if row.status is MeasurementStatus.OK else math.inf for row in rows)


def _total_s(rows: Sequence[Measurement]) -> float:
    """Seconds of all directions and ranks together; infinite if one failed."""
    return sum(row.expected_s if row.status is MeasurementStatus.OK else math.inf for row in rows)
