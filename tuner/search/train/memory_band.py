"""The error band of a predicted peak.

A peak p is expected between p / (1 + OVER_RATIO) and p / (1 - UNDER_RATIO), the largest errors of
predictions above and below the measured peak, over the published runs
(tests/benchmarks/training_memory.py prints them). The band is a largest error, not a distribution;
peak_errors.py has the probability that a peak is exceeded.

Not covered: pipelines without published peaks. Megatron's of more than two ranks take the errors of
its runs of one and two; DeepSpeed's and the reference step's, which run PyTorch's modules as
torchtitan does, take torchtitan's.
"""

from typing import Final

UNDER_RATIO: Final = 0.12
"""torchtitan's Llama 3.1 405B in a pipeline on 512 H100 (TP 8, PP 8), four rows, 0.4 to 11.7 % low;
without one on H100, H200 and B200, 16 rows, up to 6.0 % low. Megatron-Bridge without one, 3 rows,
8.7 % low. Megatron-LM on one node, 20 rows without and 7 with a pipeline of two ranks, 0.8 %."""

OVER_RATIO: Final = 0.12
"""No published run is more than 2.4 % above its peak; the margin above is set to
that below, for runs in other settings."""


def peak_band(peak_bytes: float) -> tuple[float, float]:
    """Bytes between which a measured peak is expected."""
    return peak_bytes / (1.0 + OVER_RATIO), peak_bytes / (1.0 - UNDER_RATIO)
