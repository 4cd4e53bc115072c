"""The share that trains with a node less, against generators, limits and simulated runs."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.rows import Failures
from tests.tuner.faults.drawn_failures import drawn_failures
from tests.tuner.faults.fewer_table import HOUR, STEP_S, TABLE, Row, row, shares_of
from tests.tuner.faults.level_table import seconds
from tests.tuner.faults.simulation import (
    Failure,
    FewerNodesLayout,
    Layout,
    Run,
    SimulatedRun,
    simulate,
)
from tuner.faults.fewer_nodes import (
    Losses,
    continued_run,
    layout_shares,
    node_losses,
    time_shares,
)
from tuner.faults.levels import FailureClass, FailureRates, SavePolicy
from tuner.faults.reliability import FailureModel, HostLevel, Jobs, Storage, waiting_ratio
from tuner.faults.run_shares import run_shares

MODEL_ERROR = 0.005
"""Of the share that trains, beside the error of a simulated mean."""
JOBS = Jobs(devices=64.0, nodes=8.0, checkpoint_bytes=1e12, writers=64.0)
MODEL = FailureModel(
    device_mtbf_s=64 * 30 * HOUR,
    restart_s=600.0,
    repair_s=12 * HOUR,
    storage=Storage(write_bytes_per_s=10e9, read_bytes_per_s=20e9, host_bytes_per_s=20e9),
)


def _generator_shares(losses: Losses) -> list[float]:
    """Shares of time of the number of nodes in repair, from the generator of the chain."""
    last = losses.spare_nodes + 2 + losses.idle_nodes
    generator = np.zeros((last + 1, last + 1))
    for k in range(last):
        generator[k, k + 1] = losses.per_s if k <= losses.spare_nodes else losses.fewer_per_s
        generator[k + 1, k] = (k + 1) / losses.repair_s
    generator -= np.diag(generator.sum(axis=1))
    system = np.vstack([generator.T, np.ones(last + 1)])
    return list(np.linalg.lstsq(system, np.append(np.zeros(last + 1), 1.0), rcond=None)[0])


def test_the_chain_is_that_of_its_generator(failures: Failures) -> None:
    for spare in (0, 1, 3):
        for idle in (0, 2):
            for load in (0.01, 0.5, 4.0):
                losses = Losses(
                    per_s=load / 900.0,
                    fewer_per_s=0.8 * load / 900.0,
                    repair_s=900.0,
                    spare_nodes=spare,
                    idle_nodes=idle,
                )
                shares_K = _generator_shares(losses)
                times = time_shares(losses)
                with failures.of(spare, idle, load):
                    assert times.full == pytest.approx(sum(shares_K[: spare + 1]))
                    assert times.last_spare == pytest.approx(shares_K[spare])
                    assert times.fewer == pytest.approx(sum(shares_K[spare + 1 : -1]))
                    assert times.waiting == pytest.approx(shares_K[-1], abs=1e-12)


def _waiting_row(spare_nodes: int) -> tuple[float, float]:
    """A run whose layout of fewer nodes does nothing at no cost, and one that waits."""
    jobs = replace(JOBS, spare_nodes=float(spare_nodes))
    own = run_shares(jobs, MODEL, step_s=STEP_S)
    full = layout_shares(own, jobs, MODEL, step_s=STEP_S)
    nothing = replace(
        full, training=0.0, shared_restart_s=0.0, shared_interval_s=0.0, background_s=0.0
    )
    losses = replace(node_losses(jobs, jobs, MODEL), fewer_per_s=0.0)
    return continued_run(losses, full, nothing).training, own.training


def test_fewer_nodes_that_train_nothing_are_a_wait() -> None:
    for spare_nodes in (0, 1, 2):
        continued, waited = _waiting_row(spare_nodes)
        assert continued == pytest.approx(waited, rel=1e-9), spare_nodes
        jobs = replace(JOBS, spare_nodes=float(spare_nodes))
        assert 1.0 - time_shares(
            replace(node_losses(jobs, jobs, MODEL), fewer_per_s=0.0)
        ).full == pytest.approx(float(waiting_ratio(jobs, MODEL)), rel=1e-9)


def test_with_short_repairs_and_a_spare_nothing_changes() -> None:
    jobs = replace(JOBS, spare_nodes=1.0)
    for repair_s, within in ((3600.0, 1e-2), (1.0, 1e-6)):
        model = replace(MODEL, repair_s=repair_s)
        own = run_shares(jobs, model, step_s=STEP_S)
        full = layout_shares(own, jobs, model, step_s=STEP_S)
        fewer = replace(full, step_s=STEP_S / 0.8)
        continued = continued_run(node_losses(jobs, jobs, model), full, fewer)
        assert continued.training == pytest.approx(own.training, rel=within)
    at_once = Losses(per_s=1e-5, fewer_per_s=1e-5, repair_s=0.0, spare_nodes=1)
    assert continued_run(at_once, full, fewer).training == pytest.approx(full.training)


def test_processes_that_fail_take_no_node() -> None:
    model = replace(MODEL, device_mtbf_s=math.inf, process_mtbf_s=100 * HOUR)
    own = run_shares(JOBS, model, step_s=STEP_S)
    full = layout_shares(own, JOBS, model, step_s=STEP_S)
    continued = continued_run(node_losses(JOBS, JOBS, model), full, full)
    assert continued.training == pytest.approx(own.training)
    assert (continued.switches_per_s, continued.fewer, continued.waiting) == (0.0, 0.0, 0.0)


def test_only_losses_of_nodes_count_where_a_node_is_missed(failures: Failures) -> None:
    # A node lost takes its copies along: the run restarts from shared storage, whether it goes on
    # with as many nodes or with fewer, and no failure of processes changes what that costs.
    quick = replace(MODEL, process_mtbf_s=64 * HOUR, in_process_restart_s=30.0)
    host = HostLevel(
        node_bytes_per_s=400e9,
        replicas=(0,),
        together_ratio=0.1,
        is_optional=False,
        interval_s=60.0,
    )
    for name, model in (("shared", quick), ("host", replace(quick, host=host))):
        own = run_shares(JOBS, model, step_s=STEP_S)
        shares = layout_shares(own, JOBS, model, step_s=STEP_S)
        with failures.of(name):
            assert shares.node_restart_s == pytest.approx(shares.shared_restart_s, rel=3e-2)
            assert shares.node_lost_s == pytest.approx(shares.shared_lost_s)
            assert own.restart_s < 0.5 * shares.node_restart_s
    # With replicas one loss in ten takes those along, too.
    model = replace(quick, host=replace(host, replicas=(1,)))
    shares = layout_shares(run_shares(JOBS, model, step_s=STEP_S), JOBS, model, step_s=STEP_S)
    with failures.of("replicas"):
        assert shares.node_restart_s < shares.shared_restart_s
        assert 0.1 < shares.node_lost_s / shares.shared_lost_s < 0.5


def test_the_parts_of_a_continued_run_fit_into_its_time(failures: Failures) -> None:
    for name, one in TABLE.items():
        made = continued_run(one.losses, shares_of(one.full), shares_of(one.fewer))
        parts = (made.training, made.slower, made.checkpoints, made.restarting, made.waiting)
        with failures.of(name):
            assert min(parts) >= 0.0
            # The rest is work that failures lose.
            assert 0.9 < sum(parts) < 1.0
            faster = replace(shares_of(one.fewer), step_s=STEP_S)
            assert continued_run(one.losses, shares_of(one.full), faster).training > made.training


def _failures(one: Row, rates: FailureRates, *, seed: int, stream: int) -> Iterator[Failure]:
    rng = np.random.default_rng((seed, stream))
    for failure in drawn_failures(rates, rng=rng):
        if one.is_repair_drawn:
            yield replace(failure, repair_s=rng.exponential(one.repair_s))
        else:
            yield failure


def _simulated(one: Row, *, steps: int, seed: int, waits: bool = False) -> SimulatedRun:
    layout = one.fewer_nodes(failures=_failures(one, one.fewer.rates, seed=seed, stream=1))
    return simulate(
        one.full.policy,
        one.run(steps, fewer=None if waits else layout),
        failures=_failures(one, one.full.rates, seed=seed, stream=0),
    )


def _against_simulation(one: Row, *, runs: int, hours: int) -> None:
    made = continued_run(one.losses, shares_of(one.full), shares_of(one.fewer))
    steps = hours * 360
    simulated = [_simulated(one, steps=steps, seed=seed) for seed in range(runs)]

    def near(values: list[float], expected: float, model_error: float) -> None:
        error = 3.0 * float(np.std(values, ddof=1)) / math.sqrt(runs)
        assert abs(float(np.mean(values)) - expected) < error + model_error

    near([steps * STEP_S / each.wall_s for each in simulated], made.training, MODEL_ERROR)
    near([each.waiting_s / each.wall_s for each in simulated], made.waiting, MODEL_ERROR)
    near([each.recovery_s / each.wall_s for each in simulated], made.restarting, MODEL_ERROR)
    near([each.slower_s / each.wall_s for each in simulated], made.slower, MODEL_ERROR)
    assert sum(each.returns for each in simulated)


def test_some_simulated_runs_train_the_same_share(failures: Failures) -> None:
    for name in ("no spare", "two spares, often", "copies on hosts, a spare"):
        with failures.of(name):
            _against_simulation(TABLE[name], runs=6, hours=800)


@pytest.mark.slow
def test_all_simulated_runs_train_the_same_share(failures: Failures) -> None:
    for name, one in TABLE.items():
        with failures.of(name):
            _against_simulation(one, runs=16, hours=1500)


def test_the_formula_finds_when_waiting_is_better() -> None:
    # With repairs shorter than a restart, two more restarts are all that fewer nodes bring.
    short = row(0.85, repair_s=0.2 * HOUR, restart_s=1800.0)
    long = row(0.85, repair_s=48 * HOUR)
    for one, is_better in ((short, False), (long, True)):
        full = shares_of(one.full)
        waited = full.training * (1.0 - one.losses.per_s * one.repair_s / (1.0 + _load(one)))
        continued = continued_run(one.losses, full, shares_of(one.fewer)).training
        assert (continued > waited) is is_better
        walls_s = [
            np.mean(
                [_simulated(one, steps=360 * 600, seed=n, waits=waits).wall_s for n in range(8)]
            )
            for waits in (False, True)
        ]
        assert bool(walls_s[0] < walls_s[1]) is is_better


def _load(one: Row) -> float:
    return one.losses.per_s * one.repair_s


NODE = FailureClass.NODE
FULL = SavePolicy(shared_interval_steps=4)
FEWER = FewerNodesLayout(
    layout=Layout(policy=SavePolicy(shared_interval_steps=3), seconds=seconds(step_s=20.0)),
    return_s=150.0,
)


def test_a_run_with_fewer_nodes_by_hand() -> None:
    # Steps of 10 s, shared stalls of 4 s at 44 and 88 s. A node fails at 100 s, 12 s after step 8:
    # 200 s of restart, then steps of 20 s. Step 9 ends at 320 s, is saved until 324 s, the node
    # back since 310 s: 150 s later all nodes go on, at 474 s with steps 10 to 12.
    run = Run(steps=12, seconds=seconds(), repair_s=210.0, fewer=FEWER)
    made = simulate(FULL, run, failures=(Failure(at_s=100.0, kind=NODE),))
    assert made.wall_s == pytest.approx(474.0 + 30.0)
    assert (made.returns, made.waiting_s) == (1, 0.0)
    assert made.slower_s == pytest.approx(10.0)
    assert made.lost_s == pytest.approx(12.0)
    assert made.training_s == pytest.approx(11 * 10.0 + 20.0)
    assert made.recovery_s == pytest.approx(200.0 + 150.0)
    assert made.saving_s == pytest.approx(3 * 4.0)
    # Not yet back: it goes on with fewer nodes to the end.
    late = simulate(FULL, replace(run, repair_s=900.0), failures=(Failure(at_s=100.0, kind=NODE),))
    assert late.wall_s == pytest.approx(324.0 + 60.0)
    assert late.returns == 0


def test_impossible_losses_are_refused() -> None:
    with pytest.raises(ValueError, match="below zero"):
        Losses(per_s=-1.0, fewer_per_s=0.0, repair_s=1.0)
    with pytest.raises(ValueError, match="below zero"):
        Losses(per_s=1.0, fewer_per_s=0.0, repair_s=1.0, spare_nodes=-1)
