"""The share of useful time with two checkpoint levels, against formulas and simulated runs."""

import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from tests.rows import Failures
from tests.tuner.faults.drawn_failures import drawn_failures
from tests.tuner.faults.embedded_chain import training_share
from tests.tuner.faults.level_table import TABLE, Case, case, seconds
from tests.tuner.faults.simulation import Run, SimulatedRun, simulate
from tuner.faults.interval import CheckpointCycle
from tuner.faults.levels import FailureClass, FailureRates, Level, SavePolicy
from tuner.faults.two_levels import host_lost_s, level_shares, queued_copies, unfinished

PERIODS = (3, 11)
"""Shared checkpoints of a shorter and a longer run, whose difference is free of how runs begin and
end."""


def _one_level_ratio(
    work_s: float, stall_s: float, background_s: float, restart_s: float, rate: float
) -> float:
    ratio = CheckpointCycle(
        failures_per_s=rate,
        work_s=work_s,
        stall_s=stall_s,
        background_s=background_s,
        restart_s=restart_s,
        waiting_ratio=0.0,
    ).effective_ratio
    return float(ratio)


def test_one_level_is_the_formula_of_one_level(failures: Failures) -> None:
    for mean_s in (600.0, 1e4, 1e6, 1e9):
        for is_async in (False, True):
            for restart_s in (0.0, 40.0, 900.0):
                alike = (restart_s,) * 3
                times = seconds(durable_after_s=(0.0, 35.0), shared_restart_s=alike)
                one = case(None, 12, times, (mean_s, 2 * mean_s, 5 * mean_s), asynchronous=is_async)
                stall_s = 4.0 if is_async else 39.0
                expected = _one_level_ratio(
                    120.0, stall_s, 39.0 - stall_s, restart_s, one.rates.per_s
                )
                shares = level_shares(one.policy, one.seconds, one.rates)
                with failures.of(mean_s, is_async, restart_s):
                    assert shares.training == pytest.approx(expected, rel=1e-9)
                    assert shares.host_restores == 0.0


def test_free_copies_that_no_failure_spares_change_nothing(failures: Failures) -> None:
    # Every failure takes a node, and no other node has its copy: segments are one long one.
    for mean_s in (400.0, 1e4, 1e7, 1e10):
        for host, background_s in ((6, 0.0), (3, 35.0), (2, 50.0), (1, 100.0), (1, 120.0)):
            times = seconds(
                stall_s=(0.0, 4.0),
                durable_after_s=(0.0, background_s),
                shared_restart_s=(40.0, 40.0, 40.0),
            )
            one = case(host, 12, times, (0.0, mean_s, 0.0), asynchronous=True)
            expected = _one_level_ratio(120.0, 4.0, background_s, 40.0, one.rates.per_s)
            shares = level_shares(one.policy, one.seconds, one.rates)
            with failures.of(mean_s, host, background_s):
                assert shares.training == pytest.approx(expected, rel=1e-9)
                assert shares.host_restores == pytest.approx(0.0, abs=1e-12)


def test_the_chain_of_restarts_has_the_same_share(failures: Failures) -> None:
    for name, one in TABLE.items():
        for often in (1.0, 4.0):
            own = replace(
                one,
                rates=FailureRates(
                    process_per_s=one.rates.process_per_s * often,
                    node_per_s=one.rates.node_per_s * often,
                    together_per_s=one.rates.together_per_s * often,
                ),
            )
            with failures.of(name, often):
                shares = level_shares(own.policy, own.seconds, own.rates)
                assert shares.training == pytest.approx(training_share(own), rel=1e-9)


def test_where_hardly_a_failure_takes_the_copies_hosts_are_the_only_level() -> None:
    # One failure in 1e7 needs the shared level, whose checkpoints stall as the host's do.
    times = seconds(
        stall_s=(2.0, 2.0),
        durable_after_s=(9.0, 9.0),
        host_restart_s=(50.0, 50.0),
        shared_restart_s=(50.0, 50.0, 50.0),
    )
    for host in (1, 3):
        one = case(host, 24, times, (900.0, 1800.0, 1e10), replicas=1, asynchronous=True)
        expected = _one_level_ratio(10.0 * host, 2.0, 9.0, 50.0, one.rates.per_s)
        assert level_shares(one.policy, one.seconds, one.rates).training == pytest.approx(
            expected, rel=1e-5
        )


