"""A job on nodes of several kinds, against the Markov chain of its repairs."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.expect import present
from tuner.faults.forecast import TrainingRun, forecast
from tuner.faults.interval import cycle
from tuner.faults.kinds import jobs_together, slowest
from tuner.faults.reliability import FailureModel, Jobs, Storage, longest_wait_s, waiting_ratio

STORAGE = Storage(write_bytes_per_s=40e9, read_bytes_per_s=80e9, host_bytes_per_s=25e9)
RELIABILITY = FailureModel(device_mtbf_s=1e6, restart_s=600.0, repair_s=5_000.0, storage=STORAGE)
WHOLE = FailureModel(device_mtbf_s=1e6, restart_s=70.0, storage=STORAGE)


def job(devices: int, *, spares: int) -> Jobs:
    return Jobs(
        devices=float(devices),
        nodes=devices / 8.0,
        checkpoint_bytes=0.0,
        writers=float(devices),
        spare_nodes=float(spares),
    )


def waiting_of_chain(loads: list[float], spares: list[int]) -> float:
    """Share of time with one node more in repair than spares of some kind, exponential repairs.

    Time in mean repairs: kind k fails at rate a_k while the job runs, each node returns at rate 1.
    """
    ranges = [range(most + 2) for most in spares]

    def waits(state: tuple[int, ...]) -> int:
        return sum(n > most for n, most in zip(state, spares, strict=True))

    states = [state for state in itertools.product(*ranges) if waits(state) <= 1]
    index = {state: at for at, state in enumerate(states)}
    rates = np.zeros((len(states), len(states)))
    for state in states:
        for kind, load in enumerate(loads):
            up = tuple(n + (k == kind) for k, n in enumerate(state))
            down = tuple(n - (k == kind) for k, n in enumerate(state))
            if not waits(state) and up in index:
                rates[index[state], index[up]] += load
            if state[kind]:
                rates[index[state], index[down]] += state[kind]
    generator = rates - np.diag(rates.sum(axis=1))
    equations = np.vstack([generator.T, np.ones(len(states))])
    share, *_ = np.linalg.lstsq(equations, np.eye(len(states) + 1)[-1], rcond=None)
    return float(sum(share[index[state]] for state in states if waits(state)))


def test_waiting_without_spares_is_exact() -> None:
    for devices in ((64, 64), (200, 8), (400, 100)):
        kinds = [job(n, spares=0) for n in devices]
        loads = [n / 1e6 * 5_000.0 for n in devices]
        found = waiting_ratio(jobs_together(kinds, checkpoint_bytes=1e12), RELIABILITY)
        assert found == pytest.approx(waiting_of_chain(loads, [0, 0]), rel=1e-9)
        # By hand: a job of both waits as one of a kind without spares would, a / (1 + a).
        assert found == pytest.approx(sum(loads) / (1.0 + sum(loads)))


def test_waiting_with_spares_is_the_chain_s_or_a_little_more() -> None:
    devices = (120, 80)
    for spares in ((1, 0), (1, 1), (2, 1)):
        kinds = [job(n, spares=s) for n, s in zip(devices, spares, strict=True)]
        exact = waiting_of_chain([n / 1e6 * 5_000.0 for n in devices], list(spares))
        found = float(waiting_ratio(jobs_together(kinds, checkpoint_bytes=1e12), RELIABILITY))
        assert exact <= found <= 1.2 * exact, spares


def test_a_single_kind_equals_the_plain_job() -> None:
    single = job(256, spares=2)
    together = jobs_together([single], checkpoint_bytes=0.0)
    ratios = [cycle(one, RELIABILITY, step_s=3.0).effective_ratio for one in (together, single)]
    assert ratios[0] == pytest.approx(ratios[1])
    assert waiting_ratio(together, RELIABILITY) == pytest.approx(waiting_ratio(single, RELIABILITY))
    assert longest_wait_s(together, RELIABILITY) == longest_wait_s(single, RELIABILITY)


def test_spares_of_one_kind_do_not_help_the_other() -> None:
    even = jobs_together([job(128, spares=2), job(128, spares=2)], checkpoint_bytes=1e12)
    uneven = jobs_together([job(128, spares=4), job(128, spares=0)], checkpoint_bytes=1e12)
    assert waiting_ratio(even, RELIABILITY) < waiting_ratio(uneven, RELIABILITY)


def test_the_bill_counts_spares_and_every_price() -> None:
    together = jobs_together([job(128, spares=1), job(64, spares=0)], checkpoint_bytes=1e12)
    run = TrainingRun(
        step_s=10.0,
        tokens_per_step=10**6,
        tokens=1e9,
        devices_per_node=8.0,
        price_per_device_hour=(136 * 3.0 + 64 * 1.5) / 200,
    )
    found = forecast(run, jobs=together, reliability=RELIABILITY)
    assert found.device_hours == pytest.approx(200 * present(found.wall_clock_s) / 3600)
    assert found.cost == pytest.approx((136 * 3.0 + 64 * 1.5) * present(found.wall_clock_s) / 3600)
    assert found.failure_interval_s == pytest.approx(1e6 / 192)


def test_the_slowest_kind_counts_for_all_in_any_order() -> None:
    fast = Storage(
        write_bytes_per_s=40e9,
        read_bytes_per_s=80e9,
        node_write_bytes_per_s=4e9,
        node_read_bytes_per_s=1e9,
        host_bytes_per_s=50e9,
        fresh_bytes_per_s=2e9,
    )
    slow = Storage(
        write_bytes_per_s=40e9,
        read_bytes_per_s=80e9,
        node_write_bytes_per_s=2e9,
        node_read_bytes_per_s=3e9,
        host_bytes_per_s=25e9,
        fresh_bytes_per_s=3e9,
    )
    both = [
        FailureModel(
            device_mtbf_s=1e6, restart_s=restart_s, in_process_restart_s=inside_s, storage=storage
        )
        for storage, restart_s, inside_s in ((fast, 60.0, 5.0), (slow, 90.0, 40.0))
    ]
    for order in (both, both[::-1]):
        together = slowest(order)
        assert together == FailureModel(
            device_mtbf_s=1e6,
            restart_s=90.0,
            in_process_restart_s=40.0,
            storage=Storage(
                write_bytes_per_s=40e9,
                read_bytes_per_s=80e9,
                node_write_bytes_per_s=2e9,
                node_read_bytes_per_s=1e9,
                host_bytes_per_s=25e9,
                fresh_bytes_per_s=2e9,
            ),
        )
    # One that cannot restart inside its processes lets all of them start again.
    without = replace(both[0], in_process_restart_s=None)
    assert slowest([without, both[1]]).in_process_restart_s is None
