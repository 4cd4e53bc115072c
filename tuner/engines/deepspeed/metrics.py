"""DeepSpeed: the throughput line of its engine, or the step line of its pipeline engine.

    epoch=0/micro_step=12/global_step=12, RunningAvgSamplesPerSec=..., CurrSamplesPerSec=3.2, ...,
        MaxMemAllocated=41.2GB
    steps: 12 loss: 5.1 iter time (s): 1.250 samples/sec: 25.600
    train_batch_size ............. 64

    step_s = samples_per_step / CurrSamplesPerSec

The first is the rate of the last step, from each forward to its `step()` only unless DeepSpeed's
own loader feeds it, and starts with the third step; the second is the mean of the steps since the
last such line, with further losses before the time if the model has them. Both are printed every
`steps_per_print` steps, which is never by default, and at `log_level` info only. The third is the
number of samples per step that DeepSpeed divides by: under AutoTP every tensor rank counts as a
replica (`DeepSpeedConfig` without `mpu`), so the rate is too high by their number.
DeepSpeed's GB are 2**30 bytes. Source: `ThroughputTimer` of deepspeed/utils/timer.py,
`PipelineEngine.train_batch` of deepspeed/runtime/pipe/engine.py and `DeepSpeedConfig.print` of
deepspeed/runtime/config.py, deepspeed 0.19.4 to 0.19.8.
"""

import re
from typing import Final

from tuner.engines.metrics.interface import LogLine, TrialWork, believable, number
from tuner.units import parse_bytes

_RATE: Final = re.compile(
    r"global_step=(\d{1,12}),.*CurrSamplesPerSec=([\d.e+-]{1,24}),.*MaxMemAllocated=([\d.]{1,16})GB"
)
_PIPELINE: Final = re.compile(r"steps: (\d{1,12}) loss: .*iter time \(s\): ([\d.]{1,24})")
_BATCH: Final = re.compile(r"\btrain_batch_size \.{3,40} (\d{1,12})\s*$")
_GB_BYTES: Final = parse_bytes("1GiB")


def read(line: str, job: TrialWork) -> LogLine | None:
    """Read a line of the log."""
    if match := _PIPELINE.search(line):
        return believable(LogLine(step=int(match.group(1)), step_s=number(match.group(2))))
    if match := _BATCH.search(line):
        return believable(LogLine(samples_per_step=int(match.group(1))))
    match = _RATE.search(line)
    if not match or not (rate := number(match.group(2))):
        return None
    return believable(
        LogLine(
            step=int(match.group(1)),
            step_s=job.samples_per_step / rate,
            peak_bytes=int(number(match.group(3)) * _GB_BYTES) or None,
        )
    )
