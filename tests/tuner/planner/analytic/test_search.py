"""Small spaces searched by bounds and by pricing everything."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.rows import each_row
from tuner.plan import TrainDecision
from tuner.planner.analytic.candidate_prices import price
from tuner.planner.analytic.candidates import Candidates
from tuner.planner.analytic.degrees import legal_degrees
from tuner.planner.analytic.incumbents import Search as Found
from tuner.planner.analytic.options import ways_of
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.search import Settings, search
from tuner.planner.analytic.search_result import (
    certificate_of,
    cost_of_step,
    decision_of,
    detail_of,
    pareto_front,
    why_lost,
)
from tuner.planner.analytic.space_size import by_facts, space
from tuner.planner.analytic.ties import Ties, ties_of
from tuner.planner.progress import Told
from tuner.planner.ratios import ratios_alike
from tuner.spec.capabilities import intersection, refusals
from tuner.spec.manifests.megatron_lm import MEGATRON_0_18
from tuner.spec.search import Search

MakeQuestion = Callable[..., Question]
SETTINGS = Settings(clock=time.perf_counter, time_limit_s=120.0, top=3)

FEW_WAYS = Search(
    recompute=("none", "full"),
    chunks=(1,),
    dispatcher=("alltoall", "deepep"),
    cuda_graph=("none", "partial"),
    activation_offload=(False,),
)


def fastest_of_all(question: Question) -> float:
    """Price every legal decision, in its balanced and in its lean layout."""
    degrees, ways = legal_degrees(question), ways_of(question)
    rows = degrees.rows(np.arange(degrees.num_cells))
    best_s = np.inf
    for facts, chosen in by_facts(rows):
        legal = ways.legal(facts)
        for part in np.array_split(chosen, -(-len(chosen) * len(legal) // 40_000)):
            candidates = Candidates(
                rows={name: np.repeat(column[part], len(legal)) for name, column in rows.items()},
                ways={
                    axis: np.tile(legal[:, at], len(part)) for at, axis in enumerate(ways.choices)
                },
            )
            for is_lean in (False, True):
                found = price(question, ways, candidates, is_lean=is_lean)
                fits = found.peak_bytes <= question.memory_limit_bytes
                best_s = min(best_s, found.step_s[fits].min(initial=np.inf))
    return best_s


@each_row(
    ("model", "devices", "batch", "memory_gb"),
    [
        ("olmoe-1b-7b", 4, 8, 76.0),
        ("olmoe-1b-7b", 4, 4, 34.0),
        ("olmoe-1b-7b", 8, 4, 20.0),
        ("deepseek-v2-lite", 4, 4, 62.0),
        ("llama-3.1-8b", 4, 8, 40.0),
    ],
)
def test_the_search_finds_what_pricing_everything_finds(
    ask: MakeQuestion, model: str, devices: int, batch: int, memory_gb: float
) -> None:
    question = ask(
        model,
        devices=devices,
        global_batch_size=batch,
        memory_limit_bytes=memory_gb * 1e9,
        capabilities=MEGATRON_0_18,
        limits=FEW_WAYS,
    )
    found = search(question, SETTINGS)
    expected_s = fastest_of_all(question)

    if found.found is None:
        assert np.isinf(expected_s)
        return
    assert found.found.step_s[0] == pytest.approx(expected_s, rel=1e-9)
    assert found.bound_s <= expected_s * (1.0 + 1e-9)


@pytest.fixture(scope="module")
def found(ask: MakeQuestion) -> Found:
    question = ask(
        "deepseek-v2-lite",
        devices=32,
        global_batch_size=256,
        capabilities=MEGATRON_0_18,
        price_per_device_hour=2.0,
    )
    return search(question, replace(SETTINGS, band_ratio=0.02))


def test_every_decision_of_the_space_is_accounted_for(found: Found) -> None:
    legal, illegal = space(found.ways, found.degrees)
    counts = found.counts

    assert counts.priced + counts.bounded + counts.open == legal
    assert counts.num_illegal == sum(illegal.values())
    assert counts.priced > 0
    box = (found.degrees.num_legal + found.degrees.num_illegal) * found.ways.num_ways
    assert legal + counts.num_illegal == box


def test_rows_come_best_first_and_once(found: Found) -> None:
    assert found.found is not None
    assert (np.diff(found.found.step_s) >= 0.0).all()
    rows = np.stack(list(found.found.candidates.rows.values()))
    assert len(np.unique(rows, axis=1).T) == len(found.found)


def test_a_row_becomes_a_decision_that_is_priced_the_same(found: Found) -> None:
    assert found.found is not None
    for index in range(len(found.found)):
        decision = TrainDecision.model_validate(decision_of(found, index))
        detail = detail_of(found, index)
        assert decision.num_devices == found.question.num_devices
        assert sum(decision.pipeline_layout) == found.question.model.num_layers
        assert float(np.ravel(detail.step.step_s)[0]) == pytest.approx(found.found.step_s[index])
        peak = float(detail.memory.total_PC.max())
        assert peak == pytest.approx(found.found.peak_bytes[index])
        assert peak <= found.question.memory_limit_bytes


def test_the_certificate_repeats_what_is_proven(found: Found) -> None:
    assert found.found is not None
    certificate = certificate_of(found, ties=_ties(found, 0.02))
    assert certificate.objective == found.found.step_s[0]
    assert certificate.bound is not None
    assert certificate.objective is not None
    assert certificate.bound <= certificate.objective
    assert certificate.gap_ratio <= 0.01
    ties = (found.found.step_s <= 1.02 * found.found.step_s[0]).sum() - 1
    assert certificate.within_band == ties


def test_ties_that_were_not_looked_for_are_said_to_be_at_least_so_many(found: Found) -> None:
    assert found.found is not None
    reached = found.complete_s / float(found.found.step_s[0]) - 1.0
    assert not _ties(found, reached * 0.99).is_least
    assert _ties(found, reached * 1.01).is_least


def _ties(found: Found, slower_ratio: float) -> Ties:
    assert found.found is not None
    return ties_of(
        found,
        ratios_alike(slower_ratio),
        chosen=TrainDecision.model_validate(decision_of(found, 0)),
        step_s=float(found.found.step_s[0]),
    )


def test_the_front_is_fastest_first_and_ever_leaner(found: Found) -> None:
    front = pareto_front(found)
    assert found.found is not None
    assert front[0] == 0
    assert (np.diff(found.found.peak_bytes[list(front)]) < 0.0).all()
    hours = found.found.step_s[0] / 3600.0
    assert cost_of_step(found, 0) == pytest.approx(hours * 32 * 2.0)


def test_a_runner_up_names_what_it_lost_by(found: Found) -> None:
    assert found.found is not None
    assert why_lost(found, 0) == "nothing: the model predicts the same time"
    assert "slower, of it" in why_lost(found, len(found.found) - 1)


def test_the_same_question_has_the_same_answer(ask: MakeQuestion) -> None:
    question = ask(capabilities=MEGATRON_0_18)
    one, two = search(question, SETTINGS), search(question, SETTINGS)
    assert decision_of(one, 0) == decision_of(two, 0)


@pytest.fixture(scope="module")
def whole(ask: MakeQuestion) -> Found:
    """A search with all the time that it needs."""
    return search(ask(devices=16, memory_limit_bytes=30e9), SETTINGS)


@each_row("limit_s", [0.0, 3.0, 8.0, 12.0])
def test_time_that_runs_out_leaves_the_rest_open(whole: Found, limit_s: float) -> None:
    ticks = iter(range(10_000))
    settings = Settings(clock=lambda: float(next(ticks)), time_limit_s=limit_s, top=3)
    cut_off = search(whole.question, settings)
    certificate = certificate_of(cut_off)
    assert cut_off.counts.open > 0
    assert certificate.status in ("feasible", "unknown")
    legal, _ = space(cut_off.ways, cut_off.degrees)
    assert cut_off.counts.priced + cut_off.counts.bounded + cut_off.counts.open == legal
    assert whole.found is not None
    assert cut_off.bound_s <= float(whole.found.step_s[0])


def test_a_search_says_where_it_stands(ask: MakeQuestion) -> None:
    told: list[Told] = []
    found = search(ask(devices=16), replace(SETTINGS, watch=told.append))
    lasting = [one.stage for one in told if not one.is_passing]
    assert lasting == ["space", "bounds", "search"]
    assert all("gap" in one.text or "nothing that fits" in one.text for one in told[2:])
    assert f"{found.counts.priced} priced" in told[-1].text


@each_row("target", ["reference", "megatron-lm", "torchtitan", "deepspeed"])
def test_what_is_found_for_a_target_can_be_launched_on_it(ask: MakeQuestion, target: str) -> None:
    capabilities = intersection([target])
    question = ask(devices=16, global_batch_size=64, capabilities=capabilities)
    found = search(question, replace(SETTINGS, top=12))
    assert found.found is not None
    for index in range(len(found.found)):
        decision = TrainDecision.model_validate(decision_of(found, index))
        broken = refusals(capabilities, model=question.model, decision=decision)
        assert not [rule for rule in broken if "no arguments are written" not in rule]
