"""The error band of a predicted peak.

A peak p is expected between p / (1 + over) and p / (1 - under), where `over` and `under` are the
largest errors of predictions above and below the measured peak, over the published runs of a
software, pipelines apart (tests/benchmarks/training_memory.py prints them). The band is a largest
error, not a distribution; how likely a peak is to be exceeded is said by peak_errors.py.

Not covered: pipelines that nobody published peaks of. Megatron's of more than two ranks take the
errors of its runs of one and two; DeepSpeed's and the reference step's, which run PyTorch's modules
as torchtitan does, take torchtitan's.

Letters: C peaks.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tuner.costs.analytic.constants import Software

Floats = npt.NDArray[np.float64]


class Largest(NamedTuple):
    """Largest errors of predicted peaks, as shares of the measured ones."""

    over_ratio: float
    under_ratio: float


USUAL: Final = Largest(over_ratio=0.12, under_ratio=0.12)
"""torchtitan without a pipeline on H100, H200 and B200, 16 rows, 6.0 % low to 2.4 % high.
Megatron-Bridge without one, 3 rows, 8.7 % low. Megatron-LM on one node, 20 rows without and 7 with
a pipeline of two ranks, 0.8 %."""

IN_PIPELINE: Final[Mapping[Software, Largest]] = {
    Software.TORCH_FSDP: Largest(over_ratio=0.12, under_ratio=0.12),
}
"""With a pipeline, where that is told apart: torchtitan's Llama 3.1 405B on 512 H100 (TP 8, PP 8,
four rows), 0.4 to 11.7 % low."""


def peak_bands(
    peak_bytes_C: Floats, *, software: Software, pipeline_C: npt.ArrayLike
) -> tuple[Floats, Floats]:
    """Bytes between which predicted peaks are expected to be met.

    Args:
        peak_bytes_C: predicted.
        software: that runs.
        pipeline_C: ranks of the pipeline, or one number for all.
    """
    piped = IN_PIPELINE.get(software, USUAL)
    is_piped_C = np.asarray(pipeline_C) > 1
    over_C = np.where(is_piped_C, piped.over_ratio, USUAL.over_ratio)
    under_C = np.where(is_piped_C, piped.under_ratio, USUAL.under_ratio)
    return peak_bytes_C / (1.0 + over_C), peak_bytes_C / (1.0 - under_C)


def peak_band(peak_bytes: float, *, software: Software, pipeline: int) -> tuple[float, float]:
    """Bytes between which one predicted peak is expected to be met."""
    low, high = peak_bands(np.array([peak_bytes]), software=software, pipeline_C=pipeline)
    return float(low[0]), float(high[0])
