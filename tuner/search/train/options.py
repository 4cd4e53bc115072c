"""The execution options of given degrees: ZeRO, recomputation, overlap, CUDA graphs, offloading.

An option is one choice on each of a dozen axes. All together are their product, which is far too
long to list for every combination of degrees. Axes therefore stay separate: a rule names the axes
that it ties together, and counting multiplies the independent ones.

    zero_stage          0 .. 3
    recompute           none, every set of the model's modules, the first quarter, half and three
                        quarters of each stage's layers, all of them
    chunks              MemFine's pieces of a MoE layer (arXiv:2511.21431, section 6)
    the knobs that tuner/config/knobs.py says are searched
    sharding            of the training state: over all ranks, or a copy per scale-up domain

What a model cannot have (the experts' axes in a dense one) is not in its product. Rules read a few
booleans about the degrees, `Facts`. They are listed in the order in which refusals are counted:
settings without any effect, which are illegal so that no two decisions of the space are the same
run; what a target cannot do, from its manifest (tuner/catalog/manifest.py); the user's limits.

Letters: A choices of one axis, T rows of a table of some axes together.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from profilers.steps.config import LayerKind, Recompute
from tuner.arrays import Ints
from tuner.catalog.manifest import (
    CONDITIONAL,
    DEFAULT_RANK_ORDER,
    PIPELINE_INSIDE_ORDER,
    Conditions,
)
from tuner.config.knobs import SWITCH, searched
from tuner.costs.train.host_memory import GRADIENT_BYTES
from tuner.search.train.problem import TrainProblem
from tuner.search.train.rules import Mask
from tuner.spec.accounting import num_parameters
from tuner.units import format_bytes

CHUNKS: Final = (1, 2, 4, 8)
LAYER_SHARES: Final = (0.25, 0.5, 0.75, 1.0)
RANK_ORDERS: Final = (DEFAULT_RANK_ORDER, PIPELINE_INSIDE_ORDER)
SHARDINGS: Final = ("everywhere", "domain")
"""Choices of sharding: training state over all ranks that share it, or a copy of it in each
scale-up domain."""

RECOMPUTE_AXES: Final = ("recompute", "chunks")
DISPATCH: Final = tuple(knob for knob in searched() if knob.is_of_dispatch)
DISPATCH_AXES: Final = tuple(knob.field for knob in DISPATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeChoice:
    """Choice on the recomputation axis: level, and modules or layers that are recomputed."""

    level: Recompute
    modules: frozenset[str] = frozenset()
    """Modules that selective recomputation recomputes."""
    share: float = 0.0
    """Share of every stage's layers that full recomputation recomputes."""


