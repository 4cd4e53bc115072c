from itertools import pairwise, permutations

import numpy as np
import numpy.typing as npt
import pytest

from tuner.prices.train.constants import Software
from tuner.search.train.memory_risk import (
    CRASHES,
    FAILED_START_S,
    LIKELY,
    SMALL,
    USUAL_RUN_S,
    Chances,
    LossPrices,
    chances,
    fallback_forecast,
    forecast_memory,
    loss_prices,
    tried_in_turn_s,
    whole_loss_s,
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
    expected = prices.expected_s(np.array([10.0, 12.0]), likely(0.3, 0.0))
    assert expected == pytest.approx([7.0 + 3.6 + 0.15, 12.0])
    # For sure: nothing of its own step is left, whatever a failed start costs.
    cheap = LossPrices(failed_start_s=0.0, crash_s=0.0)
    assert cheap.expected_s(np.array([1.0, 12.0]), likely(1.0, 0.0)) == pytest.approx([12.0, 12.0])


def test_what_is_run_next_may_run_out_as_well() -> None:
    # 40 % run out; half of these run out with the second too, and take the third.
    expected = LossPrices(failed_start_s=0.0, crash_s=0.0).expected_s(
        np.array([10.0, 12.0, 20.0]), likely(0.4, 0.2, 0.0)
    )
    assert expected[0] == pytest.approx(0.6 * 10.0 + 0.2 * 12.0 + 0.2 * 20.0)
    assert expected[1] == pytest.approx(0.8 * 12.0 + 0.2 * 20.0)


def random_decisions(rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Steps and chances of a few decisions, the last of which is safe."""
    count = int(rng.integers(2, 6))
    ever = rng.uniform(SMALL, 1.0, count)
    ever[-1] = rng.uniform(0.0, SMALL)
    return rng.uniform(10.0, 30.0, count), ever


def run_by_hand_s(
    prices: LossPrices, step_s: Floats, risks: Chances, tries: tuple[int, ...], num_steps: float
) -> float:
    """Mean wall clock of a run over all that its peaks may turn out to be.

    Peaks share their errors: whatever share of outcomes is worse than a decision's chance, it runs
    out in the others, and dies at the start in the worst of them. Every outcome is a run: what dies
    is paid for, and all steps are of the first that does not, or of the last.
    """
    ends = {0.0, 1.0, *risks.ever_C, *risks.at_start_C}
    mean_s = 0.0
    for low, high in pairwise(sorted(ends)):
        badness, wall_s, runs = (low + high) / 2.0, 0.0, tries[-1]
        for one in tries:
            if badness > risks.ever_C[one]:
                runs = one
                break
            wall_s += prices.failed_start_s
            if badness > risks.at_start_C[one]:
                wall_s += CRASHES * prices.crash_s
        mean_s += (high - low) * (wall_s + num_steps * step_s[runs])
    return mean_s


def expected_by_hand(prices: LossPrices, step_s: Floats, risks: Chances, first: int) -> float:
    """The least over every sequence of tries of less chance and longer step each, a step."""
    ever, expected = risks.ever_C, np.inf
    num_steps = prices.run_steps or USUAL_RUN_S / float(step_s.min())

    def may_follow(one: int, other: int) -> bool:
        is_roomier = ever[other] < ever[one] and step_s[other] >= step_s[one]
        return bool(ever[one] > SMALL and is_roomier)

    every = range(len(ever))
    for count in every:
        for rest in permutations([one for one in every if one != first], count):
            tries = (first, *rest)
            if not all(may_follow(one, other) for one, other in pairwise(tries)):
                continue
            if any(may_follow(tries[-1], other) for other in every):
                continue  # somebody would go on
            wall_s = run_by_hand_s(prices, step_s, risks, tries, num_steps)
            expected = min(expected, wall_s / num_steps)
    return float(expected)


def test_the_expected_step_is_the_mean_over_all_outcomes_of_the_best_sequence_of_tries() -> None:
    rng = np.random.default_rng(3)
    for seed in range(60):
        run_steps = None if seed % 2 else 10.0 ** rng.uniform(3.0, 6.0)
        prices = LossPrices(failed_start_s=1e4, crash_s=3e3, run_steps=run_steps)
        step_s, ever = random_decisions(rng)
        # As published errors do, the larger chance has the larger share at the start.
        risks = Chances(at_start_C=ever * np.sqrt(ever) * rng.uniform(0.2, 1.0), ever_C=ever)
        expected = prices.expected_s(step_s, risks)
        for one in range(len(ever)):
            if np.any((ever < ever[one]) & (step_s <= step_s[one])):
                continue  # another is faster and has more room: nobody tries this one
            by_hand = expected_by_hand(prices, step_s, risks, one)
            assert np.isclose(expected[one], by_hand), (seed, one, expected, by_hand)


def test_lost_starts_cost_the_same_seconds_whatever_a_step_takes() -> None:
    # 30 % of 1,000 s over 100 steps: 3 s a step of the one that takes 10 s and of that of 20.
    prices = LossPrices(failed_start_s=1000.0, crash_s=0.0, run_steps=100.0)
    expected = prices.expected_s(np.array([20.0, 10.0]), likely(0.3, 0.3))
    assert expected == pytest.approx([23.0, 13.0])


def test_the_whole_loss_is_what_is_added_to_the_steps_of_a_run() -> None:
    prices = LossPrices(failed_start_s=50.0, crash_s=0.0, run_steps=100.0)
    risks = likely(0.3, 0.0)
    expected = prices.expected_s(np.array([10.0, 12.0]), risks)
    loss_s = float(prices.loss_s(risks)[0])
    added_s = (expected[0] - 10.0) * 100.0
    # Three in ten lose 50 s, and 2 s at each of 100 steps.
    assert added_s == pytest.approx(0.3 * 50.0 + 0.3 * 200.0)
    assert whole_loss_s(loss_s, chance=0.3, slower_s=200.0) == pytest.approx(added_s)


def test_more_chance_never_makes_a_decision_better() -> None:
    rng, prices = np.random.default_rng(5), LossPrices()
    for seed in range(60):
        step_s, ever = random_decisions(rng)
        for one in range(len(ever)):
            more = ever.copy()
            expected = []
            for chance in np.linspace(ever[one], 1.0, 12):
                more[one] = chance
                expected.append(float(prices.expected_s(step_s, likely(*more))[one]))
            assert one == len(ever) - 1 or not any(
                (b < a * (1.0 - 1e-9) for a, b in pairwise(expected))
            ), (seed, one, expected)


def test_leaving_out_what_takes_most_memory_never_lowers_the_least_expected_step() -> None:
    """As a smaller memory limit does; decisions are left out by chance, likely ones first."""
    rng, prices = np.random.default_rng(7), LossPrices()
    for seed in range(60):
        step_s, ever = random_decisions(rng)
        order = np.argsort(-ever)
        least = []
        for left_out in range(len(ever)):
            kept = order[left_out:]
            expected_s = prices.expected_s(step_s[kept], likely(*ever[kept]))
            least.append(float(expected_s[ever[kept] <= LIKELY].min(initial=np.inf)))
        assert not any((b < a * (1.0 - 1e-9) for a, b in pairwise(least))), (seed, least)


def test_a_run_without_tokens_takes_its_usual_length() -> None:
    assert LossPrices().run_s(3.0) == USUAL_RUN_S
    assert LossPrices().run_s(3.0 * USUAL_RUN_S) == 3.0 * USUAL_RUN_S
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
    forecast = forecast_memory(
        peaks, 0.0, capacity_bytes=80.0, software=MEGATRON, prices=LossPrices(failed_start_s=100.0)
    )
    each = chances(peaks, capacity_bytes=80.0, software=MEGATRON, pipeline_C=3)
    assert forecast.out_of_memory_probability == pytest.approx(each.ever_C[1])
    assert forecast.out_of_memory_at_start_probability == pytest.approx(each.at_start_C[1])
    # Devices of two pools: 60 of 60 is fuller than 76 of 80.
    unlike = forecast_memory(
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


def test_trying_one_first_costs_its_own_step_as_often_as_it_runs() -> None:
    prices = LossPrices(failed_start_s=0.0, crash_s=0.0)
    risks = [fallback_forecast(chance) for chance in (0.59, 0.303)]
    assert tried_in_turn_s(prices, (2.28, 4.53), risks) == pytest.approx(0.41 * 2.28 + 0.59 * 4.53)
    # What runs out as well goes on with the next: 0.303 of all starts reach it.
    assert tried_in_turn_s(
        prices, (2.28, 4.53, 6.0), [*risks, fallback_forecast(0.0)]
    ) == pytest.approx(0.41 * 2.28 + (0.59 - 0.303) * 4.53 + 0.303 * 6.0)
