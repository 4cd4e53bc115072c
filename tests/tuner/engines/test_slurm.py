import re
from pathlib import Path
from typing import Any

from tests.rows import Failures
from tests.tuner.engines.testing import (
    Recorders,
    directives_of,
    sample_decision,
    sample_verified,
    write_emitted,
)
from tests.tuner.models import example_model
from tuner.engines.reading.launch import TrainingEngine
from tuner.engines.writers import emit, emit_all
from tuner.estimate.registry import read_launch

MIXTRAL = example_model("mixtral-8x7b")

WHOLE_LAYERS: dict[str, Any] = {
    "recompute": "full",
    "stage_recompute": ("full", "full"),
    "chunks": (1, 1),
}


def _directives(text: str) -> dict[str, str]:
    # Slurm stops reading directives at the first command.
    head = re.split(r"^(?!#|$)", text, maxsplit=1, flags=re.MULTILINE)[0]
    assert head.count("#SBATCH --") == text.count("\n#SBATCH --")
    return directives_of(head)


def test_cpus_are_requested_without_accelerators() -> None:
    verified = sample_verified(MIXTRAL, sample_decision(), emit=("slurm",), device_kind="cpu")
    (job,) = emit("slurm", verified)
    directives = _directives(job.text)
    assert "gpus-per-node" not in directives
    assert int(directives["nodes"]) * int(directives["cpus-per-task"]) == 16
    assert directives["ntasks-per-node"] == "1"


def test_the_job_starts_the_first_program_of_the_plan(tmp_path: Path) -> None:
    emitted = ("slurm", "megatron-lm", "reference")
    verified = sample_verified(MIXTRAL, sample_decision(), emit=emitted)
    write_emitted(tmp_path, emit_all(verified))
    ran = Recorders(tmp_path / "recorders").run(
        tmp_path / "slurm" / "job.sbatch",
        "--train-iters",
        "10",
        cwd=tmp_path / "slurm",
        MEGATRON_LM="/megatron",
        SLURM_JOB_ID="50001",
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_NODEID="1",
    )
    assert ran.code == 0, ran.stderr
    argv = ran.only("torchrun")
    assert "--master-addr=first-node" in argv
    # Worked by hand: 20000 + 50001 % 20000.
    assert "--master-port=30001" in argv
    assert "--node-rank=1" in argv
    assert "/megatron/pretrain_gpt.py" in argv
    assert argv[-2:] == ["--train-iters", "10"]


def test_a_job_starts_any_program_on_the_devices_of_the_plan(
    tmp_path: Path, failures: Failures
) -> None:
    recorders = Recorders(tmp_path / "recorders")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("megatron-bridge", {}, str(tmp_path / "megatron-bridge/train.py")),
        ("torchtitan", {"zero_stage": 3, **WHOLE_LAYERS}, "torchtitan.train"),
        ("deepspeed", WHOLE_LAYERS, "mine.py"),
    ]
    for program, changes, started in cases:
        decision = sample_decision(**changes)
        verified = sample_verified(MIXTRAL, decision, emit=(program, "slurm"))
        write_emitted(tmp_path, emit_all(verified))
        ran = recorders.run(
            tmp_path / "slurm" / "job.sbatch",
            cwd=tmp_path / "slurm",
            MODULE="mine",
            CONFIG="mixtral",
            TRAIN="mine.py",
            SLURM_JOB_ID="7",
            SLURM_NODEID="0",
            SLURM_JOB_NODELIST="node[1-2]",
        )
        directives = _directives((tmp_path / "slurm" / "job.sbatch").read_text())
        with failures.of(program):
            assert ran.code == 0, ran.stderr
            argv = ran.only("torchrun")
            assert started in argv
            assert argv[:2] == ["--nnodes=2", "--nproc-per-node=8"]
            requested = int(directives["nodes"]) * int(directives["gpus-per-node"])
            assert requested == decision.num_devices


def test_a_wrapper_without_program_starts_the_reference_step_from_anywhere(tmp_path: Path) -> None:
    verified = sample_verified(MIXTRAL, sample_decision(), emit=("slurm",))
    assert list(emit_all(verified)) == ["reference", "slurm"]
    write_emitted(tmp_path, emit("slurm", verified))
    ran = Recorders(tmp_path / "recorders").run(tmp_path / "job.sbatch", cwd=tmp_path)
    assert ran.code == 2
    assert "job.sbatch belongs beside its folder" in ran.stderr


def test_a_job_starts_from_a_folder_with_a_space_submitted_from_another(tmp_path: Path) -> None:
    verified = sample_verified(MIXTRAL, sample_decision(), emit=("slurm", "megatron-lm"))
    plan, elsewhere = tmp_path / "a plan", tmp_path / "else where"
    write_emitted(plan, emit_all(verified))
    elsewhere.mkdir()
    spooled = tmp_path / "slurm_script"
    job = plan / "slurm" / "job.sbatch"
    spooled.write_text(job.read_text())
    for command in (str(job), f"{job} --save out/job.sbatch", f"{job} --load /old/job.sbatch.bak"):
        ran = Recorders(tmp_path / f"recorders-{len(command)}").run(
            spooled,
            "--train-iters",
            "10",
            cwd=elsewhere,
            JOB_COMMAND=command,
            MEGATRON_LM="/megatron",
            SLURM_JOB_ID="7",
            SLURM_NODEID="0",
            SLURM_JOB_NODELIST="node[1-2]",
        )
        assert ran.code == 0, ran.stderr
        assert ran.only("torchrun")[-2:] == ["--train-iters", "10"]
    # Whoever asks what the job starts is led to the script beside it.
    assert read_launch(str(job)).engine is TrainingEngine.MEGATRON
