"""A command whose streams are closed or full keeps its exit code and says nothing elsewhere."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient_s
from tests.rows import each_row

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
    assert _failures({"plan absent.yaml -o {tmp}/x": 2}, tmp_path, redirections=redirections) == []


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


@each_row(("arguments", "code"), {"absent": 2, "--version": 0}.items())
def test_a_full_disk_behind_stderr_does_not_change_the_exit_code_of_a_refusal(
    arguments: str, code: int
) -> None:
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


# Under a limit of memory a command says that it is one, in one line, and blames no input.

PROFILE = Path(__file__).parents[2] / "examples" / "profiles" / "emulated-2x2" / "profile"


def _limited(mebibytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    size = mebibytes * 2**20
    return subprocess.run(
        [sys.executable, "-P", "-m", "tuner", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=patient_s(120),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size)),
    )


@each_row("mebibytes", (60, 150))
def test_too_little_for_the_libraries_is_said_in_one_line(mebibytes: int) -> None:
    ended = _limited(mebibytes, "profile", "show", str(PROFILE))
    assert ended.returncode == 3, ended.stderr
    assert "memory" in ended.stderr
    assert "measure it again" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith("moetune: ")


def test_enough_is_as_without_a_limit() -> None:
    ended = _limited(8000, "profile", "show", str(PROFILE))
    assert (ended.returncode, ended.stderr) == (0, "")


@each_row(("ending", "code"), {"os.abort()": 3, "os._exit(1)": 3, "sys.exit(130)": 130}.items())
def test_a_command_that_a_library_ends_has_run_out_of_memory(ending: str, code: int) -> None:
    lines = (
        "import os, sys",
        "from tuner.memory_limit import run_limited",
        f"sys.exit(run_limited(lambda: {ending}, most_bytes=2**30))",
    )
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == code, (ending, ended.stderr)
    assert ("limit of 1024 MiB" in ended.stderr) == (code == 3)


@each_row("code", (0, 1, 2))
def test_exit_codes_come_through(code: int) -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from tuner.memory_limit import run_limited;"
            f"sys.exit(run_limited(lambda: {code}, most_bytes=2**30))",
        ],
        check=False,
    )
    assert ended.returncode == code
