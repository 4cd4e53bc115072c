"""What the plan is for: a training run, its precision, its recorded routing, its failures."""

from enum import StrEnum
from typing import Literal

from profilers.records import Record
from tuner.spec.fields import Count, FilePath, Number, PositiveSeconds, Seconds


class Precision(StrEnum):
    """What the matrix products compute in; the names engines use."""

    BF16 = "bf16"
    """bfloat16 products, fp32 master weights and optimizer state."""
    FP32 = "fp32"
    """Single precision throughout."""


class Phase(StrEnum):
    """Which part of a recorded routing a plan is made for."""

    STEADY = "steady"
    """After the router has settled: the second half of the recorded passes."""
    EARLY = "early"
    """While the router still learns to balance: the first quarter of the recorded passes."""


class Routing(Record):
    """A recorded routing to plan for."""

    path: FilePath
    """A JSON file; tuner/spec/routing.py says what it holds."""
    phase: Phase = Phase.STEADY


class Reliability(Record):
    """How often devices fail and what that costs."""

    device_mtbf: PositiveSeconds
    """Mean time between failures of one device, seconds."""
    restart: Seconds
    """From a failure to the first step after it, checkpoint reading apart, seconds."""


class TrainGoal(Record):
    """A pretraining run."""

    kind: Literal["train"]
    sequence_length: Count
    """Tokens of one sequence."""
    global_batch_size: Count
    """Sequences of one optimizer step."""
    tokens: Number | None = None
    """Tokens of the whole run, for its duration and price."""
    precision: Precision = Precision.BF16
    routing: Routing | None = None
    """Absent: every expert is taken to get the same number of tokens."""
    reliability: Reliability | None = None
    """Absent: no failures are priced."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequence_length * self.global_batch_size
