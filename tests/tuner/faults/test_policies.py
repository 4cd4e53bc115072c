"""Intervals, replicas and levels against enumeration, and what makes a policy impossible."""

import math
from dataclasses import replace

import pytest

from tests.expect import present
from tests.rows import Failures
from tuner.faults.forecast import TrainingRun, forecast, writes_in_background
from tuner.faults.goodput import goodput_step_s
from tuner.faults.interval import cycle
from tuner.faults.level_seconds import failure_rates, host_bytes, run_seconds
from tuner.faults.levels import FailureClass, Level, SavePolicy
from tuner.faults.policies import PolicyChoice, choose_policy
from tuner.faults.reliability import FailureModel, HostLevel, Jobs, Storage
from tuner.faults.two_levels import level_shares, queued_copies, unfinished
from tuner.spec.goal import Checkpoint, Reliability
from tuner.units import format_bytes

HOUR = 3600.0
STATED = Reliability(device_mtbf=1.8e8, restart=600.0)
JOBS = Jobs(devices=2048.0, nodes=256.0, checkpoint_bytes=9.4e12, writers=2048.0)
"""671 B parameters of 14 bytes each."""
STORAGE = Storage(write_bytes_per_s=40e9, read_bytes_per_s=80e9, host_bytes_per_s=25e9)
HOST = HostLevel(
    node_bytes_per_s=400e9,
    save_bytes_per_s=25e9,
    load_bytes_per_s=25e9,
    replicas=(0, 1),
    together_ratio=0.02,
    is_optional=True,
)
MODEL = FailureModel(
    device_mtbf_s=50_000 * HOUR,
    process_mtbf_s=20_000 * HOUR,
    restart_s=600.0,
    storage=STORAGE,
    host=HOST,
)
BESIDE = replace(MODEL, storage=replace(STORAGE, asynchronous=True))
QUICK = replace(BESIDE, storage=replace(BESIDE.storage, write_bytes_per_s=4e12))
"""A write to shared storage takes less than a step."""
FRAGILE = replace(MODEL, device_mtbf_s=400 * HOUR, process_mtbf_s=100 * HOUR)
"""Something fails every seven minutes."""
FRAGILE_BESIDE = replace(FRAGILE, storage=BESIDE.storage)
FEW_STEPS = replace(MODEL, device_mtbf_s=900 * HOUR)
SMALL = Jobs(devices=64.0, nodes=8.0, checkpoint_bytes=4e11, writers=64.0)


def test_seconds_follow_from_bytes_and_bandwidths() -> None:
    # A node's part is 9.4e12 / 256 = 36.72 GB, a device's copy 9.4e12 / 2048 / 25e9 = 0.18359 s, a
    # part over the NICs 0.09180 s; the storage is written in 235 s and read in 117.5 s.
    seconds = run_seconds(JOBS, replace(MODEL, in_process_restart_s=60.0), replicas=1, step_s=10.0)
    assert seconds.stall_s == pytest.approx(
        {Level.HOST: 2 * 0.18359 + 0.09180, Level.SHARED: 0.18359}, abs=1e-4
    )
    assert seconds.durable_after_s == pytest.approx(
        {Level.HOST: 2 * 0.18359, Level.SHARED: 235.0}, abs=1e-4
    )
    loaded_s = 117.5 + 0.18359
    assert seconds.restart_s == pytest.approx(
        {
            (Level.HOST, FailureClass.PROCESS): 60.0 + 2 * 0.18359,
            (Level.HOST, FailureClass.NODE): 600.0 + 0.09180 + 2 * 0.18359,
            (Level.SHARED, FailureClass.PROCESS): 60.0 + loaded_s,
            (Level.SHARED, FailureClass.NODE): 600.0 + loaded_s,
            (Level.SHARED, FailureClass.TOGETHER): 600.0 + loaded_s,
        },
        abs=1e-4,
    )
    # New pages at half the link's rate, files in memory at a quarter of it, read at a fifth.
    slow = replace(
        MODEL,
        storage=replace(STORAGE, fresh_bytes_per_s=12.5e9),
        host=replace(HOST, save_bytes_per_s=6.25e9, load_bytes_per_s=5e9),
    )
    seconds = run_seconds(JOBS, slow, replicas=0, step_s=10.0)
    assert seconds.stall_s == pytest.approx(dict.fromkeys(Level, 2 * 0.18359), abs=1e-4)
    assert seconds.durable_after_s[Level.HOST] == pytest.approx(4 * 0.18359, abs=1e-4)
    from_host_s = seconds.restart_s[Level.HOST, FailureClass.PROCESS]
    assert from_host_s == pytest.approx(600.0 + (5 + 1) * 0.18359, abs=1e-4)
    assert host_bytes(JOBS, replicas=1) == pytest.approx(3 * 2 * 9.4e12 / 256)
    assert host_bytes(JOBS, replicas=1, queued=4) == pytest.approx(6 * 2 * 9.4e12 / 256)
    rates = failure_rates(JOBS, MODEL)
    assert rates.process_per_s == pytest.approx(256 / (20_000 * HOUR))
    assert rates.together_per_s == pytest.approx(0.02 * 2048 / (50_000 * HOUR))
    assert rates.node_per_s == pytest.approx(0.98 * 2048 / (50_000 * HOUR))


