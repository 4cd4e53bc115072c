"""The curve that a case belongs to, and how long ranks take over it that wait for each other.

The slowest rank decides. But the slowest of several measurements is also the one that was disturbed
most: two equal ranks come out some per cent slower than either, and more ranks slower still. So a
rank counts as slower by what it is slower in most cases of an operation, all kinds, types and sizes
together:

    seconds of a case = mean of t_r * max of f_r / mean of f_r
    f_r               = median, over the cases that all ranks measured, of t_r / mean over ranks

Both means are over the ranks that measured the case, the maximum is over all. What ranks time
together, as collectives, meetings and files on one disk, takes as long as the slowest of them says;
how long collectives wait for somebody to wake up, their sizes tell together (profilers/stalls.py).

Not covered: a rank that is slower at some sizes or kinds alone.
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from profilers.records import AXES, Case, Measurement, Status
from profilers.stalls import seconds_with_stalls

BY_GROUP: Final = frozenset({"collective", "rendezvous"})
"""Operations of all ranks together; their first axis is interpolated inside one group shape, which
is the other axes."""
TIMED_TOGETHER: Final = BY_GROUP | {"storage"}
"""Operations that no rank goes through alone."""
BY_RANK: Final = ("link", "every_rank")
"""Tables whose axes name ranks, between which nothing can be interpolated."""

Place = tuple[int, ...]
"""Sizes of a case in the order of `records.AXES`."""


class Series(NamedTuple):
    """What one curve is about."""

    operation: str
    kind: str
    dtype: str
    direction: str


Key = tuple[Series, Place]


def key_of(case: Case) -> Key:
    """Say which curve a case lies on, and where."""
    series = Series(case.operation, case.kind, case.dtype, case.direction)
    return series, tuple(case.axes[axis] for axis in AXES[case.operation])


def together_s(
    rows: Iterable[Measurement], *, shared: bool = True
) -> Mapping[Series, Mapping[Place, float]]:
    """Seconds of every size that was measured; failed rows and `BY_RANK` are left out.

    Args:
        rows: of one profile or table.
        shared: whether collectives tell each other how long they wait; if not, each takes the mean
            of its own repeats, as a check of the others needs it.
    """
    by_rank: dict[int, dict[Key, float]] = {}
    by_group: dict[Key, Measurement] = {}
    for row in rows:
        if row.status is not Status.OK or row.case.operation in BY_RANK:
            continue
        key = key_of(row.case)
        if row.case.operation in BY_GROUP:
            of_ranks = (by_group.get(key, row), row)
            by_group[key] = max(of_ranks, key=lambda one: one.expected_s)
        else:
            times = by_rank.setdefault(row.rank, {})
            times[key] = max(times.get(key, 0.0), row.expected_s)
    slowness = _slowness(by_rank)
    found = _of_groups(by_group, shared=shared)
    for key in dict.fromkeys(key for times in by_rank.values() for key in times):
        series, place = key
        measured = {rank: times[key] for rank, times in by_rank.items() if key in times}
        known = slowness.get(series.operation)
        if known is None:
            seconds = max(measured.values())
        else:
            mean = statistics.fmean(known[rank] for rank in measured)
            seconds = statistics.fmean(measured.values()) * max(known.values()) / mean
        found.setdefault(series, {})[place] = seconds
    return found


def _of_groups(
    rows: Mapping[Key, Measurement], *, shared: bool
) -> dict[Series, dict[Place, float]]:
    """Mean seconds of collectives and meetings.

    What a meeting loses depends on the work before it, so others say nothing of that; and its
    repeats, which are means by themselves, all count.
    """
    groups: dict[tuple[Series, Place], list[Key]] = {}
    for key in rows:
        series, place = key
        groups.setdefault((series, place[1:]), []).append(key)
    found: dict[Series, dict[Place, float]] = {}
    for (of_group, _), keys in groups.items():
        repeats = [rows[key].times_s for key in keys]
        if shared and of_group.operation == "collective":
            means_s = seconds_with_stalls(repeats).tolist()
        else:
            means_s = [statistics.fmean(times_s) for times_s in repeats]
        for (series, place), seconds in zip(keys, means_s, strict=True):
            found.setdefault(series, {})[place] = seconds
    return found


def _slowness(by_rank: Mapping[int, Mapping[Key, float]]) -> Mapping[str, Mapping[int, float]]:
    """How slow each rank is in most cases of an operation, 1 being the mean of all ranks.

    Nothing is said of operations that one rank measured, or of which all ranks share no case.
    """
    if len(by_rank) < 2:
        return {}
    known: dict[str, Mapping[int, float]] = {}
    operations = {series.operation for times in by_rank.values() for series, _ in times}
    for operation in operations - TIMED_TOGETHER:
        ranks = {
            rank: {key: seconds for key, seconds in times.items() if key[0].operation == operation}
            for rank, times in by_rank.items()
        }
        ranks = {rank: times for rank, times in ranks.items() if times}
        shared = set.intersection(*(set(times) for times in ranks.values()))
        means = {key: statistics.fmean(times[key] for times in ranks.values()) for key in shared}
        shared = {key for key in shared if means[key] > 0.0}
        if shared and len(ranks) > 1:
            known[operation] = {
                rank: statistics.median(times[key] / means[key] for key in shared)
                for rank, times in ranks.items()
            }
    return known
