"""Every bound against the price that it bounds, on random candidates."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.planner.analytic.axes import Facts
from tuner.planner.analytic.bounds import least_step_s
from tuner.planner.analytic.candidates import DEGREES, Candidates
from tuner.planner.analytic.counting import by_facts
from tuner.planner.analytic.degrees import legal_degrees
from tuner.planner.analytic.fitting import fits_somehow
from tuner.planner.analytic.leaning import capped_least_s
from tuner.planner.analytic.opening import allowed_by, cell_bounds_s
from tuner.planner.analytic.pricing import batch_of, least_s, price
from tuner.planner.analytic.question import Question
from tuner.planner.analytic.ways import Ways, ways_of
from tuner.planner.analytic.waytable import NEVER_WORSE, way_table

MakeQuestion = Callable[..., Question]
Drawn = tuple[Ways, Candidates, np.ndarray, Facts]

CASES = ("olmoe-1b-7b", "deepseek-v2-lite", "llama-3.1-8b")


def drawn(question: Question, seed: int, *, count: int = 64) -> Drawn:
    """Random legal ways of random rows that share their facts; also each row's cell."""
    rng = np.random.default_rng(seed)
    degrees, ways = legal_degrees(question), ways_of(question)
    cell = rng.integers(0, degrees.num_cells, size=8)
    cells = np.repeat(cell, degrees.num_pairs_N[cell])
    rows = degrees.rows(cell)
    groups = [group for group in by_facts(rows) if len(ways.legal(group[0]))]
    facts, chosen = groups[int(rng.integers(len(groups)))]
    legal = ways.legal(facts)
    at, way = rng.choice(chosen, size=count), legal[rng.integers(len(legal), size=count)]
    candidates = Candidates(
        rows={name: rows[name][at] for name in DEGREES},
        ways={axis: way[:, index] for index, axis in enumerate(ways.choices)},
    )
    return ways, candidates, cells[at], facts


@pytest.mark.parametrize("model", CASES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_bound_exceeds_the_price(ask: MakeQuestion, model: str, seed: int) -> None:
    question = ask(model, devices=16)
    ways, candidates, cells, facts = drawn(question, seed)
    step_s = price(question, ways, candidates).step_s
    least = least_s(question, ways, candidates)
    table = way_table(ways, facts)
    frame = Candidates(
        rows=candidates.rows,
        ways={
            axis: column if axis in ("dispatcher", "a2a_overlap", "cuda_graph") else 0 * column
            for axis, column in candidates.ways.items()
        },
    )
    batch = batch_of(question, ways, frame)
    units = batch.times.taken(batch.time_of_C)
    frame_s = least_step_s(question, batch.strategies, units, allowed_by(ways, table))
    cell_s = cell_bounds_s(question, ways, legal_degrees(question))[cells]

    assert (least <= step_s).all()
    assert (frame_s <= step_s).all()
    assert (cell_s <= step_s).all()


@pytest.mark.parametrize("model", CASES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_what_fits_in_a_layout_is_never_called_impossible(
    ask: MakeQuestion, model: str, seed: int
) -> None:
    question = ask(model, devices=16)
    ways, candidates, _, _ = drawn(question, seed)
    plain = price(question, ways, candidates)
    lean = price(question, ways, candidates, is_lean=True)
    limit = question.memory_limit_bytes
    could = fits_somehow(question, ways, candidates)
    capped = capped_least_s(question, ways, candidates)
    needs_lean = (plain.peak_bytes > limit) & (lean.peak_bytes <= limit)

    assert could[(plain.peak_bytes <= limit) | needs_lean].all()
    assert (capped[needs_lean] <= lean.step_s[needs_lean] * (1.0 + 1e-9)).all()


@pytest.mark.parametrize("model", CASES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_beaten_way_is_neither_faster_nor_leaner(
    ask: MakeQuestion, model: str, seed: int
) -> None:
    question = ask(model, devices=16)
    ways, candidates, _, _ = drawn(question, seed)
    # Where there is one layout only: otherwise each choice balances its own.
    rows = candidates.rows
    alone = np.flatnonzero((rows["pipeline"] == 1) | (rows["virtual_pipeline"] > 1))
    if not len(alone):
        return
    candidates = candidates.taken(alone)
    for axis, pairs in NEVER_WORSE.items():
        choices = ways.choices[axis]
        for pair in pairs:
            if not set(pair) <= set(choices):
                continue
            worse, better = (
                price(
                    question,
                    ways,
                    replace(
                        candidates,
                        ways={
                            **candidates.ways,
                            axis: np.full(len(candidates), choices.index(choice)),
                        },
                    ),
                )
                for choice in pair
            )
            assert (better.step_s <= worse.step_s * (1.0 + 1e-9)).all()
            assert (better.peak_bytes <= worse.peak_bytes * (1.0 + 1e-9)).all()
