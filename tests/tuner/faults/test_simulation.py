"""Runs with given failures, worked by hand."""

import numpy as np
import pytest

from tests.tuner.faults.drawn_failures import drawn_failures
from tests.tuner.faults.level_table import TABLE, seconds
from tests.tuner.faults.simulation import Failure, Run, simulate
from tuner.faults.levels import FailureClass, FailureRates, Level, SavePolicy

PROCESS, NODE, TOGETHER = FailureClass
TWO = SavePolicy(host_interval_steps=2, shared_interval_steps=6, replicas=1)
BESIDE = SavePolicy(host_interval_steps=2, shared_interval_steps=6, replicas=1, asynchronous=True)
RUN = Run(steps=12, seconds=seconds())
"""Steps of 10 s; stalls of 1 s and 4 s: host at 21, 42 s, shared at 66 s, host at 87, 108 s."""


def _restores(policy: SavePolicy, run: Run, *failures: Failure) -> list[tuple[float, int, Level]]:
    simulated = simulate(policy, run, failures=failures)
    return [(one.at_s, one.step, one.level) for one in simulated.restores]


def test_a_run_without_failures_is_its_steps_and_stalls() -> None:
    simulated = simulate(TWO, RUN, failures=())
    # Five checkpoints; the one after the last step is not counted.
    assert simulated.wall_s == pytest.approx(120.0 + 4 * 1.0 + 4.0)
    assert (simulated.training_s, simulated.lost_s, simulated.recovery_s) == (120.0, 0.0, 0.0)
    assert simulated.saving_s == pytest.approx(8.0)
    assert (simulated.failures, simulated.restores) == (0, ())


def test_every_class_goes_back_to_what_it_leaves() -> None:
    # At 55 s: the host copy of step 4 stands at 42 s; the shared one is that of the start.
    at_55 = {
        PROCESS: (55.0 + 60.0, 4, Level.HOST),
        NODE: (55.0 + 120.0, 4, Level.HOST),
        TOGETHER: (55.0 + 300.0, 0, Level.SHARED),
    }
    for kind, expected in at_55.items():
        assert _restores(TWO, RUN, Failure(at_s=55.0, kind=kind)) == [expected], kind
    # At 70 s the shared copy of step 6 is the newest, whatever is lost.
    for kind, after_s in zip((PROCESS, NODE, TOGETHER), (100.0, 200.0, 300.0), strict=True):
        assert _restores(TWO, RUN, Failure(at_s=70.0, kind=kind)) == [
            (70.0 + after_s, 6, Level.SHARED)
        ]
    without = SavePolicy(host_interval_steps=2, shared_interval_steps=6)
    assert _restores(without, RUN, Failure(at_s=55.0, kind=NODE)) == [(255.0, 0, Level.SHARED)]


def test_the_parts_of_a_run_by_hand() -> None:
    # At 55 s after steps 0 to 4, two stalls and 13 s of step 5 and 6: 13 s are lost. Then 60 s of
    # restart, and 20 + 4 + 20 + 1 + 20 + 1 + 20 s to the end.
    simulated = simulate(TWO, RUN, failures=(Failure(at_s=55.0, kind=PROCESS),))
    assert simulated.wall_s == pytest.approx(55.0 + 60.0 + 86.0)
    assert simulated.lost_s == pytest.approx(13.0)
    assert simulated.recovery_s == pytest.approx(60.0)
    assert simulated.saving_s == pytest.approx(8.0)
    # Of everything: 53 s of steps and two stalls are lost.
    simulated = simulate(TWO, RUN, failures=(Failure(at_s=55.0, kind=TOGETHER),))
    assert simulated.lost_s == pytest.approx(55.0)
    assert simulated.saving_s == pytest.approx(8.0)
    assert simulated.wall_s == pytest.approx(55.0 + 300.0 + 128.0)


