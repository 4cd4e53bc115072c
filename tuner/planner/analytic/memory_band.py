"""The error band of a predicted peak, and how much of it lies above what a device may use.

A peak p is expected between p / (1 + r) and p / (1 - r). The band is the largest error met on
published runs, not a distribution, so what is said of a peak below the limit is the share of the
band's width above it, and no probability.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MEMORY_BAND_RATIO: Final = 0.12
"""r: largest error on published peaks without a pipeline, tests/benchmarks/training_memory.py."""


def peak_band(peak_bytes: float) -> tuple[float, float]:
    """Bytes between which a predicted peak is expected to be met."""
    return peak_bytes / (1.0 + MEMORY_BAND_RATIO), peak_bytes / (1.0 - MEMORY_BAND_RATIO)


def above_ratio(peak_bytes: Floats, *, limit_bytes: float) -> Floats:
    """Share of the bands of some peaks that lies above a limit."""
    low, high = peak_bytes / (1.0 + MEMORY_BAND_RATIO), peak_bytes / (1.0 - MEMORY_BAND_RATIO)
    found: Floats = np.clip((high - limit_bytes) / (high - low), 0.0, 1.0)
    return found
