r"""A regular expression of the user's, with a group `step_s` and, optionally, a group `step`.

    regex:iter (?P<step>\d+) took (?P<step_s>[0-9.]+) s

Some expressions take exponential time on a short line, and Python's `re` cannot be interrupted. So
lines are truncated, the expression is bounded, and a separate process matches (regex_worker.py),
which ends itself when a line takes too long.
"""

import json
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Final

from tuner.engines.metrics.interface import Adapter, LogLine, TrialWork, believable, number
from tuner.engines.metrics.regex_worker import LIMIT_S
from tuner.errors import SpecError
from tuner.units import format_s

MAX_EXPRESSION: Final = 512
MAX_LINE: Final = 1024
MAX_DIGITS: Final = 19
"""Most digits of a step number."""

_NESTED: Final = re.compile(
    r"\((?:[^()\\]|\\.)*(?:[+*]|\{\d*,\d*\})(?:[^()\\]|\\.)*\)(?:[+*]|\{\d*,)"
)
"""The most common such expression, refused before any launch."""
_WORKER: Final = Path(__file__).with_name("regex_worker.py")


def adapter(expression: str) -> Adapter:
    """Return the adapter of an expression.

    Raises:
        SpecError: it is none, is too long, takes too long, or has no group `step_s`.
    """
    if len(expression) > MAX_EXPRESSION:
        raise SpecError(f"--metrics regex: longer than {MAX_EXPRESSION} characters")
    if not expression.isprintable():
        raise SpecError("--metrics regex: it has unprintable characters; write them as \\x1b")
    if _NESTED.search(expression):
        raise SpecError(
            f"--metrics regex: {expression!r} repeats a group that holds a repetition, which can"
            " take for ever; write the group once"
        )
    matcher = _Matcher(expression)
    if "step_s" not in matcher.groups:
        raise SpecError(
            f"--metrics regex: {expression!r} has no group (?P<step_s>...) around the seconds"
        )

    def read(line: str, job: TrialWork) -> LogLine | None:
        del job  # Step times need no conversion.
        groups = matcher.search(line[:MAX_LINE])
        if not groups or not (step_s := number(groups["step_s"] or "")):
            return None
        step = groups.get("step") or ""
        is_number = step.isdecimal() and len(step) < MAX_DIGITS
        return believable(LogLine(step=int(step) if is_number else None, step_s=step_s))

    return read


class _Matcher:
    """The process that matches; it ends with this object."""

    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._turn = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER), expression],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            # Ctrl-C is handled by this process.
            start_new_session=True,
        )
        weakref.finalize(self, _end, self._process)
        reply = self._read_reply()
        if "error" in reply:
            raise SpecError(f"--metrics regex: {expression!r}: {reply['error']}")
        self.groups = frozenset(reply["groups"])

    def search(self, line: str) -> dict[str, str | None] | None:
        """Return the groups of the first match; None where there is none.

        Raises:
            SpecError: it takes too long.
        """
        assert self._process.stdin is not None
        with self._turn:
            try:
                self._process.stdin.write(json.dumps(line) + "\n")
                self._process.stdin.flush()
            except OSError as error:
                raise self._too_long() from error
            groups: dict[str, str | None] | None = self._read_reply()
            return groups

    def _read_reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise self._too_long()
        return json.loads(line)

    def _too_long(self) -> SpecError:
        return SpecError(
            f"--metrics regex: {self._expression!r} takes more than {format_s(LIMIT_S)} or too much"
            f" memory on a line of at most {MAX_LINE} characters; repeat less in it"
        )


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except OSError:
                continue
