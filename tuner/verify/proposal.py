"""A decision that a study wants launched."""

from typing import Literal

from profilers.records import Record
from profilers.steps.config import Size
from tuner.plan import TrainDecision
from tuner.verify.budget.scale import Scale

Origin = Literal["plan", "neighbour", "alternative", "sampler", "repeat"]


class Proposal(Record):
    """A decision to launch, and where the study expects the answer."""

    number: Size
    """Of the study's trial."""
    decision: TrainDecision
    """Of the whole job."""
    scale: Scale | None = None
    """The smaller job to launch in its place."""
    origin: Origin
