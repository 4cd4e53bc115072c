"""Counts that arrive row by row, added up by pass or by source rank.

F passes, or source ranks   L layers   E experts
"""

from collections.abc import Mapping, Sequence

import numpy as np

from profilers.routing.recording import Counts
from profilers.routing.validation import MOST_CELLS


class Sums:
    """What was added so far; memory is bounded by `MOST_CELLS` counts."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], Counts] = {}

    def add(self, first: int, *, layer: int, count_E: Counts) -> None:
        """Add the counts of one layer to a pass, or to a source rank.

        Raises:
            ValueError: there are too many of them.
        """
        key = (first, layer)
        if key in self._rows:
            self._rows[key] += count_E
            return
        self._rows[key] = count_E.copy()
        if len(self._rows) * count_E.size > MOST_CELLS:
            raise ValueError(f"more than {MOST_CELLS} counts; record fewer passes at a time")

    @property
    def layers(self) -> tuple[int, ...]:
        """Every layer that something was added to, ascending."""
        return tuple(sorted({layer for _, layer in self._rows}))

    def table(self, layers: Sequence[int]) -> Counts:
        """The sums as [F, L, E], passes or ranks in ascending order."""
        return stacked(self._rows, layers)


def stacked(rows: Mapping[tuple[int, int], Counts], layers: Sequence[int]) -> Counts:
    """Stack the counts of passes, or of ranks, and layers as [F, L, E]; 0 where there are none."""
    firsts = sorted({first for first, _ in rows})
    num_experts = next(iter(rows.values())).size
    count_FLE = np.zeros((len(firsts), len(layers), num_experts), dtype=np.int64)
    place, row_of = ({each: at for at, each in enumerate(ids)} for ids in (firsts, layers))
    for (first, layer), count_E in rows.items():
        count_FLE[place[first], row_of[layer]] = count_E
    return count_FLE
