"""What a launch loses by when it saves, and what would lose less."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.expect import present
from tests.printed import unwrapped
from tests.tuner.estimate.conftest import predict
from tuner.cli.estimate_text import estimate_text
from tuner.engines.deepspeed import read as deepspeed
from tuner.engines.megatron_bridge import read as bridge
from tuner.engines.megatron_lm import read as megatron
from tuner.engines.reading.launch import LaunchSettings, TrainingEngine
from tuner.engines.targets import programs
from tuner.engines.torchtitan import read as torchtitan
from tuner.errors import SpecError
from tuner.estimate.checkpoints import FORMS, failure_notes
from tuner.estimate.records import CheckpointEstimate
from tuner.spec.goal import Reliability
from tuner.spec.spec import Spec
from tuner.units import format_bytes

LAUNCHES = Path(__file__).parent / "launches"
MakeSpec = Callable[..., Spec]
IN_BACKGROUND = "--async-save --use-persistent-ckpt-worker"
FAILING = Reliability.model_validate(
    {"device_mtbf": 5e6, "restart": 300.0, "checkpoint": {"bandwidth": 40e9}}
)
TITAN = (
    "[training]\nlocal_batch_size = 8\nseq_len = 4096\n[parallelism]\n"
    "data_parallel_shard_degree = -1\n[checkpoint]\nenable = true\n"
)


def failing(spec: Spec, **changes: Any) -> Spec:
    """Let the devices of a spec fail every two months, or as changed."""
    goal = spec.goal.model_copy(update={"reliability": FAILING.model_copy(update=changes)})
    return spec.model_copy(update={"goal": goal})


@pytest.fixture(scope="module")
def spec(spec_of: MakeSpec) -> Spec:
    return failing(spec_of("mixtral-8x7b", nodes=8))


@pytest.fixture(scope="module")
def words_of(spec: Spec) -> Callable[[CheckpointEstimate], str]:
    """Return what the estimate of Mixtral's launch says, with these checkpoints."""
    one = predict(spec, mixtral(""))

    def of(checkpoints: CheckpointEstimate) -> str:
        return unwrapped(estimate_text(one.model_copy(update={"checkpoints": checkpoints})))

    return of


def checkpoints_of(spec: Spec, launch: LaunchSettings) -> CheckpointEstimate:
    """Return what the estimate of a launch says of checkpoints."""
    return present(predict(spec, launch).checkpoints)


def mixtral(flags: str) -> LaunchSettings:
    """Return the launch of Mixtral with some more flags."""
    text = (LAUNCHES / "mixtral.sh").read_text()
    more = text.replace("--micro-batch-size", f"{flags} --micro-batch-size", 1)
    return megatron.read(more, source="mixtral.sh")


def test_the_launch_is_forecast_as_it_saves(spec: Spec) -> None:
    rare, often, behind = (
        checkpoints_of(spec, mixtral(flags))
        for flags in (
            "--save-interval 2000",
            "--save-interval 80",
            f"--save-interval 2000 {IN_BACKGROUND}",
        )
    )
    for one in (rare, often, behind):
        change = present(one.change)
        gained = change.run.effective_time_ratio - present(one.run).effective_time_ratio
        assert change.gain_ratio == pytest.approx(gained)
        assert change.gain_ratio > 0.0
    # Waiting so often is best mended by not waiting.
    assert present(often.change).lines == (IN_BACKGROUND,)
    for one in (rare, behind):
        steps = present(present(one.change).run.checkpoint_interval_steps)
        assert present(one.change).lines == (f"--save-interval {steps}",)
        assert 80 < steps < 2000
    assert rare.interval_steps == 2000
    assert behind.in_background
    # Megatron-LM turns the one off without the other.
    alone = predict(spec, mixtral("--save-interval 80 --async-save"))
    assert present(alone.checkpoints).change == often.change
    assert any("training waits for checkpoints" in note for note in alone.notes)
    # With the better interval nothing is left to gain by another one.
    again = checkpoints_of(spec, mixtral(present(rare.change).lines[0]))
    assert again.change is None or "--async-save" in again.change.lines[0]


