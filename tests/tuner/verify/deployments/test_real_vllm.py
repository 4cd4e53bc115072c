"""vLLM's build for processors starts what is emitted, serves, and is measured by its own client."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.benchmarks.launched_engine import CHECKOUT
from tests.expect import present
from tests.tuner.verify.environments import require_environment
from tuner import api
from tuner.goals.serve_trial import Reached
from tuner.goals.verify import deployment_trials, verify_serve

MODEL = CHECKOUT / "examples" / "models" / "small-moe" / "config.json"
PROFILE = CHECKOUT / "examples" / "profiles" / "epyc-vllm" / "profile"
INSTALL_S = 900.0
SETUP = "source examples/setup.sh; source examples/serving/cpu/setup.sh; setup_vllm"
REQUESTS = 6


@pytest.fixture
def engine() -> Path:
    """Return the folder of the programs of an environment with vLLM."""
    require_environment(SETUP, limit_s=INSTALL_S)
    return CHECKOUT / ".venv-vllm" / "bin"


def _plan(folder: Path) -> Path:
    spec = folder / "spec.yaml"
    spec.write_text(
        f"""
schema_version: 1
model: {MODEL}
cluster:
  pools: [{{name: here, device: cpu, profile: {PROFILE}, nodes: 1, devices_per_node: 1}}]
goal:
  kind: serve
  engine: {{name: vllm}}
  traffic: {{rate: 0.5/s, input_tokens: 64, output_tokens: 8}}
  max_model_len: 512
emit: [vllm, local]
""",
        encoding="utf-8",
    )
    api.write(folder / "plan", api.deploy(spec))
    return folder / "plan"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_vllm_serves_what_is_emitted(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = CHECKOUT / "examples" / "serving" / "cpu" / "make_model.py"
    subprocess.run([engine / "python", make, MODEL, tmp_path / "model"], check=True, timeout=120)
    monkeypatch.setenv("PATH", f"{engine}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MODEL", str(tmp_path / "model"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = _plan(tmp_path)
    messages: list[str] = []
    result = verify_serve(
        folder,
        trials=1,
        resume=False,
        by=deployment_trials(
            folder=folder,
            command="bash {launch}/local.sh --host 127.0.0.1 --load-format dummy --enforce-eager",
            benchmark=(
                "bash {launch}/bench_vllm.sh --result-filename {result} --seed {seed}"
                f" --num-warmups 1 --num-prompts {REQUESTS} --disable-tqdm"
            ),
            metrics="vllm-bench",
            runs=1,
            start_s=600.0,
            on_message=messages.append,
        ),
        reached=Reached(),
    )
    (trial,) = result.trials
    assert trial.status == "ok", (trial.reason, messages)
    assert trial.failed_ratio == 0.0
    # Slack for a loaded machine: a wrong model of the engine is off by more.
    assert 0.2 < present(trial.measured_ttft_s) / trial.predicted_ttft_s < 20.0
    assert 0.2 < present(trial.measured_tpot_s) / trial.predicted_tpot_s < 20.0
