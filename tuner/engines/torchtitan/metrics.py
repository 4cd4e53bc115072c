"""torchtitan: the line of metrics, whose `tps` is tokens per second and device.

    ... step: 12  loss:  5.1  grad_norm:  0.9  memory: 41.20GiB(51.9%)  tps: 7,251  tflops: ...

    step_s = tokens_per_step / (tps * devices)

The throughput is the mean since the last such line (`log_freq`, default 10; the first step has its
own line); 1 gives every step. It is rounded to whole tokens, so the relative error of a step is
1 / (2 tps). A device without memory counters prints -0.00GiB (-0.00%). Colours are removed before;
validation lines are skipped. Source:
`MetricsProcessor.log` of torchtitan/components/metrics.py, torchtitan 0.2.1, 0.2.2 and 0.3.0.
"""

import re
from typing import Final

from tuner.engines.metrics.interface import LogLine, TrialWork, believable, number
from tuner.units import parse_bytes

_STEP: Final = re.compile(
    r"(?<!validate )step: +(\d{1,12}) .*memory: *(-?[\d.]{1,16})GiB.*\btps: *([\d,]{1,24})"
)
_GIB_BYTES: Final = parse_bytes("1GiB")


def read(line: str, job: TrialWork) -> LogLine | None:
    """Read a line of the log."""
    match = _STEP.search(line)
    if not match or not (rate := number(match.group(3))):
        return None
    return believable(
        LogLine(
            step=int(match.group(1)),
            step_s=job.tokens_per_step / (rate * job.num_devices),
            peak_bytes=int(number(match.group(2)) * _GIB_BYTES) or None,
        )
    )
