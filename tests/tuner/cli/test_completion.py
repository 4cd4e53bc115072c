"""Completion as a shell asks for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.cli import app as frame


def completed(typed: str, *, word: int) -> list[str]:
    environment = {
        **os.environ,
        "COMP_WORDS": typed,
        "COMP_CWORD": str(word),
        "_MOETUNE_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tuner"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("typed", "word", "expected"),
    [
        ("moetune exp", 1, ["explain"]),
        ("moetune plan --device h20", 3, ["h200-sxm", "h20-sxm"]),
        ("moetune schema serve-", 2, ["serve-spec", "serve-plan", "serve-verified"]),
        ("moetune init --emit megatron-lm,sl", 3, ["megatron-lm,slurm"]),
        ("moetune explain --what", 2, ["--what-if"]),
    ],
)
def test_names_are_completed(typed: str, word: int, expected: list[str]) -> None:
    assert completed(typed, word=word) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["--show-completion", shell]) == 0
    assert "_MOETUNE_COMPLETE=complete_" in capsys.readouterr().out


def test_it_is_installed_where_bash_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert frame.run(["--install-completion", "bash"]) == 0
    script = tmp_path / ".bash_completions" / "moetune.sh"
    assert str(script) in capsys.readouterr().out
    assert str(script) in (tmp_path / ".bashrc").read_text()
    assert "_MOETUNE_COMPLETE" in script.read_text()


def test_an_unknown_shell_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["--show-completion", "tcsh"]) == 2
    assert "'tcsh' is no shell" in capsys.readouterr().err


def test_a_home_that_is_no_folder_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for home in ("/dev/null", "relative", "", "/absent"):
        monkeypatch.setenv("HOME", home)
        assert frame.run(["--install-completion", "bash"]) == 3
        assert f"HOME is {home!r}, which is no folder" in capsys.readouterr().err
