"""The decisions worth launching: the plan's candidates and their neighbours.

A neighbour keeps a candidate's degrees and layout and runs every stage with another option; another
micro-batch size makes it another candidate, which the plan has priced already. Every target must be
able to launch a neighbour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from profilers.steps.config import Recompute
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
from tuner.verify.proposal import Decision

PLANNED = "planned"
"""The option that the plan itself chose for a candidate, stage by stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point of the search space, as the sampler names it."""

    degrees: str
    option: str


class DecisionSpace(Protocol[Decision]):
    """The launchable decisions of a study, of one kind; what the search over them needs."""

    @property
    def candidates(self) -> Mapping[str, Decision]:
        """The plan's choice and its runners-up by name, best first."""

    @property
    def option_names(self) -> tuple[str, ...]:
        """The options that each candidate may run with, `PLANNED` first."""

    def decision_at(self, point: Point) -> Decision | None:
        """Return the decision at a point; None where nothing can be launched."""

    def find_point(self, decision: Decision) -> Point | None:
        """Return the point of a decision; None if it has none."""

    def predicted_step_s(self, point: Point) -> float:
        """Predict what `LaunchRecord.sampled_value` would be at a point."""

    def excess_bytes(self, decision: Decision) -> int:
        """Bytes by which a decision exceeds the memory limit; it is proposed if none."""

    def seeds(self) -> tuple[Point, ...]:
        """Return the points to launch first, in order; the plan's choice leads."""


class TrainSpace(DecisionSpace[TrainDecision], Protocol):
    """The launchable decisions of a training plan, with their predictions."""

    @property
    def plan(self) -> Plan: ...

    def predicted(self, decision: TrainDecision) -> TrainPrediction: ...


@dataclass(frozen=True, kw_only=True)
class Neighbourhood:
    """Every decision around a plan's candidates, priced on demand."""

    plan: Plan
    work: Workload
    machine: PricedMachine
    limits: Search
    _prices: dict[TrainDecision, TrainPrediction] = field(default_factory=dict, repr=False)

    @property
    def candidates(self) -> Mapping[str, TrainDecision]:
        """The plan's choice and its runners-up by the name of their degrees, best first."""
        plan = self.plan
        decisions = [plan.decision, *(other.decision for other in plan.runners_up)]
        return {degrees_name(one): one for one in decisions if one is not None}

    @property
    def option_names(self) -> tuple[str, ...]:
        """Every option, the plan's own first."""
        return (PLANNED, *(option.name for option in self._options()))

    def decision_at(self, point: Point) -> TrainDecision | None:
        """Return the decision at a point; None where some target cannot launch it."""
        base = self.candidates[point.degrees]
        if point.option == PLANNED:
            return base
        option = next(option for option in self._options() if option.name == point.option)
        neighbour = decision(
            degrees_of(base, ranks_per_node=self.machine.ranks_per_node),
            layers=base.pipeline_layout,
            options=(option,) * base.num_stages,
        )
        broken = refusals(self._capabilities(), model=self.plan.model, decision=neighbour)
        return None if broken else neighbour

    def find_point(self, decision: TrainDecision) -> Point | None:
        """Return the point of a decision; None if it has none."""
        degrees = degrees_name(decision)
        names = (PLANNED, *dict.fromkeys(option.name for option in options_of(decision)))
        points = [
            Point(degrees=degrees, option=name) for name in names if name in self.option_names
        ]
        if degrees not in self.candidates:
            return None
        return next((point for point in points if self.decision_at(point) == decision), None)

    def predicted_step_s(self, point: Point) -> float:
        """Predict the step time at a point; infinite if nothing there can be launched."""
        decision = self.decision_at(point)
        return float("inf") if decision is None else self.predicted(decision).step_time_s

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

    def excess_bytes(self, decision: TrainDecision) -> int:
        """Bytes by which the decision exceeds the memory limit; negative if it fits."""
        return max(self.predicted(decision).peak_memory_bytes) - self.machine.memory_limit_bytes

    def seeds(self) -> tuple[Point, ...]:
        """The plan's choice, its nearest chunk counts, one of each kind of parallelism, the ties.

        One launch of every kind shows more of the model's errors than many of one kind.
        """
        names = list(self.candidates)
        points = [Point(degrees=names[0], option=PLANNED)] if names else []
        points += [Point(degrees=names[0], option=name) for name in self._other_chunks(names[:1])]
        first_of_kind: dict[object, str] = {}
        for name in names:
            first_of_kind.setdefault(_kind(self.candidates[name]), name)
        kinds = [Point(degrees=name, option=PLANNED) for name in first_of_kind.values()]
        ties = [Point(degrees=name, option=PLANNED) for name in names]
        return tuple(dict.fromkeys([*points, *kinds, *ties]))

    def _other_chunks(self, names: Sequence[str]) -> list[str]:
        """Options that differ from a candidate's only in chunks and fit, nearest first.

        For a candidate without recomputation: those that chunk its experts.
        """
        nearest: list[tuple[float, str]] = []
        for name in names:
            own = options_of(self.candidates[name])[0]
            level = Recompute.SELECTIVE if own.recompute is Recompute.NONE else own.recompute
            for option in self._options():
                near = self.decision_at(Point(degrees=name, option=option.name))
                same = option.recompute is level and option.chunks != own.chunks
                if same and near is not None and self.excess_bytes(near) <= 0:
                    ratio = max(option.chunks, own.chunks) / min(option.chunks, own.chunks)
                    nearest.append((ratio, option.name))
        return [name for _, name in sorted(nearest)][:2]

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


def degrees_name(decision: TrainDecision) -> str:
    """Name the degrees of a decision, e.g. `tp1-pp2-vpp1-dp4-ep4-zero1-mbs2`."""
    return (
        f"tp{decision.tensor_model_parallel_size}-pp{decision.pipeline_model_parallel_size}"
        f"-vpp{decision.virtual_pipeline_model_parallel_size}-dp{decision.data_parallel_size}"
        f"-ep{decision.expert_model_parallel_size}{_hops(decision)}"
        f"-zero{decision.zero_stage}-mbs{decision.micro_batch_size}"
    )


def _hops(decision: TrainDecision) -> str:
    return "-hierarchical" if decision.dispatcher == "hierarchical" else ""


def _kind(decision: TrainDecision) -> tuple[bool, ...]:
    return (
        decision.tensor_model_parallel_size > 1,
        decision.pipeline_model_parallel_size > 1,
        decision.data_parallel_size > 1,
        decision.expert_model_parallel_size > 1,
        decision.dispatcher == "hierarchical",
    )
