"""For tests: layouts that were really run, and their predictions.

A file of runs names decisions and the step times of every round in which they took turns, so that
drift of the machine falls on all alike. The measured time of a layout is the median of all steps,
its noise how far the medians of its rounds lie apart.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from profilers.records import Record, Seconds
from tuner.config.train import TrainDecision
from tuner.costs.reference.workload import Workload
from tuner.plans.train import TrainPrediction
from tuner.search.reference.decisions import degrees_of
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine
from tuner.search.reference.predict import predict

Steps = Annotated[tuple[Seconds, ...], Field(min_length=1)]


class LayoutRuns(Record):
    """One decision and how long its steps took."""

    decision: TrainDecision
    step_s: Annotated[tuple[Steps, ...], Field(min_length=1)]
    """[rounds][steps]."""
    inter_node_bytes: int
    """What a step counted that dispatch and combine sent between nodes."""

    @property
    def median_s(self) -> float:
        """Of all steps."""
        return statistics.median(second for steps in self.step_s for second in steps)

    @property
    def noise_ratio(self) -> float:
        """How far the medians of the rounds lie apart."""
        medians = [statistics.median(steps) for steps in self.step_s]
        return max(medians) / min(medians) - 1.0


class MeasuredLayouts(Record):
    """Decisions that took turns on one cluster."""

    schema_version: Literal[1] = 1
    origin: str
    """What ran where."""
    link_bytes_per_s: float
    """Between nodes, as it was set."""
    link_delay_s: Seconds
    """One way, as it was set."""
    layouts: Annotated[tuple[LayoutRuns, ...], Field(min_length=2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How well the predictions order the measurements."""

    predicted: tuple[TrainPrediction, ...]
    """In the order of the layouts."""
    rank_correlation: float
    """Spearman's."""
    regret_ratio: float
    """Measured time of the first choice over the measured best, less one."""


def compare_predictions(
    runs: MeasuredLayouts, *, work: Workload, machine: PricedMachine
) -> Comparison:
    """Predict every layout as today's model does, and compare."""
    predicted = tuple(_predicted(one.decision, work, machine) for one in runs.layouts)
    predicted_s = [one.step_time_s for one in predicted]
    measured_s = [one.median_s for one in runs.layouts]
    first = predicted_s.index(min(predicted_s))
    return Comparison(
        predicted=predicted,
        rank_correlation=float(np.corrcoef(_ranks(predicted_s), _ranks(measured_s))[0, 1]),
        regret_ratio=measured_s[first] / min(measured_s) - 1.0,
    )


def _predicted(decision: TrainDecision, work: Workload, machine: PricedMachine) -> TrainPrediction:
    degrees = degrees_of(decision, ranks_per_node=machine.ranks_per_node)
    return predict(CandidateCosts(work=work, degrees=degrees, machine=machine), decision)


def _ranks(values: Sequence[float]) -> Sequence[int]:
    """Places in order; measured times are never equal."""
    ordered = sorted(values)
    return [ordered.index(value) for value in values]
