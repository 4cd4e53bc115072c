"""Megatron-LM: `elapsed time per iteration (ms)` and its memory line.

    ... iteration 12/ 20 | consumed samples: 96 | elapsed time per iteration (ms): 812.4 | ...
    [Rank 0] (after 2 iterations) memory (MB) | allocated: ... | max allocated: 912.5 | ...

The time is the mean of the iterations since the last such line (`--log-interval`, default 100); 1
gives every step, rounded to 0.1 ms. From core 0.16 on the first iteration has a line too, and its
time is included in the second line, so two warm-up lines are the minimum. Megabytes are
2**20 bytes; on processors the line says 0, which is no peak. Source: `training_log` of
megatron/training/training.py and `report_memory` (of megatron/training/utils/common_utils.py
today), core_v0.16.1, core_v0.18.2 and core_v0.19.0, github.com/NVIDIA/Megatron-LM.
"""

import re
from typing import Final

from tuner.engines.metrics.interface import LogLine, TrialWork, believable, number
from tuner.units import parse_bytes

_STEP: Final = re.compile(
    r"iteration +(\d{1,12})/ *\d+ \|.*elapsed time per iteration \(ms\): *([\d.]{1,24})"
)
_MEMORY: Final = re.compile(r"memory \(MB\) \|.*\bmax allocated: *([\d.]{1,24})")
_MEGABYTE_BYTES: Final = parse_bytes("1MiB")
_MILLISECONDS_PER_S: Final = 1000.0


def read(line: str, job: TrialWork) -> LogLine | None:
    """Read a line of the log."""
    del job  # Step times need no conversion.
    if match := _STEP.search(line):
        step_s = number(match.group(2)) / _MILLISECONDS_PER_S
        return believable(LogLine(step=int(match.group(1)), step_s=step_s))
    if match := _MEMORY.search(line):
        peak_bytes = int(number(match.group(1)) * _MEGABYTE_BYTES)
        return believable(LogLine(peak_bytes=peak_bytes)) if peak_bytes else None
    return None
