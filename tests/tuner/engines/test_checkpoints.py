"""How often a plan saves, in the words of each engine."""

import json
import runpy
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.expect import present
from tests.rows import Failures, each_row
from tests.tuner.engines.testing import (
    Recorders,
    changed,
    sample_decision,
    sample_verified,
    texts_of,
    write_emitted,
)
from tests.tuner.models import example_model
from tuner.engines.checkpoints import checkpoint_schedule, keeps_checkpoints
from tuner.engines.launchers.restart_loop import restart_loop
from tuner.engines.launchers.shape import launch_shape
from tuner.engines.megatron_lm import read as megatron
from tuner.engines.targets import TARGETS, programs
from tuner.engines.writers import emit, emit_all
from tuner.faults.forecast import ProcessRestart, RunForecast
from tuner.faults.levels import Level
from tuner.faults.run_shares import CheckpointLevels
from tuner.faults.without_spare import FewerNodes, WithoutSpare
from tuner.plans.train import VerifiedPlan
from tuner.spec.goal import Checkpoint, Reliability

EXAMPLES = Path(__file__).parents[3] / "examples"
FLAGS = json.loads((Path(__file__).parent / "megatron_flags.json").read_text(encoding="utf-8"))
RELEASES = {
    "megatron-lm": ("core_v0.18.0", "core_v0.19.0"),
    "megatron-lm-0.16": ("core_v0.16.1", "core_v0.17.1"),
}
RUN = RunForecast(
    finishes=True,
    effective_time_ratio=0.9,
    time_ratios={"training": 0.9, "lost": 0.1},
    goodput_tokens_per_s=100.0,
    effective_step_s=2.2,
    checkpoint_bytes=10 * 2**30,
    checkpoint_interval_s=240.0,
    checkpoint_interval_steps=120,
)
RESUMED = {
    "megatron-lm": ["--save", "/shared", "--load", "/shared"],
    "megatron-lm-0.16": ["--save", "/shared", "--load", "/shared"],
    "megatron-bridge": ["checkpoint.save=/shared", "checkpoint.load=/shared"],
    "torchtitan": ["--checkpoint.enable", "--checkpoint.folder", "/shared"],
}
"""What a run is started with where CHECKPOINTS names a folder."""


def saving(
    target: str,
    *,
    is_asynchronous: bool = False,
    zero_stage: int | None = None,
    devices_per_node: int = 8,
    model_name: str = "qwen3-30b-a3b",
) -> VerifiedPlan:
    """Return a plan that saves every 120 steps of two seconds."""
    model = example_model(model_name)
    one_stage: dict[str, Any] = {
        "pipeline_model_parallel_size": 1,
        "recompute": "none",
        "recompute_modules": (),
        "stage_recompute": ("none",),
        "chunks": (1,),
        "pipeline_layout": (model.num_layers,),
        "zero_stage": zero_stage or (2 if target == "torchtitan" else 1),
    }
    made = sample_verified(
        model,
        sample_decision(**one_stage),
        emit=(target,),
        devices_per_node=devices_per_node,
    )
    stated = Reliability(
        device_mtbf=1e8, restart=60.0, checkpoint=Checkpoint(asynchronous=is_asynchronous)
    )
    return forecasting(changed(made, {"plan.goal.reliability": stated}), RUN)


def forecasting(made: VerifiedPlan, run: RunForecast) -> VerifiedPlan:
    """Return a plan with another forecast of its run."""
    predicted = made.predicted.model_copy(update={"run": run})
    return changed(made, {"predicted": predicted, "plan.predicted": predicted})


def saving_on_hosts(target: str, *, replicas: int) -> VerifiedPlan:
    """Return a plan of two nodes that saves to hosts every 30 steps, elsewhere every 120."""
    made = saving(target, devices_per_node=4)
    levels = CheckpointLevels(
        levels=(Level.HOST, Level.SHARED),
        replicas=replicas,
        host_interval_s=60.0,
        host_interval_steps=30,
        host_bytes=7 * 2**30,
        compared=(),
        num_priced=1,
    )
    return forecasting(made, RUN.model_copy(update={"checkpoint_levels": levels}))


