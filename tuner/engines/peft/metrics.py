"""The step line of examples/finetuning/finetune.py.

    step 12 loss 3.2100 seconds 0.2104 peak_bytes 26636264448

Seconds are between two optimizer steps, with the device synchronised; bytes the largest peak of
`torch.cuda.max_memory_allocated` over the ranks.
"""

import re
from typing import Final

from tuner.engines.metrics.interface import LogLine, TrialWork, believable, number

_STEP: Final = re.compile(
    r"^step (\d{1,12}) loss \S{1,24} seconds ([\d.e+-]{1,24}) peak_bytes (\d{1,20})\s*$"
)


def read(line: str, job: TrialWork) -> LogLine | None:
    """Read a line of the log."""
    match = _STEP.search(line)
    if not match or not (seconds := number(match.group(2))):
        return None
    return believable(
        LogLine(step=int(match.group(1)), step_s=seconds, peak_bytes=int(match.group(3)) or None)
    )