def test_no_intervals_are_better_than_the_chosen_ones() -> None:
    _compare_with_enumeration((SMALL, FEW_STEPS, 100.0), most_steps=25, most_segments=30)


@pytest.mark.slow
def test_no_intervals_are_better_in_any_case(failures: Failures) -> None:
    for row in (
        (JOBS, FRAGILE, 60.0),
        (JOBS, BESIDE, 60.0),
        (SMALL, replace(BESIDE, device_mtbf_s=300 * HOUR, process_mtbf_s=20 * HOUR), 4.0),
    ):
        with failures.of(row):
            _compare_with_enumeration(row, most_steps=50, most_segments=70)


def _compare_with_enumeration(
    row: tuple[Jobs, FailureModel, float], *, most_steps: int, most_segments: int
) -> None:
    jobs, model, step_s = row
    choice = choose_policy(jobs, model, step_s=step_s)
    assert len(choice.by_replicas) == 2
    for one in choice.by_replicas:
        seconds = run_seconds(jobs, model, replicas=one.policy.replicas, step_s=step_s)
        rates = failure_rates(jobs, model)
        policies = (
            replace(one.policy, host_interval_steps=steps, shared_interval_steps=steps * segments)
            for steps in range(1, most_steps + 1)
            for segments in range(2, most_segments + 1)
        )
        best = max(
            level_shares(policy, seconds, rates).training
            for policy in policies
            if unfinished(policy, seconds) is None
        )
        assert one.shares.training == pytest.approx(best, rel=1e-12)
        assert one.policy.segment_steps < most_steps
        assert one.policy.segments < most_segments


def test_the_best_level_depends_on_what_fails() -> None:
    # Waiting for each write to shared storage costs more than copies on hosts ever do.
    both = choose_policy(JOBS, MODEL, step_s=10.0)
    assert present(both.chosen).policy.replicas == 1
    assert both.ratio > float(both.shared_only.effective_ratio) + 0.05
    # Without a peer's copy every lost node sends the run to shared storage.
    only_nodes = replace(MODEL, process_mtbf_s=math.inf, host=replace(HOST, replicas=(0,)))
    assert choose_policy(JOBS, only_nodes, step_s=10.0).chosen is None
    # Copies need more than their own stall is worth where they are written in the background.
    slow = replace(HOST, node_bytes_per_s=1e8, replicas=(1,))
    assert choose_policy(JOBS, replace(BESIDE, host=slow), step_s=10.0).chosen is None


RUN = TrainingRun(step_s=10.0, tokens_per_step=10**7, tokens=1e13, devices_per_node=8)


def test_plan_and_forecast_have_the_same_share() -> None:
    for model in (MODEL, BESIDE, replace(MODEL, repair_s=24 * HOUR, in_process_restart_s=30.0)):
        choice = choose_policy(JOBS, model, step_s=10.0)
        made = forecast(RUN, jobs=JOBS, reliability=model)
        objective_s = float(goodput_step_s(10.0, jobs=JOBS, reliability=model))
        assert made.effective_step_s == pytest.approx(objective_s, rel=1e-14)
        assert made.effective_time_ratio == choice.ratio
        assert sum(made.time_ratios.values()) == pytest.approx(1.0, abs=1e-12)
        levels, chosen = present(made.checkpoint_levels), present(choice.chosen)
        assert levels.levels == (Level.HOST, Level.SHARED)
        assert levels.host_interval_steps == chosen.policy.segment_steps
        assert made.checkpoint_interval_steps == chosen.policy.shared_interval_steps
        assert made.checkpoint_in_background is model.storage.asynchronous
        assert writes_in_background(made, STATED) is model.storage.asynchronous
        older = made.model_copy(update={"checkpoint_in_background": None})
        beside = STATED.model_copy(update={"checkpoint": Checkpoint(asynchronous=True)})
        assert writes_in_background(older, beside)
        assert levels.compared[0].effective_time_ratio == choice.ratio
        assert levels.compared[-1].effective_time_ratio < choice.ratio
        assert {one.replicas for one in levels.compared} == {0, 1}
        low_s, high_s = present(made.wall_clock_s_band)
        assert low_s < present(made.wall_clock_s) < high_s


