"""Completion as a shell asks for it."""

import os
import subprocess
import sys
from collections.abc import Callable
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
    assert frame.run([]) == 0
    assert capsys.readouterr().out.split() == expected


@each_row("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["--show-completion", shell]) == 0
    assert "_MOETUNE_COMPLETE=complete_" in capsys.readouterr().out


INSTALLED = {
    "bash": (".bash_completions/moetune.sh", ".bashrc"),
    "zsh": (".zfunc/_moetune", ".zshrc"),
    "fish": (".config/fish/completions/moetune.fish", ""),
}


def test_it_is_installed_once_where_each_shell_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for shell, (place, startup) in INSTALLED.items():
        home = tmp_path / f"it's {shell}"
        home.mkdir()
        # Not everybody's file is UTF-8, and a link stays a link.
        (home / "real").write_bytes(b"# caf\xe9\nexport A=1")
        if startup:
            (home / startup).symlink_to("real")
        monkeypatch.setenv("HOME", str(home))
        for _ in range(2):
            assert frame.run(["--install-completion", shell]) == 0
            assert str(home / place) in capsys.readouterr().out
        assert "_MOETUNE_COMPLETE" in (home / place).read_text()
        if startup:
            assert (home / startup).is_symlink()
            text = (home / "real").read_bytes()
            assert text.startswith(b"# caf\xe9\nexport A=1\n")
            assert len(text.splitlines()) == 3


def test_bash_reads_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "it's home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    assert frame.run(["--install-completion", "bash"]) == 0
    said = subprocess.run(
        ["bash", "-c", 'source "$HOME/.bashrc" && complete -p moetune'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "moetune" in said.stdout


def test_a_home_that_cannot_be_added_to_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt: dict[str, Callable[[Path], object]] = {
        "pipe": os.mkfifo,
        "folder": lambda path: path.mkdir(),
        "hole": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40),
        "device": lambda path: path.symlink_to("/dev/zero"),
    }
    failures = []
    for shell, (place, startup) in INSTALLED.items():
        for name, spoil in spoilt.items():
            for at in {startup, place.split("/")[0]} - {""}:
                home = tmp_path / f"{shell}-{name}-{at}"
                home.mkdir()
                spoil(home / at)
                if at != startup and name == "folder":
                    (home / place).mkdir(parents=True)
                monkeypatch.setenv("HOME", str(home))
                code = frame.run(["--install-completion", shell])
                said = capsys.readouterr().err
                if code != 3 or len(said.splitlines()) != 1 or at not in said:
                    failures.append(f"{shell} {name} {at}: {code} {said}")
    assert failures == []


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
