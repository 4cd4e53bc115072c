"""A command whose streams are closed or full keeps its exit code and says nothing elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient_s

COMMAND = "{python} -P -m tuner {arguments} {redirected}"
REDIRECTED = (">&-", "2>/dev/full", "<&- >&- 2>&-", "2>&-", ">&- 2>&-", "2>/dev/full >&-")


def _ended(arguments: str, redirected: str) -> subprocess.CompletedProcess[str]:
    line = COMMAND.format(python=sys.executable, arguments=arguments, redirected=redirected)
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, check=False, timeout=patient_s(120)
    )


def _failures(
    commands: dict[str, int], tmp_path: Path, *, redirections: tuple[str, ...] = REDIRECTED
) -> list[str]:
    failures = []
    for arguments, code in commands.items():
        for redirected in redirections:
            ended = _ended(arguments.format(tmp=tmp_path), redirected)
            is_short = len(ended.stderr.splitlines()) <= 1 and "Traceback" not in ended.stderr
            if ended.returncode != code or not is_short or (code and ended.stdout):
                failures.append(f"{arguments} {redirected}: {ended.returncode} {ended.stderr!r}")
    return failures


@pytest.mark.parametrize(
    "redirections", [REDIRECTED[:3], pytest.param(REDIRECTED[3:], marks=pytest.mark.slow)]
)
def test_streams_that_are_closed_or_full_change_no_exit_code(
    tmp_path: Path, redirections: tuple[str, ...]
) -> None:
    commands = {"plan absent.yaml -o {tmp}/x": 2}
    assert _failures(commands, tmp_path, redirections=redirections) == []


BEHIND_STDOUT = (">/dev/full", ">/dev/full 2>/dev/full", ">/dev/full 2>&-")


def _full_disk_failures(commands: dict[tuple[str, str], int]) -> list[str]:
    failures = []
    for (arguments, redirected), code in commands.items():
        ended = _ended(arguments, redirected)
        lines = ended.stderr.splitlines()
        is_said = "2>" in redirected or (
            len(lines) == 1
            and lines[0].startswith("moetune: ")
            and ("No space left" in lines[0]) == (code == 3)
        )
        if ended.returncode != code or not is_said:
            failures.append(f"{arguments} {redirected}: {ended.returncode} {ended.stderr!r}")
    return failures


def test_a_full_disk_behind_stdout_is_one_line_and_exit_code_3(tmp_path: Path) -> None:
    alone, full, closed = BEHIND_STDOUT
    # What is printed at once, what fills the buffer, what is refused anyway, and Typer's own help.
    commands = {
        ("--version", full): 3,
        ("schema plan", alone): 3,
        ("verify --help", alone): 3,
        ("verify --help", closed): 3,
        (f"verify {tmp_path}", alone): 2,
    }
    assert _full_disk_failures(commands) == []


@pytest.mark.slow
def test_a_full_disk_behind_stdout_beside_every_stderr(tmp_path: Path) -> None:
    codes = {"--version": 3, "schema plan": 3, "verify --help": 3, f"verify {tmp_path}": 2}
    commands = {(one, to): code for one, code in codes.items() for to in BEHIND_STDOUT}
    assert _full_disk_failures(commands) == []


def test_a_full_disk_behind_stderr_does_not_change_the_exit_code_of_a_refusal() -> None:
    for arguments, code in {"absent": 2, "--version": 0}.items():
        assert _ended(arguments, "2>/dev/full").returncode == code, arguments


@pytest.mark.slow
def test_of_no_command(tmp_path: Path) -> None:
    commands = {
        "--version": 0,
        "doctor": 0,
        "schema plan": 0,
        "schema": 2,
        "profile show {tmp}": 2,
        "profile -o /dev/null/x --budget 1s": 3,
        "estimate absent.sh": 2,
        "verify {tmp}": 2,
        "explain {tmp}": 2,
        "report {tmp}": 2,
        "backtest absent.csv": 2,
        "calibrate absent.csv -o {tmp}/y": 2,
        "check {tmp}": 2,
        "init": 2,
    }
    assert _failures(commands, tmp_path) == []
