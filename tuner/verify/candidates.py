"""Launchable decisions of a plan that cannot be priced again: those that it names.

Plans on datasheets or imported profiles are made for the user's engine, and launched by the user's
own command, as deployments are. Their choice and its alternatives have their predictions in
`plan.json`, so no model is run here; other decisions are not tried.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic

from typing_extensions import TypeVar

from tuner.config.serve import ServeDecision
from tuner.config.train import TrainDecision
from tuner.config.train_words import short_decision
from tuner.errors import PlanUnreadableError
from tuner.plans.serve import ServePlan, ServePrediction
from tuner.plans.train import Plan, TrainPrediction
from tuner.verify.neighbourhood import PLANNED, Point
from tuner.verify.proposal import Decision

Prediction = TypeVar("Prediction", default=Any)


class NamedDecisions(Generic[Decision, Prediction]):
    """The decisions that a plan names, with their predictions."""

    @property
    def predictions(self) -> Mapping[Decision, Prediction]:
        """The plan's choice and its runners-up, best first."""
        raise NotImplementedError

    def describe(self, decision: Decision) -> str:
        """Name a decision in a message."""
        raise NotImplementedError

    @property
    def candidates(self) -> Mapping[str, Decision]:
        """The plan's choice and its runners-up by rank, best first."""
        return {f"choice {place}": one for place, one in enumerate(self.predictions)}

    @property
    def option_names(self) -> tuple[str, ...]:
        """Only the plan's own."""
        return (PLANNED,)

    def decision_at(self, point: Point) -> Decision | None:
        """Return the decision at a point."""
        return self.candidates[point.degrees]

    def find_point(self, decision: Decision) -> Point | None:
        """Return the point of a decision; None when the plan does not name it."""
        places = (name for name, one in self.candidates.items() if one == decision)
        return next((Point(degrees=name, option=PLANNED) for name in places), None)

    def predicted(self, decision: Decision) -> Prediction:
        """Return the plan's prediction for a decision.

        Raises:
            PlanUnreadableError: the plan does not name it, so the trial is of another plan.
        """
        known = self.predictions.get(decision)
        if known is None:
            raise PlanUnreadableError(
                f"a trial launched {self.describe(decision)}, which this plan does not name:"
                " delete its record and study.db in trials/, take another database if --storage"
                " names one, and go on with --resume"
            )
        return known

    def seeds(self) -> tuple[Point, ...]:
        """All candidates, in the plan's order."""
        return tuple(Point(degrees=name, option=PLANNED) for name in self.candidates)


@dataclass(frozen=True, kw_only=True)
class PlanCandidates(NamedDecisions[TrainDecision, TrainPrediction]):
    """The decisions that a training plan names."""

    plan: Plan

    @property
    def predictions(self) -> Mapping[TrainDecision, TrainPrediction]:
        """The plan's choice and its runners-up, best first."""
        others = ((one.decision, one.predicted) for one in self.plan.runners_up)
        return _predictions(self.plan.decision, self.plan.predicted, others)

    def describe(self, decision: TrainDecision) -> str:
        """Name a decision in a message."""
        return short_decision(decision)

    def predicted_step_s(self, point: Point) -> float:
        """Return the predicted step time at a point."""
        return self.predicted(self.candidates[point.degrees]).step_time_s

    def excess_bytes(self, decision: TrainDecision) -> int:
        """Bytes by which the decision exceeds the memory limit; negative if it fits."""
        predicted = self.predicted(decision)
        # On heterogeneous pools the plan has checked each device against its own limit.
        limit_bytes = predicted.memory_limit_bytes or max(predicted.peak_memory_bytes)
        return max(predicted.peak_memory_bytes) - limit_bytes


@dataclass(frozen=True, kw_only=True)
class PlannedDeployments(NamedDecisions[ServeDecision, ServePrediction]):
    """The decisions that the plan of a deployment names; all of them fit."""

    plan: ServePlan

    @property
    def predictions(self) -> Mapping[ServeDecision, ServePrediction]:
        """The plan's choice and its alternatives, best first."""
        others = ((one.decision, one.predicted) for one in self.plan.alternatives)
        return _predictions(self.plan.decision, self.plan.predicted, others)

    def describe(self, decision: ServeDecision) -> str:
        """Name a decision in a message."""
        groups = ", ".join(
            f"{group.count} x {group.devices} {group.role.value} on {group.pool}"
            for group in decision.instances
        )
        return f"{decision.num_devices} devices, {decision.mode}: {groups}"

    def predicted_step_s(self, point: Point) -> float:
        """Return the predicted device-seconds of a request that meets the SLOs."""
        rate = self.predicted(self.candidates[point.degrees]).goodput_per_device
        return 1.0 / rate if rate else float("inf")

    def excess_bytes(self, decision: ServeDecision) -> int:
        """Return 0: the plan names what fits."""
        del decision
        return 0


def _predictions(
    decision: Decision | None,
    predicted: Prediction | None,
    others: Iterable[tuple[Decision, Prediction]],
) -> dict[Decision, Prediction]:
    predictions: dict[Decision, Prediction] = {}
    if decision is not None and predicted is not None:
        predictions[decision] = predicted
    for other, its in others:
        predictions.setdefault(other, its)
    return predictions
