"""A command whose streams are closed or full keeps its exit code and says nothing elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = "{python} -P -m tuner {arguments} {redirected}"
REDIRECTED = (">&-", "2>&-", "2>/dev/full", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full >&-")


def _ended(arguments: str, redirected: str) -> subprocess.CompletedProcess[str]:
    line = COMMAND.format(python=sys.executable, arguments=arguments, redirected=redirected)
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, check=False, timeout=120
    )


def _failures(commands: dict[str, int], tmp_path: Path) -> list[str]:
    failures = []
    for arguments, code in commands.items():
        for redirected in REDIRECTED:
            ended = _ended(arguments.format(tmp=tmp_path), redirected)
            is_short = len(ended.stderr.splitlines()) <= 1 and "Traceback" not in ended.stderr
            if ended.returncode != code or not is_short or (code and ended.stdout):
                failures.append(f"{arguments} {redirected}: {ended.returncode} {ended.stderr!r}")
    return failures


def test_streams_that_are_closed_or_full_change_no_exit_code(tmp_path: Path) -> None:
    assert _failures({"plan absent.yaml -o {tmp}/x": 2}, tmp_path) == []


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
