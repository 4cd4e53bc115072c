"""The curve that a case belongs to, and its time when ranks that wait for each other run it.

The slowest rank decides. But the slowest of several measurements is also the one that was disturbed
most: two equal ranks come out some per cent slower than either, and more ranks slower still. So the
slowness of a rank is its median over most cases of an operation, all kinds, types and sizes
together:

    seconds of a case = mean of t_r * max of f_r / mean of f_r
    f_r               = median, over the cases that all ranks measured, of t_r / mean over ranks

Both means are over the ranks that measured the case, the maximum is over all. What ranks time
together (collectives, arrival skew, files on one disk) takes as long as on the slowest of them;
late wake-ups in collectives are estimated from all sizes together (profilers/stalls.py).

Not covered: a rank that is slower at some sizes or kinds only.
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from profilers.records import AXES, Case, Measurement, MeasurementStatus
from profilers.stalls import seconds_with_stalls

BY_GROUP: Final = frozenset({"collective", "rendezvous"})
"""Operations of all ranks together; their first axis is interpolated inside one group shape, which
is the other axes."""
TIMED_TOGETHER: Final = BY_GROUP | {
    *("storage", "background_save", "host_memory", "restart", "checkpoint_load")
}
"""Operations that all ranks run together."""
BY_RANK: Final = ("link", "every_rank")
"""Tables whose axes name ranks; they cannot be interpolated."""

Place = tuple[int, ...]
"""Sizes of a case in the order of `records.AXES`."""


class Series(NamedTuple):
    """Identifies one curve."""

    operation: str
    kind: str
    dtype: str
    direction: str


Key = tuple[Series, Place]


def key_of(case: Case) -> Key:
    """The curve that a case lies on, and its place there."""
    series = Series(case.operation, case.kind, case.dtype, case.direction)
    return series, tuple(case.axes[axis] for axis in AXES[case.operation])


def together_s(
    rows: Iterable[Measurement], *, shared: bool = True
) -> Mapping[Series, Mapping[Place, float]]:
    """Seconds of every size that was measured; failed rows and `BY_RANK` are left out.

    Args:
        rows: of one profile or table.
        shared: whether sizes of a collective share an estimate of their waits; if not, each takes
            the mean of its own repeats, as a hold-out test of the others needs it.
    """
    by_rank: dict[int, dict[Key, float]] = {}
    by_group: dict[Key, Measurement] = {}
    for row in rows:
        if row.status is not MeasurementStatus.OK or row.case.operation in BY_RANK:
            continue
        key = key_of(row.case)
        if row.case.operation in BY_GROUP:
            of_ranks = (by_group.get(key, row), row)
            by_group[key] = max(of_ranks, key=lambda candidate: candidate.expected_s)
        else:
            times = by_rank.setdefault(row.rank, {})
            times[key] = max(times.get(key, 0.0), row.expected_s)
    slowdown = _slowness(by_rank)
    seconds_by_series = _of_groups(by_group, shared=shared)
    for key in dict.fromkeys(key for times in by_rank.values() for key in times):
        series, place = key
        measured = {rank: times[key] for rank, times in by_rank.items() if key in times}
        known = slowdown.get(series.operation)
        if known is None:
            seconds = max(measured.values())
        else:
            mean = statistics.fmean(known[rank] for rank in measured)
            seconds = statistics.fmean(measured.values()) * max(known.values()) / mean
        seconds_by_series.setdefault(series, {})[place] = seconds
    return seconds_by_series


def _of_groups(
    rows: Mapping[Key, Measurement], *, shared: bool
) -> dict[Series, dict[Place, float]]:
    """Mean seconds of collectives and of arrival skew.

    Arrival skew depends on the work before the collective, so its sizes share no estimate; its
    repeats, which are means themselves, all count.
    """
    groups: dict[tuple[Series, Place], list[Key]] = {}
    for key in rows:
        series, place = key
        groups.setdefault((series, place[1:]), []).append(key)
    seconds_by_series: dict[Series, dict[Place, float]] = {}
    for (of_group, _), keys in groups.items():
        repeats = [rows[key].times_s for key in keys]
        if shared and of_group.operation == "collective":
            means_s = seconds_with_stalls(repeats).tolist()
        else:
            means_s = [statistics.fmean(times_s) for times_s in repeats]
        for (series, place), seconds in zip(keys, means_s, strict=True):
            seconds_by_series.setdefault(series, {})[place] = seconds
    return seconds_by_series


def _slowness(by_rank: Mapping[int, Mapping[Key, float]]) -> Mapping[str, Mapping[int, float]]:
    """Return each rank's slowness in most cases of an operation, 1 being the mean of all ranks.

    Operations that one rank measured, or without a case that all ranks share, are left out.
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
