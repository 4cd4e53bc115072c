"""The decisions worth launching: those that a plan names, and their neighbours.

A plan's choice and its runners-up have their predictions in `plan.json`. A plan that was made from
a profile of the reference step has neighbours that are priced as it was: a candidate's degrees and
layout, with every stage run by another option; another micro-batch size makes it another candidate,
which the plan has priced already. Other plans, made for the user's engine, have only the choice
with other gradient buckets, which no model prices. Every target must be able to launch a neighbour.

The search (tuner/verify/search.py) sees decisions as `PricedPoint`s.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Generic

from typing_extensions import TypeVar

from tuner.catalog.manifest import Capabilities, with_adapters
from tuner.config.train import TrainDecision
from tuner.config.train_words import short_decision
from tuner.costs.reference.workload import Workload
from tuner.engines.targets import programs
from tuner.errors import PlanUnreadableError
from tuner.plans.train import Plan, TrainPrediction
from tuner.search.reference.decisions import decision, degrees_of, options, options_of
from tuner.search.reference.engine_workload import engine_workload
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine
from tuner.search.reference.predict import predict
from tuner.spec.refusals import refusals
from tuner.verify.measured_steps import measured_ratio
from tuner.verify.records import AnyRecord, Decision, PricedPoint, TrialRecord

STEP_ERROR: Final = 0.7
MEMORY_ERROR: Final = 0.05
LEAST_EXCESS_RATIO: Final = 1.05
"""Least ratio of peak memory to the limit that counts for a trial which ran out of memory."""

Prediction = TypeVar("Prediction", default=Any)
Price = Callable[[Plan, TrainDecision], TrainPrediction]
"""Predicts a decision of the plan or of a scaled-down plan."""


class DecisionSpace(ABC, Generic[Decision, Prediction, AnyRecord]):
    """The launchable decisions of a study, of one kind; what the search over them needs."""

    @property
    @abstractmethod
    def predictions(self) -> Mapping[Decision, Prediction]:
        """Every decision with its prediction: the plan's choice, its runners-up, neighbours."""

    @property
    @abstractmethod
    def errors(self) -> tuple[float, ...]:
        """Return each metric's common error, as a standard deviation of its logarithm."""

    @abstractmethod
    def describe(self, decision: Decision) -> str:
        """Name a decision in a message."""

    @abstractmethod
    def points(self) -> Mapping[Decision, PricedPoint]:
        """Return every decision that can be launched and is predicted to fit, the plan's first."""

    @abstractmethod
    def measured(self, record: AnyRecord) -> tuple[float | None, ...]:
        """Return what a launch measured of `PricedPoint.predicted`, None where nothing was."""

    def predicted(self, decision: Decision) -> Prediction:
        """Return the prediction of a decision.

        Raises:
            PlanUnreadableError: there is none, so the trial is of another plan.
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
class TrainSpace(DecisionSpace[TrainDecision, TrainPrediction, TrialRecord]):
    """The launchable decisions of a training plan: seconds of a step, and memory of its limit."""

    plan: Plan
    machine: PricedMachine | None = None
    """The machine of the profile that the plan was made from; None: its engine was priced."""

    @cached_property
    def predictions(self) -> Mapping[TrainDecision, TrainPrediction]:
        """Every decision with its prediction: the plan's choice, its runners-up, neighbours."""
        plan = self.plan
        named = predictions_of(
            plan.decision,
            plan.predicted,
            ((runner_up.decision, runner_up.predicted) for runner_up in plan.runners_up),
        )
        able = with_adapters(
            programs(plan.emit).capabilities(device_kind=plan.provenance.kind_of_devices),
            plan.goal.adapters,
        )
        near = (
            neighbour
            for base in named
            for neighbour in self._near(base, able)
            if neighbour not in named
        )
        return named | {
            neighbour: plan.predicted
            if self.machine is None
            else measured_prices(self.machine)(plan, neighbour)
            for neighbour in near
            if plan.predicted and not refusals(able, model=plan.model, decision=neighbour)
        }

    def _near(self, base: TrainDecision, able: Capabilities) -> Iterator[TrainDecision]:
        """Yield the neighbours of a candidate."""
        plan, bucket = self.plan, base.ddp_bucket_size
        if self.machine is not None:
            degrees = degrees_of(base, ranks_per_node=self.machine.ranks_per_node)
            has_experts = plan.model.moe is not None
            for option in options(has_experts=has_experts, capabilities=able, search=plan.search):
                stages = (option,) * base.num_stages
                yield decision(degrees, layers=base.pipeline_layout, options=stages)
        elif base == plan.decision and bucket is not None:
            for size in (bucket // 2, bucket * 2):
                yield base.model_copy(update={"ddp_bucket_size": size})

    @property
    def errors(self) -> tuple[float, ...]:
        """Return the errors of a step's seconds and of the peak memory."""
        return (STEP_ERROR, MEMORY_ERROR)

    def describe(self, decision: TrainDecision) -> str:
        """Name a decision in a message."""
        return short_decision(decision)

    def points(self) -> Mapping[TrainDecision, PricedPoint]:
        """Return the decisions that fit."""
        return self._points

    @cached_property
    def _points(self) -> Mapping[TrainDecision, PricedPoint]:
        points = {}
        for candidate, predicted in self.predictions.items():
            peak = max(predicted.peak_memory_bytes)
            # On heterogeneous pools the plan has checked each device against its own limit.
            limit_bytes = predicted.memory_limit_bytes or peak
            if self.machine is not None:
                limit_bytes = self.machine.memory_limit_bytes
            if peak <= limit_bytes:
                points[candidate] = priced_point(
                    candidate, predicted.step_time_s, peak_ratio=peak / limit_bytes
                )
        return points

    def measured(self, record: TrialRecord) -> tuple[float | None, ...]:
        """Return the step and the peak: what ran fitted, what ran out needed more.

        A scaled-down job corrects the prediction of the whole one.
        """
        if record.status not in ("ok", "out_of_memory"):
            return (None, None)
        step_s, peak_ratio = self.points()[record.decision].predicted
        if record.status == "ok" and record.scale is not None:
            return (step_s * measured_ratio(record), peak_ratio)
        if record.status == "ok":
            return (record.measured_step_s, peak_ratio)
        return (None, max(peak_ratio, LEAST_EXCESS_RATIO))


def measured_prices(machine: PricedMachine) -> Price:
    """Return the pricer of decisions of a plan and of scaled-down plans, from a profile."""

    def priced(plan: Plan, decision: TrainDecision) -> TrainPrediction:
        resized = replace(machine, num_devices=decision.num_devices)
        degrees = degrees_of(decision, ranks_per_node=machine.ranks_per_node)
        costs = CandidateCosts(work=work_of(plan), degrees=degrees, machine=resized)
        limit = {"memory_limit_bytes": machine.memory_limit_bytes}
        return predict(costs, decision).model_copy(update=limit)

    return priced


def work_of(made: Plan) -> Workload:
    """Return the workload of a plan."""
    return engine_workload(made.model, made.goal, programs(made.emit), load_ratio=made.load_ratio)


def priced_point(decision: TrainDecision, step_s: float, *, peak_ratio: float) -> PricedPoint:
    """Return a decision as the sampler sees it: seconds of a step, and the peak over the limit."""
    option = options_of(decision)[0]
    return PricedPoint(
        knobs={
            "tensor": decision.tensor_model_parallel_size,
            "pipeline": decision.pipeline_model_parallel_size,
            "virtual_pipeline": decision.virtual_pipeline_model_parallel_size,
            "context": decision.context_parallel_size,
            "expert": decision.expert_model_parallel_size,
            "dispatcher": decision.dispatcher,
            "zero": str(decision.zero_stage),
            "micro_batch": decision.micro_batch_size,
            "bucket": decision.ddp_bucket_size or 0,
            "recompute": option.recompute.value,
            "chunks": option.chunks,
        },
        predicted=(step_s, peak_ratio),
    )


def predictions_of(
    decision: Decision | None,
    predicted: Prediction | None,
    others: Iterable[tuple[Decision, Prediction]],
) -> dict[Decision, Prediction]:
    """Return what a plan names, its choice first, with the predictions."""
    predictions = {} if decision is None or predicted is None else {decision: predicted}
    for alternative, prediction in others:
        predictions.setdefault(alternative, prediction)
    return predictions
