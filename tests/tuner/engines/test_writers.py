"""What every emitter must do: each test goes through the table of emitters."""

import shlex
import shutil
from itertools import cycle, product
from pathlib import Path

import pytest

from profilers.steps.config import Recompute
from tests.rows import Failures
from tests.tuner.engines.grids import grid
from tests.tuner.engines.testing import (
    Recorders,
    assert_golden,
    changed,
    directives_of,
    sample_decision,
    sample_verified,
    texts_of,
    write_emitted,
)
from tests.tuner.models import example_model
from tuner.engines.targets import TARGETS
from tuner.engines.writers import EMITTERS, emit, emit_all
from tuner.errors import UnknownTargetError
from tuner.plans.train import VerifiedPlan
from tuner.spec.tune import Adapters

GOLDEN = Path(__file__).parent / "golden"

HOSTILE = (
    "plain name",
    'it\'s "quoted"',
    "$(touch injected)",
    "`touch injected`",
    "line\ntouch injected\n#SBATCH --nodes=99",
    "carriage\rtouch injected",
    "separator\u2028touch injected",
    "-rf --report=/injected",
    "'; touch injected; '",
    "\x1b[2J",
)

ALL_HOSTILE = " ".join(sorted(HOSTILE, key=lambda one: not one.startswith("-")))
"""One name of all of them, which begins like an option."""

PROGRAMS = ("reference", "megatron-lm", "megatron-bridge", "torchtitan", "deepspeed", "slurm")

NAMES = {
    "MEGATRON_LM": "/megatron",
    "RECIPE": "vanilla_gpt_pretrain_config",
    "MODULE": "mine",
    "CONFIG": "mixtral",
    "TRAIN": "train.py",
}
"""What some targets' scripts want named."""

DECISIONS = {
    "two stages on 16": {},
    "one device": {
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "stage_recompute": ("selective",),
        "chunks": (1,),
        "pipeline_layout": (32,),
    },
    "tensor 4, experts folded over tensor ranks": {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": 2,
        "expert_model_parallel_size": 8,
        "sequence_parallel": True,
        "stage_recompute": ("full",),
        "chunks": (1,),
        "pipeline_layout": (32,),
    },
    "3 devices, not a whole node": {
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": 3,
        "expert_model_parallel_size": 1,
        "expert_data_parallel_size": 3,
        "stage_recompute": ("none",),
        "chunks": (1,),
        "pipeline_layout": (32,),
    },
}


REPLICAS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "data_parallel_size": 16,
    "expert_model_parallel_size": 1,
    "expert_data_parallel_size": 16,
    "stage_recompute": ("full",),
    "chunks": (1,),
    "pipeline_layout": (32,),
}
"""Of targets without other parallelism."""


MIXTRAL = example_model("mixtral-8x7b")


def _suited(target: str, stages: int = 2) -> dict[str, object]:
    """Return what a target wants changed of the sample, which recomputes experts in chunks."""
    found: dict[str, object] = {}
    if TARGETS[target].largest_chunks == 1:
        found["chunks"] = (1,) * stages
    if Recompute.SELECTIVE not in TARGETS[target].recompute:
        found |= {"recompute": "full", "stage_recompute": ("full",) * stages}
    if 1 not in TARGETS[target].zero_stages:
        found["zero_stage"] = 3
    if not TARGETS[target].sequence_parallel:
        found["sequence_parallel"] = False
    if not TARGETS[target].tensor_parallel:
        found |= REPLICAS
    return found


def test_the_table_and_the_manifests_name_the_same_targets_and_no_other() -> None:
    assert set(EMITTERS) == set(TARGETS)
    verified = sample_verified(MIXTRAL, sample_decision(), emit=("megatron",))
    with pytest.raises(UnknownTargetError, match=r"'megatron'.*reference.*megatron-lm"):
        emit_all(verified)