Choice = int | float | str | bool | RecomputeChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of the degrees that the option rules read."""

    has_pipeline: bool
    has_virtual: bool
    is_sharded: bool
    """Whether several ranks hold the same dense parameters."""
    has_expert_parallel: bool
    """Whether expert parallelism is above 1."""
    has_tensor: bool = False
    """Whether tensor parallelism is above 1."""
    has_copies: bool = False
    """Whether training state can have a copy in each of several scale-up domains."""
    spans_replicas: bool = False
    """Whether experts are spread over more than one replica's context and tensor ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRule:
    """One reason why an option cannot be launched."""

    text: str
    axes: tuple[str, ...]
    """Axes that the rule reads."""
    is_broken: Callable[..., bool]
    """Function that is called with the facts and one choice per axis."""
    is_limit: bool = False
    """Whether the rule is the user's own limit of one axis."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptionSpace:
    """All axes of a problem with their choices, and the rules between them."""

    choices: Mapping[str, tuple[Choice, ...]]
    rules: tuple[OptionRule, ...]

    @property
    def num_options(self) -> int:
        """Options of every combination of degrees, legal or not."""
        return math.prod(len(choices) for choices in self.choices.values())

    def legal(self, facts: Facts) -> Ints:
        """List the legal options as choices on every axis, [T, axes]."""
        axes = tuple(self.choices)
        options = np.zeros((1, len(axes)), dtype=np.int64)
        for component in self._components():
            first = self._first_broken(facts, component, self._rules_within(component))
            sizes = [len(self.choices[axis]) for axis in component]
            chosen = np.stack(np.unravel_index(np.flatnonzero(first < 0), sizes), axis=1)
            at = [axes.index(axis) for axis in component]
            repeated = np.repeat(options, len(chosen), axis=0)
            repeated[:, at] = np.tile(chosen, (len(options), 1))
            options = repeated
        return options

    def count_legal(self, facts: Facts) -> tuple[int, dict[str, int]]:
        """Count the legal options, and the others by the first rule they break."""
        firsts = [
            self._first_broken(facts, component, self._rules_within(component))
            for component in self._components()
        ]
        left = self.num_options
        illegal: dict[str, int] = {}
        for index, rule in enumerate(self.rules):
            still = math.prod(int(((first < 0) | (first > index)).sum()) for first in firsts)
            if still < left:
                illegal[rule.text] = left - still
                left = still
        return left, illegal

    def _rules_within(self, axes: Sequence[str]) -> list[tuple[int, OptionRule]]:
        chosen = set(axes)
        return [(i, rule) for i, rule in enumerate(self.rules) if chosen.issuperset(rule.axes)]

    def _first_broken(
        self, facts: Facts, axes: tuple[str, ...], rules: Sequence[tuple[int, OptionRule]]
    ) -> Ints:
        """The index of the first rule that each row of the axes' product breaks, or -1."""
        sizes = [len(self.choices[axis]) for axis in axes]
        first = np.full(sizes, -1, dtype=np.int64)
        for index, rule in rules:
            broken = self._broken(facts, rule)
            order = [rule.axes.index(axis) for axis in axes if axis in rule.axes]
            shape = [len(self.choices[axis]) if axis in rule.axes else 1 for axis in axes]
            here = np.broadcast_to(broken.transpose(order).reshape(shape), sizes)
            first[(first < 0) & here] = index
        return first.ravel()

    def _broken(self, facts: Facts, rule: OptionRule) -> Mask:
        lists = [self.choices[axis] for axis in rule.axes]
        flat = [rule.is_broken(facts, *chosen) for chosen in itertools.product(*lists)]
        return np.array(flat, dtype=np.bool_).reshape([len(choices) for choices in lists])

    def _components(self) -> list[tuple[str, ...]]:
        """Axes that rules tie together, directly or through others."""
        groups = [{axis} for axis in self.choices]
        for rule in self.rules:
            tied = [group for group in groups if group & set(rule.axes)]
            groups = [group for group in groups if group not in tied]
            groups.append(set().union(*tied))
        return [tuple(axis for axis in self.choices if axis in group) for group in groups]


def option_space(problem: TrainProblem) -> OptionSpace:
    """Build the axes of a problem and the rules between them."""
    has_experts = problem.model.num_moe_layers > 0
    plain: dict[str, tuple[Choice, ...]] = {
        knob.field: knob.choices[:1] if knob.of_experts and not has_experts else knob.choices
        for knob in searched()
    }
    choices: dict[str, tuple[Choice, ...]] = {
        "zero_stage": plain.pop("zero_stage"),
        "recompute": tuple(_recompute_choices(problem)),
        "chunks": CHUNKS if has_experts else (1,),
        **plain,
        "sharding": SHARDINGS,
    }
    return OptionSpace(choices=choices, rules=option_rules(problem))


