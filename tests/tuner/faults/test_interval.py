"""The share of useful time against runs that are lived through event by event."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import Failures
from tests.tuner.faults.testing import Habits, lived
from tuner.faults.goodput import goodput_step_s
from tuner.faults.interval import CheckpointCycle, best_work_s, cycle
from tuner.faults.reliability import FailureModel, HostLevel, Jobs, Storage, waiting_ratio
from tuner.faults.run_shares import run_shares

HOUR = 3600.0
REPLICAS = 8
"""Lives of one grid point; their scatter gives the standard error."""

GRID = {
    # MTBF 10 h, checkpoint 60 s, restart 600 s: the example of papers on the matter.
    "synchronous": Habits(
        failures_per_s=1 / (10 * HOUR), work_s=2097.0, stall_s=60.0, restart_s=600.0
    ),
    "far too long an interval": Habits(
        failures_per_s=1 / (10 * HOUR), work_s=7140.0, stall_s=60.0, restart_s=600.0
    ),
    "fails all the time": Habits(
        failures_per_s=1 / 1800.0, work_s=600.0, stall_s=30.0, restart_s=900.0
    ),
    "asynchronous": Habits(
        failures_per_s=1 / (2 * HOUR),
        work_s=700.0,
        stall_s=5.0,
        background_s=400.0,
        restart_s=300.0,
    ),
    "the write fills the interval": Habits(
        failures_per_s=1 / (1 * HOUR),
        work_s=600.0,
        stall_s=10.0,
        background_s=600.0,
        restart_s=120.0,
    ),
    "no spare": Habits(
        failures_per_s=1 / (2 * HOUR), work_s=900.0, stall_s=30.0, restart_s=300.0, repair_s=1800.0
    ),
    "two spares, exponential repair": Habits(
        failures_per_s=1 / HOUR,
        work_s=500.0,
        stall_s=20.0,
        restart_s=200.0,
        repair_s=1.5 * HOUR,
        spare_nodes=2,
    ),
    "two spares, every repair alike": Habits(
        failures_per_s=1 / HOUR,
        work_s=500.0,
        stall_s=20.0,
        restart_s=200.0,
        repair_s=1.5 * HOUR,
        spare_nodes=2,
        repair_is_fixed=True,
    ),
}


def _reliability(habits: Habits) -> FailureModel:
    """A single device on one node that fails as often as the simulated job."""
    return FailureModel(
        device_mtbf_s=1 / habits.failures_per_s,
        restart_s=habits.restart_s,
        repair_s=habits.repair_s,
        storage=Storage(write_bytes_per_s=1e9, read_bytes_per_s=1e9, host_bytes_per_s=1e9),
    )


def _jobs(habits: Habits) -> Jobs:
    return Jobs(
        devices=1.0,
        nodes=1.0,
        checkpoint_bytes=0.0,
        writers=1.0,
        spare_nodes=float(habits.spare_nodes),
    )


def _cycle(habits: Habits) -> CheckpointCycle:
    return CheckpointCycle(
        failures_per_s=habits.failures_per_s,
        work_s=habits.work_s,
        stall_s=habits.stall_s,
        background_s=habits.background_s,
        restart_s=habits.restart_s,
        waiting_ratio=waiting_ratio(_jobs(habits), _reliability(habits)),
    )


def test_the_share_of_useful_time_is_that_of_the_simulation(failures: Failures) -> None:
    for name, habits in GRID.items():
        found = _cycle(habits)
        expected = float(found.effective_ratio)
        # Long enough for about 1,200 failures a life.
        segments = math.ceil(1200 * expected / (habits.failures_per_s * habits.work_s))
        rng = np.random.default_rng(20_06)
        lives = [lived(habits, segments=segments, rng=rng) for _ in range(REPLICAS)]
        ratios = np.array([segments * habits.work_s / life.wall_s for life in lives])
        error = float(np.std(ratios, ddof=1)) / math.sqrt(REPLICAS)
        waiting = np.array([life.waiting_s / life.wall_s for life in lives])
        waiting_error = float(np.std(waiting, ddof=1)) / math.sqrt(REPLICAS)
        with failures.of(name):
            assert error < 0.01 * expected
            # 4.5 standard errors of 8 lives (t distribution) are left once in 500.
            assert abs(float(np.mean(ratios)) - expected) < 4.5 * error
            assert abs(float(np.mean(waiting)) - float(found.waiting_ratio)) <= 4.5 * waiting_error


def test_the_share_follows_from_the_equation_by_hand() -> None:
    # tau 2097, c 60, R 600 s, lambda 1 / 36000 s: lambda (tau + c) = 0.0599167, exp - 1 =
    # 0.0617481; exp(lambda R) = 1.0168063. tau / E = 0.05825 / 0.0617481 / 1.0168063 = 0.92776.
    assert _cycle(GRID["synchronous"]).effective_ratio == pytest.approx(0.92776, abs=2e-5)
    # The long interval: 0.1983333 / (exp(0.2) - 1) / 1.0168063 = 0.88099.
    long = _cycle(GRID["far too long an interval"])
    assert long.effective_ratio == pytest.approx(0.88099, abs=2e-5)


def test_asynchronous_writing_counts_the_write_once_per_restart() -> None:
    # exp(lambda w) with lambda w = 400 / 7200 beside the synchronous share of the same stall.
    habits = GRID["asynchronous"]
    synchronous = _cycle(replace(habits, background_s=0.0)).effective_ratio
    both = _cycle(habits).effective_ratio
    assert both == pytest.approx(synchronous * math.exp(-400 / 7200), rel=1e-12)


def test_waiting_is_erlangs_loss_by_hand() -> None:
    # No spare: a / (1 + a), a = 0.25. Two spares, a = 1.5: (a^3/6) / (1 + a + a^2/2 + a^3/6)
    # = 0.5625 / 4.1875 = 0.134328.
    assert _cycle(GRID["no spare"]).waiting_ratio == pytest.approx(0.2)
    expected = 0.5625 / 4.1875
    assert _cycle(GRID["two spares, exponential repair"]).waiting_ratio == pytest.approx(expected)


@given(
    rate=st.floats(1e-9, 1e-2),
    stall=st.floats(1e-3, 1e3),
    shift=st.floats(-0.9, 3.0).filter(lambda share: abs(share) > 1e-3),
)
@settings(deadline=None, max_examples=80)
def test_no_interval_is_better_than_the_best(rate: float, stall: float, shift: float) -> None:
    best_s = float(best_work_s(failures_per_s=rate, stall_s=stall))

    def ratio(work_s: float) -> float:
        found = CheckpointCycle(
            failures_per_s=rate,
            work_s=work_s,
            stall_s=stall,
            background_s=0.0,
            restart_s=0.0,
            waiting_ratio=0.0,
        )
        return float(found.effective_ratio)

    assert ratio(best_s) >= ratio(best_s * (1 + shift)) * (1 - 1e-12)
    assert best_s <= math.sqrt(2 * stall / rate) * (1 + 1e-12)  # Young's is longer


def test_the_best_interval_lies_where_daly_puts_it() -> None:
    # Daly 2006: sqrt(2 c M) (1 + sqrt(c / 2M) / 3 + (c / 2M) / 9) - c, for c < 2 M.
    for stall, mean in ((60.0, 36_000.0), (10.0, 3_600.0), (300.0, 7_200.0)):
        root = math.sqrt(stall / (2 * mean))
        daly = math.sqrt(2 * stall * mean) * (1 + root / 3 + root**2 / 9) - stall
        best = best_work_s(failures_per_s=1 / mean, stall_s=stall)
        assert best == pytest.approx(daly, rel=2e-4)


def test_columns_are_worked_out_like_numbers() -> None:
    rates, stalls = np.array([1e-6, 1e-4, 1e-3]), np.array([5.0, 60.0, 900.0])
    together = np.asarray(best_work_s(failures_per_s=rates, stall_s=stalls))
    synchronous = [
        best_work_s(failures_per_s=float(rate), stall_s=float(stall))
        for rate, stall in zip(rates, stalls, strict=True)
    ]
    assert together.tolist() == synchronous


def _whole(**changes: float | bool | None) -> FailureModel:
    storage = Storage(
        write_bytes_per_s=40e9,
        read_bytes_per_s=80e9,
        host_bytes_per_s=25e9,
        asynchronous=bool(changes.pop("asynchronous", False)),
    )
    settings: dict[str, float | None] = {"restart_s": 600.0, "device_mtbf_s": 50_000 * HOUR}
    return FailureModel(storage=storage, **(settings | changes))  # type: ignore[arg-type]  # floats


BIG = Jobs(devices=2048.0, nodes=256.0, checkpoint_bytes=9.4e12, writers=2048.0)
"""671 B parameters of 14 bytes each."""


def test_a_cycle_takes_its_seconds_from_bytes_and_bandwidths() -> None:
    # Copy 9.4e12 / 2048 / 25e9 = 0.1836 s, write 235 s, read 117.5 s and the copy back.
    found = cycle(BIG, _whole(), step_s=10.0)
    assert found.stall_s == pytest.approx(235.1836, abs=1e-4)
    assert found.background_s == 0.0
    assert found.restart_s == pytest.approx(600 + 117.6836, abs=1e-4)
    assert found.failures_per_s == pytest.approx(2048 / (50_000 * HOUR))
    beside = cycle(BIG, _whole(asynchronous=True), step_s=10.0)
    assert beside.stall_s == pytest.approx(0.1836, abs=1e-4)
    assert beside.background_s == pytest.approx(235.0)


def test_an_asynchronous_write_is_done_before_the_next_begins() -> None:
    # The best interval would be sqrt(2 * 0.18 * 24.4 h) = 180 s, the write takes 235 s.
    assert cycle(BIG, _whole(asynchronous=True), step_s=10.0).work_s == pytest.approx(235.0)
    with_interval = cycle(BIG, _whole(asynchronous=True, interval_s=60.0), step_s=10.0)
    assert with_interval.work_s == pytest.approx(235.0)


def test_a_checkpoint_follows_a_whole_step() -> None:
    # The best interval, sqrt(2 * 235 s * 24.4 h) = 6,400 s, is shorter than this step.
    assert cycle(BIG, _whole(), step_s=9000.0).work_s == 9000.0
    assert cycle(BIG, _whole(interval_s=600.0), step_s=90.0).work_s == 600.0


def test_a_stated_interval_shorter_than_a_step_is_not_possible(failures: Failures) -> None:
    short = _whole(interval_s=60.0)
    both = replace(
        short,
        host=HostLevel(node_bytes_per_s=5e10, replicas=(1,), together_ratio=0.02, is_optional=True),
    )
    for model in (short, both):
        for step_s, reason in (
            (60.0, ""),
            (90.0, "interval 1.00 min is shorter than a step of 1.50 min"),
        ):
            shares = run_shares(BIG, model, step_s=step_s)
            with failures.of(model, step_s):
                assert (shares.training == 0.0) == bool(reason)
                assert not reason or shares.reason == reason
                wall_s = float(goodput_step_s(step_s, jobs=BIG, reliability=model))
                assert math.isinf(wall_s) == bool(reason)
    # Of several candidates, those with shorter steps are left.
    together_s = goodput_step_s(np.array([30.0, 60.0, 90.0]), jobs=BIG, reliability=short)
    assert np.isfinite(together_s).tolist() == [True, True, False]


def test_one_node_cannot_write_faster_than_its_cards() -> None:
    narrow = Storage(
        write_bytes_per_s=1e12,
        read_bytes_per_s=1e12,
        host_bytes_per_s=25e9,
        node_write_bytes_per_s=1e9,
    )
    found = cycle(BIG, replace(_whole(), storage=narrow), step_s=10.0)
    assert found.stall_s == pytest.approx(9.4e12 / 256e9 + 0.1836, abs=1e-4)
    # One replica's 16 writers lie on 16 nodes at most.
    few = cycle(replace(BIG, writers=16.0), replace(_whole(), storage=narrow), step_s=10.0)
    assert few.stall_s == pytest.approx(9.4e12 / 16e9 + 9.4e12 / 16 / 25e9, rel=1e-9)


def test_impossible_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="above zero"):
        _whole(device_mtbf_s=0.0)
    with pytest.raises(ValueError, match="below zero"):
        _whole(restart_s=-1.0)
    with pytest.raises(ValueError, match="checkpoint interval"):
        _whole(interval_s=0.0)
    with pytest.raises(ValueError, match="bandwidths"):
        Storage(write_bytes_per_s=0.0, read_bytes_per_s=1.0, host_bytes_per_s=1.0)
