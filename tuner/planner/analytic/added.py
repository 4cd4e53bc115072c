"""What a feature adds to a space that was searched before: decisions that are illegal without it.

A search that ended has shown that no decision of its space is faster than its best. With one more
feature the same decisions cost the same, as long as the feature only lifts rules, so whoever asks
what the feature would gain need look at none of them again: of degrees that were legal before only
at the ways that were not, of new degrees at all ways.

Not covered: features that change how layers are laid out over stages, and with that prices.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tuner.planner.analytic.axes import Facts
from tuner.planner.analytic.degrees import Table, state_copies
from tuner.planner.analytic.option_table import WayTable, way_table
from tuner.planner.analytic.options import Ways
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.rules import (
    Ints,
    Mask,
    dense_rules,
    expert_rules,
    first_broken,
    schedule_rules,
)
from tuner.planner.analytic.space_size import by_facts

PRICED: Final = ("uneven_layout", "empty_stages", "sequence_parallel")
"""Fields of a manifest that prices depend on; all others make rules."""


def only_adds(question: Question, known: Question) -> bool:
    """Whether the targets of two questions differ in rules alone, so that prices are the same."""
    one, other = question.capabilities, known.capabilities
    return all(getattr(one, name) == getattr(other, name) for name in PRICED)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """A space that was searched before."""

    question: Question
    ways: Ways
    _legal: dict[Facts, Ints] = field(default_factory=dict, init=False)

    def legal(self, facts: Facts) -> Ints:
        """List the legal ways of degrees with these facts, once for all who ask."""
        if facts not in self._legal:
            self._legal[facts] = self.ways.legal(facts)
        return self._legal[facts]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kinds:
    """Rows sorted by the ways that they allow, without what is legal in a space known before."""

    ways: Ways
    known: Known | None = None
    """None: no space was searched before."""
    _tables: dict[tuple[Facts, Facts | None], WayTable] = field(default_factory=dict, init=False)

    def sorted(self, rows: Table) -> Iterator[tuple[WayTable, Ints]]:
        """Yield each kind's table of ways with the indices of its rows; none without ways."""
        for facts, before, chosen in self._facts(rows):
            table = self._table(facts, before)
            if len(table.ways_TA):
                yield table, chosen

    def _facts(self, rows: Table) -> Iterator[tuple[Facts, Facts | None, Ints]]:
        if self.known is None:
            for facts, chosen in by_facts(rows):
                yield facts, None, chosen
            return
        was_legal = _legal(self.known.question, rows)
        rows_before = {**rows, "copies": state_copies(self.known.question, rows)}
        for facts, chosen in by_facts(rows):
            new, old = chosen[~was_legal[chosen]], chosen[was_legal[chosen]]
            if len(new):
                yield facts, None, new
            for before, at in by_facts({name: column[old] for name, column in rows_before.items()}):
                yield facts, before, old[at]

    def _table(self, facts: Facts, before: Facts | None) -> WayTable:
        key = (facts, before)
        if key not in self._tables:
            known = None
            if self.known is not None and before is not None:
                known = self.known.legal(before)
            self._tables[key] = way_table(self.ways, facts, without_TA=known)
        return self._tables[key]


def _legal(question: Question, rows: Table) -> Mask:
    """Which rows a question allows."""
    rules = [*dense_rules(question), *schedule_rules(question), *expert_rules(question)]
    found: Mask = np.asarray(first_broken(rules, rows) < 0)
    return found
