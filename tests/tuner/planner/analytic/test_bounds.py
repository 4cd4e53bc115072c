"""Every bound against the price that it bounds, on random candidates."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tuner.planner.analytic.axes import Facts
from tuner.planner.analytic.bounds import least_step_s
from tuner.planner.analytic.candidate_prices import batch_of, least_s, price
from tuner.planner.analytic.candidates import DEGREES, Candidates
from tuner.planner.analytic.degrees import Degrees, legal_degrees
from tuner.planner.analytic.memory_feasibility import fits_somehow
from tuner.planner.analytic.min_memory import again_fits, keeping_fits, row_fits
from tuner.planner.analytic.min_memory_layout import capped_least_s, price_to_fit
from tuner.planner.analytic.option_table import (
    AGAIN_AXES,
    FRAME_AXES,
    NEVER_WORSE,
    WayTable,
    way_table,
)
from tuner.planner.analytic.options import Ways, ways_of
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.root_bound import allowed_by, cell_bounds_s
from tuner.planner.analytic.rules import Ints
from tuner.planner.analytic.space_size import by_facts

MakeQuestion = Callable[..., Question]
Drawn = tuple[Candidates, np.ndarray, Facts]

MODELS = st.sampled_from(("olmoe-1b-7b", "deepseek-v2-lite", "llama-3.1-8b"))
SEEDS = st.integers(0, 2**32 - 1)


@dataclass(frozen=True, kw_only=True)
class Space:
    """All decisions of one model on 16 devices, listed once for all examples."""

    question: Question
    degrees: Degrees
    ways: Ways
    legal: Callable[[Facts], Ints]
    table: Callable[[Facts], WayTable]


@pytest.fixture(scope="module")
def space_of(ask: MakeQuestion) -> Callable[[str], Space]:
    @functools.cache
    def listed(model: str) -> Space:
        question = ask(model, devices=16)
        ways = ways_of(question)
        return Space(
            question=question,
            degrees=legal_degrees(question),
            ways=ways,
            legal=functools.cache(ways.legal),
            table=functools.cache(functools.partial(way_table, ways)),
        )

    return listed


def drawn(space: Space, seed: int, *, count: int = 64) -> Drawn:
    """Random legal ways of random rows that share their facts; also each row's cell."""
    rng = np.random.default_rng(seed)
    degrees, ways = space.degrees, space.ways
    cell = rng.integers(0, degrees.num_cells, size=8)
    cells = np.repeat(cell, degrees.num_pairs_N[cell])
    rows = degrees.rows(cell)
    groups = [group for group in by_facts(rows) if len(space.legal(group[0]))]
    facts, chosen = groups[int(rng.integers(len(groups)))]
    legal = space.legal(facts)
    at, way = rng.choice(chosen, size=count), legal[rng.integers(len(legal), size=count)]
    candidates = Candidates(
        rows={name: rows[name][at] for name in DEGREES},
        ways={axis: way[:, index] for index, axis in enumerate(ways.choices)},
    )
    return candidates, cells[at], facts


@given(model=MODELS, seed=SEEDS)
@settings(deadline=None, max_examples=40)
def test_no_bound_exceeds_the_price(
    space_of: Callable[[str], Space], model: str, seed: int
) -> None:
    space = space_of(model)
    question, ways = space.question, space.ways
    candidates, cells, facts = drawn(space, seed)
    step_s = price(question, ways, candidates).step_s
    least = least_s(question, ways, candidates)
    table = space.table(facts)
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
    cell_s = cell_bounds_s(question, ways, space.degrees)[cells]

    again = Candidates(
        rows=candidates.rows,
        ways={
            axis: column if axis in (*FRAME_AXES, *AGAIN_AXES) else 0 * column
            for axis, column in candidates.ways.items()
        },
    )
    batch = batch_of(question, ways, again)
    units = batch.times.taken(batch.time_of_C)
    again_s = least_step_s(question, batch.strategies, units, allowed_by(ways, table))

    assert (least <= step_s).all()
    assert (again_s <= step_s).all()
    assert (frame_s <= again_s).all()
    assert (frame_s <= step_s).all()
    assert (cell_s <= step_s).all()


@given(model=MODELS, seed=SEEDS)
@settings(deadline=None, max_examples=40)
def test_what_fits_in_a_layout_is_never_called_impossible(
    space_of: Callable[[str], Space], model: str, seed: int
) -> None:
    space = space_of(model)
    question, ways = space.question, space.ways
    candidates, _, _ = drawn(space, seed)
    plain = price(question, ways, candidates)
    lean = price(question, ways, candidates, is_lean=True)
    limit = question.memory_limit_bytes
    could = fits_somehow(question, ways, candidates)
    capped = capped_least_s(question, ways, candidates)
    needs_lean = (plain.peak_bytes > limit) & (lean.peak_bytes <= limit)

    assert could[(plain.peak_bytes <= limit) | needs_lean].all()
    assert (capped[needs_lean] <= lean.step_s[needs_lean] * (1.0 + 1e-9)).all()


@given(model=MODELS, seed=SEEDS, share=st.floats(0.05, 1.0))
@settings(deadline=None, max_examples=40)
def test_what_fits_is_left_standing_at_every_level(
    space_of: Callable[[str], Space], model: str, seed: int, share: float
) -> None:
    space = space_of(model)
    question, ways = space.question, space.ways
    question = replace(question, memory_limit_bytes=share * question.memory_limit_bytes)
    candidates, _, facts = drawn(space, seed)
    table = space.table(facts)
    every = np.stack([candidates.ways[axis] for axis in table.axes], axis=1)
    is_kept = (every[:, None] == table.ways_TA[None]).all(axis=2)
    some = candidates.taken(np.flatnonzero(is_kept.any(axis=1)))
    if not len(some):
        return
    way = is_kept.argmax(axis=1)[is_kept.any(axis=1)]
    again_of_T = np.empty(len(table.ways_TA), dtype=np.int64)
    again_of_T[table.by_again_T] = np.repeat(np.arange(len(table.again_HA)), table.count_of_H)
    prices, _ = price_to_fit(question, ways, some)
    fits = prices.peak_bytes <= question.memory_limit_bytes

    assert row_fits(question, ways, table, some.rows)[fits].all()
    assert again_fits(question, ways, table, some.rows, again_of_T[way])[fits].all()
    assert keeping_fits(question, ways, some)[fits].all()


@given(model=MODELS, seed=SEEDS)
# Two devices of a zero-bubble schedule are about equally slow.
@example(model="olmoe-1b-7b", seed=7153)
@example(model="deepseek-v2-lite", seed=7153)
@example(model="llama-3.1-8b", seed=7153)
@settings(deadline=None, max_examples=40)
def test_a_beaten_way_is_neither_faster_nor_leaner(
    space_of: Callable[[str], Space], model: str, seed: int
) -> None:
    space = space_of(model)
    question, ways = space.question, space.ways
    candidates, _, _ = drawn(space, seed)
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
