"""Corrections of an engine on a device, from launches of deployments, for later plans.

    corrected latency = factor x predicted latency, of TTFT and of TPOT each
    band              = corrected latency over and times `spread`

The factor is the geometric mean of measured over predicted of n deployments, and

    log spread = max(log 1.05, t sqrt(1 + 1 / n) s)

with s the standard deviation of the logarithms and t what holds four of five of Student's
distribution with n - 1 degrees of freedom. Two deployments at least: one says nothing of the
spread.

Not covered: the search's own prices. Options are pruned and capacity is computed by uncorrected
seconds; the simulated latencies, which decide whether SLOs hold, are corrected.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, Final

from pydantic import Field

from profilers.records import Record
from tuner.costs.serve.bands import Bands, LatencyBand

FEWEST: Final = 2
STUDENT_80: Final = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)
"""Quantiles of Student's distribution that hold four of five, by degrees of freedom from 1 on;
beyond, 1.282 + 0.85 / degrees is within 0.5 %."""
LEAST_SPREAD: Final = 1.05
"""Smallest spread: repeats of one launch differ by as much."""

MOST: Final = 30.0
"""Largest factor that is accepted (its inverse the smallest), and largest spread."""

Factor = Annotated[float, Field(gt=0.0, lt=1e3, allow_inf_nan=False)]
Spread = Annotated[float, Field(ge=1.0, lt=1e3, allow_inf_nan=False)]


class LatencyResidual(Record):
    """Correction of one latency and its spread."""

    factor: Factor
    spread: Spread

    @property
    def band(self) -> LatencyBand:
        """Return the band around a corrected prediction."""
        return LatencyBand(low_ratio=1.0 / self.spread, high_ratio=self.spread)


class ServeResidual(Record):
    """Corrections of one engine on the devices of one profile."""

    engine: str
    release: str
    ttft: LatencyResidual
    tpot: LatencyResidual
    num_deployments: Annotated[int, Field(ge=FEWEST)]

    @property
    def bands(self) -> Bands:
        """Return the bands around corrected predictions."""
        return Bands(ttft=self.ttft.band, tpot=self.tpot.band, is_new=False)


def latency_residual(
    ratios: Sequence[float], *, prior: LatencyResidual | None
) -> LatencyResidual | None:
    """Fit to measured over predicted latencies, which `prior` had corrected.

    None where no factor brings predictions near them: they are of something else.
    """
    logs = [math.log(ratio) for ratio in ratios]
    degrees = len(logs) - 1
    few = degrees <= len(STUDENT_80)
    quantile = STUDENT_80[degrees - 1] if few else 1.282 + 0.85 / degrees
    spread = quantile * math.sqrt(1.0 + 1.0 / len(logs)) * statistics.stdev(logs)
    before = 1.0 if prior is None else prior.factor
    factor = before * math.exp(statistics.mean(logs))
    if spread > math.log(MOST) or not 1.0 / MOST < factor < MOST:
        return None
    return LatencyResidual(factor=factor, spread=max(LEAST_SPREAD, math.exp(spread)))
