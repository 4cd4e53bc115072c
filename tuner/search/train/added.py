"""What a feature adds to a space that was searched before: decisions that are illegal without it.

A completed search has shown that no decision of its space is faster than its best. If a feature
only lifts rules, the same decisions cost the same with it. A search for the gain of the feature
therefore skips them: of degrees that were legal before it visits the options that were not, of new
degrees all options.

Not covered: features that change how layers are laid out over stages, and with that prices.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tuner.search.train.axes import Facts
from tuner.search.train.degrees import Table, state_copies
from tuner.search.train.option_table import OptionTable, build_option_table
from tuner.search.train.options import OptionSpace
from tuner.search.train.problem import TrainProblem
from tuner.search.train.rules import (
    Ints,
    Mask,
    dense_rules,
    expert_rules,
    first_broken,
    schedule_rules,
)
from tuner.search.train.space_size import by_facts

PRICED: Final = ("uneven_layout", "empty_stages", "sequence_parallel")
"""Fields of a manifest that prices depend on; all others make rules."""


def only_adds(problem: TrainProblem, known: TrainProblem) -> bool:
    """Whether the targets of two problems differ in rules alone, so that prices are equal."""
    one, other = problem.capabilities, known.capabilities
    return all(getattr(one, name) == getattr(other, name) for name in PRICED)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchedSpace:
    """A space that was searched before."""

    problem: TrainProblem
    options: OptionSpace
    _legal: dict[Facts, Ints] = field(default_factory=dict, init=False)

    def legal(self, facts: Facts) -> Ints:
        """List the legal options of degrees with these facts; the list is cached."""
        if facts not in self._legal:
            self._legal[facts] = self.options.legal(facts)
        return self._legal[facts]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptionTables:
    """Tables of the options that rows allow, without those of a space searched before."""

    options: OptionSpace
    known: SearchedSpace | None = None
    """None: no space was searched before."""
    _tables: dict[tuple[Facts, Facts | None], OptionTable] = field(default_factory=dict, init=False)

    def by_kind(self, rows: Table) -> Iterator[tuple[OptionTable, Ints]]:
        """Yield each table with the indices of its rows; tables without options are left out."""
        for facts, before, chosen in self._facts(rows):
            table = self._table(facts, before)
            if len(table.options_TA):
                yield table, chosen

    def _facts(self, rows: Table) -> Iterator[tuple[Facts, Facts | None, Ints]]:
        if self.known is None:
            for facts, chosen in by_facts(rows):
                yield facts, None, chosen
            return
        was_legal = _legal(self.known.problem, rows)
        rows_before = {**rows, "copies": state_copies(self.known.problem, rows)}
        for facts, chosen in by_facts(rows):
            new, old = chosen[~was_legal[chosen]], chosen[was_legal[chosen]]
            if len(new):
                yield facts, None, new
            for before, at in by_facts({name: column[old] for name, column in rows_before.items()}):
                yield facts, before, old[at]

    def _table(self, facts: Facts, before: Facts | None) -> OptionTable:
        key = (facts, before)
        if key not in self._tables:
            known = None
            if self.known is not None and before is not None:
                known = self.known.legal(before)
            self._tables[key] = build_option_table(self.options, facts, without_TA=known)
        return self._tables[key]


def _legal(problem: TrainProblem, rows: Table) -> Mask:
    """Which rows a problem allows."""
    rules = [*dense_rules(problem), *schedule_rules(problem), *expert_rules(problem)]
    is_legal: Mask = np.asarray(first_broken(rules, rows) < 0)
    return is_legal
