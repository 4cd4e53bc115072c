"""Rows of one kind of degrees with their bounds, and how ways and groups of ways unfold from them.

Letters: C rows, F frames, A axes.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tuner.planner.analytic.bounds import Allowed
from tuner.planner.analytic.candidates import Candidates
from tuner.planner.analytic.degrees import Table
from tuner.planner.analytic.option_table import WayTable
from tuner.planner.analytic.rules import Ints

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of one kind of degrees, with the ways that they allow."""

    table: WayTable
    rows: Table
    bound_CF: Floats
    """Of the leading frames, or of all."""
    allowed: Allowed

    @property
    def least_C(self) -> Floats:
        """Bound of every row, whatever its frame."""
        found: Floats = self.bound_CF.min(axis=1)
        return found

    def taken(self, chosen: Ints) -> "Rows":
        """Some of them."""
        return replace(self, rows=taken_rows(self.rows, chosen), bound_CF=self.bound_CF[chosen])


def with_ways(table: WayTable, rows: Table, ways_CA: Ints) -> Candidates:
    """Rows with a way each."""
    return Candidates(rows=rows, ways=table.columns(ways_CA))


def taken_rows(rows: Table, chosen: Ints) -> Table:
    """Some rows."""
    return {name: column[chosen] for name, column in rows.items()}


def joined(parts: list[Rows]) -> list[Rows]:
    """One of every kind of degrees."""
    alike: dict[int, list[Rows]] = {}
    for part in parts:
        alike.setdefault(id(part.table), []).append(part)
    return [
        replace(
            same[0],
            rows={n: np.concatenate([one.rows[n] for one in same]) for n in same[0].rows},
            bound_CF=np.concatenate([one.bound_CF for one in same]),
        )
        for same in alike.values()
    ]


def groups_of_frames(row: Ints, frame: Ints, frame_of: Ints, *, frames: int) -> tuple[Ints, Ints]:
    """Every group of the frames, with the row that it is of."""
    groups_F = [np.flatnonzero(frame_of == f) for f in range(frames)]
    repeats = np.array([len(groups_F[f]) for f in frame], dtype=np.int64)
    groups = np.concatenate([np.zeros(0, dtype=np.int64), *(groups_F[f] for f in frame)])
    return np.repeat(row, repeats), groups
