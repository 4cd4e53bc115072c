"""Small spaces searched by bounds and by pricing everything."""

import time
from dataclasses import replace

import numpy as np
import pytest

from tests.expect import present
from tests.rows import each_row
from tests.tuner.search.train.testing import make_problem
from tuner.config.train import TrainDecision
from tuner.engines.megatron_lm.capabilities import MEGATRON_0_18
from tuner.engines.targets import programs
from tuner.search.progress import PlanningEvent
from tuner.search.ratios import uniform_ratios
from tuner.search.settings import SearchSettings
from tuner.search.train.candidate_prices import price
from tuner.search.train.candidates import Candidates
from tuner.search.train.degrees import legal_degrees
from tuner.search.train.options import option_space
from tuner.search.train.problem import TrainProblem
from tuner.search.train.search import search
from tuner.search.train.search_result import (
    SearchOutcome,
    Ties,
    cost_of_step,
    pareto_front,
    price_solution,
    solution_fields,
    to_certificate,
)
from tuner.search.train.space_size import by_facts, space
from tuner.search.train.ties import count_ties
from tuner.spec.refusals import refusals
from tuner.spec.search import Search

SETTINGS = SearchSettings(clock=time.perf_counter, time_limit_s=120.0, top=3)

FEW_WAYS = Search(
    recompute=("none", "full"),
    chunks=(1,),
    dispatcher=("alltoall", "deepep"),
    cuda_graph=("none", "partial"),
    activation_offload=(False,),
    optimizer_offload=(False,),
)


