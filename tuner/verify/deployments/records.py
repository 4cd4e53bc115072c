"""What is kept of each launch of a deployment, one file each, and what they conclude.

    BenchRun          one run of a client, read off its JSON result
    ServeTrialRecord  `trials/NNNN.json`: one launch with all its runs, written once it has ended
    ServeVerified     `verified.json`: derived from the records

Times are seconds; percentiles are over the requests of a run that completed.
"""

from typing import Annotated, Final, Literal

from pydantic import Field

from profilers.records import Record, Seconds
from profilers.steps.config import Count, Size
from tuner.serve_plan import Ratio, ServeDecision, ServePrediction
from tuner.verify.records import TrialStatus

SCHEMA_VERSION: Final = 1
# 1: first release.

Share = Annotated[float, Field(ge=0.0, le=1.0)]
ServeOrigin = Literal["plan", "alternative", "repeat"]


class Spread(Record):
    """A time over requests, as far as the client tells it."""

    mean: Seconds
    p50: Seconds | None = None
    p90: Seconds | None = None
    p99: Seconds | None = None


class BenchRun(Record):
    """What a client measured."""

    completed: Count
    failed: Size | None
    """None where the client does not tell and was not told how many to send."""
    duration_s: Seconds
    ttft_s: Spread
    tpot_s: Spread
    """Per output token after the first."""
    requests_per_s: Ratio
    """Completed."""
    output_tokens_per_s: Ratio
    goodput_requests_per_s: Ratio | None = None
    """That met every target, as the client counts them; None where it was told none."""
    mean_input_tokens: Ratio | None = None
    mean_output_tokens: Ratio | None = None
    prefix_hit_ratio: Share | None = None
    """Of the prompt tokens, where the client asks the server."""


class ServeTrialRecord(Record):
    """`trials/NNNN.json` of a deployment: one launch that ended."""

    schema_version: Literal[1] = 1
    number: Size
    origin: ServeOrigin
    """A repeat launches a decision again that ran already."""
    decision: ServeDecision
    status: TrialStatus
    reason: str = ""
    """One line when the status is not ok."""
    last_lines: tuple[str, ...] = ()
    """The end of the server's or the client's log, where the status is not ok."""
    predicted: ServePrediction
    runs: tuple[BenchRun, ...] = ()
    """Every run of the client that could be read."""
    ready_s: Seconds | None = None
    """From the start until every server answered."""
    wall_s: Seconds
    engine: str
    client: str


class ServeTrial(Record):
    """A deployment as `verified.json` shows it: all its launches together."""

    decision: ServeDecision
    origin: ServeOrigin
    status: TrialStatus
    reason: str = ""
    num_devices: Count
    runs: Size
    """Of the client, all launches together; times below are the medians over them."""
    predicted_ttft_s: Seconds
    """Mean over requests, as the others without a percentile in their name."""
    recalibrated_ttft_s: Seconds | None
    """Scaled by what the other deployments showed; absent where no other ran."""
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
    """Requests that failed, over all that were sent; None where unknown."""
    holds_targets: bool | None = None
    """None where nothing was measured."""
    misses: tuple[str, ...] = ()
    """Targets that do not hold, a line each."""


class ServeFactors(Record):
    """Measured over predicted, median over the deployments that ran."""

    ttft: Annotated[float, Field(gt=0.0)]
    tpot: Annotated[float, Field(gt=0.0)]
    num_deployments: Count


class ServeAccuracy(Record):
    """How far predicted means were from measured ones: medians of |p - m| / m."""

    ttft_median_ape: float | None
    tpot_median_ape: float | None
    recalibrated_ttft_median_ape: float | None
    """Each deployment from the others."""
    recalibrated_tpot_median_ape: float | None
    ttft_within_band: Size
    """Deployments whose measured mean lies in the predicted band."""
    tpot_within_band: Size
    num_deployments: Size


class ServeVerified(Record):
    """`verified.json` of a deployment."""

    schema_version: Literal[1] = 1
    objective: Literal["goodput", "cost", "devices", "rate"]
    trials: tuple[ServeTrial, ...]
    """In the order they were first launched."""
    winner: ServeDecision | None
    """Best by the objective among those that hold every target; absent when none does."""
    regret_ratio: float | None
    """By the objective, the plan's first choice over the winner, minus 1; absent where the first
    choice did not run or misses a target."""
    tie: bool
    """The winner and another are equal by the objective, or nearer than the noise of their runs."""
    factors: ServeFactors | None
    accuracy: ServeAccuracy
    notes: tuple[str, ...] = ()
