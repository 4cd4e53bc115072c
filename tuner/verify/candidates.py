"""Launchable decisions of a plan that cannot be priced again: those that it names.

Plans on datasheets or imported profiles are made for the user's engine, and launched by the user's
own command. Their choice and its alternatives have their predictions in `plan.json`, so no model is
run here. Beside them only the choice with other gradient buckets is tried.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic

from typing_extensions import TypeVar

from tuner.config.train import TrainDecision
from tuner.config.train_words import short_decision
from tuner.engines.capabilities import intersection, refusals
from tuner.errors import PlanUnreadableError
from tuner.plans.train import Plan, TrainPrediction
from tuner.verify.neighbourhood import DecisionSpace, TrainSpace, priced_point
from tuner.verify.proposal import Decision, PricedPoint
from tuner.verify.records import AnyRecord, TrialRecord

Prediction = TypeVar("Prediction", default=Any)


class NamedDecisions(DecisionSpace[Decision, AnyRecord], Generic[Decision, Prediction, AnyRecord]):
    """The decisions that a plan names, with their predictions."""

    @property
    @abstractmethod
    def predictions(self) -> Mapping[Decision, Prediction]:
        """The plan's choice and its runners-up, best first."""

    @abstractmethod
    def describe(self, decision: Decision) -> str:
        """Name a decision in a message."""

    @property
    def candidates(self) -> tuple[Decision, ...]:
        """The plan's choice and its runners-up, best first."""
        return tuple(self.predictions)

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


@dataclass(frozen=True, kw_only=True)
class PlanCandidates(NamedDecisions[TrainDecision, TrainPrediction, TrialRecord], TrainSpace):
    """The decisions that a training plan names."""

    plan: Plan

    @cached_property
    def predictions(self) -> Mapping[TrainDecision, TrainPrediction]:
        """The plan's choice and its runners-up, best first."""
        plan = self.plan
        others = ((one.decision, one.predicted) for one in plan.runners_up)
        buckets = ((one, plan.predicted) for one in self._other_buckets() if plan.predicted)
        return predictions_of(plan.decision, plan.predicted, (*others, *buckets))

    def _other_buckets(self) -> Iterator[TrainDecision]:
        """Yield the choice with half and twice the gradient bucket, which no model prices."""
        choice, plan = self.plan.decision, self.plan
        if choice is None or choice.ddp_bucket_size is None:
            return
        able = intersection(plan.emit, device_kind=plan.provenance.kind_of_devices)
        for size in (choice.ddp_bucket_size // 2, choice.ddp_bucket_size * 2):
            near = choice.model_copy(update={"ddp_bucket_size": size})
            if not refusals(able, model=plan.model, decision=near):
                yield near

    def describe(self, decision: TrainDecision) -> str:
        """Name a decision in a message."""
        return short_decision(decision)

    def points(self) -> Mapping[TrainDecision, PricedPoint]:
        """Return the candidates that fit."""
        points = {}
        for decision, predicted in self.predictions.items():
            # On heterogeneous pools the plan has checked each device against its own limit.
            limit_bytes = predicted.memory_limit_bytes or max(predicted.peak_memory_bytes)
            peak_ratio = max(predicted.peak_memory_bytes) / limit_bytes
            if peak_ratio <= 1.0:
                points[decision] = priced_point(
                    decision, predicted.step_time_s, peak_ratio=peak_ratio
                )
        return points


def predictions_of(
    decision: Decision | None,
    predicted: Prediction | None,
    others: Iterable[tuple[Decision, Prediction]],
) -> dict[Decision, Prediction]:
    """Return what a plan names, its choice first, with the predictions."""
    predictions: dict[Decision, Prediction] = {}
    if decision is not None and predicted is not None:
        predictions[decision] = predicted
    for other, its in others:
        predictions.setdefault(other, its)
    return predictions
