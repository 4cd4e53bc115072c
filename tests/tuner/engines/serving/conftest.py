"""Runs emitted scripts with stand-ins for the engines, their routers and Slurm.

A server writes its call into a pipe and, where it is told to, waits until the test lets go of
`hold`; a router reads as many calls as there are servers and ends, which ends the script.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.expect import present
from tests.leaks import MARK
from tests.patience import patient_s
from tests.tuner.models import example_model
from tuner.spec.model import ModelSpec

_SERVERS = ("python", "vllm", "trtllm-serve", "trtllm-llmapi-launch")
_TOLD = ("CUDA_VISIBLE_DEVICES", "MASTER", "PORT", "PYTHONPATH", "SGLANG", "TRTLLM", "VLLM")
_ROUTERS = ("vllm-router", "nginx", "aiperf")

_SERVER = """\
#!{python} -SE
import json, os, sys
argv = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
told = dict((k, v) for k, v in os.environ.items() if k.startswith({told!r}))
# One write below 4 KiB, which pipes keep whole.
call = json.dumps(dict(argv=argv, environment=told, cwd=os.getcwd())).encode() + b"\\n"
folder = {folder!r}
if "sglang_router.launch_router" in argv or "disaggregated" in argv or argv[0] in {routers!r}:
    with open(folder + "/router.json", "wb") as file:
        file.write(call)
    if os.environ.get("SERVERS"):
        with open(folder + "/calls", "rb") as calls, open(folder + "/calls.jsonl", "wb") as log:
            for _ in range(int(os.environ["SERVERS"])):
                log.write(calls.readline())
else:
    path = "/calls" if os.environ.get("SERVERS") else "/calls.jsonl"
    with open(folder + path, "ab", buffering=0) as calls:
        calls.write(call)
    if os.environ.get("HOLD"):
        open(folder + "/hold", "rb").read()
"""

_SRUN = """\
#!{python} -SE
import json, os, subprocess, sys
options, rest = dict(), []
for index, word in enumerate(sys.argv[1:]):
    if not word.startswith("--"):
        rest = sys.argv[1 + index :]
        break
    name, _, value = word[2:].partition("=")
    options[name] = value
tasks, nodes = int(options["ntasks"]), int(options.get("nodes", 1))
with open({folder!r} + "/steps.jsonl", "a") as log:
    log.write(json.dumps(options) + "\\n")
running = []
for task in range(tasks):
    slurm = dict(
        SLURM_PROCID=str(task),
        SLURM_NODEID=str(task * nodes // tasks),
        SLURM_LOCALID=str(task % (tasks // nodes)),
        SLURM_STEP_NODELIST=options.get("nodelist", "machine"),
        SLURMD_NODENAME=options.get("nodelist", "machine").split(",")[task * nodes // tasks],
    )
    running.append(subprocess.Popen(rest, env=dict(os.environ, **slurm)))
sys.exit(max(process.wait() for process in running))
"""

_SCONTROL = """\
#!{python} -SE
import os, sys
if sys.argv[1:3] == ["show", "job"]:
    print("   Command=" + os.environ.get("JOB_COMMAND", "(null)"))
else:
    print("\\n".join(sys.argv[-1].split(",")))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a script did."""

    code: int
    stderr: str


class Programs:
    """A folder of stand-ins that stands first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "programs"
        self._path.mkdir(parents=True)
        values: dict[str, Any] = {
            "python": sys.executable,
            "folder": str(folder),
            "routers": _ROUTERS,
            "told": _TOLD,
        }
        for name in (*_SERVERS, *_ROUTERS):
            self._write(name, _SERVER.format(**values))
        self._write("srun", _SRUN.format(**values))
        self._write("scontrol", _SCONTROL.format(**values))
        os.mkfifo(folder / "calls")
        os.mkfifo(folder / "hold")

    def _write(self, name: str, text: str) -> None:
        (self._path / name).write_text(text)
        (self._path / name).chmod(0o755)

    def run(self, *words: str, cwd: Path, servers: int = 0, **environment: str) -> Ran:
        """Run bash words; with `servers` the script ends when that many have started.

        Logs of an earlier run are gone.
        """
        bash = present(shutil.which("bash"))
        for name in ("calls.jsonl", "router.json", "steps.jsonl"):
            (self.folder / name).unlink(missing_ok=True)
        waits = {"SERVERS": str(servers), "HOLD": "1"} if servers else {}
        hold = os.open(self.folder / "hold", os.O_RDWR)
        # Open for both, so that servers can write before the router reads.
        calls = os.open(self.folder / "calls", os.O_RDWR)
        said = self.folder / "stderr"
        try:
            # A file, because what the script leaves running would keep a pipe open.
            with said.open("w") as stderr:
                script = subprocess.Popen(
                    [bash, *words],
                    cwd=cwd,
                    env={
                        "PATH": f"{self._path}{os.pathsep}{os.environ['PATH']}",
                        "MODEL": "model",
                        MARK: os.environ[MARK],
                        **waits,
                        **environment,
                    },
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,
                )
            try:
                code = script.wait(timeout=patient_s(60))
            finally:
                # A server that starts late would wait for ever for whoever lets go of `hold`.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(script.pid, signal.SIGKILL)
                script.wait()
        finally:
            os.close(hold)
            os.close(calls)
        return Ran(code=code, stderr=said.read_text())

    def calls(self, name: str = "calls.jsonl") -> list[dict[str, Any]]:
        """Return what was called, in no order."""
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def called(
        self, *words: str, cwd: Path, log: str = "calls.jsonl", **environment: Any
    ) -> dict[str, Any]:
        """Run bash words that must succeed, and return the only call that they made."""
        done = self.run(*words, cwd=cwd, **environment)
        assert done.code == 0, done.stderr
        (call,) = self.calls(log)
        return call

    def argv(self) -> list[str]:
        """Return the words of the only call."""
        (call,) = self.calls()
        return [str(word) for word in call["argv"]]


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    """Stand-ins in a folder of the test."""
    return Programs(tmp_path / "stand-ins")


@pytest.fixture(scope="session")
def deepseek() -> ModelSpec:
    """256 experts, MLA."""
    return example_model("deepseek-v3")


@pytest.fixture(scope="session")
def dense() -> ModelSpec:
    """A model without experts."""
    return example_model("llama-3.1-8b")


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    """Where targets are written."""
    folder = tmp_path / "launch"
    folder.mkdir()
    return folder