def test_it_says_how_much_room_checkpoints_take(
    spec: Spec, words_of: Callable[[CheckpointEstimate], str]
) -> None:
    step_tokens = 4096 * 256
    # Steps of the run: most at once, and with which flag how many at most. Of 10,000 steps 100 are
    # saved, and 51 intervals fit once; the newest and the one that is written come on top.
    rows = (
        ("", 10_000, 100, "--save-retain-interval 5100", 3),
        ("", 300, 3, "", None),
        # The end of a run is saved, too: of 250 steps the first 100, 200 and 250.
        ("", 250, 3, "", None),
        ("", 50, 1, "", None),
        ("", None, None, "--save-retain-interval 100000", None),
        ("--save-retain-interval 2000", 10_000, 7, "", None),
        ("--save-retain-interval 2000", None, None, "", None),
    )
    for flags, steps, *expected in rows:
        tokens = None if steps is None else float(steps * step_tokens)
        goal = spec.goal.model_copy(update={"tokens": tokens})
        launch = mixtral(f"--save-interval 100 {flags}")
        assert (launch.sequence, launch.global_batch) == (4096, 256)
        one = checkpoints_of(spec.model_copy(update={"goal": goal}), launch)
        room = present(one.room)
        assert [room.most, room.change, room.change_most] == expected, (flags, steps)
        size = format_bytes(present(one.run).checkpoint_bytes)
        (line,) = (line for line in words_of(one).splitlines() if f"{size} each" in line)
        assert (f" for {expected[0]} at most" in line) == (expected[0] is not None)
        assert f" with {expected[1]}" in line or not expected[1]


def test_a_launch_without_checkpoints_is_told_so(
    spec: Spec, words_of: Callable[[CheckpointEstimate], str]
) -> None:
    told = checkpoints_of(spec, mixtral(""))
    assert (told.interval_steps, told.run, told.room) == (None, None, None)
    text = words_of(told)
    assert "none before the end: every failure starts the run again" in text
    assert f"with {present(told.change).lines[0]}" in text
    saved = checkpoints_of(spec, mixtral("--save-interval 100"))
    assert "% of the time advances training" in words_of(saved)


def test_a_launch_waits_without_a_spare_and_says_so(spec: Spec) -> None:
    launch = mixtral("")
    assert not list(failure_notes(spec, launch))
    stated = failing(spec, repair=86400.0, without_spare="auto")
    one = predict(stated, launch)
    assert set(failure_notes(stated, launch)) <= set(one.notes)
    assert any("without_spare: auto has no effect on a launch" in note for note in one.notes)


def test_other_engines_say_it_in_their_own_words(spec_of: MakeSpec) -> None:
    toml = TITAN.replace("enable = true\n", "enable = true\ninterval = 7\n")
    titan = torchtitan.read(toml, source="run.toml")
    assert (titan.save_interval, titan.saves_in_background) == (7, False)
    assert titan.kept_checkpoints == 10
    for number, kept in ((3, 3), (0, None)):
        some = torchtitan.read(f"{toml}keep_latest_k = {number}\n", source="run.toml")
        assert some.kept_checkpoints == kept
    pinned = torchtitan.read(toml + 'async_mode = "async_with_pinned_mem"\n', source="run.toml")
    assert pinned.saves_in_background
    off = torchtitan.read(toml.replace("enable = true", "enable = false"), source="run.toml")
    assert off.save_interval is None

    def overrides(lines: str) -> LaunchSettings:
        return bridge.read(f"train.micro_batch_size=1\n{lines}\n", source="overrides.txt")

    saving = overrides("checkpoint.save_interval=50\ncheckpoint.async_save=true")
    assert (saving.save_interval, saving.saves_in_background) == (50, True)
    for number, kept in ((4, 4), (0, None), (-1, None)):
        assert overrides(f"checkpoint.most_recent_k={number}").kept_checkpoints == kept
    switched_off = overrides(
        "checkpoint.async_save=true\ncheckpoint.use_persistent_ckpt_worker=false"
    )
    assert not switched_off.saves_in_background
    assert not switched_off.saves_nowhere
    spec = spec_of("llama-3.1-8b", nodes=1)
    found = present(predict(failing(spec), titan).checkpoints)
    assert present(found.change).lines[0].startswith("checkpoint.interval = ")
    assert predict(spec, titan).checkpoints is None
    zero = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}'
    assert predict(failing(spec), deepspeed.read(zero, source="ds.json")).checkpoints is None


LOCAL = "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir /dev/shm/mine"


REPLICATED = f"{LOCAL} --non-persistent-save-interval 400 --replication --replication-jump"