def _recompute_choices(problem: TrainProblem) -> Iterator[RecomputeChoice]:
    model = problem.model
    has_experts = model.num_moe_layers > 0
    has = {
        "core_attn": True,
        "layernorm": True,
        "mla_up_proj": model.attention.kind == "mla",
        "mlp": LayerKind.DENSE in model.layers,
        "moe_act": has_experts,
        "shared_experts": model.moe is not None and model.moe.shared_ffn_size > 0,
        "moe": has_experts,
    }
    modules = [module for module, present in has.items() if present]
    yield RecomputeChoice(level=Recompute.NONE)
    for count in range(1, len(modules) + 1):
        for chosen in itertools.combinations(modules, count):
            # Recomputing a MoE layer includes its activation and its shared experts.
            if "moe" in chosen and {"moe_act", "shared_experts"} & set(chosen):
                continue
            yield RecomputeChoice(level=Recompute.SELECTIVE, modules=frozenset(chosen))
    for share in LAYER_SHARES:
        yield RecomputeChoice(level=Recompute.FULL, share=share)


def option_rules(problem: TrainProblem) -> tuple[OptionRule, ...]:
    """List the rules between the axes of a problem."""
    return (*_nature(problem), *_targets(problem), *_limits(problem))


def _nature(problem: TrainProblem) -> Iterator[OptionRule]:
    """Rules for every target: settings without effect, and impossible ones."""
    yield OptionRule(
        text="schedule interleaved and virtual stages need each other",
        axes=("schedule",),
        is_broken=lambda facts, schedule: (
            (schedule == "interleaved") != facts.has_virtual and schedule != "zero_bubble"
        ),
    )
    yield OptionRule(
        text="schedule zero_bubble without a pipeline fills nothing",
        axes=("schedule",),
        is_broken=lambda facts, schedule: schedule == "zero_bubble" and not facts.has_pipeline,
    )
    least = min(problem.capabilities.zero_stages, default=0)
    yield OptionRule(
        text="zero_stage above 0 without data parallelism shards nothing",
        axes=("zero_stage",),
        is_broken=lambda facts, zero: zero > least and not facts.is_sharded,
    )
    yield OptionRule(
        text="overlap_grad_reduce without data parallelism overlaps nothing",
        axes=("overlap_grad_reduce",),
        is_broken=lambda facts, on: on and not facts.is_sharded,
    )
    yield OptionRule(
        text="overlap_param_gather without sharded optimizer state overlaps nothing",
        axes=("zero_stage", "overlap_param_gather"),
        is_broken=lambda facts, zero, on: on and (zero == 0 or not facts.is_sharded),
    )
    # A copy per domain at zero_stage 1 holds more and sends no less: V / n for its part of the
    # reduction to each of two neighbours; sharding over all ranks sends V / n twice, in the
    # reduce-scatter and in the all-gather.
    yield OptionRule(
        text="shard_ranks below zero_stage 2, or without several domains, saves no bytes",
        axes=("zero_stage", "sharding"),
        is_broken=lambda facts, zero, sharding: (
            sharding == "domain" and (zero < 2 or not facts.has_copies)
        ),
    )
    yield OptionRule(
        text="rank_order without a pipeline orders nothing",
        axes=("rank_order",),
        is_broken=lambda facts, order: order != RANK_ORDERS[0] and not facts.has_pipeline,
    )
    yield OptionRule(
        text="dispatcher above alltoall without expert parallelism moves nothing",
        axes=("dispatcher",),
        is_broken=lambda facts, name: name != "alltoall" and not facts.has_expert_parallel,
    )
    for knob in searched():
        if knob.of_experts and knob.choices == SWITCH:
            yield OptionRule(
                text=f"{knob.field} without expert parallelism overlaps nothing",
                axes=(knob.field,),
                is_broken=lambda facts, on: on and not facts.has_expert_parallel,
            )
    yield OptionRule(
        text="more than one chunk without recomputing the experts saves nothing",
        axes=("recompute", "chunks"),
        is_broken=lambda facts, recompute, chunks: chunks > 1 and not _covers_experts(recompute),
    )


def _covers_experts(recompute: RecomputeChoice) -> bool:
    return recompute.share == 1.0 or "moe" in recompute.modules


