"""Seconds that tests wait for processes, by what else the machine does."""

import os


def patient_s(seconds: float) -> float:
    """Return the seconds to wait for what takes at most so many on an idle machine.

    The longer the queue of a core, the longer: load over cores times as much, and at least as
    much. MOETUNE_TEST_PATIENCE multiplies it, for machines whose load cannot be seen.
    """
    queue = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * max(1.0, queue) * float(os.environ.get("MOETUNE_TEST_PATIENCE", "1"))
