"""Error bands of the ratio of two step times: narrower than of either time, as errors are shared.

Two configurations of one model on one machine under one release share most of the prediction error:
the clocks, the host, the kernels of that release. The remaining error is classified by

    same kernels   equal TP, CP, EP, ETP, micro-batch, recomputation and dispatch: the layers' unit
                   costs are equal, the pipeline and the data ranks differ
    other kernels  anything else differs

and by the device's generation and whether the model has experts. The bands are made from pairs of
published runs (tuner/calibrate/ratio_bands.py).
"""

from collections.abc import Sequence
from typing import Annotated, Final

from pydantic import Field

from profilers.records import Record

Edge = Annotated[float, Field(gt=0.0, lt=1e6, allow_inf_nan=False)]
Edges = tuple[float, float]

STATED_RATIO: Final = 0.8
"""Share of pairs that a band holds: an edge is passed by one pair of ten."""


class RatioBand(Record):
    """Measured over predicted ratio of two steps: where pairs that were held out fell."""

    generation: str = ""
    """Generation of the device; empty for any."""
    has_experts: bool | None = None
    """Whether the model has experts; None for both."""
    same_kernels: bool
    low: Edge
    high: Edge
    settings: int
    """Distinct settings with pairs: one model, device, precision and release each."""
    pairs: int

    def holds(self, *, generation: str, has_experts: bool, same_kernels: bool) -> bool:
        """Say whether the band is about such pairs."""
        return (
            self.same_kernels == same_kernels
            and self.generation in ("", generation)
            and self.has_experts in (None, has_experts)
        )


class RatioBands(Record):
    """Bands of ratios, and their coverage of held-out pairs."""

    stated_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = STATED_RATIO
    covered_ratio: float | None
    """Share of the pairs of left-out settings that the bands without them held; settings weigh the
    square root of their pairs of recipes."""
    bands: tuple[RatioBand, ...]


def ratio_band_among(
    bands: Sequence[RatioBand], *, generation: str, has_experts: bool, same_kernels: bool
) -> Edges | None:
    """Return the narrowest band that is about such pairs; None where there is none."""
    holding = [
        band
        for band in bands
        if band.holds(generation=generation, has_experts=has_experts, same_kernels=same_kernels)
    ]
    if not holding:
        return None
    first = max(holding, key=lambda band: bool(band.generation) + (band.has_experts is not None))
    return first.low, first.high
