"""Under a limit of memory a command says that it is one, in one line, and blames no input."""

import resource
import subprocess
import sys
from pathlib import Path

from tests.patience import patient_s

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


def test_too_little_for_the_libraries_is_said_in_one_line() -> None:
    for mebibytes in (60, 150):
        ended = _limited(mebibytes, "profile", "show", str(PROFILE))
        assert ended.returncode == 3, ended.stderr
        assert "memory" in ended.stderr
        assert "measure it again" not in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
        assert ended.stderr.startswith("moetune: ")


def test_enough_is_as_without_a_limit() -> None:
    ended = _limited(8000, "profile", "show", str(PROFILE))
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_command_that_a_library_ends_has_run_out_of_memory() -> None:
    endings = {"os.abort()": 3, "os._exit(1)": 3, "sys.exit(130)": 130}
    for ending, code in endings.items():
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


def test_exit_codes_come_through() -> None:
    for code in (0, 1, 2):
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