def test_a_copy_counts_once_it_is_durable() -> None:
    run = Run(steps=12, seconds=seconds(durable_after_s=(8.0, 35.0)))
    # The host copy of step 4 stalls until 42 s and is durable at 50 s.
    assert _restores(BESIDE, run, Failure(at_s=49.0, kind=PROCESS))[0][1:] == (2, Level.HOST)
    assert _restores(BESIDE, run, Failure(at_s=51.0, kind=PROCESS))[0][1:] == (4, Level.HOST)
    # The shared copy of step 6 stalls until 66 s and is durable at 101 s; the host's copy of step 8
    # stalls until 87 s and is written after it, until 109 s.
    at = {
        90.0: ((4, Level.HOST), (0, Level.SHARED)),
        96.0: ((4, Level.HOST), (0, Level.SHARED)),
        102.0: ((6, Level.SHARED), (6, Level.SHARED)),
        108.0: ((6, Level.SHARED), (6, Level.SHARED)),
        110.0: ((8, Level.HOST), (6, Level.SHARED)),
    }
    for time_s, (kept, lost) in at.items():
        assert _restores(BESIDE, run, Failure(at_s=time_s, kind=PROCESS))[0][1:] == kept, time_s
        assert _restores(BESIDE, run, Failure(at_s=time_s, kind=TOGETHER))[0][1:] == lost, time_s
    # The write of step 6 ended with the first failure, and has not begun again by the second.
    both = (Failure(at_s=96.0, kind=PROCESS), Failure(at_s=170.0, kind=TOGETHER))
    assert [one[1:] for one in _restores(BESIDE, run, *both)] == [
        (4, Level.HOST),
        (0, Level.SHARED),
    ]


def test_writes_follow_each_other() -> None:
    # Copies of hosts take 30 s after their stall: until 51 s, then that of step 4, which stalls
    # from 41 to 42 s, until 81 s. The shared checkpoint of step 6 is due at 62 s and waits for it.
    run = Run(steps=12, seconds=seconds(durable_after_s=(30.0, 0.0)))
    at = {50.0: 0, 52.0: 2, 80.0: 2, 84.0: 4}
    for time_s, step in at.items():
        assert _restores(BESIDE, run, Failure(at_s=time_s, kind=PROCESS))[0][1] == step, time_s
    simulated = simulate(BESIDE, run, failures=())
    assert simulated.saving_s == pytest.approx(4 * 1.0 + 19.0 + 4.0)
    # A copy on hosts is made while shared storage is written.
    long = Run(steps=9, seconds=seconds(durable_after_s=(0.0, 35.0)))
    assert simulate(BESIDE, long, failures=()).saving_s == pytest.approx(3 * 1.0 + 4.0)


def test_a_failure_in_a_restart_begins_it_again() -> None:
    # A process, then 30 s into its restart a node: 120 s from there.
    both = (Failure(at_s=55.0, kind=PROCESS), Failure(at_s=85.0, kind=NODE))
    assert _restores(TWO, RUN, *both) == [(205.0, 4, Level.HOST)]
    # A node, then a process: the node still has to be replaced.
    both = (Failure(at_s=55.0, kind=NODE), Failure(at_s=85.0, kind=PROCESS))
    assert _restores(TWO, RUN, *both) == [(205.0, 4, Level.HOST)]
    both = (Failure(at_s=55.0, kind=TOGETHER), Failure(at_s=85.0, kind=PROCESS))
    assert _restores(TWO, RUN, *both) == [(385.0, 0, Level.SHARED)]
    simulated = simulate(TWO, RUN, failures=both)
    assert simulated.failures == 2
    assert simulated.recovery_s == pytest.approx(330.0)


def test_nodes_that_hold_each_other_s_copies_are_lost_together() -> None:
    def after(*nodes: int, at_s: tuple[float, ...] = (55.0, 60.0)) -> Level:
        failures = (
            Failure(at_s=time_s, kind=NODE, node=node)
            for time_s, node in zip(at_s, nodes, strict=True)
        )
        return _restores(TWO, RUN, *failures)[-1][2]

    assert after(2, 3) is Level.SHARED
    assert after(1, 2) is Level.HOST
    assert after(2, 2) is Level.HOST
    # At the same moment, too; but not once the first one's copy is back.
    assert after(4, 5, at_s=(55.0, 55.0)) is Level.SHARED
    assert after(4, 5, at_s=(55.0, 185.0)) is Level.HOST


