"""DeepSpeed takes the emitted files, trains on the CPU and is measured: ZeRO 1 to 3, AutoEP."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tuner import api
from tuner.goals.verify import command_trials
from tuner.verify.verification import Effort, Watcher

CHECKOUT = Path(__file__).parents[3]
EXAMPLE = CHECKOUT / "examples" / "engines" / "deepspeed"
MODEL = CHECKOUT / "examples" / "models" / "tiny-moe" / "config.json"
PROFILE = CHECKOUT / "examples" / "profiles" / "epyc-quickstart-1" / "used" / "profile"
INSTALL_S = 420.0
SETUP = 'source "$1/examples/setup.sh"; source "$1/examples/engines/deepspeed/setup.sh"'


@pytest.fixture
def engine() -> Path:
    """Return the folder of the programs of an environment with DeepSpeed."""
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; {SETUP}; setup_deepspeed", "_", str(CHECKOUT)],
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_S,
    )
    if done.returncode:
        pytest.skip(f"DeepSpeed cannot be installed: {done.stderr.strip()[-300:]}")
    return CHECKOUT / ".venv-deepspeed" / "bin"


def _spec(folder: Path, search: str) -> Path:
    file = folder / "spec.yaml"
    file.write_text(
        f"""
schema_version: 1
model: {MODEL}
cluster: {{pools: [{{name: here, profile: {PROFILE}, nodes: 1, devices_per_node: 2}}]}}
goal: {{kind: train, sequence_length: 128, global_batch_size: 8, precision: bf16}}
search: {{pipeline_model_parallel_size: [1], micro_batch_size: [2], {search}}}
emit: [deepspeed]
""",
        encoding="utf-8",
    )
    return file


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deepspeed_trains_what_is_emitted(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{engine}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("TRAIN", str(EXAMPLE / "train.py"))
    failures, model = [], shlex.quote(str(MODEL))
    for search in (
        "zero_stage: [1], expert_model_parallel_size: [1]",
        "zero_stage: [2], expert_model_parallel_size: [2]",
        "zero_stage: [3], expert_model_parallel_size: [1]",
    ):
        folder = tmp_path / f"a plan {len(list(tmp_path.iterdir()))}"
        api.write(folder, api.plan(_spec(tmp_path, search)))
        result = api.verify(
            folder,
            effort=Effort(trials=1, steps=2, repeats=0),
            resume=False,
            watcher=Watcher(started=lambda *_: None, ended=lambda _: None),
            by=command_trials(
                command=f"bash {{launch}}/run.sh --model {model} --sequence 128 --steps {{steps}}",
                metrics="deepspeed",
                folder=folder,
            ),
        )
        (trial,) = result.trials
        if trial.status != "ok" or not trial.measured_step_s:
            failures.append(f"{search}: {trial.status}: {trial.reason}")
    assert not failures
