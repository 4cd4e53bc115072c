"""A decision that a study proposes to launch."""

from typing import Literal

from profilers.records import Record
from profilers.steps.config import Size
from tuner.config.train import TrainDecision
from tuner.verify.budget.scale import Scale

Origin = Literal["plan", "neighbour", "alternative", "sampler", "repeat"]


class Proposal(Record):
    """A decision to launch, and the trial of the study that expects its result."""

    number: Size
    """Of the study's trial."""
    decision: TrainDecision
    """Of the whole job."""
    scale: Scale | None = None
    """The scaled-down job to launch instead."""
    origin: Origin
