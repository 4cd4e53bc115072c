"""Number of decisions of the space, and of those that break each rule, without listing them.

Rules read a few booleans about the degrees, so rows of equal facts have equally many legal options:
count the rows of each kind, multiply.

A completed search has shown that no decision of its space is faster than its best. If a feature
only lifts rules, the same decisions cost the same with it. A search for the gain of the feature
therefore skips them: of degrees that were legal before it visits the options that were not, of new
degrees all options. Not covered: features that change how layers are laid out over stages, and with
that prices.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tuner.arrays import Ints
from tuner.search.train.degrees import Degrees, Table, legal_degrees, state_copies
from tuner.search.train.option_table import OptionTable, build_option_table
from tuner.search.train.options import Facts, OptionSpace, option_space
from tuner.search.train.problem import TrainProblem
from tuner.search.train.rules import Mask, dense_rules, expert_rules, first_broken, schedule_rules


def space(options: OptionSpace, degrees: Degrees) -> tuple[int, dict[str, int]]:
    """Count the legal decisions, and the others by the first rule they break."""
    illegal = Counter({rule: n * options.num_options for rule, n in degrees.illegal.items()})
    legal = 0
    for facts, rows in _rows_by_facts(degrees):
        num_legal, broken = options.count_legal(facts)
        legal += rows * num_legal
        for rule, count in broken.items():
            illegal[rule] += rows * count
    return legal, dict(sorted(illegal.items()))


def has_legal(problem: TrainProblem) -> bool:
    """Return whether any decision of a problem is legal."""
    return bool(space(option_space(problem), legal_degrees(problem))[0])


def _rows_by_facts(degrees: Degrees) -> Iterator[tuple[Facts, int]]:
    """Yield the facts with the number of rows that have them, without listing the rows."""
    dense_N, dense_E = degrees.partials_N["dense"], degrees.pairs_E["dense"]
    code_N = _partial_codes(degrees.dense_rows(dense_N) | dict(degrees.partials_N))
    code_E = _pair_codes(degrees.dense_rows(dense_E) | dict(degrees.pairs_E))
    for pair_code in np.unique(code_E):
        pairs_D = np.bincount(
            dense_E[code_E == pair_code], minlength=len(degrees.dense_D["tensor"])
        )
        for cell_code in np.unique(code_N):
            rows = int(pairs_D[dense_N[code_N == cell_code]].sum())
            if rows:
                yield _facts_of(int(cell_code | pair_code)), rows


def by_facts(rows: Table) -> Iterator[tuple[Facts, Ints]]:
    """Group rows by the facts that the option rules read."""
    codes = _partial_codes(rows) | _pair_codes(rows)
    for code in np.unique(codes):
        yield _facts_of(int(code)), np.flatnonzero(codes == code)


def _partial_codes(rows: Table) -> Ints:
    """Facts that need no expert degrees, a bit each."""
    facts = (
        rows["pipeline"] > 1,
        rows["virtual_pipeline"] > 1,
        rows["data"] * rows["context"] > 1,
        rows["tensor"] > 1,
    )
    return _bits(facts, first=0)


def _pair_codes(rows: Table) -> Ints:
    """Facts that need the expert degrees, a bit each."""
    spans = rows["tensor"] * rows["context"] % rows["expert"] != 0
    copies = rows.get("copies", np.ones_like(rows["expert"]))
    return _bits((rows["expert"] > 1, spans, copies > 1), first=4)


def _bits(facts: Sequence[Mask], *, first: int) -> Ints:
    code = np.zeros(len(facts[0]), dtype=np.int64)
    for bit, fact in enumerate(facts):
        code |= fact.astype(np.int64) << (first + bit)
    return code


def _facts_of(code: int) -> Facts:
    return Facts(
        has_pipeline=bool(code & 1),
        has_virtual=bool(code & 2),
        is_sharded=bool(code & 4),
        has_tensor=bool(code & 8),
        has_expert_parallel=bool(code & 16),
        spans_replicas=bool(code & 32),
        has_copies=bool(code & 64),
    )


PRICED: Final = ("uneven_layout", "empty_stages", "sequence_parallel", "fp8_dispatch")
"""Fields of a manifest that prices depend on; all others make rules."""


def only_adds(problem: TrainProblem, known: TrainProblem) -> bool:
    """Return whether two problems' targets differ in rules alone, so that prices are equal."""
    capabilities, known_capabilities = problem.capabilities, known.capabilities
    return all(getattr(capabilities, name) == getattr(known_capabilities, name) for name in PRICED)


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
    """Space that was searched before; None: there is none."""
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
    """Return which rows a problem allows."""
    rules = [*dense_rules(problem), *schedule_rules(problem), *expert_rules(problem)]
    is_legal: Mask = np.asarray(first_broken(rules, rows) < 0)
    return is_legal
