"""Commands that are refused."""

from collections.abc import Sequence

import pytest

from tuner.cli.app import run


def refusal(capsys: pytest.CaptureFixture[str], words: Sequence[str], *, code: int = 2) -> str:
    """Return the one line that refuses a command, which prints nothing else."""
    assert run(list(words)) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line
