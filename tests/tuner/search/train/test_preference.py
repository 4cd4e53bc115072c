"""The order among decisions that the model cannot tell apart, against every legal decision."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.expect import present
from tests.tuner.search.train.testing import every_decision, make_problem
from tuner.config.shapes import number
from tuner.costs.train.expert_imbalance import ExpertImbalance
from tuner.engines.megatron_lm.capabilities import MEGATRON_0_18
from tuner.prices.train.constants import Software
from tuner.search.settings import SearchSettings
from tuner.search.train.memory_risk import (
    LIKELY,
    SMALL,
    LossPrices,
    forecast_memory,
    uneven_bytes,
)
from tuner.search.train.preference import (
    CRITERIA,
    MOST_SLOWER_RATIO,
    TOLERANCE_RATIO,
    Preferred,
    choose_preferred,
    criteria,
    fastest_with_headroom,
    oom_chances,
)
from tuner.search.train.search import search
from tuner.search.train.search_result import Detail, SearchOutcome, Solutions, price_solution
from tuner.spec.search import Search

USUAL = LossPrices()
SETTINGS = SearchSettings(clock=time.perf_counter, top=2, band_ratio=TOLERANCE_RATIO)


@pytest.fixture(scope="module")
def outcome() -> SearchOutcome:
    """OLMoE with ample memory."""
    problem = make_problem(
        "olmoe-1b-7b",
        devices=16,
        capabilities=MEGATRON_0_18,
        limits=Search(
            micro_batch_size=(1, 2),
            cuda_graph=("none",),
            zero_stage=(1,),
            chunks=(1, 4),
            dispatcher=("alltoall",),
        ),
    )
    return search(problem, SETTINGS)


@pytest.fixture(scope="module")
def tight(outcome: SearchOutcome) -> SearchOutcome:
    """The same with three tenths of the memory."""
    limit = 0.3 * outcome.problem.memory_limit_bytes
    return search(replace(outcome.problem, memory_limit_bytes=limit), SETTINGS)


@pytest.fixture(scope="module")
def every_tight(tight: SearchOutcome) -> Solutions:
    """All decisions that fit there."""
    return every_decision(tight)


def closed_form_s(detail: Detail) -> float:
    return number(detail.step.step_s)


def chosen_among(
    outcome: SearchOutcome,
    fastest: Solutions,
    *,
    prices: LossPrices = USUAL,
    is_near: Callable[[Detail, float, float], bool] = lambda *_: True,
    simulate: Callable[[Detail], float] = closed_form_s,
) -> Preferred | None:
    return choose_preferred(
        outcome,
        fastest,
        objective_s=float(fastest.step_s[0]),
        prices=prices,
        simulate=simulate,
        is_near=is_near,
    )


def times_closed_form(slower: float) -> Callable[[Detail], float]:
    """A simulation that takes so many times the closed form."""
    return lambda detail: slower * closed_form_s(detail)


def as_expected(objective_s: float) -> Callable[[Detail, float, float], bool]:
    """As a plan without failures judges what is near."""
    return lambda _, step_s, most_ratio: step_s <= objective_s * most_ratio


@pytest.mark.slow
def test_nothing_near_the_least_expected_step_comes_before_the_preferred(
    outcome: SearchOutcome, tight: SearchOutcome, every_tight: Solutions
) -> None:
    for memory, made, every in (
        ("ample", outcome, every_decision(outcome)),
        ("tight", tight, every_tight),
    ):
        fastest = present(made.solutions).taken(np.array([0]))
        chosen = chosen_among(made, fastest)
        row = fastest if chosen is None else chosen.row
        every = every.taken(np.flatnonzero(every.step_s <= float(fastest.step_s[0]) * 1.1))
        risks = oom_chances(made, every)
        assert (risks.ever_C <= SMALL).any(), memory
        expected_s = LossPrices().expected_s(every.step_s, risks)
        expected_s = np.where(risks.ever_C <= LIKELY, expected_s, np.inf)
        least_s = max(float(fastest.step_s[0]), float(expected_s.min()))
        near = every.taken(np.flatnonzero(expected_s <= least_s * (1.0 + TOLERANCE_RATIO)))
        first = min(tuple(key) for key in criteria(made, near))
        own = tuple(criteria(made, row)[0])
        assert own == first, (
            memory,
            own,
            first,
            float(row.peak_bytes[0]),
        )
        assert float(row.peak_bytes[0]) <= made.problem.memory_limit_bytes, (
            memory,
            own,
            first,
            float(row.peak_bytes[0]),
        )


def test_a_decision_whose_simulation_is_too_slow_is_passed_over(outcome: SearchOutcome) -> None:
    fastest = present(outcome.solutions).taken(np.array([0]))
    own_s = float(fastest.step_s[0])
    assert chosen_among(outcome, fastest, is_near=lambda *_: False) is None
    full = replace(fastest, peak_bytes=np.array([1.2 * outcome.problem.capacity_bytes]))
    slow = repr(present(chosen_among(outcome, full, is_near=as_expected(own_s))).detail.strategies)

    def simulate(detail: Detail) -> float:
        return closed_form_s(detail) * (2.0 if repr(detail.strategies) == slow else 1.0)

    other = present(chosen_among(outcome, full, simulate=simulate, is_near=as_expected(own_s)))
    assert repr(other.detail.strategies) != slow
    assert other.step_s < own_s * (1.0 + TOLERANCE_RATIO) ** 2


def test_what_runs_out_is_not_chosen_because_all_others_simulate_slowly(
    outcome: SearchOutcome,
) -> None:
    """No simulation is within the tolerance of the least closed form."""
    fastest = present(outcome.solutions).taken(np.array([0]))
    own_s = float(fastest.step_s[0])
    for share in (1.2, 1.02):
        full = replace(fastest, peak_bytes=np.array([share * outcome.problem.capacity_bytes]))
        assert oom_chances(outcome, full).ever_C[0] > LIKELY
        plain = present(chosen_among(outcome, full, is_near=as_expected(own_s)))
        for slower in (1.03, 1.2, 2.0):
            simulate = times_closed_form(slower)
            chosen = chosen_among(outcome, full, simulate=simulate, is_near=as_expected(own_s))
            assert chosen is not None, (share, slower)
            assert oom_chances(outcome, chosen.row).ever_C[0] <= LIKELY
            # All simulations take as long, so the same is chosen.
            assert chosen.step_s == pytest.approx(slower * plain.step_s, rel=TOLERANCE_RATIO)


def test_a_costly_fastest_stays_where_all_others_simulate_slower(outcome: SearchOutcome) -> None:
    fastest = present(outcome.solutions).taken(np.array([0]))
    own_s = float(fastest.step_s[0])
    capacity = outcome.problem.capacity_bytes
    shares = np.linspace(0.85, 1.0, 61)
    full = next(
        one
        for share in shares
        if 0.3
        < oom_chances(
            outcome, one := replace(fastest, peak_bytes=np.array([share * capacity]))
        ).ever_C
        <= LIKELY
    )
    dear = LossPrices(failed_start_s=0.2 * own_s * 1e4, run_steps=1e4)

    def chosen_with(slower: float) -> Preferred | None:
        return chosen_among(
            outcome,
            full,
            prices=dear,
            simulate=times_closed_form(slower),
            is_near=as_expected(own_s),
        )

    near = present(chosen_with(1.0))
    assert present(near.fastest_expected_s) > own_s * (1.0 + TOLERANCE_RATIO)
    # 3 % more than the closed form is still less than what the fastest is expected to take.
    assert present(chosen_with(1.03)).step_s < present(near.fastest_expected_s)
    assert chosen_with(1.5) is None


def test_less_chance_of_running_out_comes_before_everything_else(outcome: SearchOutcome) -> None:
    one = present(outcome.solutions).taken(np.array([0]))
    capacity = outcome.problem.capacity_bytes

    def key(share: float) -> tuple[int, ...]:
        return tuple(criteria(outcome, replace(one, peak_bytes=np.array([share * capacity])))[0])

    assert CRITERIA[0][0] == "memory"
    none, some, likely = (key(share)[0] for share in (0.5, 0.9, 1.0))
    assert 0 == none < some < likely
    assert key(0.5)[1:] == key(1.0)[1:]


def test_the_capacity_is_all_of_the_device_not_what_a_plan_may_use(outcome: SearchOutcome) -> None:
    problem = outcome.problem
    assert problem.capacity_bytes * problem.usable_memory_ratio == pytest.approx(
        problem.memory_limit_bytes
    )
    assert problem.usable_memory_ratio < 1.0


def test_a_costlier_failure_reaches_for_safer_decisions(outcome: SearchOutcome) -> None:
    """The fastest is made to run out for sure; the more that costs, the slower a step may be."""
    fastest = present(outcome.solutions).taken(np.array([0]))
    full = replace(fastest, peak_bytes=np.array([1.2 * outcome.problem.capacity_bytes]))

    def expected_s(failed_start_s: float) -> float:
        prices = LossPrices(failed_start_s=failed_start_s, run_steps=1e4)
        chosen = present(chosen_among(outcome, full, prices=prices))
        assert float(chosen.row.peak_bytes[0]) < outcome.problem.capacity_bytes
        return present(chosen.fastest_expected_s)

    step_s = float(fastest.step_s[0])
    cheap, dear = (expected_s(share * step_s * 1e4) for share in (0.0, 0.05))
    assert step_s <= cheap < dear
    assert dear == pytest.approx(1.05 * step_s, rel=0.02)


@pytest.mark.slow
def test_the_roomier_decision_is_the_fastest_with_a_small_chance(
    tight: SearchOutcome, every_tight: Solutions
) -> None:
    step_s = float(present(tight.solutions).step_s[0])
    row = fastest_with_headroom(tight, step_s=step_s)
    most_s = step_s * (1.0 + MOST_SLOWER_RATIO)
    every = every_tight.taken(np.flatnonzero(every_tight.step_s <= most_s))
    roomy = every.step_s[oom_chances(tight, every).ever_C <= SMALL]
    assert (row is None) == (len(roomy) == 0)
    if row is not None:
        assert float(row.step_s[0]) == pytest.approx(float(roomy.min()))
        assert float(oom_chances(tight, row).ever_C[0]) <= SMALL


def test_pipelines_of_torchtitan_need_more_headroom_than_others(outcome: SearchOutcome) -> None:
    ranks = present(outcome.solutions).candidates.rows["pipeline"]
    both = present(outcome.solutions).taken(np.array([np.argmin(ranks), np.argmax(ranks)]))
    assert list(both.candidates.rows["pipeline"] > 1) == [False, True]
    peak_bytes = np.full(2, 0.92 * outcome.problem.capacity_bytes)
    torch = replace(outcome, problem=replace(outcome.problem, software=Software.TORCH_FSDP))

    def at_start(search: SearchOutcome) -> list[float]:
        return list(oom_chances(search, replace(both, peak_bytes=peak_bytes)).at_start_C)

    own_kind, other = at_start(outcome), at_start(torch)
    assert own_kind[0] == pytest.approx(own_kind[1])
    assert other[0] < 0.1
    assert other[1] > 0.3


def test_experts_without_a_recording_grow_and_those_with_one_do_not(outcome: SearchOutcome) -> None:
    one = present(outcome.solutions).taken(np.array([0]))
    full = replace(one, peak_bytes=np.array([0.93 * outcome.problem.capacity_bytes]))
    degrees = tuple(d for d in range(1, 65) if 64 % d == 0)
    flat = ExpertImbalance(
        degrees=degrees, mean_D=np.ones(len(degrees)), p99_D=np.ones(len(degrees))
    )
    recorded = replace(outcome, problem=replace(outcome.problem, expert_imbalance=flat))
    guessed, known = oom_chances(outcome, full), oom_chances(recorded, full)
    assert guessed.at_start_C[0] == known.at_start_C[0]
    assert guessed.later_C[0] > 2.0 * known.later_C[0]


def test_the_order_and_the_forecast_of_a_decision_have_one_chance() -> None:
    """Of unequal stages the one that grows most need not have the peak: 48 layers, 4 stages."""
    limits = Search(
        micro_batch_size=(1, 2),
        cuda_graph=("none",),
        zero_stage=(1,),
        pipeline_model_parallel_size=(4,),
    )
    problem = make_problem("qwen3-30b-a3b", devices=32, capabilities=MEGATRON_0_18, limits=limits)
    outcome = search(problem, SETTINGS)
    peaks = present(outcome.solutions).peak_bytes
    # As if the device had little more than the peaks: no chance is 0 or 1.
    capacity = 1.03 * float(np.median(peaks))
    limited = replace(problem, usable_memory_ratio=problem.memory_limit_bytes / capacity)
    tight = replace(outcome, problem=limited)
    probabilities = []
    for index in range(len(present(outcome.solutions))):
        detail = price_solution(tight, index)
        grown = uneven_bytes(
            limited.shape,
            detail.strategies,
            limited.hardware,
            detail.stages,
            constants=limited.memory_constants,
        )
        forecast = forecast_memory(
            detail.memory.total_PC[:, 0],
            grown,
            capacity_bytes=limited.capacity_bytes,
            software=limited.software,
            prices=USUAL,
        )
        probabilities.append(forecast.out_of_memory_probability)
    ordered = oom_chances(tight, present(outcome.solutions)).ever_C
    assert ((ordered > 0.05) & (ordered < 0.95)).sum() >= 3
    assert ordered == pytest.approx(probabilities, rel=1e-6, abs=1e-9)
