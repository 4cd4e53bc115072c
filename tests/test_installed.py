"""The wheel in an environment of its own, far from the checkout: plan, estimate, report."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
MODEL = CHECKOUT / "examples" / "models" / "qwen3-30b-a3b" / "config.json"
INSTALL_S = 900.0
SPEC = """
schema_version: 1
model: config.json
cluster:
  pools: [{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 8, nic: 400Gbit/s}]
goal: {kind: train, sequence_length: 4096, global_batch_size: 64, precision: bf16}
search: {context_parallel_size: 1, expert_tensor_parallel_size: 1, micro_batch_size: [1]}
emit: [megatron-lm]
"""


def _run(*command: str, folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment | {"PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_S,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    path = os.environ["PATH"]
    wheels, environment, work = tmp_path / "dist", tmp_path / "environment", tmp_path / "work"
    work.mkdir()
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet")
    made = _run(*pip, "--wheel-dir", str(wheels), str(CHECKOUT), folder=work, path=path)
    assert made.returncode == 0, made.stderr
    (wheel,) = wheels.glob("moetune-*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    programs = environment / "bin"
    path = f"{programs}{os.pathsep}{path}"
    constraint = f"--constraint={CHECKOUT / 'tests' / 'constraints.txt'}"
    install = (str(programs / "python"), "-m", "pip", "install", "--quiet", constraint)
    done = _run(*install, f"{wheel}[report]", folder=work, path=path)
    if done.returncode:
        pytest.skip(f"what moetune needs cannot be installed: {done.stderr.strip()[-200:]}")

    shutil.copy(MODEL, work)
    (work / "spec.yaml").write_text(SPEC, encoding="utf-8")
    for words in (
        ("plan", "spec.yaml", "-o", "plan"),
        ("explain", "plan"),
        ("estimate", "spec.yaml", "--launch", "plan/launch/megatron-lm/run.sh"),
        ("report", "plan", "-o", "page.html"),
    ):
        ran = _run(str(programs / "moetune"), *words, folder=work, path=path)
        assert ran.returncode == 0, f"{words}: {ran.stderr}"
        assert str(CHECKOUT) not in ran.stdout + ran.stderr
    assert (work / "plan" / "launch" / "megatron-lm" / "run.sh").is_file()
    page = (work / "page.html").read_text(encoding="utf-8")
    assert "<svg" in page or "plotly" in page.lower()
