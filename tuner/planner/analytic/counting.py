"""How many decisions the space has, and how many break which rule, without listing them.

Rules see degrees through a few yes-or-no facts, so rows of equal facts have equally many legal
ways: count the rows of each kind, multiply.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from tuner.planner.analytic.axes import Facts
from tuner.planner.analytic.degrees import Degrees, Table
from tuner.planner.analytic.rules import Ints
from tuner.planner.analytic.ways import Ways


def space(ways: Ways, degrees: Degrees) -> tuple[int, dict[str, int]]:
    """Count the legal decisions, and the others by the first rule they break."""
    illegal = Counter({rule: n * ways.num_ways for rule, n in degrees.illegal.items()})
    legal = 0
    for facts, rows in _rows_by_facts(degrees):
        num_legal, broken = ways.counted(facts)
        legal += rows * num_legal
        for rule, count in broken.items():
            illegal[rule] += rows * count
    return legal, dict(sorted(illegal.items()))


def _rows_by_facts(degrees: Degrees) -> Iterator[tuple[Facts, int]]:
    """How many rows have the same facts, without listing the rows."""
    dense = degrees.cells_N["dense"]
    apart_D = np.bincount(
        degrees.pairs_E["dense"],
        weights=degrees.pairs_E["expert"] > 1,
        minlength=len(degrees.dense_D["tensor"]),
    ).astype(np.int64)
    cells = degrees.dense_rows(dense) | dict(degrees.cells_N)
    codes = _codes(cells | {"expert": np.ones(degrees.num_cells, dtype=np.int64)})
    for code in np.unique(codes):
        here = codes == code
        apart = int(apart_D[dense[here]].sum())
        rest = int(degrees.num_pairs_N[here].sum()) - apart
        if rest:
            yield _facts_of(int(code)), rest
        if apart:
            yield _facts_of(int(code) | 8), apart


def by_facts(rows: Table) -> Iterator[tuple[Facts, Ints]]:
    """Sort rows by what the ways' rules ask of them."""
    codes = _codes(rows)
    for code in np.unique(codes):
        yield _facts_of(int(code)), np.flatnonzero(codes == code)


def _codes(rows: Table) -> Ints:
    facts = (
        rows["pipeline"] > 1,
        rows["virtual_pipeline"] > 1,
        rows["data"] * rows["context"] > 1,
        rows["expert"] > 1,
    )
    code = np.zeros(len(rows["pipeline"]), dtype=np.int64)
    for bit, fact in enumerate(facts):
        code |= fact.astype(np.int64) << bit
    return code


def _facts_of(code: int) -> Facts:
    return Facts(
        has_pipeline=bool(code & 1),
        has_virtual=bool(code & 2),
        is_sharded=bool(code & 4),
        has_experts_apart=bool(code & 8),
    )
