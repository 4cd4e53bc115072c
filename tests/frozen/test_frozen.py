"""The product still answers what is recorded in `data/`.

Frozen are, to 1e-12 of each figure (`comparison.py` says where a difference of large terms has more
room, and words agree to the letter):

    training      2,000 random configurations each on the constants of Megatron, torchtitan and
                  DeepSpeed, over models and devices, and 2,000 on the reference step: seconds of a
                  step, its parts, bytes by cause and of every pipeline rank, and what the search
                  makes of them (its layouts, its bounds)
    serving       every way to run an instance that six specs weigh, with its figures
    whole plans   plan.json and every launch file of `examples/checks`, the times of planning and
                  hashes of inputs left out; the planner's clock stands still, so that no search
                  ends for want of time
    estimates     of public recipes and of launch files that the checks' plans have written

What is not meant to change an answer passes as it is; where it moves or renames, `columns.py`
follows. A deliberate correction lands alone: `python -m tests.frozen.record` prints what it changes
and records it, and the new files of `data/` belong to its commit. `record CASE ...` takes names or
beginnings of names, `--dry-run` only prints.

By default a sample runs: rows of each table and one plan. All of it:
`bash tests/run.sh --slow tests/frozen`, or `pytest -m slow tests/frozen`.
"""

from collections.abc import Iterable

import pytest

from tests.frozen import columns
from tests.frozen.comparison import (
    Difference,
    differences,
    largest_first,
    read,
    recorded,
    rows_of,
    sampled,
)

SAMPLED_ROWS = 50
"""Of the tables of each engine together; fewer of the reference step, whose rows are dear."""
SAMPLED_REFERENCE_ROWS = 12
SAMPLED_PLAN = "check-serve-disaggregated"
MOST_SHOWN = 12


def _failed(found: Iterable[Difference]) -> None:
    ordered = largest_first(list(found))
    if not ordered:
        return
    lines = [str(one) for one in ordered[:MOST_SHOWN]]
    lines.append(f"{len(ordered)} differences; python -m tests.frozen.record shows and records all")
    pytest.fail("\n".join(lines), pytrace=False)


def _of_case(name: str, *, rows: int | None = None) -> list[Difference]:
    old = read(name)
    assert old is not None, f"{name} is not recorded: python -m tests.frozen.record {name}"
    if not columns.is_table(name):
        return differences(name, old, columns.answered(name))
    old = old if rows is None else sampled(old, rows)
    return differences(name, old, columns.answered(name, rows_of(old)))


def test_what_is_recorded_is_what_is_asked() -> None:
    assert set(recorded()) == set(columns.names())


def test_a_sample_of_the_answers_is_the_recorded_one() -> None:
    found = _of_case(SAMPLED_PLAN)
    tables = [name for name in columns.names() if columns.is_table(name)]
    for name in tables:
        engine = name.partition("-")[0]
        alike = sum(one.startswith(engine) for one in tables)
        rows = SAMPLED_REFERENCE_ROWS if engine == "reference" else SAMPLED_ROWS
        found += _of_case(name, rows=rows // alike)
    _failed(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", columns.names())
def test_the_answers_are_the_recorded_ones(name: str) -> None:
    _failed(_of_case(name))