def continuing(target: str, *, zero_stage: int | None = None, **changes: Any) -> VerifiedPlan:
    """Return a plan of eight nodes that goes on with seven where no spare is left."""
    made = saving(target, zero_stage=zero_stage)
    fewer = FewerNodes(
        nodes=7,
        fewest_searched=4,
        devices=56,
        layout="pp7 dp8",
        step_time_s=3.0,
        throughput_ratio=0.7,
        effective_time_ratio=0.9,
        fewer_ratio=0.1,
        waiting_ratio=0.01,
        restart_s=700.0,
        return_s=600.0,
        read_bytes=8 * 2**30,
        fewer_node_read_bytes=2**30,
        node_read_bytes=2**30,
    )
    record = WithoutSpare(
        decision="continue", nodes=8, wait_effective_time_ratio=0.8, fewer=fewer
    ).model_copy(update=changes)
    return forecasting(made, RUN.model_copy(update={"without_spare": record}))


def emitted(verified: VerifiedPlan, name: str) -> str:
    """Return the text of one emitted file."""
    (target,) = verified.plan.emit
    return texts_of(emit(target, verified))[name]


WAITS = "# Checkpoint every 120 steps (4.00 min), training waits for it;"
LAST_TWO = "10.0 GiB each, 30.0 GiB for 2 and the one that is written."
NEWEST = (
    "30.0 GiB for the newest, the one that is written and that of every 120,000 steps, which stays."
)
BY_PROGRAM = "DeepSpeed removes no checkpoint: your program does"
"""DeepSpeed has no rule for it: the program does, and the README tells its author."""
PACKAGE = "# From core 0.17 on, --async-save needs the package nvidia-resiliency-ext"
LMS = ("megatron-lm", "megatron-lm-0.16")
BRIDGES = ("megatron-bridge", "megatron-bridge-26.04", "megatron-bridge-26.02")
RESHARDABLE = {
    **dict.fromkeys(LMS, ("megatron_args.txt", "--dist-ckpt-optim-fully-reshardable\n")),
    **dict.fromkeys(
        BRIDGES, ("overrides.txt", "checkpoint.dist_ckpt_optim_fully_reshardable=true\n")
    ),
}
ASYNC: dict[str, Any] = {"is_asynchronous": True}
FSDP: dict[str, Any] = {"zero_stage": 2}
SYNC_ARGUMENTS = ("--save-interval 120",), ("--async-save",)
Made = Callable[..., VerifiedPlan]
Words = tuple[str, ...]
SAID: list[tuple[Made, Words, dict[str, Any], str, Words, Words]] = [
    (saving, LMS, {}, "run.sh", (WAITS, NEWEST), (LAST_TWO, BY_PROGRAM, "all of them are kept")),
    (
        saving,
        ("megatron-bridge", "torchtitan"),
        {},
        "run.sh",
        (WAITS, LAST_TWO),
        (NEWEST, BY_PROGRAM, "all of them are kept"),
    ),
    (saving, ("deepspeed",), {}, "run.sh", (WAITS, LAST_TWO, BY_PROGRAM), (NEWEST,)),
    # Saving in the background, and what it needs. Bridge cannot be started without the package.
    (saving, LMS, {}, "megatron_args.txt", *SYNC_ARGUMENTS),
    (
        saving,
        LMS,
        ASYNC,
        "megatron_args.txt",
        ("--async-save\n", "--use-persistent-ckpt-worker\n", PACKAGE),
        (),
    ),
    (saving, LMS, {}, "run.sh", (), (PACKAGE,)),
    (saving, LMS, ASYNC, "run.sh", (PACKAGE,), ()),
    (
        saving,
        ("megatron-bridge",),
        ASYNC,
        "run.sh",
        ('"checkpoint.load=$CHECKPOINTS" checkpoint.async_save=true)',),
        ("resiliency",),
    ),
    (
        saving,
        ("megatron-bridge",),
        {},
        "overrides.txt",
        ("checkpoint.save_interval=120\n", "checkpoint.most_recent_k=2\n"),
        (),
    ),
    *(
        (saving, ("torchtitan",), options, "run.sh", *told)
        for options, told in (
            (ASYNC, (("is copied into pinned memory of the host",), ())),
            ({}, ((), ("is copied into pinned memory of the host",))),
        )
    ),
    # Releases that cannot save Megatron-FSDP in the background wait and say so.
    *(
        (
            saving,
            (target,),
            ASYNC | FSDP,
            "run.sh",
            (f"training waits for it: {target} writes checkpoints in the background with",),
            ("written in the background;", "checkpoint.async_save=true"),
        )
        for target in ("megatron-lm-0.16", *BRIDGES[1:])
    ),
    (saving, ("megatron-lm-0.16",), ASYNC | FSDP, "megatron_args.txt", (), ("\n--async-save",)),
    *(
        (
            saving,
            targets,
            ASYNC | {"zero_stage": zero_stage},
            "run.sh",
            ("written in the background;", *said),
            ("writes checkpoints in the background with",),
        )
        for targets, zero_stage, said in (
            (LMS, 1, ()),
            (LMS[:1], 2, ()),
            (BRIDGES, 1, ("checkpoint.async_save=true",)),
            (BRIDGES[:1], 2, ("checkpoint.async_save=true",)),
        )
    ),
    (saving, LMS[:1], ASYNC | FSDP, "megatron_args.txt", ("\n--async-save",), ()),
    # What the other layout restores. Megatron-FSDP's need no flag, and a job that waits none.
    *(
        (made, (target,), options, name, (line,) * is_told, (line,) * (not is_told))
        for target, (name, line) in RESHARDABLE.items()
        for made, options, is_told in (
            (continuing, {}, True),
            (continuing, {"is_fewer": True}, True),
            (continuing, FSDP, False),
            (continuing, {"decision": "wait"}, False),
            (saving, {}, False),
        )
    ),
    *(
        (continuing, tuple(RESUMED), options, "run.sh", *told)
        for options, told in (
            ({}, (("launch files of fewer-nodes/ on 7 nodes, from the same CHECKPOINTS.",), ())),
            ({"is_fewer": True}, (("For 7 of 8 nodes, while one is missing",), ())),
            ({"decision": "wait"}, ((), ("missing and no spare",))),
        )
    ),
]


