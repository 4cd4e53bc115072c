"""Seconds of wall clock per step, as columns: what must never get better, and what must not vanish.

The case worked by hand: 64 devices of 1,000 h MTBF, lambda = 1.7778e-5 /s; 1e12 bytes at 10 GB/s,
every device copying its 64th at 1 GB/s: c = 15.625 + 100 = 115.625 s, R = 60 + 115.625 s.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tuner.catalog.saved_bytes import MIXED_PRECISION, SavedBytes
from tuner.faults.goodput import goodput_step_s
from tuner.faults.reliability import FailureModel, Jobs, Storage, checkpoint_bytes

HOUR = 3600.0
STORAGE = Storage(write_bytes_per_s=10e9, read_bytes_per_s=10e9, host_bytes_per_s=1e9)
RELIABILITY = FailureModel(device_mtbf_s=1000 * HOUR, restart_s=60.0, storage=STORAGE)
JOBS = Jobs(devices=64.0, nodes=8.0, checkpoint_bytes=1e12, writers=64.0)


def _one(step_s: float, jobs: Jobs, reliability: FailureModel) -> float:
    return float(goodput_step_s(step_s, jobs=jobs, reliability=reliability))


def test_a_step_costs_its_share_of_checkpoints_failures_and_restarts() -> None:
    # Best tau: x + exp(-x - 0.0020556) = 1 gives x = 0.062765, tau = 3530.5 s; E per segment =
    # exp(lambda R) (exp(lambda (tau + c)) - 1) / lambda.
    rate, restart = 64 / (1000 * HOUR), 175.625
    tau = 3530.5
    expected = np.exp(rate * restart) * np.expm1(rate * (tau + 115.625)) / rate / tau
    assert _one(1.0, JOBS, RELIABILITY) == pytest.approx(expected, rel=1e-6)


def test_without_failures_a_step_is_a_step() -> None:
    assert goodput_step_s(np.array([1.0, 2.5]), jobs=JOBS, reliability=None).tolist() == [1.0, 2.5]


def test_columns_differ_in_everything_a_configuration_decides() -> None:
    step_s = np.array([1.0, 1.1, 0.9])
    jobs = Jobs(
        devices=np.array([64.0, 56.0, 64.0]),
        nodes=np.array([8.0, 7.0, 8.0]),
        checkpoint_bytes=np.array([1e12, 1e12, 1.2e12]),
        writers=np.array([64.0, 7.0, 8.0]),
        spare_nodes=np.array([0.0, 1.0, 0.0]),
    )
    reliability = replace(RELIABILITY, repair_s=24 * HOUR, node_mtbf_s=5000 * HOUR)
    together = goodput_step_s(step_s, jobs=jobs, reliability=reliability)
    for column in range(3):
        single = Jobs(
            devices=float(np.asarray(jobs.devices)[column]),
            nodes=float(np.asarray(jobs.nodes)[column]),
            checkpoint_bytes=float(np.asarray(jobs.checkpoint_bytes)[column]),
            writers=float(np.asarray(jobs.writers)[column]),
            spare_nodes=float(np.asarray(jobs.spare_nodes)[column]),
        )
        assert _one(float(step_s[column]), single, reliability) == together[column]


def test_a_slower_step_on_fewer_devices_can_be_the_better_run() -> None:
    # Eight nodes without a spare wait a day after each failure (every 15.6 h); seven with one do
    # not, and 8/7 of the step time is less than what waiting costs.
    reliability = replace(RELIABILITY, repair_s=24 * HOUR)
    all_eight = _one(1.0, JOBS, reliability)
    seven = replace(JOBS, devices=56.0, nodes=7.0, writers=56.0, spare_nodes=1.0)
    assert _one(8 / 7, seven, reliability) < all_eight
    assert _one(8 / 7, seven, RELIABILITY) > _one(1.0, JOBS, RELIABILITY)


def test_a_run_that_cannot_finish_is_infinitely_long_beside_ones_that_can() -> None:
    jobs = replace(JOBS, checkpoint_bytes=np.array([1e12, 1e15]))
    hopeless = replace(RELIABILITY, device_mtbf_s=20 * HOUR)  # a failure every 19 minutes
    steps_s = goodput_step_s(np.array([1.0, 1.0]), jobs=jobs, reliability=hopeless)
    assert np.isfinite(steps_s[0])
    assert np.isinf(steps_s[1])


def test_a_checkpoint_holds_what_is_trained_and_what_its_engine_adds() -> None:
    assert checkpoint_bytes(MIXED_PRECISION, trained=10.0) == 140.0
    both = SavedBytes(trained=12.0, frozen=4.0, reread=2.0)
    assert checkpoint_bytes(both, trained=10.0, frozen=100.0) == 520.0
    # arXiv 2104.04473 states 13.8 TB for its model of 1,008 billion parameters.
    assert checkpoint_bytes(MIXED_PRECISION, trained=1008e9) == pytest.approx(13.8e12, rel=0.03)


reliabilities = st.builds(
    FailureModel,
    device_mtbf_s=st.floats(100 * HOUR, 1e6 * HOUR),
    node_mtbf_s=st.floats(100 * HOUR, 1e6 * HOUR),
    restart_s=st.floats(0.0, 3600.0),
    repair_s=st.floats(0.0, 48 * HOUR),
    storage=st.builds(
        Storage,
        write_bytes_per_s=st.floats(1e9, 1e12),
        read_bytes_per_s=st.floats(1e9, 1e12),
        node_write_bytes_per_s=st.floats(1e8, 1e11),
        node_read_bytes_per_s=st.floats(1e8, 1e11),
        host_bytes_per_s=st.floats(1e9, 1e11),
        asynchronous=st.booleans(),
    ),
    interval_s=st.none() | st.floats(60.0, 24 * HOUR),
)
jobs_on_pool = st.builds(
    Jobs,
    devices=st.integers(1, 4096).map(float),
    nodes=st.integers(1, 512).map(float),
    checkpoint_bytes=st.floats(1e9, 2e13),
    writers=st.integers(1, 4096).map(float),
    spare_nodes=st.integers(0, 20).map(float),
)
ROUNDING = 1 + 1e-9


@given(
    reliability=reliabilities,
    jobs=jobs_on_pool,
    step=st.floats(0.1, 100.0),
    more=st.floats(1.0, 3.0),
)
@settings(deadline=None, max_examples=60)
def test_what_is_worse_never_makes_the_run_shorter(
    reliability: FailureModel, jobs: Jobs, step: float, more: float
) -> None:
    now = _one(step, jobs, reliability)
    assert now >= step
    assert _one(step * more, jobs, reliability) * ROUNDING >= now
    for worse in (
        replace(reliability, device_mtbf_s=reliability.device_mtbf_s / more),
        replace(reliability, node_mtbf_s=reliability.node_mtbf_s / more),
        replace(reliability, restart_s=reliability.restart_s * more),
        replace(reliability, repair_s=reliability.repair_s * more),
    ):
        assert _one(step, jobs, worse) * ROUNDING >= now
    assert _one(step, replace(jobs, devices=jobs.devices * more), reliability) * ROUNDING >= now
    more_spares = replace(jobs, spare_nodes=jobs.spare_nodes + 1.0)
    assert _one(step, more_spares, reliability) <= now * ROUNDING


@given(reliability=reliabilities, jobs=jobs_on_pool, more=st.floats(1.0, 3.0))
@settings(deadline=None, max_examples=60)
def test_slower_storage_never_helps_when_the_interval_is_free(
    reliability: FailureModel, jobs: Jobs, more: float
) -> None:
    free = replace(reliability, interval_s=None)
    now = _one(1.0, jobs, free)
    storage = free.storage
    for slower in (
        replace(storage, write_bytes_per_s=storage.write_bytes_per_s / more),
        replace(storage, read_bytes_per_s=storage.read_bytes_per_s / more),
        replace(storage, host_bytes_per_s=storage.host_bytes_per_s / more),
    ):
        assert _one(1.0, jobs, replace(free, storage=slower)) * ROUNDING >= now
    assert _one(1.0, jobs, free) <= _one(1.0, jobs, reliability) * ROUNDING


OVERWHELMED = (
    # A write takes 80 minutes, and something fails every 44.
    replace(
        RELIABILITY,
        device_mtbf_s=9974518.0,
        node_mtbf_s=373302.0,
        restart_s=0.0,
        storage=Storage(
            write_bytes_per_s=1e9,
            read_bytes_per_s=1e9,
            node_write_bytes_per_s=1e8,
            node_read_bytes_per_s=1e8,
            host_bytes_per_s=1e9,
        ),
    ),
    Jobs(devices=2209.0, nodes=58.0, checkpoint_bytes=4777790876306.0, writers=54.0),
)


@given(reliability=reliabilities, jobs=jobs_on_pool)
@example(*OVERWHELMED)
@settings(deadline=None, max_examples=40)
def test_writing_beside_the_training_never_costs_more_than_waiting_for_it(
    reliability: FailureModel, jobs: Jobs
) -> None:
    free = replace(reliability, interval_s=None)
    waits = replace(free, storage=replace(free.storage, asynchronous=False))
    beside = replace(free, storage=replace(free.storage, asynchronous=True))
    assert _one(1.0, jobs, beside) <= _one(1.0, jobs, waits) * ROUNDING
