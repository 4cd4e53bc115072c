"""Megatron-SWIFT's log: one dictionary a line, on the terminal and in `logging.jsonl`.

    {'loss': 1.2, 'iteration': '10/200', 'memory(GiB)': 59.82, 'train_speed(s/it)': 9.6143}

Seconds are the mean of all iterations since the start, the first ones included; memory is the most
that PyTorch's allocator has reserved on any rank. Source: `on_log` of
swift/megatron/callbacks/print.py, ms-swift 4.6.0.
"""

import re
from typing import Final

from tuner.engines.metrics.interface import LogLine, TrialWork, believable, number
from tuner.units import parse_bytes

_STEP: Final = re.compile(r"""["']iteration["']: *["'](\d{1,12})/\d{1,12}["']""")
_SPEED: Final = re.compile(r"""["']train_speed\(s/it\)["']: *["']?([\d.]{1,24})""")
_MEMORY: Final = re.compile(r"""["']memory\(GiB\)["']: *["']?([\d.]{1,24})""")
_GIB: Final = parse_bytes("1GiB")


def read(line: str, job: TrialWork) -> LogLine | None:
    """Read a line of the log."""
    del job  # Step times need no conversion.
    step, speed, memory = (pattern.search(line) for pattern in (_STEP, _SPEED, _MEMORY))
    if step is None or speed is None:
        return None
    peak_bytes = int(number(memory.group(1)) * _GIB) if memory else 0
    return believable(
        LogLine(
            step=int(step.group(1)), step_s=number(speed.group(1)), peak_bytes=peak_bytes or None
        )
    )
