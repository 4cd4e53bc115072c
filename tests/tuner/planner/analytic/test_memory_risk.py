import numpy as np
import pytest

from tuner.costs.analytic.constants import Software
from tuner.planner.analytic.memory_risk import (
    CRASHES,
    FAILED_START_S,
    USUAL_RUN_S,
    Chances,
    LossPrices,
    chances,
    forecast_of,
    loss_prices,
)
from tuner.spec.goal import TrainGoal

MEGATRON = Software.MEGATRON_2025


def certain(at_start: float, ever: float) -> Chances:
    return Chances(at_start_C=np.array([at_start]), ever_C=np.array([ever]))


def test_a_failed_start_costs_itself_and_a_late_crash_its_restarts_too() -> None:
    # 10 % at the start: 0.1 x 1,000 s. 20 % later: 0.2 x (2 x 300 + 1,000) s.
    prices = LossPrices(failed_start_s=1000.0, crash_s=300.0)
    assert CRASHES == 2.0
    assert prices.loss_s(certain(0.1, 0.3)) == pytest.approx([100.0 + 320.0])


def test_the_expected_step_spreads_the_loss_and_goes_on_with_the_roomier() -> None:
    # A run of 100 steps of 10 s. Out at the start for sure: 50 s lost are 5 %, then 11 s a step.
    prices = LossPrices(failed_start_s=50.0, crash_s=0.0, run_steps=100.0)
    found = prices.expected_s(np.array([10.0]), certain(1.0, 1.0), fallback_s=11.0)
    assert found == pytest.approx([10.0 * 1.05 + 1.0])
    safe = prices.expected_s(np.array([10.0]), certain(0.0, 0.0), fallback_s=11.0)
    assert safe == pytest.approx([10.0])


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