def test_emitted_files_equal_the_golden_ones(failures: Failures) -> None:
    for target in EMITTERS:
        decision = sample_decision(**_suited(target))
        for file in emit(target, sample_verified(MIXTRAL, decision, emit=(target,))):
            # Programs carry another suffix here, so that no tool takes them for the project's own.
            suffix = ".golden" if file.path.suffix == ".py" else ""
            path = GOLDEN / target / f"{file.path}{suffix}"
            with failures.of(path):
                assert_golden(file.text, path)


ADAPTED = {
    "deepspeed": ("adapters.json", "README.txt", "run.sh"),
    "megatron-bridge": ("train.py",),
    "megatron-bridge-26.04": ("train.py",),
    "torchtitan": ("moetune_plan.py", "torchtitan.toml"),
    "transformers-peft": ("finetune.json",),
}
"""The files that differ where adapters are trained."""


def test_files_of_adapters_equal_the_golden_ones(failures: Failures) -> None:
    tune = Adapters(method="lora", rank=16)
    for target, names in ADAPTED.items():
        replicas = REPLICAS if target == "deepspeed" else {}
        decision = sample_decision(**_suited(target) | replicas)
        verified = sample_verified(MIXTRAL, decision, emit=(target,))
        tuned = VerifiedPlan.waive(
            changed(verified.plan, {"goal.tune": tune}), reason="moetune plan does not launch"
        )
        files = texts_of(emit(target, tuned))
        for name in names:
            suffix = ".golden" if name.endswith(".py") else ""
            path = GOLDEN / "lora" / target / f"{name}{suffix}"
            with failures.of(path):
                assert_golden(files[name], path)


def test_every_file_says_what_was_measured_or_that_nothing_was() -> None:
    wrong = []
    for target in EMITTERS:
        decision = sample_decision(**_suited(target))
        waived, measured = (
            sample_verified(MIXTRAL, decision, emit=(target,), waived=reason)
            for reason in ("moetune plan does not launch", "")
        )
        files = texts_of(emit(target, waived))
        for name, text in files.items():
            # JSON has no comments; the README beside it speaks for it.
            said = files["README.txt"] if name.endswith(".json") else text
            if "NOT VERIFIED: moetune plan does not launch" not in said:
                wrong.append((target, name, "waived"))
        files = texts_of(emit(target, measured))
        for name, text in files.items():
            if not name.endswith(".json") and "this configuration took 2.10 s a step" not in text:
                wrong.append((target, name, "measured"))
        if texts_of(emit(target, measured)) != files:
            wrong.append((target, "", "other bytes the second time"))
    assert not wrong


@pytest.mark.parametrize("points", grid(tuple(EMITTERS), (1, 4, 8), tuple(DECISIONS)))
def test_the_requested_devices_are_those_of_the_plan(
    points: list[tuple[str, int, str]],
    tmp_path: Path,
    failures: Failures,
    recorders: Recorders,
) -> None:
    for number, (target, devices_per_node, name) in enumerate(points):
        stages = 2 if name == "two stages on 16" else 1
        decision = sample_decision(**{**DECISIONS[name], **_suited(target, stages)})
        verified = sample_verified(
            MIXTRAL, decision, emit=(target,), devices_per_node=devices_per_node
        )
        launch = tmp_path / str(number)
        with failures.of(target, devices_per_node, name):
            write_emitted(launch, emit_all(verified))
            assert _requested_devices(launch, recorders, target=target) == decision.num_devices


def _requested_devices(launch: Path, recorders: Recorders, *, target: str) -> int:
    """Return nodes times processes, as Slurm's directives or the call that starts ranks say."""
    if target == "slurm":
        directives = directives_of((launch / "slurm" / "job.sbatch").read_text())
        return int(directives["nodes"]) * int(directives["gpus-per-node"])
    environment = {"MASTER_ADDR": "head", "NODE_RANK": "0", **NAMES}
    (call,) = recorders.start(launch / target / "run.sh", cwd=launch, **environment).calls
    options = dict(word.split("=", 1) for word in call["argv"] if "=" in word)
    if call["program"] == "python":
        return int(options["--ranks"])
    return int(options["--nnodes"]) * int(options["--nproc-per-node"])


