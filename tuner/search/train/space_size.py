"""How many decisions the space has, and how many break which rule, without listing them.

Rules read a few booleans about the degrees, so rows of equal facts have equally many legal options:
count the rows of each kind, multiply.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from tuner.search.train.axes import Facts
from tuner.search.train.degrees import Degrees, Table
from tuner.search.train.options import OptionSpace
from tuner.search.train.rules import Ints, Mask


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


def _rows_by_facts(degrees: Degrees) -> Iterator[tuple[Facts, int]]:
    """How many rows have the same facts, without listing the rows."""
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