@each_row(("made", "targets", "options", "name", "said", "unsaid"), SAID)
def test_files_say_how_the_run_saves(
    made: Made, targets: Words, options: dict[str, Any], name: str, said: Words, unsaid: Words
) -> None:
    for target in targets:
        text = emitted(made(target, **options), name)
        assert [words for words in (*said, *unsaid) if words in text] == [*said], target


def test_releases_know_the_flags() -> None:
    flags = {"--save-interval", "--async-save", "--use-persistent-ckpt-worker"}
    flags |= {"--save-retain-interval", "--dist-ckpt-optim-fully-reshardable"}
    assert all(flags <= set(known) for known in FLAGS["releases"].values())


@each_row("program", ("reference", "torchrun"))
def test_the_reference_step_promises_no_checkpoints(tmp_path: Path, program: str) -> None:
    made = changed(saving(program, model_name="mixtral-8x7b"), {"plan.emit": (program, "slurm")})
    write_emitted(tmp_path / program, emit_all(made))
    assert "checkpoints" not in json.loads(
        (tmp_path / f"{program}/{program}/train.json").read_text()
    )
    for name in ("run.sh", "README.txt", "job.sbatch"):
        text = next((tmp_path / program).rglob(name)).read_text()
        for words in ("CHECKPOINTS", "heckpoint every", "starts the program again"):
            assert words not in text, (program, name, words)


@each_row(("steps", "retained"), ((100, 120), (120, 120), (240, 240), (361, 240), (1200, 720)))
@each_row("target", ("megatron-lm", "megatron-lm-0.16"))
def test_megatron_keeps_the_newest_and_one_more_of_a_run(
    steps: int, retained: int, target: str
) -> None:
    # Checkpoints every 120 steps: 0, 1, 2, 3 and 10 of them; one stays of half of a run or more.
    verified = forecasting(saving(target), RUN.model_copy(update={"steps": steps}))
    lines = emitted(verified, "megatron_args.txt").splitlines()
    assert f"--save-retain-interval {retained}" in lines, steps
    # The parser asserts it, and reads the flag in every release.
    assert retained % 120 == 0
    assert steps // retained <= 1
    # The first save after a checkpoint without a number would fail.
    assert "that says release" in emitted(verified, "run.sh")


