"""Real training engines take the emitted files, train on the CPU and are measured."""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.benchmarks.engine_layouts import engine_of
from tests.benchmarks.launched_engine import CHECKOUT, LaunchedEngine
from tests.tuner.verify.environments import require_environment
from tuner import api
from tuner.goals.verify import command_trials
from tuner.verify.verification import Effort, Watcher

PROFILE = CHECKOUT / "examples" / "profiles" / "epyc-quickstart-1" / "used" / "profile"
INSTALL_S = 420.0
SEARCHES = {
    "deepspeed": (
        "pipeline_model_parallel_size: [1], zero_stage: [1], expert_model_parallel_size: [1]",
        "pipeline_model_parallel_size: [1], zero_stage: [2], expert_model_parallel_size: [2]",
        "pipeline_model_parallel_size: [1], zero_stage: [3], expert_model_parallel_size: [1]",
    ),
    "megatron-lm": (
        "zero_stage: [3], tensor_model_parallel_size: [1], pipeline_model_parallel_size: [1]",
        "tensor_model_parallel_size: [2], expert_model_parallel_size: [2], recompute: [selective],"
        " chunks: [2]",
        "pipeline_model_parallel_size: [2], virtual_pipeline_model_parallel_size: [2]",
    ),
    "torchtitan": (
        "zero_stage: [0], expert_model_parallel_size: [1], tensor_model_parallel_size: [1]",
        "zero_stage: [3], expert_model_parallel_size: [2], tensor_model_parallel_size: [1],"
        " recompute: [full]",
        "zero_stage: [2], expert_model_parallel_size: [2], tensor_model_parallel_size: [2]",
    ),
}


ADAPTERS = {
    "deepspeed": (
        ("zero_stage: [1]", "[attention]"),
        ("zero_stage: [2]", "[q_proj, v_proj]"),
        ("zero_stage: [3]", "[attention]"),
    ),
    "torchtitan": (
        ("zero_stage: [0], expert_model_parallel_size: [1]", "[attention]"),
        ("zero_stage: [3], expert_model_parallel_size: [2], recompute: [full]", "[attention]"),
        ("zero_stage: [2], tensor_model_parallel_size: [2]", "[o_proj]"),
    ),
}


def _spec(engine: LaunchedEngine, folder: Path, search: str, *, tune: str = "full") -> Path:
    file = folder / "spec.yaml"
    file.write_text(
        f"""
schema_version: 1
model: {engine.model}
cluster: {{pools: [{{name: here, profile: {PROFILE}, nodes: 1, devices_per_node: 2}}]}}
goal: {{kind: train, {engine.goal}, tune: {tune}}}
search: {{micro_batch_size: [2], {search}}}
emit: [{engine.name}]
""",
        encoding="utf-8",
    )
    return file


def test_a_stand_in_refuses_to_run_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    file = engine_of("torchtitan").example / "train_on_cpu.py"
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
@pytest.mark.parametrize("name", SEARCHES)
def test_an_engine_trains_what_is_emitted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _launch(name, [(search, "full") for search in SEARCHES[name]], tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_engine_trains_the_adapters_that_are_emitted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        (
            f"pipeline_model_parallel_size: [1], {search}",
            f"{{method: lora, rank: 8, targets: {of}}}",
        )
        for search, of in ADAPTERS[name]
    ]
    _launch(name, rows, tmp_path, monkeypatch)


def _launch(
    name: str, rows: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan, emit and start each row, which is limits of the search and what is trained."""
    engine = engine_of(name)
    require_environment(engine.setup, limit_s=INSTALL_S)
    monkeypatch.setenv("PATH", f"{engine.programs}{os.pathsep}{os.environ['PATH']}")
    for variable, value in engine.environment.items():
        monkeypatch.setenv(variable, value)
    failures = []
    for search, tune in rows:
        folder = tmp_path / f"a plan {len(list(tmp_path.iterdir()))}"
        api.write(folder, api.plan(_spec(engine, tmp_path, search, tune=tune)))
        result = api.verify(
            folder,
            effort=Effort(trials=1, steps=2, repeats=0),
            resume=False,
            watcher=Watcher(started=lambda *_: None, ended=lambda _: None),
            by=command_trials(
                command=f"bash {{launch}}/run.sh {engine.arguments}",
                metrics=engine.metrics,
                folder=folder,
            ),
        )
        (trial,) = result.trials
        if trial.status != "ok" or not trial.measured_step_s:
            failures.append(f"{search}, {tune}: {trial.status}: {trial.reason}")
    assert not failures
