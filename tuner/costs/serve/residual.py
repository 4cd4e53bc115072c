"""Corrections of an engine's latencies on a device, fitted to launched deployments.

    corrected latency = factor x predicted latency, of TTFT and of TPOT each
    band              = corrected latency / spread to corrected latency * spread

x_i is log(measured / predicted) of deployment i of n, x their median. They are taken as normal,
mean and spread unknown, with conjugate priors (Gelman et al., Bayesian Data Analysis, 3.3)
that are worth k = 1 deployment of mean 0 and v = 2 of the metric's usual spread s; a median in the
place of the mean, as TTFT has long tails:

    log factor = log before + n x / (n + k)
    log spread = max(log 1.05, t sqrt((1 + 1 / (n + k)) (v s^2 + sum (x_i - x)^2
                                                          + k n x^2 / (n + k)) / (v + n)))

where `before` is the factor that the plan was made with, 1 at first, and t the two-sided 80 %
quantile of Student's distribution with v + n degrees of freedom. So a single launch already
corrects, and the farther it is from what was predicted, the wider is the band. The three constants
are from published launches (tests/benchmarks/serving_accuracy.py).

The logs of a running server correct the steps themselves instead (`steps`), and capacity with them;
the factors on latencies are over what such steps give.

Not covered: which round a launch is of (four in four rounds count for more than four in one), and
the search's prices: options are pruned and capacity is computed without factors on latencies; the
simulated latencies, which decide whether SLOs hold, have them.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal

from pydantic import Field

from profilers.records import Record
from tuner.costs.serve.bands import Bands, LatencyBand
from tuner.prices.serve.corrections import UNCORRECTED, Factor, StepCorrections
from tuner.units import format_counted

PRIOR_LAUNCHES: Final = 1
"""Deployments that the prior mean is worth."""
PRIOR_DEGREES: Final = 2
"""Deployments that the prior spread is worth."""
STUDENT_80: Final = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)
"""Quantiles of Student's distribution that hold four of five, by degrees of freedom from 1 on;
beyond, 1.282 + 0.85 / degrees is within 0.5 %."""
Metric = Literal["ttft", "tpot"]
METRICS: Final[tuple[Metric, ...]] = ("ttft", "tpot")
USUAL_LOG_SPREADS: Final[Mapping[Metric, float]] = {"ttft": 0.2, "tpot": 0.1}
"""Standard deviation of log(measured / predicted) among deployments of one engine on a device."""
LEAST_SPREAD: Final = 1.05
"""Smallest spread: repeats of one launch differ by as much."""

MOST: Final = 30.0
"""Largest factor that is accepted (its inverse the smallest), and largest spread."""

Spread = Annotated[float, Field(ge=1.0, lt=1e3, allow_inf_nan=False)]


class LatencyResidual(Record):
    """Correction of one latency, with its spread."""

    factor: Factor
    """Corrected over predicted latency."""
    spread: Spread
    """Edge of the band over the corrected latency."""

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
    num_deployments: Annotated[int, Field(ge=1)]
    model: str = ""
    """Model whose steps were corrected; empty: none were."""
    layout: str = ""
    """Layout of the server whose logs corrected them."""
    steps: StepCorrections = UNCORRECTED
    """Corrections of the steps that the latencies are predicted from."""

    def notes(self, *, release: str, model: str) -> Iterator[str]:
        """Say what is corrected, by which logs or launches, and what changed since."""
        factors = {"TTFT": self.ttft.factor, "TPOT": self.tpot.factor}
        if not self.model:
            source = f"{format_counted(self.num_deployments, 'deployment')} of {self.engine}"
            listed = ", ".join(f"{name} x {factor:.3g}" for name, factor in factors.items())
            yield f"corrected by {source} {self.release}: {listed}"
            return
        factors = {**self.steps.model_dump(), **factors}
        changed = {name: factor for name, factor in factors.items() if factor != 1.0}
        listed = ", ".join(f"{name} x {factor:.3g}" for name, factor in changed.items())
        yield (
            f"steps corrected by logs of {self.model} ({self.layout}) on {self.engine}"
            f" {self.release}: {listed.replace('_', ' ')}"
        )
        for name, before, now in (("release", self.release, release), ("model", self.model, model)):
            if before != now:
                yield f"the logs are of {name} {before}, not {now}"

    def of_release(self, release: str) -> "ServeResidual":
        """Return the corrections for a release; another one's bands are as wide as without logs."""
        if release == self.release:
            return self
        spreads = {str(name): latency_residual((), metric=name, before=None) for name in METRICS}
        return self.model_copy(update=spreads)

    @property
    def bands(self) -> Bands:
        """Return the bands around corrected predictions."""
        return Bands(ttft=self.ttft.band, tpot=self.tpot.band, is_new=False)


def latency_residual(
    ratios: Sequence[float], *, metric: Metric, before: LatencyResidual | None
) -> LatencyResidual | None:
    """Fit a correction to ratios of measured latencies to predictions that `before` corrected.

    Return None where factor or spread exceeds `MOST`: what was measured is something else.
    """
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.median(logs or [0.0])
    weight, degrees = len(logs) + PRIOR_LAUNCHES, len(logs) + PRIOR_DEGREES
    few = degrees <= len(STUDENT_80)
    quantile = STUDENT_80[degrees - 1] if few else 1.282 + 0.85 / degrees
    squares = (
        PRIOR_DEGREES * USUAL_LOG_SPREADS[metric] ** 2
        + math.fsum((log - middle) ** 2 for log in logs)
        + PRIOR_LAUNCHES * len(logs) / weight * middle**2
    )
    spread = quantile * math.sqrt((1.0 + 1.0 / weight) * squares / degrees)
    factor = math.exp(middle * len(logs) / weight) * (1.0 if before is None else before.factor)
    if spread > math.log(MOST) or not 1.0 / MOST < factor < MOST:
        return None
    return LatencyResidual(factor=factor, spread=max(LEAST_SPREAD, math.exp(spread)))
