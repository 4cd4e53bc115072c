"""Runs an emitted script with stand-ins for the engines' programs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import patient_s

_PROGRAMS = ("python", "vllm", "trtllm-serve", "trtllm-llmapi-launch")
_STAND_IN = """#!{python}
import json, os, sys
json.dump({{"words": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "cwd": os.getcwd()}},
          open({log!r}, "w"))
"""

Start = Callable[..., tuple[list[str], Path]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Run `run.sh` of a folder from elsewhere; return the words of the command and its folder."""
    programs, log = tmp_path / "programs", tmp_path / "call.json"
    programs.mkdir()
    for name in _PROGRAMS:
        (programs / name).write_text(_STAND_IN.format(python=sys.executable, log=str(log)))
        (programs / name).chmod(0o755)

    def run(folder: Path, *arguments: str, **environment: str) -> tuple[list[str], Path]:
        subprocess.run(
            [str(folder / "run.sh"), *arguments],
            cwd=tmp_path,
            env={"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", **environment},
            check=True,
            capture_output=True,
            timeout=patient_s(60),
        )
        call = json.loads(log.read_text())
        return call["words"], Path(call["cwd"])

    return run
