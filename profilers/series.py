"""The curve that a case belongs to, and how long ranks take over it that wait for each other.

The slowest rank decides. But the slowest of several measurements is also the one that was disturbed
most: of two ranks on equal cores it lay 4 % above their mean in the median of seven profiles, and
of more ranks it lies higher. So a rank counts as slower by what it is slower in most cases:

    seconds of a case = mean over ranks of t_r * max over ranks of f_r
    f_r               = median over the cases of an operation of t_r / mean over ranks of t_r

Collectives and meetings are timed by all ranks together: there the slowest rank's time counts.
"""

import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from profilers.records import AXES, Case, Measurement, Status

BY_GROUP: Final = frozenset({"collective", "rendezvous"})
"""Operations of all ranks together; their first axis is interpolated inside one group shape, which
is the other axes."""
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


def slowest_s(rows: Iterable[Measurement]) -> Mapping[Series, Mapping[Place, float]]:
    """Seconds of every size that was measured; failed rows and `BY_RANK` are left out."""
    by_rank: dict[int, dict[Key, float]] = {}
    for row in rows:
        if row.status is Status.OK and row.case.operation not in BY_RANK:
            times = by_rank.setdefault(row.rank, {})
            key = key_of(row.case)
            times[key] = max(times.get(key, 0.0), row.expected_s)
    found: dict[Series, dict[Place, float]] = {}
    shared = _shared(by_rank.values())
    slower = _slower_ratio(by_rank, shared)
    for times in by_rank.values():
        for (series, place), seconds in times.items():
            found.setdefault(series, {})[place] = seconds
    for (series, place), measured in shared.items():
        found[series][place] = (
            max(measured)
            if series.operation in BY_GROUP
            else statistics.fmean(measured) * slower[series.operation]
        )
    return found


def _shared(by_rank: Collection[Mapping[Key, float]]) -> Mapping[Key, list[float]]:
    """What all ranks took over the sizes that more than one of them measured."""
    if len(by_rank) < 2:
        return {}
    listed: dict[Key, list[float]] = {}
    for times in by_rank:
        for key, seconds in times.items():
            listed.setdefault(key, []).append(seconds)
    return {key: measured for key, measured in listed.items() if len(measured) > 1}


def _slower_ratio(
    by_rank: Mapping[int, Mapping[Key, float]], shared: Mapping[Key, list[float]]
) -> Mapping[str, float]:
    """By how much the slowest rank of each operation is slower than the mean of all."""
    ratios: dict[str, dict[int, list[float]]] = {}
    for key, measured in shared.items():
        mean_s = statistics.fmean(measured)
        of_operation = ratios.setdefault(key[0].operation, {})
        for rank, times in by_rank.items():
            if key in times and mean_s > 0.0:
                of_operation.setdefault(rank, []).append(times[key] / mean_s)
    return {
        operation: max((statistics.median(of_rank) for of_rank in of_ranks.values()), default=1.0)
        for operation, of_ranks in ratios.items()
    }
