"""A run of tests that leaves a process or a folder fails, and says which."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.leaks import MARK
from tests.patience import patient_s

TIDY = """
import subprocess, tempfile

def test_tidy(tmp_path):
    subprocess.run(["true"], check=True)
    with tempfile.TemporaryDirectory(prefix="moetune-"):
        pass
    tempfile.mkdtemp(prefix="other-")
"""
UNTIDY = """
import pathlib, subprocess, tempfile

def test_untidy(tmp_path):
    # Its parent ends at once: it is nobody's child.
    line = "sleep 300 >/dev/null 2>&1 & echo $!"
    pid = subprocess.run(["sh", "-c", line], check=True, capture_output=True, text=True).stdout
    pathlib.Path("pid").write_text(pid)
    tempfile.mkdtemp(prefix="moetune-")
    tempfile.mkdtemp(prefix="torchelastic_")
"""


def _run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "test_it.py").write_text(text)
    options = ("-q", "-p", "tests.conftest", "-p", "no:cacheprovider", f"--rootdir={folder}")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--basetemp={folder / 'base'}", "test_it.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=patient_s(120),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )


def test_tests_that_leave_nothing_pass(tmp_path: Path) -> None:
    ended = _run(tmp_path / "tidy", TIDY)
    assert ended.returncode == 0, ended.stdout


def test_tests_that_leave_something_fail_and_their_processes_are_ended(tmp_path: Path) -> None:
    folder = tmp_path / "untidy"
    ended = _run(folder, UNTIDY)
    pid = int((folder / "pid").read_text())
    try:
        assert ended.returncode == 1, ended.stdout
        for words in (f"process {pid}: sleep 300 (first seen after test_it.py)", "1 error"):
            assert words in ended.stdout
        for prefix in ("moetune-", "torchelastic_"):
            assert f"/temporary0/{prefix}" in ended.stdout
        # Whoever reaps orphans here may not have done so yet.
        with contextlib.suppress(FileNotFoundError):
            assert ") Z " in Path(f"/proc/{pid}/stat").read_text()
    finally:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)
