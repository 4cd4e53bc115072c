"""Completion as a shell asks for it."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rows import each_row
from tuner.cli import app as frame


def requested(typed: str, *, word: int) -> dict[str, str]:
    """What bash puts into the environment of the command that it asks."""
    return {
        "COMP_WORDS": typed,
        "COMP_CWORD": str(word),
        "_MOETUNE_COMPLETE": "complete_bash",
    }


def test_the_command_completes_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tuner"],
        env=os.environ | requested("moetune exp", word=1),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["explain"]


@each_row(
    ("typed", "word", "expected"),
    [
        ("moetune plan --device h20", 3, ["h20-3e", "h20-sxm", "h200-nvl", "h200-sxm"]),
        ("moetune schema serve-", 2, ["serve-spec", "serve-plan", "serve-verified"]),
        ("moetune init --emit megatron-lm,sl", 3, ["megatron-lm,slurm"]),
        ("moetune explain --what", 2, ["--what-if"]),
    ],
)
def test_names_are_completed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: str,
    word: int,
    expected: list[str],
) -> None:
    for name, value in requested(typed, word=word).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        frame.run([])
    assert not left.value.code
    assert capsys.readouterr().out.split() == expected


def test_bash_reads_what_is_installed(tmp_path: Path) -> None:
    home = tmp_path / "my home"
    home.mkdir()
    moetune = f"{shlex.quote(sys.executable)} -m tuner --install-completion"
    told = subprocess.run(
        ["bash", "-c", f'{moetune} && source "$HOME/.bashrc" && complete -p moetune'],
        env=os.environ | {"HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "complete -o default -F _moetune_completion moetune" in told.stdout