def test_nodes_around_a_ring_have_no_copies_until_the_next_checkpoint_on_hosts() -> None:
    ring = Run(steps=12, seconds=seconds(), ring_nodes=4)

    def after(*nodes: int, at_s: float) -> Level:
        failures = (
            Failure(at_s=time_s, kind=NODE, node=node)
            for time_s, node in zip((55.0, at_s), nodes, strict=True)
        )
        return _restores(TWO, ring, *failures)[-1][2]

    # Every neighbour counts, the last node's the first; others do not.
    assert after(1, 2, at_s=60.0) is Level.SHARED
    assert after(2, 1, at_s=60.0) is Level.SHARED
    assert after(3, 0, at_s=60.0) is Level.SHARED
    assert after(1, 3, at_s=60.0) is Level.HOST
    # Training goes on at 175 s; steps 5 and 6 end in a shared checkpoint at 199 s, 7 and 8 in one
    # on hosts at 220 s.
    assert after(1, 2, at_s=185.0) is Level.SHARED
    assert after(1, 2, at_s=225.0) is Level.HOST


def test_without_a_spare_node_the_job_waits_for_a_repair() -> None:
    run = Run(steps=12, seconds=seconds(), repair_s=500.0, spare_nodes=1)
    failures = (
        Failure(at_s=55.0, kind=NODE),
        Failure(at_s=56.0, kind=PROCESS),
        Failure(at_s=57.0, kind=NODE),
        Failure(at_s=300.0, kind=NODE),
    )
    simulated = simulate(TWO, run, failures=failures)
    # The spare node replaces the first; the second waits until 555 s, so that the last failure
    # meets nothing.
    assert simulated.waiting_s == pytest.approx(555.0 - 57.0)
    assert simulated.failures == 3
    assert simulated.restores[0].at_s == pytest.approx(555.0 + 120.0)


def test_parts_add_up_and_draws_are_repeated() -> None:
    for name, one in TABLE.items():
        run = Run(steps=5 * one.policy.shared_interval_steps, seconds=one.seconds, repair_s=400.0)
        twice = [
            simulate(
                one.policy,
                run,
                failures=drawn_failures(one.rates, rng=np.random.default_rng(7)),
            )
            for _ in range(2)
        ]
        assert twice[0] == twice[1], name
        simulated = twice[0]
        parts = (
            simulated.training_s,
            simulated.lost_s,
            simulated.saving_s,
            simulated.recovery_s,
            simulated.waiting_s,
        )
        assert sum(parts) == pytest.approx(simulated.wall_s), name
        assert simulated.failures >= len(simulated.restores), name


def test_drawn_failures_have_their_rates() -> None:
    rates = FailureRates(process_per_s=0.02, node_per_s=0.05, together_per_s=0.03)
    draws = drawn_failures(rates, rng=np.random.default_rng(3))
    first = [next(draws) for _ in range(20_000)]
    assert first[-1].at_s == pytest.approx(20_000 / 0.1, rel=0.03)
    for kind, share in zip(FailureClass, (0.2, 0.5, 0.3), strict=True):
        assert sum(one.kind is kind for one in first) == pytest.approx(20_000 * share, rel=0.05)


def test_impossible_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="sort them by time"):
        simulate(TWO, RUN, failures=(Failure(at_s=9.0, kind=NODE), Failure(at_s=8.0, kind=NODE)))
    for values in ({"steps": 0}, {"steps": 1, "spare_nodes": -1}, {"steps": 1, "repair_s": -1.0}):
        with pytest.raises(ValueError, match="one step or more"):
            Run(seconds=seconds(), **values)
    with pytest.raises(ValueError, match="a step of"):
        seconds(step_s=0.0)
    with pytest.raises(ValueError, match="below zero"):
        seconds(stall_s=(-1.0, 0.0))
