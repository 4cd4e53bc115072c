"""Matches one expression against lines from stdin, in a process of its own that can be ended.

    python -I regex_worker.py EXPRESSION

Answers each line, a JSON string, with a line of JSON: the groups, or null where nothing matches.
The first answer is about the expression itself: `{"groups": [...]}` or `{"error": "..."}`. Python's
`re` cannot be interrupted by whoever calls it: what takes more than `LIMIT_S` of processor time
ends the process. Started by path, so it imports nothing of ours.
"""

import json
import re
import resource
import signal
import sys
import warnings

LIMIT_S = 1.0
LIMIT_BYTES = 2**30


def main() -> None:
    """Answer until there is no more to read."""
    _, most_bytes = resource.getrlimit(resource.RLIMIT_AS)
    # A limit that is stricter already stays; only root could raise it.
    if most_bytes == resource.RLIM_INFINITY or most_bytes > LIMIT_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    _allow(LIMIT_S)
    try:
        expression = re.compile(sys.argv[1])
    except (re.error, OverflowError, RecursionError, MemoryError) as error:
        _answer({"error": str(error) or type(error).__name__})
        return
    _answer({"groups": list(expression.groupindex)})
    for line in sys.stdin:
        _allow(LIMIT_S)
        found = expression.search(json.loads(line))
        _answer(found.groupdict() if found else None)


def _allow(seconds: float) -> None:
    """Let the process go on for so long; the signal of this timer ends it."""
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


def _answer(value: object) -> None:
    print(json.dumps(value), flush=True)  # noqa: T201 - what the process is asked for


if __name__ == "__main__":
    main()
