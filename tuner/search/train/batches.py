"""Batches of a search that grow, so that the threshold falls early.

Letters: N partial rows.
"""

from collections.abc import Iterator

import numpy as np

from tuner.search.train.rules import Ints

FIRST_ROWS = 512
"""Rows of the first batch; every further one may be twice as large, up to `MOST_ROWS`."""
MOST_ROWS = 32_768


def rank_within(group: Ints) -> Ints:
    """0, 1, ... for the entries of each group, in the order given."""
    order = np.argsort(group, kind="stable")
    starts = np.r_[True, np.diff(group[order]) != 0]
    position = np.arange(len(group))
    first = np.maximum.accumulate(np.where(starts, position, 0))
    rank = np.empty(len(group), dtype=np.int64)
    rank[order] = position - first
    return rank


def batches(order: Ints, rows_N: Ints, *, first: int = FIRST_ROWS) -> Iterator[Ints]:
    """Cut work, best first, into batches of rows; `first` limits the first batch."""
    most, start = first, 0
    cumulative_rows = np.cumsum(rows_N[order])
    while start < len(order):
        done = int(cumulative_rows[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(cumulative_rows, done + most, side="right")))
        yield order[start:stop]
        start, most = stop, min(2 * most, MOST_ROWS)


def expand_runs(count: Ints, start: Ints) -> tuple[Ints, Ints]:
    """For runs of a list: the run of each entry, and its place in the list."""
    run = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
    return run, start[run] + within