def test_torchtitan_keeps_the_last_two() -> None:
    for is_asynchronous, mode in ((False, "disabled"), (True, "async_with_pinned_mem")):
        verified = saving("torchtitan", is_asynchronous=is_asynchronous)
        written = tomllib.loads(emitted(verified, "torchtitan.toml"))["checkpoint"]
        assert written == {"interval": 120, "async_mode": mode, "keep_latest_k": 2}
    # A job of Slurm takes nothing away. Processors have no memory to pin; a launch may be of two
    # engines.
    pinned = saving("torchtitan", is_asynchronous=True)
    files = emit("torchtitan", changed(pinned, {"plan.emit": ("torchtitan", "slurm")}))
    assert any('async_mode = "async_with_pinned_mem"' in file.text for file in files)
    verified = changed(pinned, {"plan.provenance.device_kind": {"a": "cpu"}})
    written = tomllib.loads(emitted(verified, "torchtitan.toml"))["checkpoint"]
    assert written["async_mode"] == "async"
    assert {name for name, one in TARGETS.items() if one.pinned_checkpoints} == {"torchtitan"}
    assert not programs(("torchtitan", "deepspeed")).capabilities().pinned_checkpoints


@each_row(
    ("target", "changes", "keeps"),
    (
        ("megatron-lm", {}, True),
        ("megatron-lm", {"data_parallel_size": 64}, True),
        ("megatron-lm", {"zero_stage": 2}, False),
        ("megatron-lm", {"expert_model_parallel_size": 1}, False),
        ("torchtitan", {"data_parallel_size": 64}, False),
    ),
)
def test_a_winner_whose_checkpoints_the_other_layout_cannot_restore_is_not_told_of_it(
    *, target: str, changes: dict[str, Any], keeps: bool
) -> None:
    verified = changed(
        continuing(target), {f"decision.{name}": value for name, value in changes.items()}
    )
    assert keeps_checkpoints(verified) is keeps, (target, changes)
    assert bool(present(checkpoint_schedule(verified)).other_layout) is keeps, (target, changes)


def test_the_program_of_deepspeed_names_a_checkpoint_when_all_ranks_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Engine:
        """Saves like DeepSpeed's, in one process."""

        global_rank = 0

        def save_checkpoint(self, folder: str, *, tag: str, save_latest: bool, **_: Any) -> None:
            assert not save_latest
            order.append(f"saved {tag}, latest is {latest()}")
            (Path(folder) / tag).mkdir()

    def latest() -> str:
        file = tmp_path / "latest"
        return file.read_text() if file.exists() else "none"

    def barrier() -> None:
        order.append(f"all ranks are done, latest is {latest()}")

    fake = SimpleNamespace(comm=SimpleNamespace(barrier=barrier))
    names = SimpleNamespace(AutoConfig=None, AutoModelForCausalLM=None)
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    monkeypatch.setitem(sys.modules, "transformers", names)
    program = runpy.run_path(str(EXAMPLES / "engines" / "deepspeed" / "train.py"))
    for name in ("step-5", "step-10_universal", "step-99", "notes"):
        (tmp_path / name).mkdir()
    for step in (10, 20):
        program["save"](Engine(), tmp_path, step=step, kept=2)
    assert order == [
        "saved step-10, latest is none",
        "all ranks are done, latest is none",
        "saved step-20, latest is step-10",
        "all ranks are done, latest is step-10",
    ]
    assert latest() == "step-20"
    # What is newer is of a run that failed, and other names are not the program's.
    left = {one.name for one in tmp_path.iterdir()}
    assert left == {"step-10", "step-20", "step-99", "step-10_universal", "notes", "latest"}


def test_deepspeed_tells_the_program_when_to_save(tmp_path: Path, recorders: Recorders) -> None:
    saved = ("CHECKPOINTS", "SAVE_STEPS", "KEPT_CHECKPOINTS")
    write_emitted(tmp_path, emit("deepspeed", saving("deepspeed")))
    said = (tmp_path / "README.txt").read_text(encoding="utf-8")
    program = (EXAMPLES / "engines" / "deepspeed" / "train.py").read_text(encoding="utf-8")
    for name in saved:
        assert name in said, name
        assert f'"{name}"' in program, name
    settings = {"TRAIN": "mine.py", "NODE_RANK": "0", "MASTER_ADDR": "head"}
    planned = {"SAVE_STEPS": "120", "KEPT_CHECKPOINTS": "2"}
    for given in ({}, {"CHECKPOINTS": "/shared", "SAVE_STEPS": "7"}):
        (call,) = recorders.start(tmp_path / "run.sh", cwd=tmp_path, **settings, **given).calls
        heard = {name: call["environment"].get(name) for name in saved}
        assert heard == {"CHECKPOINTS": None, **planned, **given}
    assert "checkpoint" not in json.loads((tmp_path / "deepspeed.json").read_text())
    # Replicas of a pipeline stage each write some of its layers.
    stages = {
        "decision.pipeline_model_parallel_size": 2,
        "decision.pipeline_layout": (24, 24),
        "decision.stage_recompute": ("none", "none"),
        "decision.chunks": (1, 1),
    }
    of_pipeline = emitted(changed(saving("deepspeed"), stages), "deepspeed.json")
    assert json.loads(of_pipeline)["checkpoint"] == {"parallel_write": {"pipeline_stage": True}}