def test_where_shared_storage_is_chosen_nothing_changes() -> None:
    model = replace(BESIDE, host=replace(HOST, node_bytes_per_s=1e8, replicas=(1,)))
    made = forecast(RUN, jobs=JOBS, reliability=model)
    assert present(made.checkpoint_levels).levels == (Level.SHARED,)
    without = forecast(RUN, jobs=JOBS, reliability=replace(model, host=None))
    assert made.model_copy(update={"checkpoint_levels": None}) == without
    assert "checkpoint_levels" not in without.model_dump()
    assert "checkpoint_levels" in made.model_dump()


def test_stated_intervals_are_kept() -> None:
    host = replace(HOST, replicas=(1,), interval_s=95.0)
    choice = choose_policy(JOBS, replace(MODEL, host=host), step_s=10.0)
    assert choice.by_replicas[0].policy.host_interval_steps == 10
    both = replace(MODEL, host=host, interval_s=1000.0)
    policy = choose_policy(JOBS, both, step_s=10.0).by_replicas[0].policy
    assert (policy.host_interval_steps, policy.shared_interval_steps) == (10, 100)
    free = choose_policy(JOBS, MODEL, step_s=10.0)
    for stated in (replace(MODEL, host=host), both, replace(MODEL, interval_s=1000.0)):
        assert choose_policy(JOBS, stated, step_s=10.0).ratio < free.ratio


def test_a_stated_shared_interval_moves_by_a_step_or_two_percent(failures: Failures) -> None:
    one_copy = replace(HOST, replicas=(1,))
    # Also intervals whose only divisors are far from the best host interval, and no whole steps.
    for stated_s in (40.0, 70.0, 130.0, 470.0, 1000.0, 1013.0, 1990.0, 20_000.0):
        for model in (MODEL, FRAGILE, QUICK):
            stated = replace(model, host=one_copy, interval_s=stated_s)
            with failures.of(stated_s, model):
                policy = choose_policy(JOBS, stated, step_s=10.0).by_replicas[0].policy
                moved_s = abs(policy.shared_interval_steps * 10.0 - stated_s)
                assert moved_s <= max(10.0, 0.02 * stated_s)
                assert policy.segments > 1
    # A host write of five steps leaves one policy, the nearest.
    slow = replace(QUICK, host=replace(one_copy, save_bytes_per_s=2e8), interval_s=85.0)
    policy = choose_policy(JOBS, slow, step_s=10.0).by_replicas[0].policy
    assert (policy.segment_steps, policy.shared_interval_steps) == (5, 10)


def test_no_host_interval_beside_a_stated_one_is_better(failures: Failures) -> None:
    for model, stated_steps in ((MODEL, 100), (FRAGILE, 150), (FEW_STEPS, 64)):
        stated = replace(model, interval_s=10.0 * stated_steps)
        for one in choose_policy(JOBS, stated, step_s=10.0).by_replicas:
            seconds = run_seconds(JOBS, stated, replicas=one.policy.replicas, step_s=10.0)
            rates = failure_rates(JOBS, stated)
            divisors = [steps for steps in range(1, stated_steps) if stated_steps % steps == 0]
            with failures.of(stated_steps, one.policy.replicas):
                assert one.shares.training >= max(
                    level_shares(
                        replace(
                            one.policy,
                            host_interval_steps=steps,
                            shared_interval_steps=stated_steps,
                        ),
                        seconds,
                        rates,
                    ).training
                    for steps in divisors
                )


