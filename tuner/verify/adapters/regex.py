r"""A regular expression of the user's, with a group `step_s` and, optionally, a group `step`.

    regex:iter (?P<step>\d+) took (?P<step_s>[0-9.]+) s

Expressions that can take exponential time on a short line exist, and Python's `re` cannot be
interrupted: a group that is repeated and itself holds a repetition, as in `(a+)+`, is refused,
lines are cut short, and the expression is bounded. Not covered: expressions that are slow by other
means (many repetitions beside each other), which cost the user their own time.
"""

import re
from typing import Final

from tuner.errors import SpecError
from tuner.verify.adapters.reading import Adapter, Job, Reading, believable, number

MAX_EXPRESSION: Final = 512
MAX_LINE: Final = 1024

_NESTED: Final = re.compile(
    r"\((?:[^()\\]|\\.)*(?:[+*]|\{\d*,\d*\})(?:[^()\\]|\\.)*\)(?:[+*]|\{\d*,)"
)


def adapter(expression: str) -> Adapter:
    """Return the adapter of an expression.

    Raises:
        SpecError: it is none, is too long, may take for ever, or has no group `step_s`.
    """
    if len(expression) > MAX_EXPRESSION:
        raise SpecError(f"--metrics regex: longer than {MAX_EXPRESSION} characters")
    if _NESTED.search(expression):
        raise SpecError(
            f"--metrics regex: {expression!r} repeats a group that holds a repetition, which can"
            " take for ever; write the group once"
        )
    try:
        compiled = re.compile(expression)
    except re.error as error:
        raise SpecError(f"--metrics regex: {expression!r}: {error}") from error
    if "step_s" not in compiled.groupindex:
        raise SpecError(
            f"--metrics regex: {expression!r} has no group (?P<step_s>...) around the seconds"
        )

    def read(line: str, job: Job) -> Reading | None:
        del job  # A time needs no rate to be one.
        found = compiled.search(line[:MAX_LINE])
        if not found or not (step_s := number(found.group("step_s") or "")):
            return None
        step = found.groupdict().get("step") or ""
        return believable(Reading(step=int(step) if step.isdecimal() else None, step_s=step_s))

    return read
