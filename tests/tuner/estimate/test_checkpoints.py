"""What a launch loses by when it saves, and what would lose less."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.expect import present
from tests.printed import unwrapped
from tuner.cli.estimate_text import estimate_text
from tuner.engines.deepspeed import read as deepspeed
from tuner.engines.megatron_bridge import read as bridge
from tuner.engines.megatron_lm import read as megatron
from tuner.engines.reading.launch import TrainingEngine
from tuner.engines.torchtitan import read as torchtitan
from tuner.errors import SpecError
from tuner.estimate.checkpoints import FORMS, failure_notes
from tuner.estimate.estimate import estimate
from tuner.estimate.records import CheckpointEstimate, Estimate
from tuner.spec.goal import Reliability
from tuner.spec.spec import Spec
from tuner.units import format_bytes

LAUNCHES = Path(__file__).parent / "launches"
MakeSpec = Callable[..., Spec]
IN_BACKGROUND = "--async-save --use-persistent-ckpt-worker"
FAILING = Reliability.model_validate(
    {"device_mtbf": 5e6, "restart": 300.0, "checkpoint": {"bandwidth": 40e9}}
)


def failing(spec: Spec) -> Spec:
    """Let the devices of a spec fail every two months."""
    goal = spec.goal.model_copy(update={"reliability": FAILING})
    return spec.model_copy(update={"goal": goal})


@pytest.fixture(scope="module")
def estimated(spec_of: MakeSpec) -> Callable[[str], Estimate]:
    spec = failing(spec_of("mixtral-8x7b", nodes=8))
    text = (LAUNCHES / "mixtral.sh").read_text()

    def of(flags: str) -> Estimate:
        more = text.replace("--micro-batch-size", f"{flags} --micro-batch-size", 1)
        return estimate(spec, megatron.read(more, source="mixtral.sh"))

    return of


def checkpoints_of(one: Estimate) -> CheckpointEstimate:
    """Return what an estimate says of checkpoints."""
    assert one.checkpoints is not None
    return one.checkpoints


def test_the_launch_is_forecast_as_it_saves(estimated: Callable[[str], Estimate]) -> None:
    rare, often, behind = (
        checkpoints_of(estimated(flags))
        for flags in (
            "--save-interval 2000",
            "--save-interval 80",
            f"--save-interval 2000 {IN_BACKGROUND}",
        )
    )
    for one in (rare, often, behind):
        assert one.change is not None
        gained = one.change.run.effective_time_ratio - present(one.run).effective_time_ratio
        assert one.change.gain_ratio == pytest.approx(gained)
        assert one.change.gain_ratio > 0.0
    # Waiting so often is best mended by not waiting.
    assert present(often.change).lines == (IN_BACKGROUND,)
    for one in (rare, behind):
        assert one.change is not None
        steps = one.change.run.checkpoint_interval_steps
        assert one.change.lines == (f"--save-interval {steps}",)
        assert steps is not None
        assert 80 < steps < 2000
    assert rare.interval_steps == 2000
    assert behind.in_background
    # Megatron-LM turns the one off without the other.
    alone = estimated("--save-interval 80 --async-save")
    assert checkpoints_of(alone).change == often.change
    assert any("training waits for checkpoints" in note for note in alone.notes)
    # With the better interval nothing is left to gain by another one.
    again = present(checkpoints_of(estimated(rare.change.lines[0])) if rare.change else None)
    assert again.change is None or "--async-save" in again.change.lines[0]


def test_it_says_how_much_room_checkpoints_take(
    spec_of: MakeSpec, estimated: Callable[[str], Estimate]
) -> None:
    step_tokens = 4096 * 256
    spec = failing(spec_of("mixtral-8x7b", nodes=8))
    text = (LAUNCHES / "mixtral.sh").read_text()

    def of(flags: str, *, steps: int | None) -> tuple[CheckpointEstimate, str]:
        tokens = None if steps is None else float(steps * step_tokens)
        goal = spec.goal.model_copy(update={"tokens": tokens})
        more = text.replace("--micro-batch-size", f"{flags} --micro-batch-size", 1)
        launch = megatron.read(more, source="mixtral.sh")
        assert launch.sequence is not None
        assert launch.global_batch is not None
        assert launch.sequence * launch.global_batch == step_tokens
        one = estimate(spec.model_copy(update={"goal": goal}), launch)
        return checkpoints_of(one), estimate_text(one)

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
        one, words = of(f"--save-interval 100 {flags}", steps=steps)
        assert one.room is not None
        assert [one.room.most, one.room.change, one.room.change_most] == expected, (flags, steps)
        size = format_bytes(present(one.run).checkpoint_bytes)
        (line,) = (line for line in unwrapped(words).splitlines() if f"{size} each" in line)
        assert (f" for {expected[0]} at most" in line) == (expected[0] is not None)
        assert f" with {expected[1]}" in line or not expected[1]
    assert checkpoints_of(estimated("")).room is None


def test_a_launch_without_checkpoints_is_told_so(estimated: Callable[[str], Estimate]) -> None:
    one = estimated("")
    told = checkpoints_of(one)
    assert (told.interval_steps, told.run) == (None, None)
    text = estimate_text(one)
    assert "checkpoints    none before the end: every failure starts the run again" in text
    assert f"with {present(told.change).lines[0]}" in text
    assert "% of the time advances training" in estimate_text(estimated("--save-interval 100"))


def test_a_launch_waits_without_a_spare_and_says_so(spec_of: MakeSpec) -> None:
    spec = failing(spec_of("mixtral-8x7b", nodes=8))
    launch = megatron.read((LAUNCHES / "mixtral.sh").read_text(), source="mixtral.sh")
    assert not list(failure_notes(spec, launch))
    both = {"repair": 86400.0, "without_spare": "auto"}
    goal = spec.goal.model_copy(update={"reliability": FAILING.model_copy(update=both)})
    stated = spec.model_copy(update={"goal": goal})
    one = estimate(stated, launch)
    assert set(failure_notes(stated, launch)) <= set(one.notes)
    assert any("without_spare: auto has no effect on a launch" in note for note in one.notes)


def test_other_engines_say_it_in_their_own_words(spec_of: MakeSpec) -> None:
    toml = (
        "[training]\nlocal_batch_size = 8\nseq_len = 4096\n[parallelism]\n"
        "data_parallel_shard_degree = -1\n[checkpoint]\nenable = true\ninterval = 7\n"
    )
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
    overrides = bridge.read(
        "train.micro_batch_size=1\ncheckpoint.save_interval=50\ncheckpoint.async_save=true\n",
        source="overrides.txt",
    )
    assert (overrides.save_interval, overrides.saves_in_background) == (50, True)
    for number, kept in ((4, 4), (0, None), (-1, None)):
        some = bridge.read(
            f"train.micro_batch_size=1\ncheckpoint.most_recent_k={number}\n", source="o.txt"
        )
        assert some.kept_checkpoints == kept
    switched_off = bridge.read(
        "train.micro_batch_size=1\ncheckpoint.async_save=true\n"
        "checkpoint.use_persistent_ckpt_worker=false\n",
        source="overrides.txt",
    )
    assert not switched_off.saves_in_background
    assert not switched_off.saves_nowhere
    spec = spec_of("llama-3.1-8b", nodes=1)
    estimated = checkpoints_of(estimate(failing(spec), titan))
    assert present(estimated.change).lines[0].startswith("checkpoint.interval = ")
    assert estimate(spec, titan).checkpoints is None
    zero = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}'
    assert estimate(failing(spec), deepspeed.read(zero, source="ds.json")).checkpoints is None


LOCAL = "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir /dev/shm/mine"


def test_checkpoints_on_hosts_of_a_launch_are_priced(
    estimated: Callable[[str], Estimate], spec_of: MakeSpec
) -> None:
    without = checkpoints_of(estimated("--save-interval 4000"))
    hosts = checkpoints_of(
        estimated(
            f"--save-interval 4000 {LOCAL} --non-persistent-save-interval 400 --replication"
            " --replication-jump 8"
        )
    )
    assert without.host_interval_steps is None
    assert hosts.host_interval_steps == 400
    assert hosts.run is not None
    levels = present(hosts.run.checkpoint_levels)
    # A factor of two is one replica; without process failures only they restore from hosts.
    assert (levels.replicas, levels.host_interval_steps) == (1, 400)
    assert hosts.run.checkpoint_interval_steps == 4000
    assert without.run is not None
    assert hosts.run.effective_time_ratio > without.run.effective_time_ratio
    # Ranks of a node that copy to each other lose both copies with it.
    near = estimated(
        f"--save-interval 4000 {LOCAL} --non-persistent-save-interval 400 --replication"
        " --replication-jump 1"
    )
    near_run = checkpoints_of(near).run or hosts.run
    assert near_run.checkpoint_levels is None or near_run.checkpoint_levels.replicas == 0
    assert any("--replication-jump 8 sends them to others" in note for note in near.notes)
    # Ranks 0, 4 and 8 are on two nodes of eight devices.
    wide = estimated(
        f"--save-interval 4000 {LOCAL} --non-persistent-save-interval 400 --replication"
        " --replication-jump 4 --replication-factor 3"
    )
    assert checkpoints_of(wide).run == hosts.run
    assert not any("sends them to others" in note for note in wide.notes)
    with pytest.raises(SpecError, match="--replication needs --replication-jump"):
        estimated(f"{LOCAL} --non-persistent-save-interval 400 --replication")
    # Without replicas every lost node takes the copies.
    single = checkpoints_of(
        estimated(f"--save-interval 4000 {LOCAL} --non-persistent-save-interval 400")
    )
    assert present(single.run).effective_time_ratio < without.run.effective_time_ratio
    # No copy on a host lies between two on shared storage.
    rare = checkpoints_of(
        estimated(f"--save-interval 4000 {LOCAL} --non-persistent-save-interval 3000")
    )
    assert rare.host_interval_steps is None
    assert rare.run == without.run
    # Global checkpoints between others are on shared storage.
    elsewhere = checkpoints_of(estimated("--save-interval 4000 --non-persistent-ckpt-type global"))
    assert elsewhere.run == without.run
    text = estimate_text(
        estimated(f"--save-interval 4000 {LOCAL} --non-persistent-save-interval 90")
    )
    assert "and every 90 steps on hosts:" in text


def test_copies_on_hosts_that_no_rate_gives_a_use_to_do_no_harm(spec_of: MakeSpec) -> None:
    spec, text = spec_of("mixtral-8x7b", nodes=8), (LAUNCHES / "mixtral.sh").read_text()
    only = {"device_mtbf": None, "process_mtbf": 1e6}
    goal = spec.goal.model_copy(update={"reliability": FAILING.model_copy(update=only)})
    stated = spec.model_copy(update={"goal": goal})
    without, with_copies = (
        estimate(stated, megatron.read(saving_as(text, flags), source="mixtral.sh"))
        for flags in ("", f"{LOCAL} --non-persistent-save-interval 400")
    )
    assert checkpoints_of(with_copies).run == checkpoints_of(without).run
    assert checkpoints_of(without).run is not None
    said = {note for note in with_copies.notes if "checkpoints on hosts are left out" in note}
    assert len(said) == 1
    assert not said & set(without.notes)
    # Copies that do not fit are another matter: such a launch runs out of memory.
    small = FAILING.checkpoint.model_copy(update={"host_memory": 10**9})
    goal = spec.goal.model_copy(
        update={"reliability": FAILING.model_copy(update={"checkpoint": small})}
    )
    full = estimate(
        spec.model_copy(update={"goal": goal}),
        megatron.read(
            saving_as(text, f"{LOCAL} --non-persistent-save-interval 400"), source="mixtral.sh"
        ),
    )
    run = present(checkpoints_of(full).run)
    assert not run.finishes
    assert "may be taken (cluster.pools[].host" in run.reason


def saving_as(text: str, flags: str) -> str:
    """Let a launch save every 4,000 steps, and have some more flags."""
    return text.replace("--micro-batch-size", f"--save-interval 4000 {flags} --micro-batch-size", 1)


def test_restarts_in_place_count_for_launches_that_have_them(spec_of: MakeSpec) -> None:
    spec, text = spec_of("mixtral-8x7b", nodes=8), (LAUNCHES / "mixtral.sh").read_text()
    shorter = FAILING.model_copy(update={"process_mtbf": 1e6, "in_process_restart": 5.0})
    goal = spec.goal.model_copy(update={"reliability": shorter})
    stated = spec.model_copy(update={"goal": goal})
    without, with_it = (
        estimate(stated, megatron.read(saving_as(text, flags), source="mixtral.sh"))
        for flags in ("", "--inprocess-restart")
    )
    runs = [checkpoints_of(one).run for one in (without, with_it)]
    assert present(runs[1]).effective_time_ratio > present(runs[0]).effective_time_ratio
    said = [
        any("in_process_restart has no" in note for note in one.notes) for one in (without, with_it)
    ]
    assert said == [True, False]


def test_a_launch_is_told_how_to_save_to_hosts_where_the_spec_asks(spec_of: MakeSpec) -> None:
    text = (LAUNCHES / "mixtral.sh").read_text()
    spec = failing(spec_of("mixtral-8x7b", nodes=8))
    # Processes fail every ten hours, and reading from shared storage takes minutes.
    often = FAILING.model_copy(update={"process_mtbf": 3e5})

    def changed(flags: str, levels: object) -> tuple[str, ...]:
        asks = often.checkpoint.model_copy(update={"levels": levels, "bandwidth": 2e9})
        goal = spec.goal.model_copy(
            update={"reliability": often.model_copy(update={"checkpoint": asks})}
        )
        launch = text.replace("--micro-batch-size", f"{flags} --micro-batch-size", 1)
        own = spec.model_copy(update={"goal": goal})
        change = checkpoints_of(estimate(own, megatron.read(launch, source="mixtral.sh"))).change
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


def test_what_an_interval_is_worth_nothing_without_is_named(spec_of: MakeSpec) -> None:
    text = (LAUNCHES / "mixtral.sh").read_text().replace('"$@"', "")
    spec = failing(spec_of("mixtral-8x7b", nodes=8))

    def changed(flags: str) -> str:
        launch = text.replace("--micro-batch-size", f"{flags} --micro-batch-size", 1)
        one = checkpoints_of(estimate(spec, megatron.read(launch, source="run.sh")))
        # What is saved nowhere is no checkpoint.
        assert one.change is not None
        assert (one.run is None) == one.change.lines[0].startswith("--save DIR ")
        return one.change.lines[0]

    assert changed("").startswith("--save DIR --save-interval ")
    assert changed("--save-interval 9000").startswith("--save DIR --save-interval ")
    assert changed("--save-interval 9000 --save /shared").startswith("--save-interval ")
    # A variable may hold the folder.
    assert changed('--save-interval 9000 ${CHECKPOINTS:+--save "$CHECKPOINTS"}').startswith(
        "--save-interval "
    )
    assert changed('--save-interval 9000 "$@"').startswith("--save-interval ")
    toml = (
        "[training]\nlocal_batch_size = 8\nseq_len = 4096\n[parallelism]\n"
        "data_parallel_shard_degree = -1\n[checkpoint]\ninterval = 7\n"
    )
    titan = torchtitan.read(toml, source="run.toml")
    change = present(
        checkpoints_of(estimate(failing(spec_of("llama-3.1-8b", nodes=1)), titan)).change
    )
    assert change.lines[0].startswith("checkpoint.enable = true, checkpoint.interval = ")


def test_torchtitan_is_told_to_save_from_pinned_memory(spec_of: MakeSpec) -> None:
    spec = failing(spec_of("llama-3.1-8b", nodes=1))
    toml = (
        "[training]\nlocal_batch_size = 8\nseq_len = 4096\n[parallelism]\n"
        "data_parallel_shard_degree = -1\n[checkpoint]\nenable = true\ninterval = 20\n"
    )
    modes = ("disabled", "async", "async_with_pinned_mem")
    found = {
        mode: estimate(spec, torchtitan.read(f'{toml}async_mode = "{mode}"\n', source="run.toml"))
        for mode in modes
    }
    runs = [checkpoints_of(one).run for one in found.values()]
    stalls_s = [0.0 if run is None else run.checkpoint_stall_s or 0.0 for run in runs]
    # 12 bytes of each of 8.03e9 parameters over eight devices: to the storage; into new memory of
    # 2.3 GB/s; over the link of a device.
    assert stalls_s[0] > stalls_s[1] > 10.0 * stalls_s[2] > 0.0
    assert stalls_s[1] == pytest.approx(12.0 * 8.03e9 / 8.0 / 2.3e9, rel=0.01)
    (line,) = FORMS[TrainingEngine.TORCHTITAN][1:]
    for mode in modes[:2]:
        change = checkpoints_of(found[mode]).change
        assert change is not None, mode
        assert change.lines == (line,), mode
    last = checkpoints_of(found[modes[2]])
    assert last.change is None or line not in last.change.lines
    assert "in the background from pinned memory:" in estimate_text(found[modes[2]])


def test_sharded_launches_save_in_the_background_where_their_release_can(
    spec_of: MakeSpec,
) -> None:
    text = (LAUNCHES / "mixtral.sh").read_text().replace("CONNECTIONS=1", "CONNECTIONS=32")
    text = text.replace("PP=4", "PP=1")
    sharded = (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --ckpt-format"
        " fsdp_dtensor"
    )
    for sharding, emit, is_told in (
        (sharded, ("megatron-lm",), True),
        (sharded, ("megatron-lm-0.16",), False),
        (sharded, ("reference",), True),
        ("", ("megatron-lm-0.16",), True),
    ):
        spec = failing(spec_of("mixtral-8x7b", nodes=8)).model_copy(update={"emit": emit})
        flags = f"--save /shared --save-interval 80 {sharding} --micro-batch-size"
        launch = megatron.read(text.replace("--micro-batch-size", flags, 1), source="run.sh")
        change = present(checkpoints_of(estimate(spec, launch)).change)
        assert any("--async-save" in line for line in change.lines) == is_told, (sharding, emit)


def test_time_lost_to_waiting_for_a_node_is_said_of_spares(spec_of: MakeSpec) -> None:
    # A node of 64 devices fails every 5e6 / 64 s and is away for a fifth of that: without a spare
    # a sixth of the time is spent waiting, and B(2, 0.2) = 0.0164, B(3, 0.2) = 0.0011 with more.
    repair = 0.2 * 5e6 / 64
    waiting = FAILING.model_copy(update={"repair": repair})
    spec = spec_of("mixtral-8x7b", nodes=8)
    spec = spec.model_copy(update={"goal": spec.goal.model_copy(update={"reliability": waiting})})
    text = saving_as((LAUNCHES / "mixtral.sh").read_text(), IN_BACKGROUND)
    result = estimate(spec, megatron.read(text.replace("4000", "400"), source="mixtral.sh"))
    own = checkpoints_of(result)
    assert own.run is not None
    assert own.run.time_ratios["waiting"] == pytest.approx(1 / 6, rel=1e-6)
    assert own.more_spare_nodes == 2
    spared = own.run.effective_time_ratio / (1 - 1 / 6) * (1 - 0.00109)
    assert own.spared_time_ratio == pytest.approx(spared, rel=1e-3)
    said = unwrapped(estimate_text(result))
    assert "16.7 % of the time waits for a replacement of a node" in said
    assert "with 2 more spare nodes (goal.reliability.spare_nodes)" in said
    assert "of the time advances training" not in said.split("spares ")[0].split("checkpoints ")[-1]
    # Where nodes are back at once nothing waits.
    assert (
        checkpoints_of(estimate(failing(spec), megatron.read(text, source="m.sh"))).more_spare_nodes
        == 0
    )