def test_what_is_not_possible_says_why(failures: Failures) -> None:
    small = replace(HOST, memory_bytes=150e9)
    odd = replace(JOBS, nodes=255.0)
    single = replace(JOBS, nodes=1.0, devices=8.0, writers=8.0)
    never = replace(MODEL, device_mtbf_s=math.inf)
    short = replace(MODEL, host=replace(HOST, interval_s=5.0))
    quick = replace(BESIDE, host=replace(HOST, interval_s=0.3))
    crowded = replace(BESIDE, interval_s=200.0)
    unable = replace(MODEL, host=replace(HOST, obstacle="torchtitan has none"))
    for jobs, model, step_s, message, left in (
        (JOBS, replace(MODEL, host=small), 10.0, "1 replica take 205 GiB of a node's memory", 1),
        (odd, MODEL, 10.0, "groups of 2 nodes, into which 255 nodes cannot be divided", 1),
        (single, MODEL, 10.0, "into which 1 node cannot be divided", 1),
        (JOBS, never, 10.0, "need a rate at which nodes are lost", 0),
        (JOBS, short, 10.0, "host_interval 5.00 s is shorter than a step of 10.0 s", 0),
        (JOBS, quick, 0.1, "is shorter than the write of a copy on hosts", 1),
        (JOBS, crowded, 10.0, "interval 3.33 min has no room for a host checkpoint", 0),
        (JOBS, unable, 10.0, "torchtitan has none", 0),
    ):
        choice = choose_policy(jobs, model, step_s=step_s)
        with failures.of(message):
            assert any(message in reason for reason in choice.left_out), choice.left_out
            assert len(choice.left_out) == 1
            assert len(choice.by_replicas) == left
        needed = replace(model, host=replace(present(model.host), is_optional=False, replicas=(1,)))
        run = TrainingRun(step_s=step_s, tokens_per_step=1, tokens=None, devices_per_node=8)
        made = forecast(run, jobs=jobs, reliability=needed)
        with failures.of(message, "needed"):
            assert not made.finishes
            assert message in made.reason
            assert "\n" not in made.reason
            assert present(made.checkpoint_levels).levels == ()
            assert math.isinf(float(goodput_step_s(step_s, jobs=jobs, reliability=needed)))


def test_copies_that_wait_for_a_write_need_memory() -> None:
    # Written in 235 s, during which a copy is made every minute where memory is no limit.
    def chosen(memory_bytes: float | None = None, interval_s: float | None = None) -> PolicyChoice:
        host = replace(
            HOST,
            replicas=(1,),
            is_optional=False,
            memory_bytes=memory_bytes,
            interval_s=interval_s,
        )
        return choose_policy(JOBS, replace(FRAGILE_BESIDE, host=host), step_s=10.0)

    free = present(chosen().chosen)
    queued = queued_copies(free.policy, free.seconds)
    assert queued > 3
    assert free.host_bytes == host_bytes(JOBS, replicas=1, queued=queued)
    memory = host_bytes(JOBS, replicas=1, queued=2)
    less = present(chosen(memory_bytes=memory).chosen)
    assert less.host_bytes <= memory
    assert less.ratio < free.ratio
    assert less.policy.segment_steps > free.policy.segment_steps
    # Stated intervals leave no choice.
    stated = chosen(memory_bytes=memory, interval_s=20.0)
    assert stated.chosen is None
    (reason,) = stated.left_out
    assert "wait for a write to shared storage of 3.92 min take" in reason
    assert f"{format_bytes(memory)} may be taken (cluster.pools[].host" in reason


def test_impossible_levels_are_refused() -> None:
    for change, message in (
        ({"node_bytes_per_s": 0.0}, "above zero"),
        ({"together_ratio": 0.0}, "above zero"),
        ({"replicas": ()}, "none is named"),
        ({"interval_s": -1.0}, "interval"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(HOST, **change)
    with pytest.raises(ValueError, match="no level on hosts"):
        choose_policy(JOBS, replace(MODEL, host=None), step_s=1.0)


def test_restarts_in_the_process_shorten_one_level_too() -> None:
    one = replace(MODEL, host=None)
    usual = cycle(JOBS, one, step_s=10.0)
    same = cycle(JOBS, replace(one, in_process_restart_s=600.0), step_s=10.0)
    shorter = cycle(JOBS, replace(one, in_process_restart_s=30.0), step_s=10.0)
    assert float(same.restart_s) == pytest.approx(float(usual.restart_s), rel=1e-12)
    # The model of two levels without copies on hosts, which restarts each class by itself.
    policy = SavePolicy(shared_interval_steps=500)
    seconds = run_seconds(JOBS, replace(MODEL, in_process_restart_s=30.0), replicas=0, step_s=10.0)
    shares = level_shares(policy, seconds, failure_rates(JOBS, MODEL))
    at_500 = replace(shorter, work_s=5000.0)
    assert float(at_500.effective_ratio) == pytest.approx(shares.training, rel=1e-12)
    assert float(shorter.effective_ratio) > float(usual.effective_ratio)