def test_checkpoints_on_hosts_of_a_launch_are_priced(
    spec: Spec, words_of: Callable[[CheckpointEstimate], str]
) -> None:
    def saving(flags: str) -> CheckpointEstimate:
        return checkpoints_of(spec, saving_rarely(flags))

    without, hosts = saving(""), saving(f"{REPLICATED} 8")
    alone, run = present(without.run), present(hosts.run)
    assert without.host_interval_steps is None
    assert hosts.host_interval_steps == 400
    levels = present(run.checkpoint_levels)
    # A factor of two is one replica; without process failures only they restore from hosts.
    assert (levels.replicas, levels.host_interval_steps) == (1, 400)
    assert run.checkpoint_interval_steps == 4000
    assert run.effective_time_ratio > alone.effective_time_ratio
    # Ranks of a node that copy to each other lose both copies with it.
    near_run = saving(f"{REPLICATED} 1").run or run
    assert near_run.checkpoint_levels is None or near_run.checkpoint_levels.replicas == 0
    (note,) = failure_notes(spec, saving_rarely(f"{REPLICATED} 1"))
    assert "--replication-jump 8 sends them to others" in note
    # Ranks 0, 4 and 8 are on two nodes of eight devices.
    wide = f"{REPLICATED} 4 --replication-factor 3"
    assert saving(wide).run == run
    assert not list(failure_notes(spec, saving_rarely(wide)))
    with pytest.raises(SpecError, match="--replication needs --replication-jump"):
        mixtral(REPLICATED.removesuffix(" --replication-jump"))
    # Without replicas every lost node takes the copies.
    single = saving(f"{LOCAL} --non-persistent-save-interval 400")
    assert present(single.run).effective_time_ratio < alone.effective_time_ratio
    # No copy on a host lies between two on shared storage.
    rare = saving(f"{LOCAL} --non-persistent-save-interval 3000")
    assert rare.host_interval_steps is None
    assert rare.run == alone
    # Global checkpoints between others are on shared storage.
    assert saving("--non-persistent-ckpt-type global").run == alone
    text = words_of(saving(f"{LOCAL} --non-persistent-save-interval 90"))
    assert "and every 90 steps on hosts:" in text


def test_copies_on_hosts_that_no_rate_gives_a_use_to_do_no_harm(spec: Spec) -> None:
    copied = saving_rarely(f"{LOCAL} --non-persistent-save-interval 400")
    stated = failing(spec, device_mtbf=None, process_mtbf=1e6)
    without = checkpoints_of(stated, saving_rarely(""))
    assert checkpoints_of(stated, copied).run == present(without.run)
    (note,) = failure_notes(stated, copied)
    assert "checkpoints on hosts are left out" in note
    assert not list(failure_notes(stated, saving_rarely("")))
    # Copies that do not fit are another matter: such a launch runs out of memory.
    small = FAILING.checkpoint.model_copy(update={"host_memory": 10**9})
    run = present(checkpoints_of(failing(spec, checkpoint=small), copied).run)
    assert not run.finishes
    assert "may be taken (cluster.pools[].host" in run.reason


def saving_rarely(flags: str) -> LaunchSettings:
    """Let a launch save every 4,000 steps, and have some more flags."""
    return mixtral(f"--save-interval 4000 {flags}")


def test_restarts_in_place_count_for_launches_that_have_them(spec: Spec) -> None:
    stated = failing(spec, process_mtbf=1e6, in_process_restart=5.0)
    launches = [saving_rarely(flags) for flags in ("", "--inprocess-restart")]
    runs = [present(checkpoints_of(stated, one).run) for one in launches]
    assert runs[1].effective_time_ratio > runs[0].effective_time_ratio
    (note,) = failure_notes(stated, launches[0])
    assert "in_process_restart has no" in note
    assert not list(failure_notes(stated, launches[1]))


def test_a_launch_is_told_how_to_save_to_hosts_where_the_spec_asks(spec: Spec) -> None:
    def changed(flags: str, levels: object) -> tuple[str, ...]:
        # Processes fail every ten hours, and reading from shared storage takes minutes.
        asks = FAILING.checkpoint.model_copy(update={"levels": levels, "bandwidth": 2e9})
        stated = failing(spec, process_mtbf=3e5, checkpoint=asks)
        change = checkpoints_of(stated, mixtral(flags)).change
        return () if change is None else change.lines

    (best,) = changed(f"--save-interval 20000 {IN_BACKGROUND}", ("shared",))
    assert best.startswith("--save-interval ")
    assert changed(f"{best} {IN_BACKGROUND}", ("shared",)) == ()
    interval, to_hosts = changed(f"{best} {IN_BACKGROUND}", "auto")
    assert interval.startswith("--save-interval ")
    assert to_hosts.startswith("--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir")
    assert to_hosts.endswith(" --replication --replication-jump 8 --replication-factor 2")
    # Told both, it has nothing left to gain.
    hosts = to_hosts.replace("FOLDER", "/dev/shm/mine")
    assert changed(f"{interval} {hosts} {IN_BACKGROUND}", "auto") == ()


