"""The order among decisions that the model cannot tell apart, against every legal decision."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tuner.costs.analytic.constants import Software
from tuner.costs.analytic.shapes import number
from tuner.planner.analytic.answer import Detail
from tuner.planner.analytic.candidates import Candidates
from tuner.planner.analytic.counting import by_facts
from tuner.planner.analytic.finalists import played_s
from tuner.planner.analytic.found import Found
from tuner.planner.analytic.found import Search as Searched
from tuner.planner.analytic.leaning import price_to_fit
from tuner.planner.analytic.preferring import CRITERIA, TOLERANCE_RATIO, criteria, preferred
from tuner.planner.analytic.question import Question
from tuner.planner.analytic.search import Settings, search
from tuner.spec.manifests.megatron_lm import MEGATRON_0_18
from tuner.spec.search import Search

MakeQuestion = Callable[..., Question]
SETTINGS = Settings(clock=time.perf_counter, top=2, band_ratio=TOLERANCE_RATIO)


def searched(ask: MakeQuestion, *, limit_ratio: float = 1.0) -> Searched:
    question = ask(
        "olmoe-1b-7b",
        devices=16,
        capabilities=MEGATRON_0_18,
        limits=Search(micro_batch_size=(1, 2), cuda_graph=("none",), zero_stage=(1,)),
    )
    limit = question.memory_limit_bytes * limit_ratio
    return search(replace(question, memory_limit_bytes=limit), SETTINGS)


def every_decision(found: Searched) -> Found:
    """All legal decisions that fit, priced one kind of degrees at a time."""
    rows = found.degrees.rows(np.arange(found.degrees.num_cells))
    every: Found | None = None
    for facts, chosen in by_facts(rows):
        legal = found.ways.legal(facts)
        if not len(legal):
            continue
        candidates = Candidates(
            rows={name: np.repeat(column[chosen], len(legal)) for name, column in rows.items()},
            ways={
                axis: np.tile(legal[:, at], len(chosen))
                for at, axis in enumerate(found.ways.choices)
            },
        )
        prices, _ = price_to_fit(found.question, found.ways, candidates)
        some = Found(
            candidates=candidates,
            step_s=prices.step_s,
            peak_bytes=prices.peak_bytes,
            layers_PC=prices.layers_PC,
        )
        fits = np.flatnonzero(prices.peak_bytes <= found.question.memory_limit_bytes)
        every = some.taken(fits) if every is None else every.beside(some.taken(fits))
    assert every is not None
    return every


def closed_form_s(detail: Detail) -> float:
    return number(detail.step.step_s)


@pytest.mark.parametrize("limit_ratio", [1.0, 0.3])
def test_nothing_near_the_fastest_comes_before_the_preferred(
    ask: MakeQuestion, limit_ratio: float
) -> None:
    found = searched(ask, limit_ratio=limit_ratio)
    assert found.found is not None
    fastest = found.found.taken(np.array([0]))
    limit_s = float(fastest.step_s[0]) * (1.0 + TOLERANCE_RATIO)
    chosen = preferred(
        found,
        fastest,
        limit_s=limit_s,
        play=closed_form_s,
        is_near=lambda _, step_s: step_s <= limit_s,
    )
    row = fastest if chosen is None else chosen.row
    every = every_decision(found)
    near = every.taken(np.flatnonzero(every.step_s <= limit_s))
    first = min(tuple(key) for key in criteria(found, near))
    assert tuple(criteria(found, row)[0]) == first
    assert float(row.step_s[0]) <= limit_s
    assert float(row.peak_bytes[0]) <= found.question.memory_limit_bytes


def test_a_schedule_that_plays_too_slowly_is_passed_over(ask: MakeQuestion) -> None:
    found = searched(ask)
    assert found.found is not None
    last = found.found.taken(np.array([len(found.found) - 1]))
    worst = replace(last, peak_bytes=np.array([found.question.memory_limit_bytes]))

    def choose(is_near: Callable[[Detail, float], bool]) -> bool:
        limit_s = float(last.step_s[0])
        chosen = preferred(found, worst, limit_s=limit_s, play=played_s, is_near=is_near)
        return chosen is not None

    assert choose(lambda _detail, _step_s: True)
    assert not choose(lambda _detail, _step_s: False)


def test_more_room_in_memory_comes_before_everything_else(ask: MakeQuestion) -> None:
    found = searched(ask)
    assert found.found is not None
    one = found.found.taken(np.array([0]))
    limit = found.question.memory_limit_bytes
    names = [name for name, _ in CRITERIA]

    def key(share: float) -> tuple[int, ...]:
        return tuple(criteria(found, replace(one, peak_bytes=np.array([share * limit])))[0])

    assert names[0] == "memory"
    # Bands end at 1 / 0.88 of the peak: 20 % of the second and 53 % of the last lie above.
    assert [key(share)[0] for share in (0.87, 0.92, 1.0)] == [0, 1, 2]
    assert key(0.87)[1:] == key(1.0)[1:]


def test_pipelines_of_torchtitan_need_more_room_than_others(ask: MakeQuestion) -> None:
    found = searched(ask)
    assert found.found is not None
    ranks = found.found.candidates.rows["pipeline"]
    both = found.found.taken(np.array([np.argmin(ranks), np.argmax(ranks)]))
    assert list(both.candidates.rows["pipeline"] > 1) == [False, True]
    peak_bytes = np.full(2, 0.85 * found.question.memory_limit_bytes)
    torch = replace(found, question=replace(found.question, software=Software.TORCH_FSDP))

    def risks(search: Searched) -> list[int]:
        return list(criteria(search, replace(both, peak_bytes=peak_bytes))[:, 0])

    assert risks(found) == [0, 0]
    # 0.85 / 0.77 of the limit: 30 % of a band that begins at 0.85 / 1.12 lies above.
    assert risks(torch) == [0, 2]
