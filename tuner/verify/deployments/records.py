"""Records of the launches of a deployment, one file each, and their conclusion.

    BenchmarkRun      one run of a client, read from its JSON result
    ServeTrialRecord  `trials/NNNN.json`: one launch with all its runs, written once it has ended
    ServeVerified     `verified.json`: derived from the records

Times are seconds; percentiles are over the requests of a run that completed.
"""

import statistics
from typing import Annotated, Literal

from pydantic import Field

from profilers.records import Record, Seconds
from profilers.steps.config import Count, Size
from tuner.config.serve import ServeDecision
from tuner.costs.serve.residual import ServeResidual
from tuner.engines.metrics.benchmark_run import BenchmarkRun, Spread
from tuner.plans.serve import Ratio, ServePrediction
from tuner.tables import Rows
from tuner.verify.records import Conclusion, LaunchRecord, ShownTrial

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class ServeTrialRecord(LaunchRecord[ServeDecision]):
    """`trials/NNNN.json` of a deployment: one launch that ended."""

    last_lines: tuple[str, ...] = ()
    """The tail of the server's or client's log if the status is not ok."""
    predicted: ServePrediction
    runs: tuple[BenchmarkRun, ...] = ()
    """Every benchmark run with a readable result."""
    ready_s: Seconds | None = None
    """Seconds from the start until every server was ready."""
    client: str

    @property
    def sampled_value(self) -> float | None:
        """Device-seconds of a request that meets the SLOs, of any where goodput is unknown.

        None if nothing was measured.
        """
        rates = [
            run.requests_per_s if run.goodput_requests_per_s is None else run.goodput_requests_per_s
            for run in self.runs
        ]
        if self.status != "ok" or not rates or not statistics.median(rates):
            return None
        return self.decision.num_devices / statistics.median(rates)


class ServeTrial(ShownTrial):
    """A deployment as `verified.json` shows it: all its launches together."""

    decision: ServeDecision
    num_devices: Count
    runs: Size
    """Benchmark runs of all launches; times below are medians over them."""
    predicted_ttft_s: Seconds
    """Mean over requests, as the others without a percentile in their name."""
    recalibrated_ttft_s: Seconds | None
    """Predicted mean TTFT times the factor of the other deployments; absent if no other ran."""
    measured_ttft_s: Seconds | None
    measured_ttft: Spread | None = None
    predicted_tpot_s: Seconds
    recalibrated_tpot_s: Seconds | None
    measured_tpot_s: Seconds | None
    measured_tpot: Spread | None = None
    predicted_requests_per_s: Ratio
    measured_requests_per_s: Ratio | None = None
    predicted_output_tokens_per_s: Ratio
    measured_output_tokens_per_s: Ratio | None = None
    predicted_goodput_per_device: Ratio
    measured_goodput_per_device: Ratio | None = None
    failed_ratio: Share | None = None
    """Failed requests over all sent; None if unknown."""
    holds_targets: bool | None = None
    """Whether every SLO is met; None if nothing was measured."""
    misses: tuple[str, ...] = ()
    """Missed SLOs, a line each."""


class ServeFactors(Record):
    """Measured over predicted, median over the deployments that ran."""

    ttft: Annotated[float, Field(gt=0.0)]
    tpot: Annotated[float, Field(gt=0.0)]
    num_deployments: Count


class ServeAccuracy(Record):
    """Errors of predicted means against measured ones: medians of |p - m| / m."""

    ttft_median_ape: float | None
    tpot_median_ape: float | None
    recalibrated_ttft_median_ape: float | None
    """Median error of TTFT after recalibration, each deployment from the others."""
    recalibrated_tpot_median_ape: float | None
    ttft_within_band: Size
    """Deployments whose measured mean lies in the predicted band."""
    tpot_within_band: Size
    num_deployments: Size


class ServeVerified(Conclusion):
    """`verified.json` of a deployment."""

    winner: ServeDecision | None
    """Best by the objective among those that meet every SLO; absent if none does."""
    objective: Literal["goodput", "cost", "devices", "rate"]
    trials: Rows[ServeTrial]
    """Trials in the order that their decisions were first launched."""
    factors: ServeFactors | None
    residual: ServeResidual | None = None
    """Corrections for later plans of this engine on these devices; absent where a latency was not
    measured, no factor brings predictions near it, or pools have several engines."""
    accuracy: ServeAccuracy
