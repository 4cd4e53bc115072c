from itertools import pairwise, permutations

import numpy as np
import numpy.typing as npt
import pytest

from tuner.costs.analytic.constants import Software
from tuner.planner.analytic.memory_risk import (
    CRASHES,
    FAILED_START_S,
    LIKELY,
    SMALL,
    USUAL_RUN_S,
    Chances,
    LossPrices,
    chances,
    forecast_of,
    loss_prices,
)
from tuner.spec.goal import TrainGoal

Floats = npt.NDArray[np.float64]
MEGATRON = Software.MEGATRON_2025


def likely(*ever: float) -> Chances:
    """Every one at the start."""
    return Chances(at_start_C=np.array(ever), ever_C=np.array(ever))


def certain(at_start: float, ever: float) -> Chances:
    return Chances(at_start_C=np.array([at_start]), ever_C=np.array([ever]))


def test_a_failed_start_costs_itself_and_a_late_crash_its_restarts_too() -> None:
    # 10 % at the start: 0.1 x 1,000 s. 20 % later: 0.2 x (2 x 300 + 1,000) s.
    prices = LossPrices(failed_start_s=1000.0, crash_s=300.0)
    assert CRASHES == 2.0
    assert prices.loss_s(certain(0.1, 0.3)) == pytest.approx([100.0 + 320.0])


def test_a_decision_that_runs_out_delivers_the_step_of_what_is_run_next() -> None:
    # 30 % run out: 0.7 x 10 s and 0.3 x 12 s. 50 s lost of a run of 100 steps of 10 s: 0.3 x 5 %.
    prices = LossPrices(failed_start_s=50.0, crash_s=0.0, run_steps=100.0)
    found = prices.expected_s(np.array([10.0, 12.0]), likely(0.3, 0.0))
    assert found == pytest.approx([7.0 + 3.6 + 0.15, 12.0])
    # For sure: nothing of its own step is left, whatever a failed start costs.
    cheap = LossPrices(failed_start_s=0.0, crash_s=0.0)
    assert cheap.expected_s(np.array([1.0, 12.0]), likely(1.0, 0.0)) == pytest.approx([12.0, 12.0])


def test_what_is_run_next_may_run_out_as_well() -> None:
    # 40 % run out; half of these run out with the second too, and take the third.
    found = LossPrices(failed_start_s=0.0, crash_s=0.0).expected_s(
        np.array([10.0, 12.0, 20.0]), likely(0.4, 0.2, 0.0)
    )
    assert found[0] == pytest.approx(0.6 * 10.0 + 0.2 * 12.0 + 0.2 * 20.0)
    assert found[1] == pytest.approx(0.8 * 12.0 + 0.2 * 20.0)