def _targets(problem: TrainProblem) -> Iterator[OptionRule]:
    """Rules of the targets' manifests."""
    target = problem.capabilities
    yield OptionRule(
        text="the target has no such zero_stage",
        axes=("zero_stage",),
        is_broken=lambda facts, zero: zero not in target.zero_stages,
    )
    yield OptionRule(
        text="the target has no such zero_stage with pipeline parallelism",
        axes=("zero_stage",),
        is_broken=lambda facts, zero: (
            facts.has_pipeline and zero not in target.zero_stages_with_pipeline
        ),
    )
    yield OptionRule(
        text="the target cannot shard over part of the ranks at this zero_stage",
        axes=("zero_stage", "sharding"),
        is_broken=lambda facts, zero, sharding: (
            sharding == "domain" and zero not in target.shard_ranks_zero_stages
        ),
    )
    if target.expert_folding_needs_sharding:
        yield OptionRule(
            text="the target spreads experts over replicas at zero_stage above 0 only",
            axes=("zero_stage",),
            is_broken=lambda facts, zero: zero == 0 and facts.spans_replicas,
        )
    yield OptionRule(
        text="the target cannot recompute this",
        axes=("recompute",),
        is_broken=lambda facts, recompute: (
            recompute.level not in target.recompute
            or not recompute.modules <= target.recompute_modules
            or (0.0 < recompute.share < 1.0 and not target.recompute_num_layers)
        ),
    )
    yield OptionRule(
        text="the target has no such chunks",
        axes=("recompute", "chunks"),
        is_broken=lambda facts, recompute, chunks: (
            chunks > 1
            and (
                chunks > target.largest_chunks
                or recompute.level not in target.chunks_need
                or (
                    recompute.level is Recompute.SELECTIVE
                    and not target.chunks_need_modules <= recompute.modules
                )
            )
        ),
    )
    yield OptionRule(
        text="the target has no such schedule",
        axes=("schedule",),
        is_broken=lambda facts, schedule: (
            schedule not in target.schedules
            or (
                schedule == "zero_bubble"
                and target.zero_bubble_needs_virtual_pipeline
                and not facts.has_virtual
            )
        ),
    )
    yield OptionRule(
        text="the target has no such dispatcher",
        axes=("dispatcher",),
        is_broken=lambda facts, name: (
            name not in target.dispatchers
            or (facts.has_pipeline and name not in target.dispatchers_with_pipeline)
        ),
    )
    for feature in CONDITIONAL:
        yield from _conditional_rules(problem, feature)
    yield from _graph_rules(problem)
    yield from _offload_rules(problem)
    yield OptionRule(
        text="the target cannot overlap this",
        axes=("overlap_grad_reduce", "overlap_param_gather"),
        is_broken=lambda facts, reduce, gather: (
            (reduce and not target.overlap_grad_reduce)
            or (gather and not target.overlap_param_gather)
            or (gather and not reduce and target.param_gather_needs_grad_reduce)
        ),
    )
    yield OptionRule(
        text="the target has no such rank_order",
        axes=("rank_order",),
        is_broken=lambda facts, order: order not in target.rank_orders,
    )
    if problem.precision == "fp8-delayed":
        yield OptionRule(
            text="the target cannot recompute this under fp8-delayed",
            axes=("recompute",),
            is_broken=lambda facts, recompute: bool(
                recompute.modules & target.delayed_scaling_excludes
            ),
        )


def _conditional_rules(problem: TrainProblem, feature: str) -> Iterator[OptionRule]:
    """Yield the rules for the settings beside which the target has a feature."""
    conditions: Conditions | None = getattr(problem.capabilities, feature)
    mtp = problem.model.mtp_num_layers
    yield OptionRule(
        text=f"the target has no {feature} with these degrees",
        axes=(feature,),
        is_broken=lambda facts, on: (
            on
            and (
                conditions is None
                or (
                    conditions.needs_virtual_pipeline
                    and facts.has_pipeline
                    and not facts.has_virtual
                )
                or mtp > conditions.largest_mtp
                or (mtp > 0 and conditions.mtp_needs_pipeline and not facts.has_pipeline)
            )
        ),
    )
    if conditions is None:
        return
    yield OptionRule(
        text=f"the target has no {feature} with this dispatcher",
        axes=("dispatcher", feature),
        is_broken=lambda facts, name, on: on and name not in conditions.dispatchers,
    )
    yield OptionRule(
        text=f"the target has no {feature} with this recompute",
        axes=("recompute", feature),
        is_broken=lambda facts, recompute, on: (
            on
            and (
                recompute.level not in conditions.recompute
                or bool(recompute.modules & conditions.excludes)
            )
        ),
    )
    yield OptionRule(
        text=f"the target has no {feature} with this cuda_graph",
        axes=(feature, "cuda_graph"),
        is_broken=lambda facts, on, graph: on and graph not in conditions.cuda_graphs,
    )