@pytest.mark.parametrize(
    "points",
    [
        [(target, ALL_HOSTILE) for target in PROGRAMS] + list(zip(cycle(PROGRAMS), HOSTILE)),
        pytest.param(list(product(PROGRAMS, HOSTILE)), marks=pytest.mark.slow),
    ],
    ids=["together", "grid"],
)
def test_hostile_names_and_paths_come_out_harmless(
    points: list[tuple[str, str]],
    tmp_path: Path,
    failures: Failures,
    recorders: Recorders,
) -> None:
    for number, (target, hostile) in enumerate(points):
        verified = sample_verified(
            MIXTRAL.model_copy(update={"name": hostile}),
            sample_decision(**_suited(target)),
            emit=(target,),
            devices_per_node=16,
            waived=hostile,
        )
        launch = tmp_path / f"{number} {hostile.replace('/', '_')}" / "launch"
        write_emitted(launch, emit_all(verified))
        script = launch / target / ("job.sbatch" if target == "slurm" else "run.sh")
        python = launch / "python"
        shutil.copy(tmp_path / "recorders" / "programs" / "python", python)
        ran = recorders.run(
            script,
            hostile,
            cwd=script.parent,
            **dict.fromkeys(NAMES, hostile),
            REPORT=hostile,
            PYTHON=str(python),
            SLURM_JOB_ID="7",
            SLURM_JOB_NODELIST=hostile,
            SLURM_SUBMIT_DIR=str(script.parent),
        )
        with failures.of(target, hostile):
            assert ran.code == 0, ran.stderr
            program = "python" if target in ("reference", "slurm") else "torchrun"
            assert ran.only(program)[-1] == hostile
            assert not list(tmp_path.rglob("injected"))
            if target == "slurm":
                lines = script.read_text().splitlines()
                nodes = [line for line in lines if line.startswith("#SBATCH --nodes")]
                assert nodes == ["#SBATCH --nodes=1"]


def test_a_script_refuses_another_number_of_devices(
    tmp_path: Path, failures: Failures, recorders: Recorders
) -> None:
    for target in (name for name in PROGRAMS if name != "slurm"):
        decision = sample_decision(**_suited(target))
        files = emit(target, sample_verified(MIXTRAL, decision, emit=(target,)))
        write_emitted(tmp_path / target, files)
        for nodes, processes in (("2", "4"), ("x", "8"), ("", "-1"), ("2;touch injected", "8")):
            ran = recorders.run(
                tmp_path / target / "run.sh",
                cwd=tmp_path,
                NNODES=nodes,
                NPROC_PER_NODE=processes,
                MASTER_ADDR="head",
                NODE_RANK="0",
                **NAMES,
            )
            with failures.of(target, nodes, processes):
                assert ran.code == 2
                assert ran.calls == ()
                assert len(ran.stderr.splitlines()) == 1
    assert not list(tmp_path.rglob("injected"))


def test_several_nodes_need_their_number_and_the_name_of_the_first(
    tmp_path: Path, recorders: Recorders
) -> None:
    write_emitted(tmp_path, emit("reference", sample_verified(MIXTRAL, sample_decision())))
    for given, lacking in (
        ({"MASTER_ADDR": "head"}, "NODE_RANK"),
        ({"SLURM_NODEID": "1"}, "MASTER_ADDR"),
    ):
        ran = recorders.run(tmp_path / "run.sh", cwd=tmp_path, **given)
        assert ran.code != 0
        assert ran.calls == ()
        assert lacking in ran.stderr
    ran = recorders.run(
        tmp_path / "run.sh", cwd=tmp_path, MASTER_ADDR="head", SLURM_NODEID="1", MASTER_PORT="123"
    )
    assert shlex.join(ran.only("torchrun")[:6]) == (
        "--nnodes=2 --nproc-per-node=8 --node-rank=1 --rdzv-backend=static "
        "--master-addr=head --master-port=123"
    )