def random_decisions(rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Steps and chances of a few decisions, the last of which hardly runs out."""
    count = int(rng.integers(2, 6))
    ever = rng.uniform(SMALL, 1.0, count)
    ever[-1] = rng.uniform(0.0, SMALL)
    return rng.uniform(10.0, 30.0, count), ever


def expected_by_hand(prices: LossPrices, step_s: Floats, ever: Floats, first: int) -> float:
    """The least over every sequence of tries of less chance and longer step each."""
    run_s, found = prices.run_s(float(step_s.min())), np.inf
    roomy = [one for one in range(len(ever)) if ever[one] <= SMALL]
    for count in range(len(ever)):
        for rest in permutations([one for one in range(len(ever)) if one != first], count):
            tries = (first, *rest)
            falls = all(ever[b] < ever[a] and step_s[b] >= step_s[a] for a, b in pairwise(tries))
            if not falls or any(one in roomy for one in tries[:-1]):
                continue
            is_last = tries[-1] in roomy or not any(
                ever[one] < ever[tries[-1]] and step_s[one] >= step_s[tries[-1]]
                for one in range(len(ever))
            )
            if not is_last:
                continue
            left = [*(ever[one] for one in tries), 0.0]
            total = (1.0 - left[0]) * step_s[first] + left[-2] * step_s[tries[-1]]
            total += sum((left[i] - left[i + 1]) * step_s[tries[i + 1]] for i in range(count))
            for one in tries:
                lost_s = prices.loss_s(likely(ever[one]))[0]
                total += step_s[one] * lost_s / run_s
            found = min(found, total)
    return float(found)


def test_the_expected_step_is_the_least_over_every_sequence_of_tries() -> None:
    rng, prices, wrong = np.random.default_rng(3), LossPrices(failed_start_s=1e4), []
    for seed in range(60):
        step_s, ever = random_decisions(rng)
        found = prices.expected_s(step_s, likely(*ever))
        for one in range(len(ever)):
            if np.any((ever < ever[one]) & (step_s <= step_s[one])):
                continue  # another is faster and has more room: nobody tries this one
            by_hand = expected_by_hand(prices, step_s, ever, one)
            if not np.isclose(found[one], by_hand):
                wrong.append((seed, one, found, by_hand))
    assert not wrong


def test_more_chance_never_makes_a_decision_better() -> None:
    rng, prices, wrong = np.random.default_rng(5), LossPrices(), []
    for seed in range(60):
        step_s, ever = random_decisions(rng)
        for one in range(len(ever)):
            more = ever.copy()
            found = []
            for chance in np.linspace(ever[one], 1.0, 12):
                more[one] = chance
                found.append(float(prices.expected_s(step_s, likely(*more))[one]))
            if one != len(ever) - 1 and any(b < a * (1.0 - 1e-9) for a, b in pairwise(found)):
                wrong.append((seed, one, found))
    assert not wrong


def test_leaving_out_what_takes_most_memory_never_lowers_the_least_expected_step() -> None:
    """As a smaller memory limit does; decisions are left out by chance, likely ones first."""
    rng, prices, wrong = np.random.default_rng(7), LossPrices(), []
    for seed in range(60):
        step_s, ever = random_decisions(rng)
        order = np.argsort(-ever)
        least = []
        for left_out in range(len(ever)):
            kept = order[left_out:]
            expected_s = prices.expected_s(step_s[kept], likely(*ever[kept]))
            least.append(float(expected_s[ever[kept] <= LIKELY].min(initial=np.inf)))
        if any(b < a * (1.0 - 1e-9) for a, b in pairwise(least)):
            wrong.append((seed, least))
    assert not wrong


def test_a_run_without_tokens_takes_its_usual_length() -> None:
    assert LossPrices().run_s(3.0) == USUAL_RUN_S
    assert LossPrices(run_steps=100.0).run_s(3.0) == 300.0


def test_a_goal_states_its_own_prices() -> None:
    values = {"kind": "train", "sequence_length": 4096, "global_batch_size": 1024}
    assert loss_prices(TrainGoal.model_validate(values)).failed_start_s == FAILED_START_S
    stated = TrainGoal.model_validate(
        values
        | {
            "tokens": 4096 * 1024 * 500,
            "failed_start": "30min",
            "reliability": {
                "device_mtbf": "50000h",
                "restart": "10min",
                "checkpoint": {"interval": "20min"},
            },
        }
    )
    assert loss_prices(stated) == LossPrices(
        failed_start_s=1800.0, crash_s=600.0 + 600.0, run_steps=500.0
    )


def test_the_device_that_is_most_likely_to_run_out_decides() -> None:
    peaks = np.array([70.0, 76.0, 60.0])
    forecast = forecast_of(
        peaks, 0.0, capacity_bytes=80.0, software=MEGATRON, prices=LossPrices(failed_start_s=100.0)
    )
    each = chances(peaks, capacity_bytes=80.0, software=MEGATRON, pipeline_C=3)
    assert forecast.out_of_memory_probability == pytest.approx(each.ever_C[1])
    assert forecast.out_of_memory_at_start_probability == pytest.approx(each.at_start_C[1])
    # Devices of two pools: 60 of 60 is fuller than 76 of 80.
    unlike = forecast_of(
        peaks,
        0.0,
        capacity_bytes=np.array([80.0, 80.0, 60.0]),
        software=MEGATRON,
        prices=LossPrices(),
    )
    assert unlike.out_of_memory_probability > forecast.out_of_memory_probability


def test_what_an_uneven_load_decides_makes_late_crashes_likelier() -> None:
    even, uneven = (
        chances(
            np.array([72.0]),
            capacity_bytes=80.0,
            software=MEGATRON,
            pipeline_C=1,
            uneven_bytes_C=more,
        )
        for more in (0.0, 30.0)
    )
    assert uneven.at_start_C == even.at_start_C
    assert uneven.later_C[0] > 5.0 * even.later_C[0]