def _graph_rules(problem: TrainProblem) -> Iterator[OptionRule]:
    target = problem.capabilities
    has_experts = problem.model.num_moe_layers > 0
    yield OptionRule(
        text="the target has no such cuda_graph",
        axes=("cuda_graph",),
        is_broken=lambda facts, graph: (
            graph not in target.cuda_graphs
            or (facts.has_pipeline and graph not in target.cuda_graphs_with_pipeline)
        ),
    )
    yield OptionRule(
        text="the target has no full_iteration graph with this dispatcher",
        axes=("dispatcher", "cuda_graph"),
        is_broken=lambda facts, name, graph: (
            graph == "full_iteration" and has_experts and name not in target.full_graph_dispatchers
        ),
    )
    yield OptionRule(
        text="the target has no partial graph with this recompute",
        axes=("recompute", "cuda_graph"),
        is_broken=lambda facts, recompute, graph: (
            graph == "partial"
            and (
                recompute.level not in target.partial_graph_recompute
                or bool(recompute.modules & target.partial_graph_excludes)
            )
        ),
    )


def _offload_rules(problem: TrainProblem) -> Iterator[OptionRule]:
    target = problem.capabilities
    yield OptionRule(
        text="the target cannot offload the optimizer under this zero_stage",
        axes=("zero_stage", "optimizer_offload"),
        is_broken=lambda facts, zero, on: on and zero not in target.optimizer_offload_zero_stages,
    )
    nodes = max(1.0, problem.num_devices / problem.devices_per_node)
    limit, known = problem.host_limit_bytes, problem.memory_constants
    least = known.master_bytes + known.moments_bytes + GRADIENT_BYTES
    least *= 0.0 if problem.tuned.get("adapter_rank") else num_parameters(problem.model) / nodes
    # A price leaves out a few parameters, such as some norms.
    if limit is not None and least > limit * 1.01:
        yield OptionRule(
            text=f"the optimizer would take {format_bytes(int(least))} of a node's memory, of which"
            f" {format_bytes(int(limit))} may be used",
            axes=("optimizer_offload",),
            is_broken=lambda facts, on: on,
        )
    if target.moe_offload_needs_one_tensor_rank and problem.model.num_moe_layers:
        yield OptionRule(
            text="the target cannot offload the optimizer of experts under tensor parallelism",
            axes=("optimizer_offload",),
            is_broken=lambda facts, on: on and facts.has_tensor,
        )


def _limits(problem: TrainProblem) -> Iterator[OptionRule]:
    """Yield the rules of the user's limits, one per limited decision."""
    limits = problem.limits
    for axis in ("chunks", *(knob.field for knob in searched())):
        yield from _limit(axis, getattr(limits, axis, None))
    levels = limits.recompute
    if levels is not None:
        yield OptionRule(
            text="search.recompute leaves it out",
            axes=("recompute",),
            is_broken=lambda facts, recompute: recompute.level not in levels,
            is_limit=True,
        )


def _limit(name: str, allowed: tuple[Choice, ...] | None) -> Iterator[OptionRule]:
    if allowed is not None:
        yield OptionRule(
            text=f"search.{name} leaves it out",
            axes=(name,),
            is_broken=lambda facts, choice: choice not in allowed,
            is_limit=True,
        )
