"""Commands as they are typed: what they print, and how they are refused."""

from collections.abc import Sequence

import pytest

from tuner.cli.app import run

Captured = pytest.CaptureFixture[str]


def output(capsys: Captured, words: Sequence[object], *, code: int = 0) -> str:
    """Return what a command prints on stdout; what was printed before is dropped."""
    capsys.readouterr()
    assert run([str(word) for word in words]) == code
    return capsys.readouterr().out


def refusal(capsys: Captured, words: Sequence[object], *, code: int = 2) -> str:
    """Return the one line that refuses a command, which prints nothing else."""
    capsys.readouterr()
    assert run([str(word) for word in words]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line
