"""A decision that a study wants launched."""

from dataclasses import dataclass
from typing import Literal

from tuner.plan import TrainDecision

Origin = Literal["plan", "neighbour", "alternative", "sampler", "repeat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A decision to launch, and where the study expects the answer."""

    number: int
    """Of the study's trial."""
    decision: TrainDecision
    origin: Origin