@pytest.mark.parametrize("target", RESUMED)
def test_a_script_saves_to_and_resumes_from_a_folder_that_is_named(
    target: str, tmp_path: Path, recorders: Recorders
) -> None:
    write_emitted(tmp_path / target, emit(target, saving(target)))
    script = tmp_path / target / "run.sh"
    for environment, words in (({}, []), ({"CHECKPOINTS": "/shared"}, RESUMED[target])):
        ran = recorders.start(
            script,
            cwd=Path("/"),
            MASTER_ADDR="head",
            NODE_RANK="0",
            MEGATRON_LM="/megatron",
            RECIPE="mine",
            **environment,
        )
        argv = ran.only("torchrun")
        assert argv[len(argv) - len(words) :] == words
        assert ("/shared" in " ".join(argv)) == bool(words)


FOLDERS = {"CHECKPOINTS": "/shared", "LOCAL_CHECKPOINTS": "/dev/shm/mine"}


def host_words(target: str, verified: VerifiedPlan, *, replicas: int) -> list[str]:
    """Return what a run is started with where both folders are named."""
    jump = str(launch_shape(verified.plan, verified.decision).devices_per_node)
    if target.startswith("megatron-lm"):
        words = ["--non-persistent-ckpt-type", "local", "--non-persistent-save-interval", "30"]
        words += ["--non-persistent-local-ckpt-dir", "/dev/shm/mine"]
        copies = ["--replication", "--replication-jump", jump, "--replication-factor", "2"]
        return [*words, *(copies if replicas else []), *RESUMED[target]]
    fields = ["non_persistent_ckpt_type=local", "non_persistent_save_interval=30"]
    fields += ["non_persistent_local_ckpt_dir='/dev/shm/mine'"]
    copies = ["replication=true", f"replication_jump={jump}", "replication_factor=2"]
    named = [f"checkpoint.{field}" for field in (*fields, *(copies if replicas else []))]
    return [*RESUMED["megatron-bridge"], *named]


@each_row("target", [name for name in TARGETS if name.startswith(("megatron-lm", "megatron-b"))])
@each_row("replicas", (0, 1))
def test_megatron_saves_to_hosts_in_between(tmp_path: Path, target: str, replicas: int) -> None:
    verified = saving_on_hosts(target, replicas=replicas)
    folder = tmp_path / f"{target}-{replicas}"
    write_emitted(folder, emit(target, verified))
    recorders = Recorders(tmp_path / f"recorders-{target}-{replicas}")
    settings = {"MASTER_ADDR": "head", "NODE_RANK": "0", "MEGATRON_LM": "/m", "RECIPE": "mine"}
    told = host_words(target, verified, replicas=replicas)
    for folders, words in (({}, []), (FOLDERS, told)):
        ran = recorders.start(folder / "run.sh", cwd=Path("/"), **settings, **folders)
        argv = ran.only("torchrun")
        assert argv[len(argv) - len(words) :] == words
        assert ("persistent" in " ".join(argv)) == bool(words)
    ran = recorders.run(folder / "run.sh", cwd=Path("/"), CHECKPOINTS="/shared", **settings)
    assert ran.code != 0
    assert "LOCAL_CHECKPOINTS: must name a folder in the memory" in ran.stderr
    assert "need the package nvidia-resiliency-ext" in (folder / "run.sh").read_text()
    # With one level nothing is said of hosts.
    assert "LOCAL_CHECKPOINTS" not in emitted(saving(target), "run.sh")


