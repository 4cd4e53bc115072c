"""Proposals, trial records, one file each, and the conclusion of a verification of training.

Every kind of decision has a record of its own with what a launch of it measured; the study and the
loop know `LaunchRecord` (a deployment's is in tuner/verify/deployments/records.py).

A trial's file is written when the trial has ended and never changed, so a killed verification loses
at most the running trial. `verified.json` is derived from the files.

A proposal is a decision that a study wants launched, a training run's or a deployment's. What is
generic here, in the study and in the search over it is a training run's unless another kind is
named: `Proposal` is `Proposal[TrainDecision]`.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal

from pydantic import Field
from typing_extensions import TypeVar

from profilers.records import Record, Seconds
from profilers.steps.config import Size
from tuner.config.train import TrainDecision
from tuner.costs.residuals import Residual
from tuner.plans.folder import read_trials_as
from tuner.plans.train import Band
from tuner.tables import Rows
from tuner.verify.budget.scale import Scale

Origin = Literal["plan", "neighbour", "alternative", "sampler", "repeat"]
"""Proposer of a trial; only former releases wrote `neighbour` and `alternative`."""

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


TrialStatus = Literal["ok", "out_of_memory", "timeout", "crashed"]


class LaunchRecord(Record, Generic[Decision]):
    """`trials/NNNN.json`: one launch that ended, of any kind of decision."""

    schema_version: Literal[1] = 1
    number: Size
    """Number of the Optuna trial."""
    origin: Origin
    """Proposer of the decision; a repeat launches one once more."""
    decision: Decision
    """Decision of the whole job."""
    status: TrialStatus
    reason: str = ""
    """One line when the status is not ok."""
    wall_s: Seconds
    """The whole launch, start-up included."""
    engine: str

    @property
    def job(self) -> tuple[Decision, Scale | None]:
        """The decision, and the scaled-down job that was launched instead of it."""
        return self.decision, None

    @property
    @abstractmethod
    def sampled_value(self) -> float | None:
        """Return the value that the sampler minimises; None if nothing was measured."""


class TrialRecord(LaunchRecord[TrainDecision]):
    """One launch of a training run."""

    scale: Scale | None = None
    """The scaled-down job that was launched instead; all other fields are about it."""
    predicted_step_s: Seconds
    predicted_communication_s: Seconds
    """The communication in it; recalibration scales the two parts."""
    predicted_activation_bytes: tuple[Size, ...]
    """Predicted bytes of activations per pipeline rank, peak over its devices."""
    measured_steps_s: tuple[Seconds, ...] = ()
    """Every timed step."""
    measured_step_s: Seconds | None = None
    """Median seconds of a timed step."""
    measured_activation_bytes: tuple[Size, ...] = ()
    """Measured bytes of activations per pipeline rank, peak over its devices."""
    measured_peak_bytes: Size | None = None
    """Largest memory use of a device, if the engine reports it."""
    measured_loads: tuple[tuple[int, ...], ...] = ()
    """[MoE layers][experts]: token copies of the last step."""
    release: str
    device: str

    @property
    def job(self) -> tuple[TrainDecision, Scale | None]:
        """The decision, and the scaled-down job that was launched instead of it."""
        return self.decision, self.scale

    @property
    def sampled_value(self) -> float | None:
        """Seconds of a step; None if nothing was measured."""
        return self.measured_step_s


AnyRecord = TypeVar("AnyRecord", bound=LaunchRecord[Any], default=TrialRecord)


class Extrapolated(Record):
    """Step time of a full-scale job, from trials of it, of scaled-down or of other jobs."""

    step_time_s: Seconds
    step_time_s_band: Band
    """90 % band: nine of ten contain the measured time."""
    error_ratio: Annotated[float, Field(ge=0.0)]
    """Half of the band over the step."""
    unseen: tuple[str, ...] = ()
    """Parts of the full-scale job that no trial ran: there the model's own band applies."""


class ShownTrial(Record):
    """Fields of a trial in `verified.json` that all kinds of decisions share."""

    origin: str
    status: TrialStatus
    reason: str = ""


class Trial(ShownTrial):
    """A trial of a training run as `verified.json` shows it."""

    decision: TrainDecision
    """Decision of the whole job."""
    scale: Scale | None = None
    """The scaled-down job that was launched instead; times and bytes are its own."""
    extrapolated: Extrapolated | None = None
    """Estimate of the full-scale job from all trials, if it was not launched itself."""
    predicted_step_s: Seconds
    recalibrated_step_s: Seconds | None
    """Recalibrated from the other trials only; absent if there are too few."""
    measured_step_s: Seconds | None
    predicted_activation_bytes: tuple[Size, ...]
    recalibrated_activation_bytes: tuple[Size, ...]
    """Equal to the predicted ones: they are exact counts, not fitted."""
    measured_activation_bytes: tuple[Size, ...]


class Accuracy(Record):
    """Errors of predictions against measurements, over the trials that ran."""

    predicted_median_ape: float | None
    """Median of |predicted - measured| / measured of the step time, before any trial."""
    recalibrated_median_ape: float | None
    """Median error of the step time after recalibration, each trial from the others."""
    activation_max_ape: float | None
    """Largest relative error of the activation bytes, over all trials and pipeline ranks."""
    rank_of_measured_best: Annotated[int, Field(ge=1)] | None
    """Rank of the fastest measured trial by predicted time."""


class Conclusion(Record):
    """Fields of `verified.json` that all kinds of decisions share."""

    schema_version: Literal[1] = 1
    regret_ratio: float | None
    """Regret of the plan's first choice against the winner: ratio of the worse to the better
    objective, minus 1, extrapolated for scaled-down launches; absent if the first choice did not
    run or misses an SLO."""
    tie: bool
    """The winner and the first choice, or another deployment, are equal, or differ by less than
    the noise of their runs or the error of their extrapolation."""
    notes: tuple[str, ...] = ()


class Verified(Conclusion):
    """`verified.json` of a training plan."""

    winner: TrainDecision | None
    """The fastest decision, measured or extrapolated from other jobs; absent if none ran."""
    trials: Rows[Trial]
    """Trials in the order of their launches."""
    winner_step_s: Seconds | None
    """Step time of the winner, measured unless `winner_extrapolated` is set."""
    winner_extrapolated: Extrapolated | None = None
    """Extrapolation of the winner's step; set if the winner was launched at a smaller scale only,
    or is the plan's own choice and was not launched."""
    residual: Residual | None
    """Residual of the model fitted to all trials."""
    accuracy: Accuracy


def read_trials(folder: Path) -> tuple[TrialRecord, ...]:
    """Read every finished trial of a plan, in order of their numbers.

    Raises:
        PlanUnreadableError: a file is damaged; it names the file and what to do.
    """
    return read_trials_as(TrialRecord, folder)
