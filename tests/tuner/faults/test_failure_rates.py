"""Rates of a failure log with their intervals."""

import math

import numpy as np
import pytest

from tuner.catalog.saved_bytes import MIXED_PRECISION
from tuner.faults.failure_rates import observed_rates, poisson_interval
from tuner.faults.forecast import TrainingRun, forecast
from tuner.faults.reliability import FailureModel, Jobs, Storage, checkpoint_bytes
from tuner.spec.failure_log import FailureLog

DAY = 86_400.0
LLAMA_3 = {"device": 268, "node": 46, "link": 42, "software": 63}
"""Of 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv 2407.21783, table 5): faulty
GPUs, HBM, SRAM, system processors, thermal sensors and silent corruption; hosts, their disks and
power; switches, cables and NICs; software, its dependencies and NCCL's timeouts."""


def test_poisson_intervals_are_those_of_the_tables() -> None:
    # Two-sided 90 % limits: halves of chi-squared quantiles at 5 and 95 %.
    tables = {
        0: (0.0, 2.9957),
        1: (0.0513, 4.7439),
        5: (1.9701, 10.5130),
        30: (21.5940, 40.6906),
        100: (84.1393, 118.0793),
    }
    for count, expected in tables.items():
        assert poisson_interval(count) == pytest.approx(expected, rel=1e-3), count
    low, high = poisson_interval(1_000_000)
    assert (high - low) / 2e6 == pytest.approx(1.645e-3, rel=0.01)


def test_intervals_cover_the_true_rate_as_often_as_they_say() -> None:
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        low, high = poisson_interval(int(generator.poisson(12.0)))
        covered += low <= 12.0 <= high
    # Exact intervals cover at least as often.
    assert 0.87 <= covered / 400 <= 0.97


def test_the_interruptions_of_llama_3_give_its_effective_share() -> None:
    """More than 90 % of the time was effective; 419 failures were seen."""
    period, devices = 54 * DAY, 16_384
    log = FailureLog(
        counts=dict(LLAMA_3),
        device_s=devices * period,
        node_s=devices / 8 * period,
        period_s=period,
    )
    rates = {rate.component: rate for rate in observed_rates(log)}
    assert rates["device"].mtbf_s / 3600.0 == pytest.approx(79_230, rel=1e-3)
    assert all(rate.mtbf_s_band[0] < rate.mtbf_s < rate.mtbf_s_band[1] for rate in rates.values())
    # Storage as stated (section 3.3.1: 2 TB/s sustained); ten minutes to restart are ours.
    model = FailureModel(
        device_mtbf_s=log.device_mtbf_s or math.inf,
        node_mtbf_s=log.node_mtbf_s or math.inf,
        process_mtbf_s=log.mtbf_s("software") or math.inf,
        restart_s=600.0,
        storage=Storage(write_bytes_per_s=2e12, read_bytes_per_s=2e12, host_bytes_per_s=25e9),
    )
    jobs = Jobs(
        devices=float(devices),
        nodes=devices / 8,
        checkpoint_bytes=checkpoint_bytes(MIXED_PRECISION, trained=405e9),
        writers=float(devices),
    )
    # 16 M tokens a step at 400 TFLOP/s a device: 6 x 405e9 x 16e6 / (16,384 x 400e12) s.
    step_s, tokens = 5.93, 16e6 * 54 * DAY * 0.92 / 5.93
    run = forecast(
        TrainingRun(step_s=step_s, tokens_per_step=16_000_000, tokens=tokens, devices_per_node=8),
        jobs=jobs,
        reliability=model,
    )
    assert 0.90 < run.effective_time_ratio < 0.97
    assert run.wall_clock_s == pytest.approx(period, rel=0.15)
    assert run.expected_failures == pytest.approx(419, rel=0.15)
