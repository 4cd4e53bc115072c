"""What is shown while something takes long: on a terminal a line that goes, elsewhere nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COLOUR = re.compile(rb"\x1b\[[0-9;]*3[0-7](;[0-9;]*)?m")
LONG = ("plan", str(ROOT / "examples" / "placement" / "balance.yaml"), "--time-limit", "1s")


def on_a_terminal(*arguments: str, **environment: str) -> tuple[int, bytes, bytes]:
    """Run a command with its stderr on a terminal, its stdout in a pipe."""
    terminal, its_end = os.openpty()
    command = [sys.executable, "-m", "tuner", *arguments]
    clean = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    shown = b""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=its_end,
        env={**clean, "TERM": "xterm-256color", **environment},
    ) as started:
        os.close(its_end)
        try:
            while piece := os.read(terminal, 4096):
                shown += piece
        except OSError:
            pass  # EIO: the other end is closed.
        out, _ = started.communicate(timeout=60)
    os.close(terminal)
    return started.returncode, out, shown


@pytest.mark.slow
def test_a_terminal_is_shown_the_stage_the_time_and_its_limit(tmp_path: Path) -> None:
    code, out, shown = on_a_terminal(*LONG, "-o", str(tmp_path / "plan"))
    assert code == 0
    assert b"placing" in shown
    assert re.search(rb"0:00:0\d.*of 1 s", shown)
    assert COLOUR.search(shown)
    assert b"\x1b" not in out


@pytest.mark.slow
def test_no_color_leaves_colours_out(tmp_path: Path) -> None:
    _, _, shown = on_a_terminal(*LONG, "-o", str(tmp_path / "plan"), NO_COLOR="1")
    assert b"placing" in shown
    assert not COLOUR.search(shown)


def test_a_pipe_gets_the_result_alone_and_no_colour(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tuner", *LONG, "-o", str(tmp_path / "plan")],
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    assert b"\x1b" not in done.stdout
