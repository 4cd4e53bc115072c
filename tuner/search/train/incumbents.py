"""The result of a search: solutions, counts of the space, a proven bound."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.config.knobs import FIELD_OF_DEGREE
from tuner.search.driver import Proof
from tuner.search.layout_groups import Layout
from tuner.search.train.candidates import Candidates
from tuner.search.train.degrees import Degrees
from tuner.search.train.options import OptionSpace
from tuner.search.train.problem import TrainProblem

LAYOUT: Final = ("tensor", "context", "pipeline", "data", "expert", "expert_tensor")
"""Columns of a row that make its layout, as tuner/search/layout_groups.py lists them."""

MOST_KEPT = 65_536
"""Rows that a search keeps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solutions:
    """Rows that fit in memory, each at its best option, best first."""

    candidates: Candidates
    step_s: Floats
    peak_bytes: Floats
    layers_PC: Ints
    """Layers of every device of the pipeline."""

    def concat_best(self, added: "Solutions") -> "Solutions":
        """Concatenate, each row at its better option, best first, up to `MOST_KEPT` rows."""
        both = self.concat(added)
        order = np.argsort(both.step_s, kind="stable")
        _, row = both.candidates.same(FIELD_OF_DEGREE)
        _, first = np.unique(row[order], return_index=True)
        return both.taken(order[np.sort(first)][:MOST_KEPT])

    def concat(self, added: "Solutions") -> "Solutions":
        """Concatenate as they are."""
        return Solutions(
            candidates=self.candidates.concat(added.candidates),
            step_s=np.concatenate((self.step_s, added.step_s)),
            peak_bytes=np.concatenate((self.peak_bytes, added.peak_bytes)),
            layers_PC=_side_by_side(self.layers_PC, added.layers_PC),
        )

    def taken(self, chosen: Ints) -> "Solutions":
        """Select some of them."""
        return Solutions(
            candidates=self.candidates.taken(chosen),
            step_s=self.step_s[chosen],
            peak_bytes=self.peak_bytes[chosen],
            layers_PC=self.layers_PC[:, chosen],
        )

    def layouts(self) -> Iterator[Layout]:
        """The layout of each, best first."""
        rows = self.candidates.rows
        columns = [rows[name] for name in LAYOUT]
        return (tuple(int(column[at]) for column in columns) for at in range(len(self)))

    def __len__(self) -> int:
        return len(self.step_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchOutcome:
    """The solutions of a search and what it proves."""

    problem: TrainProblem
    options: OptionSpace
    degrees: Degrees
    solutions: Solutions | None
    proof: Proof


def _side_by_side(left: Ints, right: Ints) -> Ints:
    """Columns of both; the shorter ones are filled with zeros."""
    rows = max(len(left), len(right))
    return np.concatenate(
        [np.pad(part, ((0, rows - len(part)), (0, 0))) for part in (left, right)], axis=1
    )
