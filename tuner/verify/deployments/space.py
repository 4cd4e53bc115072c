"""The deployments that a verification launches: those that a plan names, and their neighbours.

A neighbour is the plan's choice with other sizes of batches. Each decision is priced for the search
(tuner/verify/search.py) by what the conclusion compares, and by every latency over its target:

    goodput, rate    device-seconds of a request that meets the targets
    devices, cost    devices or their price, times request_s^0.05: equal ones are told by latency
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from tuner.config.serve import Role, ServeDecision
from tuner.config.serve_words import short_serve
from tuner.plans.serve import ServePlan, ServePrediction
from tuner.spec.serving.lengths import mean_tokens
from tuner.verify.deployments.conclusion import GOOD, METRICS, measured_spread, slo_limits
from tuner.verify.deployments.records import ServeTrialRecord
from tuner.verify.records import PricedPoint
from tuner.verify.space import DecisionSpace, predictions_of

ERROR: Final = 0.5
"""Prior error of each metric, as a standard deviation of its logarithm."""
LATENCY_POWER: Final = 0.05
LEAST_RATIO: Final = 1e-6
"""Floor of a ratio (a latency over its target, or a reciprocal rate), which a simulation may give
as 0."""
KNOBS: Final = (
    *("count", "devices", "attention_tp", "attention_dp", "ep", "pp"),
    *("max_batch", "max_batched_tokens"),
)


@dataclass(frozen=True, kw_only=True)
class PlannedDeployments(DecisionSpace[ServeDecision, ServePrediction, ServeTrialRecord]):
    """The decisions that the plan of a deployment names, and neighbours of its choice."""

    plan: ServePlan
    neighbours: Mapping[ServeDecision, ServePrediction] = field(default_factory=dict)

    @cached_property
    def predictions(self) -> Mapping[ServeDecision, ServePrediction]:
        """The plan's choice, its alternatives, best first, and the neighbours."""
        others = (
            (alternative.decision, alternative.predicted) for alternative in self.plan.alternatives
        )
        named = predictions_of(self.plan.decision, self.plan.predicted, others)
        return {**named, **self.neighbours}

    def describe(self, decision: ServeDecision) -> str:
        """Name a decision in a message."""
        return short_serve(decision)

    @property
    def errors(self) -> tuple[float, ...]:
        """Return the errors of the compared quantity and of each latency with a target."""
        return (ERROR,) * (1 + len(slo_limits(self.plan)))

    def points(self) -> Mapping[ServeDecision, PricedPoint]:
        """Return every decision as the search sees it."""
        return {
            decision: PricedPoint(
                knobs=dict(_knobs(decision)), predicted=self._predicted(decision, predicted)
            )
            for decision, predicted in self.predictions.items()
        }

    def _predicted(self, decision: ServeDecision, predicted: ServePrediction) -> tuple[float, ...]:
        latencies = {"ttft": predicted.ttft_s, "tpot": predicted.tpot_s}
        good = predicted.goodput_per_device
        request_s = self._request_s(predicted.ttft_s.mean, predicted.tpot_s.mean)
        return (
            self._worth(decision, predicted, 1.0 / max(good, LEAST_RATIO), request_s),
            *(
                max(getattr(latencies[metric], name) / limit_s, LEAST_RATIO)
                for metric, name, limit_s in slo_limits(self.plan)
            ),
        )

    def measured(self, record: ServeTrialRecord) -> tuple[float | None, ...]:
        """Return what was measured of a decision's metrics, None where nothing was."""
        limits = slo_limits(self.plan)
        if record.status != "ok" or not record.runs or record.sampled_value is None:
            return (None,) * (1 + len(limits))
        spreads = {name: measured_spread(record.runs, name) for name in METRICS}
        request_s = self._request_s(spreads["ttft"].mean, spreads["tpot"].mean)
        worth = self._worth(record.decision, record.predicted, record.sampled_value, request_s)
        known = [(getattr(spreads[metric], name), limit_s) for metric, name, limit_s in limits]
        return (worth, *(None if value is None else value / limit_s for value, limit_s in known))

    def _worth(
        self,
        decision: ServeDecision,
        predicted: ServePrediction,
        device_s: float,
        request_s: float,
    ) -> float:
        if self.plan.goal.objective in GOOD:
            return device_s
        price = predicted.cost_per_hour if self.plan.goal.objective == "cost" else None
        latency: float = request_s**LATENCY_POWER
        return (price or float(decision.num_devices)) * latency

    def _request_s(self, ttft_s: float, tpot_s: float) -> float:
        lengths = self.plan.goal.traffic.output_tokens
        tokens = 1.0 if lengths is None else mean_tokens(lengths)
        return max(ttft_s + max(0.0, tokens - 1.0) * tpot_s, LEAST_RATIO)


def _knobs(decision: ServeDecision) -> Iterator[tuple[str, Any]]:
    """Yield every knob, of a role without instances as 0."""
    yield "mode", decision.mode
    for role in Role:
        group = next(
            (instances for instances in decision.instances if instances.role is role), None
        )
        for name in KNOBS:
            yield f"{role.value} {name}", 0 if group is None else getattr(group, name)


def is_neighbour(decision: ServeDecision, choice: ServeDecision) -> bool:
    """Return whether a decision differs from the plan's choice in its batches alone."""
    return decision != choice and _without_batches(decision) == _without_batches(choice)


def _without_batches(decision: ServeDecision) -> ServeDecision:
    update = {"max_batch": 1, "max_batched_tokens": 1, "memory_ratio": None, "kv_tokens": 0}
    groups = tuple(group.model_copy(update=update) for group in decision.instances)
    return decision.model_copy(update={"instances": groups})
