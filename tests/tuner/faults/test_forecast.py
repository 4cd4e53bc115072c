"""The whole run of a plan: length, failures, shares of time, bill, and how sure luck leaves us."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.expect import present
from tests.tuner.faults.testing import Habits, lived
from tuner.faults.forecast import RunForecast, TrainingRun, forecast
from tuner.faults.goodput import goodput_step_s
from tuner.faults.reliability import FailureModel, Jobs, Storage

HOUR = 3600.0
STORAGE = Storage(write_bytes_per_s=40e9, read_bytes_per_s=80e9, host_bytes_per_s=25e9)
RELIABILITY = FailureModel(
    device_mtbf_s=50_000 * HOUR, restart_s=600.0, repair_s=24 * HOUR, storage=STORAGE
)
JOBS = Jobs(devices=2048.0, nodes=256.0, checkpoint_bytes=9.4e12, writers=2048.0, spare_nodes=4.0)
RUN = TrainingRun(
    step_s=10.0,
    tokens_per_step=4096 * 15360,
    tokens=14.8e12,
    devices_per_node=8,
    price_per_device_hour=2.0,
)


def test_the_run_of_a_real_model_adds_up() -> None:
    run_forecast = forecast(RUN, jobs=JOBS, reliability=RELIABILITY)
    # 14.8e12 / 62,914,560 = 235,239.8 steps.
    assert run_forecast.steps == 235_240
    assert run_forecast.wall_clock_s == pytest.approx(
        235_240 * present(run_forecast.effective_step_s)
    )
    assert run_forecast.effective_time_ratio == pytest.approx(
        10.0 / present(run_forecast.effective_step_s)
    )
    assert sum(run_forecast.time_ratios.values()) == pytest.approx(1.0, abs=1e-12)
    assert run_forecast.failure_interval_s == pytest.approx(50_000 * HOUR / 2048)
    # 2048 devices train and 4 * 8 stand by.
    assert run_forecast.device_hours == pytest.approx(
        2080 * present(run_forecast.wall_clock_s) / HOUR
    )
    assert run_forecast.cost == pytest.approx(2 * present(run_forecast.device_hours))
    running_s = present(run_forecast.wall_clock_s) * (1 - run_forecast.time_ratios["waiting"])
    assert run_forecast.expected_failures == pytest.approx(running_s * 2048 / (50_000 * HOUR))
    assert run_forecast.goodput_tokens_per_s == pytest.approx(
        62_914_560 / present(run_forecast.effective_step_s)
    )
    # Young's sqrt(2 * 235.18 / 1.1378e-5) = 6429.6 s, less 2 c / 3 = 156.8 s to second order.
    assert run_forecast.checkpoint_interval_s == pytest.approx(6272.8, abs=2.0)
    assert run_forecast.checkpoint_interval_steps == round(
        present(run_forecast.checkpoint_interval_s) / 10.0
    )


def test_a_write_in_the_background_is_done_before_the_next_checkpoint() -> None:
    """9.4 TB at 40 GB/s take 235 s, 7.34 steps of 32 s, which rounds to 7: too few."""
    beside = replace(RELIABILITY, storage=replace(STORAGE, asynchronous=True))
    for step_s, steps in ((32.0, 8), (47.0, 5), (235.0, 1), (10.0, 24)):
        made = forecast(replace(RUN, step_s=step_s), jobs=JOBS, reliability=beside)
        assert made.checkpoint_in_background
        assert made.checkpoint_interval_steps == steps, step_s


def test_the_plan_s_objective_and_its_forecast_agree() -> None:
    objective = float(goodput_step_s(RUN.step_s, jobs=JOBS, reliability=RELIABILITY))
    run_forecast = forecast(RUN, jobs=JOBS, reliability=RELIABILITY)
    assert run_forecast.effective_step_s == pytest.approx(objective, rel=1e-14)


def test_without_reliability_the_run_is_its_steps() -> None:
    run_forecast = forecast(RUN, jobs=JOBS, reliability=None)
    assert run_forecast.wall_clock_s == 2_352_400.0
    assert run_forecast.wall_clock_s_band == (2_352_400.0, 2_352_400.0)
    assert (run_forecast.expected_failures, run_forecast.checkpoint_interval_s) == (0.0, None)
    assert run_forecast.effective_time_ratio == 1.0


def test_without_tokens_only_rates_are_stated() -> None:
    run_forecast = forecast(replace(RUN, tokens=None), jobs=JOBS, reliability=RELIABILITY)
    assert run_forecast.goodput_tokens_per_s > 0
    assert (run_forecast.steps, run_forecast.wall_clock_s, run_forecast.cost) == (None, None, None)


def test_without_a_price_there_are_hours_and_no_bill() -> None:
    free = replace(RUN, price_per_device_hour=None)
    run_forecast = forecast(free, jobs=JOBS, reliability=RELIABILITY)
    assert run_forecast.device_hours is not None
    assert run_forecast.cost is None


def test_a_run_that_never_finishes_says_why() -> None:
    cases: list[tuple[float, float, float | None, str]] = [
        (30 * HOUR, 60.0, None, "a checkpoint takes 3.92 min"),
        (300 * HOUR, 6 * HOUR, None, "restarting takes 6.03 h"),
        (300 * HOUR, 60.0, 20 * HOUR, "two checkpoints takes 20.0 h"),
    ]
    for mtbf_s, restart_s, interval_s, said in cases:
        hopeless = FailureModel(
            storage=STORAGE, device_mtbf_s=mtbf_s, restart_s=restart_s, interval_s=interval_s
        )
        run_forecast = forecast(RUN, jobs=JOBS, reliability=hopeless)
        assert not run_forecast.finishes
        assert said in run_forecast.reason
        assert "use fewer devices" in run_forecast.reason
        assert (run_forecast.effective_step_s, run_forecast.wall_clock_s, run_forecast.cost) == (
            None,
            None,
            None,
        )
        assert run_forecast.goodput_tokens_per_s == 0.0


def test_a_run_that_waits_for_ever_says_so() -> None:
    # One failure a day and 200 days of repair: all but one day of 201.
    broken = replace(RELIABILITY, repair_s=200 * 24 * HOUR)
    run_forecast = forecast(RUN, jobs=replace(JOBS, spare_nodes=0.0), reliability=broken)
    assert not run_forecast.finishes
    assert "waits for repairs" in run_forecast.reason


@given(
    mtbf=st.floats(1.0, 1e12),
    restart=st.floats(0.0, 1e9),
    repair=st.floats(0.0, 1e9),
    size=st.floats(0.0, 1e18),
    step=st.floats(1e-6, 1e6),
    spares=st.integers(0, 50),
    asynchronous=st.booleans(),
)
@settings(deadline=None, max_examples=80)
def test_every_forecast_is_valid_json_without_nan_or_infinity(
    mtbf: float,
    restart: float,
    repair: float,
    size: float,
    step: float,
    spares: int,
    asynchronous: bool,
) -> None:
    reliability = FailureModel(
        device_mtbf_s=mtbf,
        restart_s=restart,
        repair_s=repair,
        storage=replace(STORAGE, asynchronous=asynchronous),
    )
    jobs = replace(JOBS, checkpoint_bytes=size, spare_nodes=float(spares))
    run_forecast = forecast(replace(RUN, step_s=step), jobs=jobs, reliability=reliability)
    text = run_forecast.model_dump_json()
    json.loads(text, parse_constant=_refuse)
    assert RunForecast.model_validate_json(text) == run_forecast
    assert run_forecast.finishes != bool(run_forecast.reason)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} in JSON")


HABITS = Habits(
    failures_per_s=1 / (4 * HOUR),
    work_s=1800.0,
    stall_s=60.0,
    restart_s=600.0,
    repair_s=2 * HOUR,
    spare_nodes=1,
)


FAST = Storage(write_bytes_per_s=250e9, read_bytes_per_s=1e18, host_bytes_per_s=1e18)


def test_shares_failures_and_band_are_those_of_simulated_runs() -> None:
    # 64 devices of 256 h fail every 4 h; 15e12 bytes at 250 GB/s take 60 s, no copy worth naming.
    reliability = FailureModel(
        device_mtbf_s=256 * HOUR,
        restart_s=600.0,
        repair_s=2 * HOUR,
        interval_s=1800.0,
        storage=FAST,
    )
    jobs = Jobs(devices=64.0, nodes=8.0, checkpoint_bytes=15e12, writers=64.0, spare_nodes=1.0)
    run = TrainingRun(step_s=10.0, tokens_per_step=1, tokens=180 * 400.0, devices_per_node=8)
    run_forecast = forecast(run, jobs=jobs, reliability=reliability)
    rng = np.random.default_rng(7)
    lives = [lived(HABITS, segments=400, rng=rng) for _ in range(600)]
    wall_s = np.array([life.wall_s for life in lives])
    assert run_forecast.wall_clock_s == pytest.approx(float(wall_s.mean()), rel=0.005)
    failures = float(np.mean([life.failures for life in lives]))
    assert run_forecast.expected_failures == pytest.approx(failures, rel=0.03)
    for name, spent in (
        ("waiting", [life.waiting_s for life in lives]),
        ("restarting", [life.restarting_s for life in lives]),
        ("checkpoints", [life.checkpoints_s for life in lives]),
    ):
        share = float(np.sum(spent)) / float(wall_s.sum())
        assert run_forecast.time_ratios[name] == pytest.approx(share, rel=0.05)
    low, high = present(run_forecast.wall_clock_s_band)
    # A tenth of the lives lies on either side; 600 lives scatter by 1.2 points, the normal
    # approximation is allowed as much again.
    assert float(np.mean(wall_s < low)) == pytest.approx(0.1, abs=0.04)
    assert float(np.mean(wall_s > high)) == pytest.approx(0.1, abs=0.04)
    assert math.isclose(
        run_forecast.time_ratios["training"],
        720_000 / present(run_forecast.wall_clock_s),
        rel_tol=1e-12,
    )


def test_the_band_follows_the_work_that_failures_take_away() -> None:
    # No waiting and hardly a restart: every failure (8 h apart) costs half of two hours on average.
    reliability = FailureModel(
        device_mtbf_s=512 * HOUR, restart_s=60.0, interval_s=2 * HOUR, storage=FAST
    )
    jobs = Jobs(devices=64.0, nodes=8.0, checkpoint_bytes=15e12, writers=64.0)
    run = TrainingRun(step_s=10.0, tokens_per_step=1, tokens=720 * 200.0, devices_per_node=8)
    run_forecast = forecast(run, jobs=jobs, reliability=reliability)
    habits = Habits(failures_per_s=1 / (8 * HOUR), work_s=2 * HOUR, stall_s=60.0, restart_s=60.0)
    rng = np.random.default_rng(8)
    wall_s = np.array([lived(habits, segments=200, rng=rng).wall_s for _ in range(1000)])
    low, high = present(run_forecast.wall_clock_s_band)
    # A thousand lives know the width between P10 and P90 to about 4 %.
    width = float(np.subtract(*np.percentile(wall_s, [90, 10])))
    assert high - low == pytest.approx(width, rel=0.15)
    assert float(np.mean((wall_s > low) & (wall_s < high))) == pytest.approx(0.8, abs=0.05)


def test_the_largest_published_run_keeps_more_than_nine_tenths_of_its_time() -> None:
    # Llama 3 405B (arXiv 2407.21783, sections 3.3.1 and 3.3.4): 419 unexpected stops of 16,384
    # devices in 54 days, storage of 2 TB/s, "higher than 90 % effective training time". A restart
    # of ten minutes is ours.
    fifty_four_days_s = 54 * 24 * HOUR
    mtbf_s = 16_384 * fifty_four_days_s / 419
    assert mtbf_s == pytest.approx(50_700 * HOUR, rel=0.001)
    storage = Storage(write_bytes_per_s=2e12, read_bytes_per_s=2e12, host_bytes_per_s=25e9)
    reliability = FailureModel(device_mtbf_s=mtbf_s, restart_s=600.0, storage=storage)
    jobs = Jobs(devices=16_384.0, nodes=2048.0, checkpoint_bytes=14 * 405e9, writers=16_384.0)
    step_s = 10.0
    run = TrainingRun(
        step_s=step_s,
        tokens_per_step=16 * 2**20,
        tokens=16 * 2**20 * fifty_four_days_s / step_s,
        devices_per_node=8,
    )
    run_forecast = forecast(run, jobs=jobs, reliability=reliability)
    assert 0.90 < run_forecast.effective_time_ratio < 0.97
    # 419 in 54 days of wall clock, and a little more until as much training is done.
    per_54_days = (
        present(run_forecast.expected_failures)
        * fifty_four_days_s
        / present(run_forecast.wall_clock_s)
    )
    assert per_54_days == pytest.approx(419, rel=1e-9)
