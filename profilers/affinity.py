"""The processor cores that this process may use: all of the machine's, or those it is bound to."""

import os


def usable_cores() -> frozenset[int]:
    """Return the numbers of the cores; where the system does not say which, of as many as exist."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
