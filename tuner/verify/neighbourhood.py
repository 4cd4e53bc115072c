"""The decisions worth launching: the plan's candidates and their neighbours.

A neighbour keeps a candidate's degrees and layout and runs every stage with another option; another
micro-batch size makes it another candidate, which the plan has priced already. Every target must be
able to launch a neighbour. The search (tuner/verify/search.py) sees decisions as `PricedPoint`s.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Generic

from tuner.config.train import TrainDecision
from tuner.costs.reference.workload import Workload
from tuner.engines.capabilities import Capabilities, intersection, refusals
from tuner.engines.manifest import with_adapters
from tuner.plans.train import Plan, TrainPrediction
from tuner.search.reference.decisions import decision, degrees_of, options_of
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine
from tuner.search.reference.options import RecomputeOption, options
from tuner.search.reference.predict import predict
from tuner.spec.search import Search
from tuner.verify.evidence import measured_ratio
from tuner.verify.proposal import Decision, PricedPoint
from tuner.verify.records import AnyRecord, TrialRecord

STEP_ERROR: Final = 0.7
MEMORY_ERROR: Final = 0.05
LEAST_EXCESS_RATIO: Final = 1.05
"""Least ratio of peak memory to the limit that counts for a trial which ran out of memory."""


class DecisionSpace(ABC, Generic[Decision, AnyRecord]):
    """The launchable decisions of a study, of one kind; what the search over them needs."""

    @property
    @abstractmethod
    def errors(self) -> tuple[float, ...]:
        """Return each metric's common error, as a standard deviation of its logarithm."""

    @abstractmethod
    def points(self) -> Mapping[Decision, PricedPoint]:
        """Return every decision that can be launched and is predicted to fit, the plan's first."""

    @abstractmethod
    def measured(self, record: AnyRecord) -> tuple[float | None, ...]:
        """Return what a launch measured of `PricedPoint.predicted`, None where nothing was."""


class TrainSpace(DecisionSpace[TrainDecision, TrialRecord]):
    """The launchable decisions of a training plan: seconds of a step, and memory of its limit."""

    plan: Plan

    @property
    @abstractmethod
    def candidates(self) -> tuple[TrainDecision, ...]:
        """The plan's choice and its runners-up, best first."""

    @abstractmethod
    def predicted(self, decision: TrainDecision) -> TrainPrediction:
        """Return what the model says of a decision."""

    @property
    def errors(self) -> tuple[float, ...]:
        """Return the errors of a step's seconds and of the peak memory."""
        return (STEP_ERROR, MEMORY_ERROR)

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


@dataclass(frozen=True, kw_only=True)
class Neighbourhood(TrainSpace):
    """Every decision around a plan's candidates, priced on demand."""

    plan: Plan
    work: Workload
    machine: PricedMachine
    limits: Search
    _prices: dict[TrainDecision, TrainPrediction] = field(default_factory=dict, repr=False)
    _points: dict[TrainDecision, PricedPoint] = field(default_factory=dict, init=False, repr=False)

    @property
    def candidates(self) -> tuple[TrainDecision, ...]:
        """The plan's choice and its runners-up, best first."""
        plan = self.plan
        decisions = [plan.decision, *(other.decision for other in plan.runners_up)]
        return tuple(one for one in decisions if one is not None)

    def points(self) -> Mapping[TrainDecision, PricedPoint]:
        """Return the candidates, and each with every stage run by every other option."""
        if not self._points:
            near = chain.from_iterable(map(self._near, self.candidates))
            limit_bytes = self.machine.memory_limit_bytes
            for decision in (*self.candidates, *near):
                predicted = self.predicted(decision)
                peak_ratio = max(predicted.peak_memory_bytes) / limit_bytes
                point = priced_point(decision, predicted.step_time_s, peak_ratio=peak_ratio)
                if point.predicted[1] <= 1.0:
                    self._points.setdefault(decision, point)
        return self._points

    def _near(self, base: TrainDecision) -> Iterator[TrainDecision]:
        """Return a candidate with other options, where every target can launch it."""
        for option in self._options():
            neighbour = decision(
                degrees_of(base, ranks_per_node=self.machine.ranks_per_node),
                layers=base.pipeline_layout,
                options=(option,) * base.num_stages,
            )
            if not refusals(self._capabilities(), model=self.plan.model, decision=neighbour):
                yield neighbour

    def predicted(self, decision: TrainDecision) -> TrainPrediction:
        """Price a decision with the costs that the plan was made from."""
        known = self._prices.get(decision)
        if known is None:
            costs = CandidateCosts(
                work=self.work,
                degrees=degrees_of(decision, ranks_per_node=self.machine.ranks_per_node),
                machine=self.machine,
            )
            known = self._prices[decision] = predict(costs, decision)
        return known

    def _options(self) -> tuple[RecomputeOption, ...]:
        return options(
            has_experts=self.plan.model.moe is not None,
            capabilities=self._capabilities(),
            search=self.limits,
        )

    def _capabilities(self) -> Capabilities:
        kind = self.plan.provenance.kind_of_devices
        able = intersection(self.plan.emit, device_kind=kind)
        return with_adapters(able, self.plan.goal.adapters)


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
