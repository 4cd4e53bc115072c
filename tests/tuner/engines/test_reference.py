import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from profilers.steps.config import StepConfig, StepReport
from tests.patience import patient_s
from tests.tuner.engines.testing import (
    Recorders,
    changed,
    sample_decision,
    sample_verified,
    texts_of,
    write_emitted,
)
from tests.tuner.models import example_model
from tuner.engines.reference.step_config import step_config
from tuner.engines.writers import emit
from tuner.plans.train import VerifiedPlan

TINY = example_model("tiny-moe")


def _two_ranks() -> VerifiedPlan:
    """Return EP 2 over DP 2 on processors, two chunks, two sequences of 32 tokens."""
    decision = sample_decision(
        pipeline_model_parallel_size=1,
        data_parallel_size=2,
        expert_model_parallel_size=2,
        stage_recompute=("selective",),
        chunks=(2,),
        pipeline_layout=(4,),
    )
    verified = sample_verified(TINY, decision, device_kind="cpu", sequence_length=32)
    return changed(verified, {"plan.goal.global_batch_size": 2})


def test_the_emitted_step_is_that_of_verification_and_training_learns_its_routing() -> None:
    verified = _two_ranks()
    files = texts_of(emit("reference", verified))
    config = StepConfig.model_validate_json(files["step.json"])
    launched = step_config(
        verified.plan, verified.decision, steps=config.steps, warmup_steps=config.warmup_steps
    )
    assert config == launched
    config = StepConfig.model_validate_json(files["train.json"])
    assert config.routing.mode == "learned"
    (stage,) = config.stages
    (predicted,) = verified.predicted.stages
    assert stage.max_chunk_tokens == predicted.max_chunk_tokens is not None


def test_the_script_starts_the_training_run_on_request(tmp_path: Path) -> None:
    write_emitted(tmp_path, emit("reference", _two_ranks()))
    ran = Recorders(tmp_path / "recorders").run(
        tmp_path / "run.sh", cwd=Path("/"), CONFIG="train.json"
    )
    assert ran.code == 0, ran.stderr
    assert ran.only("python")[-2:] == [f"{tmp_path}/train.json", "--report=report.json"]


def test_the_script_starts_the_step_with_our_packages_first(
    tmp_path: Path, recorders: Recorders
) -> None:
    write_emitted(tmp_path, emit("reference", _two_ranks()))
    python = tmp_path / "py thon" / "python"
    python.parent.mkdir()
    shutil.copy(tmp_path / "recorders" / "programs" / "python", python)
    arguments = {"PYTHON": str(python), "REPORT": "-r"}
    ran = recorders.start(tmp_path / "run.sh", "--deadline", "9", cwd=Path("/"), **arguments)
    (call,) = ran.calls
    assert call["environment"]["OMP_NUM_THREADS"] == "1"
    step = ["profilers.steps", f"{tmp_path}/step.json", "--report=-r", "--deadline", "9"]
    assert ran.only("python") == ["-P", "-m", "profilers.local_ranks", "--ranks=2", *step]
    # Ranks of two nodes meet at the first one, and torchrun starts them.
    spread = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "head", "NODE_RANK": "0"}
    ran = recorders.run(
        tmp_path / "run.sh", "--deadline", "9", cwd=Path("/"), **arguments, **spread
    )
    assert ran.only("torchrun") == [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--node-rank=0",
        "--rdzv-backend=static",
        "--master-addr=head",
        "--master-port=29500",
        "--no-python",
        str(python),
        "-P",
        "-m",
        *step,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step.json", "train.json"])
def test_the_emitted_folder_really_trains(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "my launch $(exit 1)"
    write_emitted(folder, emit("reference", _two_ranks()))
    programs = Path(sys.executable).parent
    scratch, caller = tmp_path / "tmp", tmp_path / "called from"
    scratch.mkdir()
    caller.mkdir()
    subprocess.run(
        ["bash", str(folder / "run.sh")],
        cwd=caller,
        env={
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "CONFIG": name,
            "TMPDIR": str(scratch),
        },
        check=True,
        capture_output=True,
        timeout=patient_s(200),
    )
    # PyTorch keeps a cache of its own.
    assert [file for file in scratch.iterdir() if "torchinductor" not in file.name] == []
    report = StepReport.model_validate_json((caller / "report.json").read_text(encoding="utf-8"))
    assert len(report.step_s) == 8
    assert report.tokens_per_step == 64
    assert len(report.memory) == 2
