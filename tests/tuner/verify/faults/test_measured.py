"""Parts of a run from its events, by hand; and replays of the same run."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from profilers.steps.events import file_of
from tuner.faults.levels import FailureClass, Level, RunSeconds
from tuner.faults.simulation import Failure, Outage, Run, simulate
from tuner.verify.faults.calibration import (
    STEPS,
    PolicySeconds,
    durations,
    expected_durations,
    measure_fewer,
    measure_policy,
    replay_durations,
    short_faults,
    short_steps,
    with_expected_fewer,
    with_replayed_fewer,
)
from tuner.verify.faults.comparison import Expectation, policy_result
from tuner.verify.faults.curve import measure_curve
from tuner.verify.faults.events import EVENTS_NAME, rank_events
from tuner.verify.faults.links import NodeLinks
from tuner.verify.faults.measured import measured_run
from tuner.verify.faults.nodes import emulated_nodes
from tuner.verify.faults.scenario import (
    Fault,
    FaultKind,
    Scenario,
    StatedPolicy,
    WithoutSpareAction,
)
from tuner.verify.faults.supervisor import Injected, LaunchLog

Line = tuple[str, float, dict[str, Any]]


def launch(
    folder: Path,
    *lines: Line,
    failed_at_s: float | None = None,
    noticed_at_s: float | None = None,
) -> LaunchLog:
    """Write the events of one rank, and read them in two pieces."""
    folder.mkdir()
    path = file_of(folder / EVENTS_NAME, 0)
    text = "".join(
        json.dumps({"event": event, "time_s": time_s, "rank": 0, **fields}) + "\n"
        for event, time_s, fields in lines
    )
    ranks = rank_events(folder, world=1)
    assert ranks[0].read() == 0
    path.write_text(text[:40], encoding="utf-8")
    ranks[0].read()
    path.write_text(text, encoding="utf-8")
    ranks[0].read()
    assert len(ranks[0].events) == len(lines)
    return LaunchLog(ranks=ranks, failed_at_s=failed_at_s, noticed_at_s=noticed_at_s)


def steps(first: int, last: int, *, begin_s: float) -> list[Line]:
    """Steps of one second each."""
    return [
        (
            "step_done",
            begin_s + 1.0 + step - first,
            {"step": step, "seconds": 1.0, "loss": 1 / step},
        )
        for step in range(first, last + 1)
    ]


def a_run(folder: Path) -> list[LaunchLog]:
    """Save after every fourth step for half a second; killed 0.3 s into step 7, again at once."""
    save = {"level": "shared", "step": 4}
    first = launch(
        folder / "0",
        ("restored", 100.0, {"level": "none", "step": 0, "seconds": 0.0}),
        *steps(1, 4, begin_s=100.0),
        ("training_resumed", 104.5, save | {"stall_s": 0.5}),
        ("durable", 104.5, save | {"seconds": 0.5}),
        *steps(5, 6, begin_s=104.5),
        failed_at_s=106.8,
        noticed_at_s=107.0,
    )
    first.faults.append(
        Injected(fault=Fault(at_s=6.8, kind=FaultKind.FREEZE, node=0, place=0), time_s=106.8)
    )
    second = launch(folder / "1", failed_at_s=108.0, noticed_at_s=108.0)
    second.faults.append(
        Injected(fault=Fault(at_s=8.0, kind=FaultKind.LOSE_NODE, node=0, place=0), time_s=108.0)
    )
    third = launch(
        folder / "2",
        ("restored", 110.0, {"level": "shared", "step": 4, "seconds": 0.1}),
        *steps(5, 8, begin_s=110.0),
        ("training_resumed", 114.5, {"level": "shared", "step": 8, "stall_s": 0.5}),
    )
    return [first, second, third]


def test_the_parts_of_a_run_by_hand(tmp_path: Path) -> None:
    run = measured_run(a_run(tmp_path))
    assert run.wall_s == pytest.approx(14.0)
    assert run.training_s == pytest.approx(8.0)
    assert run.saving_s == pytest.approx(0.5)
    assert run.recovery_s == pytest.approx(3.2)
    assert run.lost_s == pytest.approx(2.3)
    assert run.losses == tuple(1 / step for step in range(1, 9))
    (restart,) = run.restarts
    assert (restart.level, restart.kind) == (Level.SHARED, FailureClass.NODE)
    assert (restart.step, restart.launches, restart.is_frozen) == (4, 2, True)
    assert restart.unnoticed_s == pytest.approx(0.2)


def test_what_is_expected_by_hand(tmp_path: Path) -> None:
    """Faults every 30 years, so that only one of two checkpoints, half a second, is expected."""
    launches = a_run(tmp_path)
    during = measure_policy(launches)
    scenario = Scenario.model_validate(
        {"steps": 8, "nodes": 2, "mean_interval": 1e9, "faults": {"kill": 1}}
    )
    result = policy_result(
        StatedPolicy(shared=4),
        during.run,
        scenario=scenario,
        before=durations(during),
        during=durations(during),
        done=(),
        windows=(),
        ranks_per_node=1,
        curve=measure_curve(during.run, during.run.losses, precision="fp32"),
    )
    assert result.is_on_curve
    assert result.replayed.overhead_s == pytest.approx(0.5)
    assert result.expected_wall_s == pytest.approx(8.5)
    assert result.expected_overhead is not None
    assert result.expected_overhead.mean_s == pytest.approx(0.5)
    # The run took 14 s, 6 of them beside its steps.
    expected = Expectation(mean_s=4.0, deviation_s=0.5)
    other = result.model_copy(update={"expected_overhead": expected, "deviation_s": 11.0})
    assert other.deviations == pytest.approx(4.0)
    assert other.wall_deviations == pytest.approx(0.5)
    older = other.model_copy(update={"expected_overhead": None})
    assert older.deviations == pytest.approx(0.5)


def test_a_stall_that_a_later_restart_went_back_behind_is_lost(tmp_path: Path) -> None:
    """Saves after steps 4 and 8, half a second each; the third launch begins anew."""
    begun = ("restored", 100.0, {"level": "none", "step": 0, "seconds": 0.0})
    save = {"level": "shared", "stall_s": 0.5}
    first = launch(
        tmp_path / "0",
        begun,
        *steps(1, 4, begin_s=100.0),
        ("training_resumed", 104.5, save | {"step": 4}),
        *steps(5, 8, begin_s=104.5),
        ("training_resumed", 109.0, save | {"step": 8}),
        failed_at_s=109.0,
        noticed_at_s=109.0,
    )
    second = launch(
        tmp_path / "1",
        ("restored", 111.0, {"level": "shared", "step": 8, "seconds": 0.1}),
        failed_at_s=111.0,
        noticed_at_s=111.0,
    )
    third = launch(
        tmp_path / "2",
        ("restored", 113.0, {"level": "none", "step": 0, "seconds": 0.1}),
        *steps(1, 4, begin_s=113.0),
        ("training_resumed", 117.5, save | {"step": 4}),
        *steps(5, 6, begin_s=117.5),
    )
    run = measured_run([first, second, third])
    assert (run.wall_s, run.training_s) == pytest.approx((19.5, 6.0))
    assert run.saving_s == pytest.approx(0.5)
    assert run.recovery_s == pytest.approx(4.0)
    assert run.lost_s == pytest.approx(9.0)


def a_continued_run(folder: Path) -> list[LaunchLog]:
    """Save after every fourth step for half a second; a node is lost in step 6 and back at 116 s.

    Without it step 5 to 8 take 1.5 s each; the checkpoint of step 8 is durable at 118.7 s. In the
    end another one is lost, whose repair the run waits for until 140 s.
    """
    save = {"level": "shared", "stall_s": 0.5}
    lost = Fault(at_s=5.5, kind=FaultKind.LOSE_NODE, node=1, place=0)
    first = launch(
        folder / "0",
        ("restored", 100.0, {"level": "none", "step": 0, "seconds": 0.0}),
        *steps(1, 4, begin_s=100.0),
        ("training_resumed", 104.5, save | {"step": 4}),
        ("durable", 104.4, save | {"step": 4}),
        *steps(5, 5, begin_s=104.5),
        failed_at_s=106.0,
        noticed_at_s=106.1,
    )
    first.faults.append(Injected(fault=lost, time_s=106.0))
    fewer = launch(
        folder / "1",
        ("restored", 112.0, {"level": "shared", "step": 4, "seconds": 0.1}),
        *(
            ("step_done", 112.0 + 1.5 * count, {"step": 4 + count, "seconds": 1.5, "loss": 0.1})
            for count in (1, 2, 3, 4)
        ),
        ("durable", 118.4, save | {"step": 8}),
        ("training_resumed", 118.5, save | {"step": 8}),
        failed_at_s=118.5,
        noticed_at_s=118.7,
    )
    fewer.is_full, fewer.is_return = False, True
    third = launch(
        folder / "2",
        ("restored", 122.7, {"level": "shared", "step": 8, "seconds": 0.1}),
        *steps(9, 9, begin_s=122.7),
        failed_at_s=124.0,
        noticed_at_s=124.0,
    )
    third.faults.append(Injected(fault=replace(lost, at_s=24.0), time_s=124.0))
    third.waited_s = 16.0
    last = launch(
        folder / "3",
        ("restored", 145.0, {"level": "shared", "step": 8, "seconds": 0.1}),
        *steps(9, 12, begin_s=145.0),
    )
    return [first, fewer, third, last]


def test_a_run_with_fewer_nodes_by_hand(tmp_path: Path) -> None:
    launches = a_continued_run(tmp_path)
    run = measured_run(launches)
    assert run.wall_s == pytest.approx(49.0)
    assert run.training_s == pytest.approx(8 * 1.0 + 4 * 1.5)
    assert run.saving_s == pytest.approx(1.0)
    assert run.waiting_s == pytest.approx(16.0)
    assert run.recovery_s == pytest.approx(6.0 + 4.2 + 5.0)
    assert run.lost_s == pytest.approx(1.5 + 1.3)
    assert [step.is_full for step in run.steps] == [True] * 4 + [False] * 4 + [True] * 4
    into, back, again = run.restarts
    assert (into.is_full, into.is_return, into.kind) == (False, False, FailureClass.NODE)
    assert (back.is_full, back.is_return, back.kind) == (True, True, FailureClass.PROCESS)
    assert [again.waited_s, again.recovery_s] == pytest.approx([16.0, 5.0])
    assert [(one.since, one.is_changed, one.loss == one.before) for one in run.repeats] == [
        (0, True, False),
        (0, False, True),
    ]
    # Its durations: a step of 1.5 instead of 1 s, restarts of 5.9 and 5 s, a return of 4 s.
    full, fewer = measure_policy(launches), measure_fewer(launches)
    assert fewer is not None
    assert fewer.step_ratio == pytest.approx(1.5)
    assert fewer.returns_s == pytest.approx([4.0])
    policy = StatedPolicy(shared=4, without_spare=WithoutSpareAction.CONTINUE)
    during = with_replayed_fewer(durations(full), policy, fewer, fewer, idle_nodes=0)
    expected = with_expected_fewer(durations(full), policy, fewer, idle_nodes=0)
    for made in (during, expected):
        assert made.fewer is not None
        assert made.fewer.return_s == pytest.approx(4.0)
        seconds = made.fewer.layout.seconds
        assert seconds.step_s == pytest.approx(1.5)
        assert seconds.restart_s[Level.SHARED, FailureClass.NODE] == pytest.approx(5.9)
    assert during.seconds.restart_s[Level.SHARED, FailureClass.NODE] == pytest.approx(5.0)
    scaled = replace(during, speed_deviation=1.0).at_speed(1.0)
    assert scaled.fewer is not None
    assert scaled.fewer.return_s == pytest.approx(4.0 * math.e)
    # Repairs of the run took 10 and 16 s; replayed they are 12 s.
    scenario = Scenario.model_validate(
        {
            "steps": 12,
            "nodes": 4,
            "mean_interval": 1e9,
            "faults": {"lose_node": 1},
            "repair": 12.0,
        }
    )
    result = policy_result(
        policy,
        run,
        scenario=scenario,
        before=expected,
        during=during,
        done=[one.fault for one in launches[0].faults],
        windows=(),
        ranks_per_node=1,
        curve=measure_curve(run, run.losses, precision="fp64"),
    )
    assert (result.fewer_steps, result.returns) == (4, 1)
    assert result.measured.slower_s == pytest.approx(4 * 0.5)
    assert result.effective_ratio == pytest.approx(12.0 / 49.0)
    # Lost at 5.5 s, a second after step 4; four steps of 1.5 s and a save from 11.4 s on, during
    # which the node comes back; 4 s later the last four steps.
    assert result.replayed.wall_s == pytest.approx(5.5 + 5.9 + 6.0 + 0.5 + 4.0 + 4.0)
    assert result.replayed.slower_s == pytest.approx(2.0)
    # The step that both layouts took has another loss here.
    assert not result.is_on_curve


def test_launches_before_the_first_step_are_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    in_vain = launch(tmp_path / "in-vain", failed_at_s=80.0, noticed_at_s=80.0)
    launches = a_run(tmp_path / "run")
    assert measured_run([in_vain, *launches]) == measured_run(launches)


def test_a_replay_has_the_same_parts(tmp_path: Path) -> None:
    run = measured_run(a_run(tmp_path))
    seconds = RunSeconds(
        step_s=1.0,
        stall_s=dict.fromkeys(Level, 0.5),
        durable_after_s=dict.fromkeys(Level, 0.0),
        restart_s={(level, kind): 2.0 for level in Level for kind in FailureClass},
    )
    failures = [
        Failure(at_s=6.8, kind=FailureClass.PROCESS, silence_s=0.5),
        Failure(at_s=8.0, kind=FailureClass.NODE),
    ]
    policy = StatedPolicy(shared=4).policy()
    replayed = simulate(policy, Run(steps=8, seconds=seconds), failures=failures)
    for part in ("wall_s", "training_s", "saving_s", "recovery_s", "lost_s"):
        assert getattr(replayed, part) == pytest.approx(getattr(run, part)), part
    # With a full disk at the save, the run begins anew.
    without = simulate(
        policy,
        Run(steps=8, seconds=seconds),
        failures=failures,
        outages=[Outage(begin_s=4.2, end_s=4.3)],
    )
    assert without.restores[0].step == 0
    assert without.wall_s == pytest.approx(run.wall_s + 4.0 + 0.5)


def test_durations_of_a_short_run_by_hand(tmp_path: Path) -> None:
    save = {"level": "host", "step": 3}
    slow: list[Line] = [
        ("step_done", 104.7, {"step": 4, "seconds": 1.5, "loss": 1.0}),
        ("step_done", 105.7, {"step": 5, "seconds": 1.0, "loss": 1.0}),
    ]
    own = measure_policy(
        [
            launch(
                tmp_path / "0",
                ("restored", 100.0, {"level": "none", "step": 0, "seconds": 0.0}),
                *steps(1, 3, begin_s=100.0),
                ("training_resumed", 103.2, save | {"stall_s": 0.2}),
                ("durable", 104.2, save | {"seconds": 1.2}),
                *slow,
            )
        ]
    )
    # The step beside the write took half a second longer than the others.
    assert own.step_s == pytest.approx(1.0)
    assert own.stall_s[Level.HOST] == pytest.approx(0.2 + 0.5)
    assert own.durable_after_s[Level.HOST] == pytest.approx(1.0)


def test_the_wait_for_an_earlier_write_is_not_part_of_a_stall(tmp_path: Path) -> None:
    """A write of 6 s; the next checkpoint, 4 s later, waits for 2 s of its 2.1."""
    own = measure_policy(
        [
            launch(
                tmp_path / "0",
                ("restored", 100.0, {"level": "none", "step": 0, "seconds": 0.0}),
                *steps(1, 4, begin_s=100.0),
                ("training_resumed", 104.1, {"level": "shared", "step": 4, "stall_s": 0.1}),
                *steps(5, 8, begin_s=104.1),
                ("durable", 110.1, {"level": "shared", "step": 4, "seconds": 6.0}),
                ("training_resumed", 110.2, {"level": "shared", "step": 8, "stall_s": 2.1}),
                *steps(9, 12, begin_s=110.2),
                ("durable", 116.2, {"level": "shared", "step": 8, "seconds": 6.0}),
            )
        ]
    )
    assert own.stall_s[Level.SHARED] == pytest.approx(0.1)
    assert own.durable_after_s[Level.SHARED] == pytest.approx(6.0)


def test_slow_steps_by_hand(tmp_path: Path) -> None:
    slow: list[Line] = [
        ("step_done", 105.0, {"step": 4, "seconds": 2.0, "loss": 1.0}),
        ("step_done", 107.5, {"step": 5, "seconds": 2.5, "loss": 1.0}),
        ("step_done", 109.0, {"step": 6, "seconds": 1.5, "loss": 1.0}),
        ("step_done", 110.0, {"step": 7, "seconds": 1.0, "loss": 1.0}),
    ]
    log = launch(
        tmp_path / "0",
        ("restored", 100.0, {"level": "none", "step": 0, "seconds": 0.0}),
        *steps(1, 3, begin_s=100.0),
        *slow,
    )
    fault = Fault(at_s=2.9, kind=FaultKind.SLOW_LINK, node=0, place=0)
    log.faults.append(Injected(fault=fault, time_s=102.9, lasts_s=5.1))
    own = measure_policy([log])
    assert own.step_s == pytest.approx(1.0)
    # The third and the sixth step are partly beside the slow link.
    assert own.slow_steps_s == pytest.approx((2.0, 2.5))
    other = tmp_path / "other"
    other.mkdir()
    both = durations(own, measure_policy(a_run(other)))
    assert both.slow_factor == pytest.approx(2.25)
    # Of the one restart, which two launches took.
    assert both.seconds.restart_s[Level.SHARED, FailureClass.NODE] == pytest.approx(3.2 / 2)


def test_checkpoints_beside_a_slow_link_do_not_count(tmp_path: Path) -> None:
    def own(*levels: str) -> PolicySeconds:
        lines: list[Line] = []
        begin_s = 100.0
        for number, (level, stall_s) in enumerate(zip(levels, (4.0, 1.0, 2.0), strict=True), 1):
            step = 2 * number
            lines += steps(step - 1, step, begin_s=begin_s)
            begin_s += 2.0 + stall_s
            save = {"level": level, "step": step}
            lines.append(("training_resumed", begin_s, save | {"stall_s": stall_s}))
            lines.append(("durable", begin_s, save | {"seconds": 0.0}))
        start: Line = ("restored", 100.0, {"level": "none", "step": 0, "seconds": 0.0})
        log = launch(tmp_path / "-".join(levels), start, *lines)
        fault = Fault(at_s=3.0, kind=FaultKind.SLOW_LINK, node=0, place=0)
        log.faults.append(Injected(fault=fault, time_s=103.0, lasts_s=1.0))
        return measure_policy([log])

    assert own("host", "host", "host").stall_s == pytest.approx({Level.HOST: 1.5})
    only_slow = own("host", "shared", "shared")
    assert only_slow.stall_s == pytest.approx({Level.SHARED: 1.5})
    assert only_slow.durable_after_s.keys() == set(Level)
    # A run without a restart and without steps beside slow links has those of others.
    assert not only_slow.slow_steps_s
    other = tmp_path / "other"
    other.mkdir()
    slow = replace(measure_policy(a_run(other)), slow_steps_s=(3.0,), stall_s={Level.HOST: 0.7})
    during = replay_durations(only_slow, slow)
    assert during.slow_factor == pytest.approx(3.0 / slow.step_s)
    assert during.seconds.restart_s[Level.SHARED, FailureClass.NODE] == pytest.approx(3.2 / 2)
    assert during.seconds.stall_s == pytest.approx({Level.HOST: 0.7, Level.SHARED: 1.5})
    both = replace(slow, slow_steps_s=(2.0,))
    assert replay_durations(both, slow).slow_factor == pytest.approx(2.0 / slow.step_s)


def test_the_speed_of_the_machine_changes_as_it_did_between_runs(tmp_path: Path) -> None:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    own, other = (measure_policy(a_run(tmp_path / name)) for name in ("own", "other"))
    expected = expected_durations(own, [replace(other, step_s=1.3)], unbroken=own)
    assert expected.seconds.step_s == pytest.approx(1.1)
    assert expected.speed_deviation == pytest.approx(0.3 / math.sqrt(3) / 1.1)
    usual, slower = expected.at_speed(0.0).seconds, expected.at_speed(1.0).seconds
    assert usual == expected.seconds
    factor = math.exp(expected.speed_deviation)
    for name in ("stall_s", "durable_after_s", "restart_s"):
        pairs = zip(getattr(slower, name).values(), getattr(usual, name).values(), strict=True)
        assert all(more == pytest.approx(less * factor) for more, less in pairs), name
    assert slower.step_s == pytest.approx(1.1 * factor)


def test_a_short_run_is_long_enough_for_its_faults() -> None:
    for faults, slow_s in (({"kill": 1}, 0.0), ({"kill": 1, "slow_link": 1}, 8.0)):
        scenario = Scenario.model_validate(
            {"steps": 9, "nodes": 2, "mean_interval": 9.0, "faults": faults, "link": 1e9}
        )
        for step_s in (0.01, 0.3, 2.0):
            *slow, kill = short_faults(scenario, mean_step_s=step_s)
            assert kill.kind is FaultKind.KILL
            assert all(one.at_s + slow_s <= kill.at_s for one in slow)
            # Half of the usual steps are left after the kill, or the time between two faults.
            steps_left = short_steps(scenario, mean_step_s=step_s) - kill.at_s / step_s
            assert steps_left >= STEPS / 2 - 1
            assert 9.0 <= steps_left * step_s < max(9.0, STEPS / 2 * step_s) + step_s + 1e-9


def test_a_slow_link_ends_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[tuple[int, float]] = []
    monkeypatch.setattr(
        NodeLinks, "set_rate", lambda _self, node, *, ratio=1.0: rates.append((node, ratio))
    )
    scenario = Scenario.model_validate(
        {
            "steps": 9,
            "nodes": 2,
            "mean_interval": 9.0,
            "faults": {"kill": 1, "slow_link": 1},
            "link": 1e9,
            "link_slow_ratio": 0.25,
        }
    )
    with emulated_nodes(2, ranks=2) as nodes:
        nodes.links = NodeLinks(bytes_per_s=1e9)
        fault = Fault(at_s=1.0, kind=FaultKind.SLOW_LINK, node=1, place=0)
        assert nodes.inject(fault, scenario=scenario, lost=(), now_s=100.0) == 8.0
        for now_s in (104.0, 107.9, 108.0, 109.0):
            nodes.undo_due(now_s)
    assert rates == [(1, 0.25), (1, 1.0)]
