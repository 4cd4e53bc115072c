"""Matches one expression against lines from stdin, in a separate process that can be killed.

    python -I regex_worker.py EXPRESSION

Replies to each line, a JSON string, with a JSON line: the groups, or null without a match. The
first reply is about the expression: `{"groups": [...]}` or `{"error": "..."}`. Python's `re` cannot
be interrupted by its caller: a match that takes more than `LIMIT_S` of CPU time ends the process.
Started by path, so it imports nothing of moetune.
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
    """Reply until stdin ends."""
    _, most_bytes = resource.getrlimit(resource.RLIMIT_AS)
    # A stricter limit stays; only root could raise it.
    if most_bytes == resource.RLIM_INFINITY or most_bytes > LIMIT_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    _allow(LIMIT_S)
    try:
        expression = re.compile(sys.argv[1])
    except (re.error, OverflowError, RecursionError, MemoryError) as error:
        _reply({"error": str(error) or type(error).__name__})
        return
    _reply({"groups": list(expression.groupindex)})
    for line in sys.stdin:
        _allow(LIMIT_S)
        match = expression.search(json.loads(line))
        _reply(match.groupdict() if match else None)


def _allow(seconds: float) -> None:
    """Restart the CPU time limit; its signal ends the process."""
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


def _reply(value: object) -> None:
    print(json.dumps(value), flush=True)  # noqa: T201 - the protocol of this process


if __name__ == "__main__":
    main()
