"""A decision that a study proposes to launch: a training run's, or a deployment's.

What is generic here, in the study and in the search over it is a training run's unless another kind
is named: `Proposal` is `Proposal[TrainDecision]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal

from typing_extensions import TypeVar

from profilers.records import Record
from profilers.steps.config import Size
from tuner.config.train import TrainDecision
from tuner.verify.budget.scale import Scale

Origin = Literal["plan", "neighbour", "alternative", "sampler", "repeat"]

Decision = TypeVar("Decision", bound=Record, default=TrainDecision)


class Proposal(Record, Generic[Decision]):
    """A decision to launch, and the trial of the study that expects its result."""

    number: Size
    """Number of the study's trial."""
    decision: Decision
    """Decision of the whole job."""
    scale: Scale | None = None
    """The scaled-down job to launch instead."""
    origin: Origin

    @property
    def job(self) -> tuple[Decision, Scale | None]:
        """The decision, and the scaled-down job to launch instead of it."""
        return self.decision, self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest(Generic[Decision]):
    """A launch that the loop wants next."""

    decision: Decision | None = None
    """Decision to launch once more; None: a new decision of the sampler."""
    scale: Scale | None = None
    """The scaled-down job to launch instead of the decision."""
    among: Mapping[Decision, Scale | None] | None = None
    """New decisions that may be launched, each with its scaled-down job; None: all, whole."""


Knobs = Mapping[str, str | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPoint:
    """A launchable point of the search space."""

    knobs: Knobs
    """Equal names at every point."""
    predicted: tuple[float, ...]
    """The metric to minimise, then metrics over their limits; all positive."""