def _against_simulation(one: Case, *, runs: int, most_error: float) -> None:
    """Compare the mean wall clock of a period, and what it consists of, within 3 errors."""
    expected = level_shares(one.policy, one.seconds, one.rates)
    period_s = one.policy.shared_interval_steps * one.seconds.step_s
    both = [_pair(one, seed) for seed in range(runs)]
    periods = PERIODS[1] - PERIODS[0]

    def differences(name: str) -> np.ndarray:
        return np.array([getattr(long, name) - getattr(short, name) for short, long in both])

    wall_s = differences("wall_s")
    error_s = float(np.std(wall_s, ddof=1)) / math.sqrt(runs)
    assert error_s < most_error * float(np.mean(wall_s))
    assert abs(np.mean(wall_s) - periods * period_s / expected.training) < 3.0 * error_s
    parts = {
        "saving_s": expected.checkpoints,
        "lost_s": expected.lost,
        "recovery_s": expected.restarting,
    }
    for name, share in parts.items():
        # A ratio of two means; its error from what is left of the part.
        rest = differences(name) - share * wall_s
        error_s = float(np.std(rest, ddof=1)) / math.sqrt(runs)
        assert abs(np.mean(rest)) <= 3.0 * error_s + 1e-6 * float(np.mean(wall_s)), name
    from_host = np.array([_host_restores(long) - _host_restores(short) for short, long in both])
    every = np.array([len(long.restores) - len(short.restores) for short, long in both])
    rest = from_host - expected.host_restores * every
    error = float(np.std(rest, ddof=1)) / math.sqrt(runs)
    assert abs(np.mean(rest)) <= 3.0 * error + 1e-9


def _pair(one: Case, seed: int) -> tuple[SimulatedRun, SimulatedRun]:
    """A shorter and a longer run through the same failures."""
    short, long = (
        simulate(
            one.policy,
            Run(steps=num * one.policy.shared_interval_steps, seconds=one.seconds),
            failures=drawn_failures(one.rates, rng=np.random.default_rng(seed)),
        )
        for num in PERIODS
    )
    return short, long


def _host_restores(run: SimulatedRun) -> int:
    return run.restores.count(Level.HOST)


def test_a_few_simulated_runs_agree_with_the_renewal_model(failures: Failures) -> None:
    for name, one in TABLE.items():
        with failures.of(name):
            _against_simulation(one, runs=120, most_error=0.12)


@pytest.mark.slow
def test_two_thousand_simulated_runs_agree_with_the_renewal_model(failures: Failures) -> None:
    for name, one in TABLE.items():
        with failures.of(name):
            _against_simulation(one, runs=2000, most_error=0.03)


def test_rare_failures_cost_no_digits(failures: Failures) -> None:
    # To first order a failure of a class costs half of what it loses, and its restart. Ten segments
    # of 41 s, the last one of 42 s.
    policy = SavePolicy(
        host_interval_steps=4, shared_interval_steps=40, replicas=1, asynchronous=True
    )
    period_s = 400.0 + 9 * 1.0 + 2.0
    # The write to shared storage ends before the first copy on hosts is made; or in the ninth
    # segment, so that eight of them wait for it, and each for those before it.
    hardly = [46.0 + 41.0 * j for j in range(9)]
    long = [355.0 + 5.0 * j for j in range(9)]
    for write_s, host_at in ((30.0, hardly), (350.0, long)):
        times = seconds(stall_s=(1.0, 2.0), durable_after_s=(5.0, write_s))
        # From one shared copy to the next, and what each newest copy holds.
        newest = [write_s, *host_at, period_s + write_s]
        lost_s = sum(
            ((begin + end) / 2 - 41.0 * segment) * (end - begin)
            for segment, (begin, end) in enumerate(pairwise(newest))
        )
        newest_shared = (host_at[0] - write_s) / period_s
        for rate in (1e-9, 1e-12):
            rates = FailureRates(process_per_s=rate, node_per_s=2 * rate, together_per_s=3 * rate)
            shares = level_shares(policy, times, rates)
            host_cost_s = (rates.process_per_s + rates.node_per_s) * lost_s / period_s
            host_cost_s += rates.process_per_s * 60.0 + rates.node_per_s * 120.0
            host_cost_s += newest_shared * (
                rates.process_per_s * (100.0 - 60.0) + rates.node_per_s * (200.0 - 120.0)
            )
            all_cost_s = rates.together_per_s * (period_s / 2 + write_s + 300.0)
            expected = 400.0 / period_s * (1.0 - host_cost_s - all_cost_s)
            close = 20 * 900 * 900 * rate * rate + 1e-13
            with failures.of(write_s, rate):
                assert shares.training == pytest.approx(expected, rel=close)


def test_what_restarts_from_hosts_repeat_by_hand() -> None:
    # Segments of 21 and 24 s. The copy on hosts is durable 23 s after the one on shared storage
    # began to be written, and the newest until the next of these is, at 45 s; or, where that takes
    # 30 s, from 32 s until 75 s.
    policy = SavePolicy(host_interval_steps=2, shared_interval_steps=4, asynchronous=True)
    for write_s, lost_s in ((0.0, (23.0 + 45.0) / 2 - 21.0), (30.0, (32.0 + 75.0) / 2 - 21.0)):
        times = seconds(durable_after_s=(2.0, write_s))
        assert host_lost_s(policy, times) == pytest.approx(lost_s), write_s
    # Many segments: half of one and the write of its copy.
    policy = SavePolicy(host_interval_steps=2, shared_interval_steps=4000, asynchronous=True)
    assert host_lost_s(policy, times) == pytest.approx(21.0 / 2 + 2.0, rel=1e-2)


