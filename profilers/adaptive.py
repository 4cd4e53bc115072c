"""Choose the next sizes to measure in a table: between those that are known, spread out.

The line (profilers/sampled_sizes.py) with the fewest points comes first, and the next one where all
of its sizes are known. Of `CANDIDATES` sizes drawn on it, the one is taken that lies farthest, in
octaves, from all measured points of the line, over what it costs: half of the time would go to the
largest tenth of the sizes otherwise.

Every `HOLDOUT_EVERY`-th size is drawn uniformly at random instead and left out of all fits until
the end: the hold-out sizes that measure the error in between (profilers/held_out.py).

Letters: N points of a line, A axes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from profilers.records import Case, Measurement
from profilers.sampled_sizes import SIZES, Line, drawn, lines, listed

CANDIDATES = 32
HOLDOUT_EVERY = 6
MAX_LINE_POINTS = 350
"""Points of a line: the fit of more costs more than they add."""
TRIES = 20
"""Times in a row that no line has a size that is not known; then there is nothing in between."""


@dataclass(slots=True, kw_only=True)
class Infill:
    """Chooses sizes to add to one table, from its rows so far."""

    rows: list[Measurement]
    """All rows so far; grows as the table is measured."""
    rng: np.random.Generator
    holdout: set[str] = field(default_factory=set)
    """Ids of the hold-out cases, which are left out of fits."""
    cost_s: Callable[[Case], float] = field(default=lambda _case: 1.0)
    """Seconds that a case takes."""
    _proposed: int = field(init=False, default=0)
    _read: int = field(init=False, default=0)
    """Rows that the two below know."""
    _points: dict[Line, dict[str, Case]] = field(init=False, default_factory=dict)
    _seen: set[str] = field(init=False, default_factory=set)
    """Ids of all measured cases, failed ones too: a size among them would not test a fit."""

    def next(self) -> Case | None:
        """Choose the next size to measure; None if there is nothing between the sizes."""
        self._update()
        points = (tuple(self._points[line].values()) for line in sorted(self._points))
        known = [cases for cases in points if _is_open(cases)]
        for _ in range(TRIES if known else 0):
            self._proposed += 1
            if self._proposed % HOLDOUT_EVERY == 0:
                case = drawn(known[int(self.rng.integers(len(known)))], rng=self.rng)
                if case.id not in self._seen:
                    self.holdout.add(case.id)
                    return case
                continue
            for line in sorted(known, key=len):
                case = self._farthest(line)
                if case.id not in self._seen:
                    return case
        return None

    def _update(self) -> None:
        new, self._read = self.rows[self._read :], len(self.rows)
        self._seen |= {listed(row.case).id for row in new}
        for line, cases in lines(new).items():
            self._points.setdefault(line, {}).update({case.id: case for case in cases})

    def _farthest(self, line: Sequence[Case]) -> Case:
        """Draw the size that is farthest from all measured ones, for its cost."""
        taken_NA = _octaves(line)

        def gain(case: Case) -> float:
            distance_N = np.linalg.norm(taken_NA - _octaves([case]), axis=1)
            return float(distance_N.min()) / self.cost_s(case)

        return max((drawn(line, rng=self.rng) for _ in range(CANDIDATES)), key=gain)


def _is_open(line: Sequence[Case]) -> bool:
    """Return whether there are sizes in between, and not too many known ones."""
    return len(line) < MAX_LINE_POINTS and any(
        len({case.axes[name] for case in line}) > 1 for name in SIZES[line[0].operation]
    )


def _octaves(cases: Sequence[Case]) -> NDArray[np.float64]:
    names = SIZES[cases[0].operation]
    sizes_NA = np.array([[max(case.axes[name], 1) for name in names] for case in cases])
    octaves: NDArray[np.float64] = np.log2(sizes_NA)
    return octaves
