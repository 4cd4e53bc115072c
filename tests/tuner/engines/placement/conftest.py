"""Runs an emitted script with stand-ins for the engines' programs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tuner.engines.serving.conftest import Programs

Start = Callable[..., tuple[list[str], Path]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Run `run.sh` of a folder from elsewhere; return the words of the command and its folder."""
    programs = Programs(tmp_path / "stand-ins")

    def run(folder: Path, *arguments: str, **environment: str) -> tuple[list[str], Path]:
        script = str(folder / "run.sh")
        call = programs.called(script, *arguments, cwd=tmp_path, **environment)
        return call["argv"], Path(call["cwd"])

    return run
