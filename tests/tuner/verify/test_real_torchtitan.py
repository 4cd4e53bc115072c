"""torchtitan takes the emitted files, trains on the CPU and is measured: FSDP2, EP, TP with EP."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from tests.benchmarks.launched_torchtitan import ENGINE
from tuner import api
from tuner.goals.verify import command_trials
from tuner.verify.verification import Effort, Watcher

CHECKOUT = Path(__file__).parents[3]
PROFILE = CHECKOUT / "examples" / "profiles" / "epyc-quickstart-1" / "used" / "profile"
INSTALL_S = 420.0


@pytest.fixture
def engine() -> Path:
    """Return the folder of the programs of an environment with torchtitan."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", ENGINE.setup],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_S,
    )
    if done.returncode:
        pytest.skip(f"torchtitan cannot be installed: {done.stderr.strip()[-300:]}")
    return ENGINE.programs


def _spec(folder: Path, search: str) -> Path:
    file = folder / "spec.yaml"
    file.write_text(
        f"""
schema_version: 1
model: {ENGINE.model}
cluster: {{pools: [{{name: here, profile: {PROFILE}, nodes: 1, devices_per_node: 2}}]}}
goal: {{kind: train, sequence_length: 128, global_batch_size: 8, precision: bf16}}
search: {{pipeline_model_parallel_size: [1], micro_batch_size: [2], {search}}}
emit: [torchtitan]
""",
        encoding="utf-8",
    )
    return file


def test_the_stand_in_refuses_to_run_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ENGINE.example / "train_on_cpu.py"
    spec = importlib.util.spec_from_file_location("train_on_cpu", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(SystemExit, match="CUDA"):
        module.stand_in()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torchtitan_trains_what_is_emitted(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{engine}{os.pathsep}{os.environ['PATH']}")
    for name, value in ENGINE.environment.items():
        monkeypatch.setenv(name, value)
    failures = []
    for search in (
        "zero_stage: [0], expert_model_parallel_size: [1], tensor_model_parallel_size: [1]",
        "zero_stage: [3], expert_model_parallel_size: [2], tensor_model_parallel_size: [1],"
        " recompute: [full]",
        "zero_stage: [2], expert_model_parallel_size: [2], tensor_model_parallel_size: [2]",
    ):
        folder = tmp_path / f"a plan {len(list(tmp_path.iterdir()))}"
        api.write(folder, api.plan(_spec(tmp_path, search)))
        result = api.verify(
            folder,
            effort=Effort(trials=1, steps=2, repeats=0),
            resume=False,
            watcher=Watcher(started=lambda *_: None, ended=lambda _: None),
            by=command_trials(
                command=f"bash {{launch}}/run.sh {ENGINE.arguments}",
                metrics=ENGINE.metrics,
                folder=folder,
            ),
        )
        (trial,) = result.trials
        if trial.status != "ok" or not trial.measured_step_s:
            failures.append(f"{search}: {trial.status}: {trial.reason}")
    assert not failures
