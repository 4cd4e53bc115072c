"""Megatron-LM takes the emitted files, trains on the CPU and is measured: FSDP, EP, PP."""

import os
import subprocess
from pathlib import Path

import pytest

from tuner import api
from tuner.goals.verify import command_trials
from tuner.verify.verification import Effort, Watcher

CHECKOUT = Path(__file__).parents[3]
EXAMPLE = CHECKOUT / "examples" / "engines" / "megatron_lm"
MODEL = CHECKOUT / "examples" / "models" / "tiny-moe" / "config.json"
PROFILE = CHECKOUT / "examples" / "profiles" / "epyc-quickstart-1" / "used" / "profile"
INSTALL_S = 420.0
OWN = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --lr 1e-4 --eval-iters 0"
    " --eval-interval 1000000 --log-interval 1 --train-iters {steps}"
)
SETUP = 'source "$1/examples/setup.sh"; source "$1/examples/engines/megatron_lm/setup.sh"'


@pytest.fixture
def engine() -> Path:
    """Return the folder of the programs of an environment with Megatron-LM."""
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; {SETUP}; setup_megatron", "_", str(CHECKOUT)],
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_S,
    )
    if done.returncode:
        pytest.skip(f"Megatron-LM cannot be had: {done.stderr.strip()[-300:]}")
    return CHECKOUT / ".venv-megatron" / "bin"


def _spec(folder: Path, search: str) -> Path:
    file = folder / "spec.yaml"
    file.write_text(
        f"""
schema_version: 1
model: {MODEL}
cluster: {{pools: [{{name: here, profile: {PROFILE}, nodes: 1, devices_per_node: 2}}]}}
goal: {{kind: train, sequence_length: 128, global_batch_size: 8, precision: bf16}}
search: {{micro_batch_size: [2], {search}}}
emit: [megatron-lm]
""",
        encoding="utf-8",
    )
    return file


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_megatron_lm_trains_what_is_emitted(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{engine}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MEGATRON_LM", str(EXAMPLE))
    failures = []
    for search in (
        "zero_stage: [3], tensor_model_parallel_size: [1], pipeline_model_parallel_size: [1]",
        "tensor_model_parallel_size: [2], expert_model_parallel_size: [2], recompute: [selective],"
        " chunks: [2]",
        "pipeline_model_parallel_size: [2], virtual_pipeline_model_parallel_size: [2]",
    ):
        folder = tmp_path / f"a plan {len(list(tmp_path.iterdir()))}"
        api.write(folder, api.plan(_spec(tmp_path, search)))
        result = api.verify(
            folder,
            effort=Effort(trials=1, steps=2, repeats=0),
            resume=False,
            watcher=Watcher(started=lambda *_: None, ended=lambda _: None),
            by=command_trials(
                command=f"bash {{launch}}/run.sh {OWN}",
                metrics="megatron",
                folder=folder,
            ),
        )
        (trial,) = result.trials
        if trial.status != "ok" or not trial.measured_step_s:
            failures.append(f"{search}: {trial.status}: {trial.reason}")
    assert not failures
