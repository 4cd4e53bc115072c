"""Rows of one kind of degrees with their bounds, and their expansion into options and groups.

They are visited in batches that grow, so that the threshold falls early.

Letters: C rows, D dispatch settings, A axes, N partial rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.search.train.bounds import Allowed
from tuner.search.train.candidates import Candidates
from tuner.search.train.degrees import Table
from tuner.search.train.option_table import OptionTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of one kind of degrees, with the options that they allow."""

    table: OptionTable
    rows: Table
    bound_CD: Floats
    """Lower bounds of the step in seconds, for the leading dispatch settings or for all."""
    allowed: Allowed

    @property
    def least_C(self) -> Floats:
        """Bound of every row, whatever its dispatch setting."""
        least: Floats = self.bound_CD.min(axis=1)
        return least

    def taken(self, chosen: Ints) -> "Rows":
        """Select some of them."""
        return replace(self, rows=take_rows(self.rows, chosen), bound_CD=self.bound_CD[chosen])


def with_options(table: OptionTable, rows: Table, options_CA: Ints) -> Candidates:
    """Rows with an option each, as candidates."""
    return Candidates(rows=rows, options=table.columns(options_CA))


def take_rows(rows: Table, chosen: Ints) -> Table:
    """Select some rows."""
    return {name: column[chosen] for name, column in rows.items()}


def merge_by_table(parts: list[Rows]) -> list[Rows]:
    """Merge parts of the same kind of degrees."""
    by_table: dict[int, list[Rows]] = {}
    for part in parts:
        by_table.setdefault(id(part.table), []).append(part)
    return [
        replace(
            same[0],
            rows={n: np.concatenate([rows.rows[n] for rows in same]) for n in same[0].rows},
            bound_CD=np.concatenate([rows.bound_CD for rows in same]),
        )
        for same in by_table.values()
    ]


def expand_dispatch_level(
    row: Ints, dispatch: Ints, dispatch_of: Ints, *, num_dispatch: int
) -> tuple[Ints, Ints]:
    """Every group of the dispatch settings, with the row that it belongs to."""
    groups_F = [np.flatnonzero(dispatch_of == f) for f in range(num_dispatch)]
    repeats = np.array([len(groups_F[f]) for f in dispatch], dtype=np.int64)
    groups = np.concatenate([np.zeros(0, dtype=np.int64), *(groups_F[f] for f in dispatch)])
    return np.repeat(row, repeats), groups


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
    max_rows, start = first, 0
    cumulative_rows = np.cumsum(rows_N[order])
    while start < len(order):
        done = int(cumulative_rows[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(cumulative_rows, done + max_rows, side="right")))
        yield order[start:stop]
        start, max_rows = stop, min(2 * max_rows, MOST_ROWS)


def expand_runs(count: Ints, start: Ints) -> tuple[Ints, Ints]:
    """Return the run of each entry and its place in the list, for runs of a list."""
    run = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
    return run, start[run] + within