def fastest_of_all(problem: TrainProblem) -> float:
    """Price every legal decision, in its balanced layout and in the one that fits."""
    degrees, options = legal_degrees(problem), option_space(problem)
    rows = degrees.rows(np.arange(degrees.num_partials))
    best_s = np.inf
    for facts, chosen in by_facts(rows):
        legal = options.legal(facts)
        for part in np.array_split(chosen, -(-len(chosen) * len(legal) // 40_000)):
            candidates = Candidates(
                rows={name: np.repeat(column[part], len(legal)) for name, column in rows.items()},
                options={
                    axis: np.tile(legal[:, at], len(part))
                    for at, axis in enumerate(options.choices)
                },
            )
            for is_moved_to_fit in (False, True):
                outcome = price(problem, options, candidates, is_moved_to_fit=is_moved_to_fit)
                fits = outcome.peak_bytes <= problem.memory_limit_bytes
                best_s = min(best_s, outcome.step_s[fits].min(initial=np.inf))
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
    model: str, devices: int, batch: int, memory_gb: float
) -> None:
    problem = make_problem(
        model,
        devices=devices,
        global_batch_size=batch,
        memory_limit_bytes=memory_gb * 1e9,
        capabilities=MEGATRON_0_18,
        limits=FEW_WAYS,
    )
    outcome = search(problem, SETTINGS)
    expected_s = fastest_of_all(problem)

    if outcome.solutions is None:
        assert np.isinf(expected_s)
        return
    assert outcome.solutions.step_s[0] == pytest.approx(expected_s, rel=1e-9)
    assert outcome.proof.bound_s <= expected_s * (1.0 + 1e-9)


def test_unequal_replicas_are_found_as_by_pricing_everything() -> None:
    able = replace(MEGATRON_0_18, unequal_microbatches=True)
    are_unequal = []
    for model, devices, batch, pipeline, memory_gb in (
        ("small-moe", 3, 8, (1,), 76.0),
        ("olmoe-1b-7b", 6, 8, (1, 2, 3), 76.0),
        ("olmoe-1b-7b", 6, 10, (2,), 60.0),
    ):
        problem = make_problem(
            model,
            devices=devices,
            global_batch_size=batch,
            memory_limit_bytes=memory_gb * 1e9,
            capabilities=able,
            limits=FEW_WAYS.model_copy(update={"pipeline_model_parallel_size": pipeline}),
        )
        outcome = search(problem, SETTINGS)
        expected_s = fastest_of_all(problem)
        assert present(outcome.solutions).step_s[0] == pytest.approx(expected_s, rel=1e-9)
        assert outcome.proof.bound_s <= expected_s * (1.0 + 1e-9)
        decision = TrainDecision.model_validate(solution_fields(outcome, 0))
        counts = decision.microbatches_by_replica(batch)
        assert sum(counts) * decision.micro_batch_size == batch
        assert max(counts) == decision.num_microbatches(batch)
        are_unequal.append(len(set(counts)) > 1)
        equal = search(replace(problem, capabilities=MEGATRON_0_18), SETTINGS)
        # No number of replicas that fit divides the batch.
        assert (equal.solutions is None) == are_unequal[-1]
    assert are_unequal == [True, False, True]


@pytest.fixture(scope="module")
def outcome() -> SearchOutcome:
    problem = make_problem(
        "deepseek-v2-lite",
        devices=32,
        global_batch_size=256,
        capabilities=MEGATRON_0_18,
        price_per_device_hour=2.0,
    )
    return search(problem, replace(SETTINGS, band_ratio=0.02))


def test_every_decision_of_the_space_is_accounted_for(outcome: SearchOutcome) -> None:
    legal, illegal = space(outcome.options, outcome.degrees)
    counts = outcome.proof.counts

    assert counts.priced + counts.bounded + counts.open == legal
    assert counts.illegal == sum(illegal.values())
    assert counts.priced > 0
    combinations = outcome.degrees.num_legal + sum(outcome.degrees.illegal.values())
    assert legal + counts.illegal == combinations * outcome.options.num_options


def test_rows_come_best_first_and_once(outcome: SearchOutcome) -> None:
    assert (np.diff(present(outcome.solutions).step_s) >= 0.0).all()
    rows = np.stack(list(present(outcome.solutions).candidates.rows.values()))
    assert len(np.unique(rows, axis=1).T) == len(present(outcome.solutions))


def test_a_row_becomes_a_decision_that_is_priced_the_same(outcome: SearchOutcome) -> None:
    for index in range(len(present(outcome.solutions))):
        decision = TrainDecision.model_validate(solution_fields(outcome, index))
        detail = price_solution(outcome, index)
        assert decision.num_devices == outcome.problem.num_devices
        assert sum(decision.pipeline_layout) == outcome.problem.model.num_layers
        assert float(np.ravel(detail.step.step_s)[0]) == pytest.approx(
            present(outcome.solutions).step_s[index]
        )
        peak = float(detail.memory.total_PC.max())
        assert peak == pytest.approx(present(outcome.solutions).peak_bytes[index])
        assert peak <= outcome.problem.memory_limit_bytes


def test_the_certificate_repeats_what_is_proven(outcome: SearchOutcome) -> None:
    certificate = to_certificate(outcome, ties=_ties(outcome, 0.02))
    assert certificate.objective == present(outcome.solutions).step_s[0]
    assert present(certificate.bound) <= present(certificate.objective)
    assert certificate.gap_ratio <= 0.01
    ties = (
        present(outcome.solutions).step_s <= 1.02 * present(outcome.solutions).step_s[0]
    ).sum() - 1
    assert certificate.within_band == ties


def test_ties_that_were_not_searched_are_reported_as_a_lower_bound(
    outcome: SearchOutcome,
) -> None:
    reached = outcome.proof.complete_s / float(present(outcome.solutions).step_s[0]) - 1.0
    assert not _ties(outcome, reached * 0.99).is_least
    assert _ties(outcome, reached * 1.01).is_least


def _ties(outcome: SearchOutcome, slower_ratio: float) -> Ties:
    return count_ties(
        outcome,
        uniform_ratios(slower_ratio),
        chosen=TrainDecision.model_validate(solution_fields(outcome, 0)),
        step_s=float(present(outcome.solutions).step_s[0]),
    )


def test_the_front_is_fastest_first_and_ever_smaller(outcome: SearchOutcome) -> None:
    front = pareto_front(outcome)
    assert front[0] == 0
    assert (np.diff(present(outcome.solutions).peak_bytes[list(front)]) < 0.0).all()
    hours = present(outcome.solutions).step_s[0] / 3600.0
    assert cost_of_step(outcome, 0) == pytest.approx(hours * 32 * 2.0)


def test_the_same_problem_has_the_same_solution() -> None:
    problem = make_problem(capabilities=MEGATRON_0_18)
    one, two = search(problem, SETTINGS), search(problem, SETTINGS)
    assert solution_fields(one, 0) == solution_fields(two, 0)


@pytest.fixture(scope="module")
def whole() -> SearchOutcome:
    """A search with all the time that it needs."""
    return search(make_problem(devices=16, memory_limit_bytes=30e9), SETTINGS)


@pytest.mark.slow
@each_row("limit_s", [0.0, 3.0, 8.0, 12.0])
def test_time_that_runs_out_leaves_the_rest_open(whole: SearchOutcome, limit_s: float) -> None:
    ticks = iter(range(10_000))
    settings = SearchSettings(clock=lambda: float(next(ticks)), time_limit_s=limit_s, top=3)
    cut_off = search(whole.problem, settings)
    certificate = to_certificate(cut_off)
    assert cut_off.proof.counts.open > 0
    assert certificate.status in ("feasible", "unknown")
    legal, _ = space(cut_off.options, cut_off.degrees)
    assert (
        cut_off.proof.counts.priced + cut_off.proof.counts.bounded + cut_off.proof.counts.open
        == legal
    )
    assert cut_off.proof.bound_s <= float(present(whole.solutions).step_s[0])


def test_a_search_reports_its_progress() -> None:
    events: list[PlanningEvent] = []
    outcome = search(make_problem(devices=8), replace(SETTINGS, watch=events.append))
    assert [one.stage for one in events] == ["space", "bounds", *["search"] * (len(events) - 2)]
    assert all("gap" in one.text or "nothing that fits" in one.text for one in events[2:])
    assert f"{outcome.proof.counts.priced} priced" in events[-1].text


@pytest.mark.slow
@each_row("target", ["reference", "megatron-lm", "torchtitan", "deepspeed"])
def test_a_solution_for_a_target_can_be_launched_on_it(target: str) -> None:
    capabilities = programs([target]).capabilities()
    problem = make_problem(devices=16, global_batch_size=64, capabilities=capabilities)
    outcome = search(problem, replace(SETTINGS, top=12))
    for index in range(len(present(outcome.solutions))):
        decision = TrainDecision.model_validate(solution_fields(outcome, index))
        broken = refusals(capabilities, model=problem.model, decision=decision)
        assert not [rule for rule in broken if "no arguments are written" not in rule]