@each_row("target", RELEASES)
@each_row("replicas", (0, 1))
def test_saves_to_hosts_are_described_and_read_back(
    tmp_path: Path, target: str, replicas: int
) -> None:
    verified = saving_on_hosts(target, replicas=replicas)
    folder = tmp_path / f"{target}-{replicas}"
    write_emitted(folder, emit(target, verified))
    script = (folder / "run.sh").read_text()
    where = " and of another one" if replicas else ""
    assert (
        f"# In between, every 30 steps, to the memory of every node{where}"
        " (LOCAL_CHECKPOINTS): 7.00 GiB a node."
    ) in script
    assert "LOCAL_CHECKPOINTS: the run then goes on from CHECKPOINTS." in script
    read = megatron.read(script, source="run.sh", beside=partial(_text, folder))
    saved = (read.save_interval, read.host_save_interval, read.host_copies)
    assert saved == (120, 30, replicas + 1)
    told = host_words(target, verified, replicas=replicas)
    flags = {word for word in told if word.startswith(("--non-persistent", "--replication"))}
    assert all(flags <= set(known) for known in FLAGS["releases"].values())


def test_replicas_that_nodes_cannot_be_grouped_for_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be divided into groups of 3"):
        emit("megatron-lm", saving_on_hosts("megatron-lm", replicas=2))


def _text(folder: Path, name: str) -> str:
    return (folder / name).read_text()


def test_without_failures_nothing_is_said_of_checkpoints() -> None:
    verified = sample_verified(example_model("qwen3-30b-a3b"), sample_decision())
    assert checkpoint_schedule(verified) is None


def restarting(
    target: str, *, restart_s: float, zero_stage: int = 1, devices_per_node: int = 8
) -> VerifiedPlan:
    """Return a saving plan that restarts in its processes, and whose checkpoints take so long."""
    made = saving(target, zero_stage=zero_stage, devices_per_node=devices_per_node)
    restart = ProcessRestart(
        decision="in_process",
        in_process_s=20.0,
        full_s=600.0,
        effective_time_ratio=0.9,
        full_effective_time_ratio=0.8,
    )
    run = RUN.model_copy(update={"restart_s": 20.0 + restart_s, "process_restart": restart})
    return forecasting(made, run)


def test_megatron_restarts_in_its_processes_where_the_plan_counts_on_it(failures: Failures) -> None:
    for target in ("megatron-lm", "megatron-lm-0.16"):
        quick = emitted(restarting(target, restart_s=30.0), "megatron_args.txt").splitlines()
        slow = emitted(restarting(target, restart_s=300.0), "megatron_args.txt").splitlines()
        flags = [line for line in slow if line.startswith(("--inprocess", "--distributed-t"))]
        script = emitted(restarting(target, restart_s=30.0), "run.sh")
        with failures.of(target):
            # Twice 30 s to load are the parser's own 60 s.
            assert [line for line in quick if "inprocess" in line] == [
                "--inprocess-restart",
                "--inprocess-empty-cuda-cache",
            ]
            # Worked by hand: twice 300 s, then 30 and 60 s more as the defaults have it; PyTorch
            # waits longer than the 630 s.
            assert flags == [
                "--inprocess-restart",
                "--inprocess-empty-cuda-cache",
                "--inprocess-soft-timeout 600",
                "--inprocess-hard-timeout 630",
                "--inprocess-barrier-timeout 660",
                "--inprocess-completion-timeout 660",
                "--distributed-timeout-minutes 11",
            ]
            for release in RELEASES[target]:
                assert {line.split()[0] for line in flags} <= set(FLAGS["releases"][release])
            assert 'export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"' in script
            assert "needs the package\n# nvidia-resiliency-ext" in script
        # Plans of before the choice have no record of it, and restart so where that was stated.
        for stated_s in (None, 20.0):
            path = "plan.goal.reliability.in_process_restart"
            text = emitted(changed(saving(target), {path: stated_s}), "megatron_args.txt")
            with failures.of(target, "older", stated_s):
                assert ("--inprocess-restart" in text) == (stated_s is not None)
        # Groups of Megatron-FSDP outlive a restart.
        sharded = restarting(target, restart_s=30.0, zero_stage=2)
        without = (emitted(sharded, "megatron_args.txt"), emitted(saving(target), "run.sh"))
        with failures.of(target, "none"):
            assert not any(name in text for text in without for name in ("inprocess", "NVLS"))


def test_a_loop_that_saves_at_the_end_is_told_of_no_schedule() -> None:
    alone = {f"{of}decision.expert_model_parallel_size": 1 for of in ("", "plan.")}
    made = changed(saving("transformers-peft", zero_stage=3), alone)
    text = emitted(made, "README.txt")
    assert "The forecast saves every 120 steps. The loop saves at the end alone" in text
    assert "Checkpoint every" not in text
    assert restart_loop(made, program="transformers-peft") is None
    assert restart_loop(saving("megatron-lm"), program="megatron-lm") is not None