def test_copies_on_hosts_queue_behind_a_write_to_shared_storage(failures: Failures) -> None:
    for segments, host_s, shared_s in product(
        (1, 2, 3, 5, 40), (0.0, 2.0, 11.5, 20.0), (0.0, 3.0, 21.0, 50.0, 84.0, 300.0)
    ):
        policy = SavePolicy(
            host_interval_steps=2, shared_interval_steps=2 * segments, asynchronous=True
        )
        own = seconds(durable_after_s=(host_s, shared_s))
        if unfinished(policy, own) is not None:
            continue
        # A segment takes 21 s; one writer takes one copy after the other.
        made_s = [21.0 * number for number in range(1, segments)]
        free_s, durable_s = shared_s, []
        for each_s in made_s:
            free_s = max(free_s, each_s) + host_s
            durable_s.append(free_s)
        most = max(
            (
                sum(made <= now < durable for made, durable in zip(made_s, durable_s, strict=True))
                for now in made_s
            ),
            default=0,
        )
        with failures.of(segments, host_s, shared_s):
            assert queued_copies(policy, own) == max(1, most)


def test_what_is_worse_is_never_better(failures: Failures) -> None:
    for name, one in TABLE.items():
        now = level_shares(one.policy, one.seconds, one.rates).training
        rates = one.rates
        longer = replace(
            one.seconds, restart_s={key: 1.5 * s for key, s in one.seconds.restart_s.items()}
        )
        worse = [
            (one.seconds, replace(rates, **{field: getattr(rates, field) * 1.3 + 1e-6}))
            for field in ("process_per_s", "node_per_s", "together_per_s")
        ]
        for times, rate in (*worse, (longer, rates)):
            with failures.of(name, rate):
                assert level_shares(one.policy, times, rate).training < now
        shares = level_shares(one.policy, one.seconds, one.rates)
        with failures.of(name):
            assert 0.0 < now < 1.0
            assert shares.lost > 0.0
            assert 0.0 <= shares.host_restores < 1.0


def test_a_hopeless_run_trains_nothing() -> None:
    for host in (None, 3):
        for restart_s, mean_s in ((1e5, 20.0), (1e12, 1e9), (10.0, 1e-3), (1e300, 1e3)):
            alike = (restart_s,) * 3
            times = seconds(shared_restart_s=alike, host_restart_s=alike[:2])
            one = case(host, 12, times, (mean_s,) * 3, replicas=int(host is not None))
            shares = level_shares(one.policy, one.seconds, one.rates)
            assert 0.0 <= shares.training < 1e-9
            assert 0.0 <= shares.lost <= 1.0
            assert 0.0 <= shares.restarting <= 1.0
            assert 0.0 <= shares.host_restores <= 1.0


def test_what_the_model_does_not_hold_for_is_refused() -> None:
    late = case(3, 12, seconds(durable_after_s=(31.0, 0.0)), (9.0, 9.0, 9.0), asynchronous=True)
    assert unfinished(late.policy, late.seconds) is Level.HOST
    # 123 s pass between shared checkpoints, in which three copies on hosts are written, too.
    later = case(3, 12, seconds(durable_after_s=(5.0, 109.0)), (9.0, 9.0, 9.0), asynchronous=True)
    assert unfinished(later.policy, later.seconds) is Level.SHARED
    sooner = case(3, 12, seconds(durable_after_s=(5.0, 108.0)), (9.0, 9.0, 9.0), asynchronous=True)
    assert unfinished(sooner.policy, sooner.seconds) is None
    for one in (late, later):
        with pytest.raises(ValueError, match="outlasts its interval"):
            level_shares(one.policy, one.seconds, one.rates)
    safe = case(3, 12, seconds(), (900.0, 900.0, 0.0), replicas=1)
    with pytest.raises(ValueError, match="no failure takes the copies"):
        level_shares(safe.policy, safe.seconds, safe.rates)
    for host, shared, replicas, message in (
        (5, 12, 0, "no multiple"),
        (0, 12, 0, "one step or more"),
        (None, 12, 1, "need checkpoints on hosts"),
    ):
        with pytest.raises(ValueError, match=message):
            SavePolicy(host_interval_steps=host, shared_interval_steps=shared, replicas=replicas)
    with pytest.raises(ValueError, match="something must fail"):
        FailureRates()
    assert not SavePolicy(shared_interval_steps=2, host_interval_steps=1).survives(
        FailureClass.NODE
    )