def test_what_an_interval_is_worth_nothing_without_is_named(spec: Spec, spec_of: MakeSpec) -> None:
    text = (LAUNCHES / "mixtral.sh").read_text().replace('"$@"', "")
    saved = "--save-interval "
    for flags, start in (
        ("", f"--save DIR {saved}"),
        ("--save-interval 9000", f"--save DIR {saved}"),
        ("--save-interval 9000 --save /shared", saved),
        # A variable may hold the folder.
        ('--save-interval 9000 ${CHECKPOINTS:+--save "$CHECKPOINTS"}', saved),
        ('--save-interval 9000 "$@"', saved),
    ):
        launch = text.replace("--micro-batch-size", f"{flags} --micro-batch-size", 1)
        one = checkpoints_of(spec, megatron.read(launch, source="run.sh"))
        assert present(one.change).lines[0].startswith(start), flags
        # What is saved nowhere is no checkpoint.
        assert (one.run is None) == start.startswith("--save DIR "), flags
    titan = torchtitan.read(TITAN.replace("enable = true", "interval = 7"), source="run.toml")
    change = present(checkpoints_of(failing(spec_of("llama-3.1-8b", nodes=1)), titan).change)
    assert change.lines[0].startswith("checkpoint.enable = true, checkpoint.interval = ")


def test_torchtitan_is_told_to_save_from_pinned_memory(
    spec_of: MakeSpec, words_of: Callable[[CheckpointEstimate], str]
) -> None:
    spec = failing(spec_of("llama-3.1-8b", nodes=1))
    modes = ("disabled", "async", "async_with_pinned_mem")
    found = [
        checkpoints_of(
            spec,
            torchtitan.read(f'{TITAN}interval = 20\nasync_mode = "{mode}"\n', source="run.toml"),
        )
        for mode in modes
    ]
    stalls_s = [present(present(one.run).checkpoint_stall_s) for one in found]
    # 12 bytes of each of 8.03e9 parameters over eight devices: to the storage; into new memory of
    # 2.3 GB/s; over the link of a device.
    assert stalls_s[0] > stalls_s[1] > 10.0 * stalls_s[2] > 0.0
    assert stalls_s[1] == pytest.approx(12.0 * 8.03e9 / 8.0 / 2.3e9, rel=0.01)
    (line,) = FORMS[TrainingEngine.TORCHTITAN][1:]
    for one, mode in zip(found[:2], modes, strict=False):
        assert present(one.change).lines == (line,), mode
    last = found[2]
    assert last.change is None or line not in last.change.lines
    assert "in the background from pinned memory:" in words_of(last)


def test_sharded_launches_save_in_the_background_where_their_release_can(spec: Spec) -> None:
    text = (LAUNCHES / "mixtral.sh").read_text().replace("CONNECTIONS=1", "CONNECTIONS=32")
    text = text.replace("PP=4", "PP=1")
    sharded = (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --ckpt-format"
        " fsdp_dtensor"
    )
    for sharding, emit, is_told in (
        (sharded, "megatron-lm", True),
        (sharded, "megatron-lm-0.16", False),
        (sharded, "reference", True),
        ("", "megatron-lm-0.16", True),
    ):
        flags = f"--save /shared --save-interval 80 {sharding} --micro-batch-size"
        launch = megatron.read(text.replace("--micro-batch-size", flags, 1), source="run.sh")
        change = present(
            checkpoints_of(spec.model_copy(update={"programs": programs((emit,))}), launch).change
        )
        assert any("--async-save" in line for line in change.lines) == is_told, (sharding, emit)


def test_time_lost_to_waiting_for_a_node_is_said_of_spares(
    spec: Spec, words_of: Callable[[CheckpointEstimate], str]
) -> None:
    # A node of 64 devices fails every 5e6 / 64 s and is away for a fifth of that: without a spare
    # a sixth of the time is spent waiting, and B(2, 0.2) = 0.0164, B(3, 0.2) = 0.0011 with more.
    waiting = failing(spec, repair=0.2 * 5e6 / 64)
    own = checkpoints_of(waiting, mixtral(f"--save-interval 400 {IN_BACKGROUND}"))
    run = present(own.run)
    assert run.time_ratios["waiting"] == pytest.approx(1 / 6, rel=1e-6)
    assert own.more_spare_nodes == 2
    spared = run.effective_time_ratio / (1 - 1 / 6) * (1 - 0.00109)
    assert own.spared_time_ratio == pytest.approx(spared, rel=1e-3)
    said = words_of(own)
    assert "16.7 % of the time waits for a replacement of a node" in said
    assert "with 2 more spare nodes (goal.reliability.spare_nodes)" in said
    assert "of the time advances training" not in said.split("spares ")[0].split("checkpoints ")[-1]
    # Where nodes are back at once nothing waits.
    assert checkpoints_of(spec, saving_rarely(IN_BACKGROUND)).more_spare_nodes == 0
