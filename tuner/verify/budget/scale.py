"""A scaled-down job for a decision: fewer layers, fewer replicas, fewer pipeline ranks.

A scaled-down trial says something about the full-scale job only if its kernels and collectives are
the same. So these stay:

    TP, CP, EP, ETP         the groups of every collective in a layer, and its kernels' shapes
    micro-batch size        and micro-batches per replica: the global batch shrinks with DP
    devices of one node     used as before, so that groups use the same links
    a layer of every kind   on each kept stage, evenly spread over its layers

and these shrink, in order of the information lost:

    data replicas           to a divisor of DP; EP * ETP must divide TP * CP * DP; never to one
    layers of every stage   each stage by the same ratio
    pipeline ranks          to a divisor of PP, the first and last stay and the others are spread

A layer's kind is dense or MoE, with windowed or full attention. Recorded loads of the kept layers
are kept.

Not covered: heterogeneous pools, whose ranks differ; fewer micro-batches.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Annotated, Final

from pydantic import Field

from profilers.records import Record
from profilers.steps.config import Count, LayerKind, Size
from tuner.config.train import TrainDecision
from tuner.engines.launchers.shape import launch_shape
from tuner.engines.targets import programs
from tuner.plans.train import Plan
from tuner.spec.model import Layer, ModelSpec
from tuner.spec.refusals import refusals

LAYER_RATIOS: Final = (Fraction(1), Fraction(1, 2), Fraction(1, 4), Fraction(0))
"""Shares of a stage's layers to try; 0 keeps one of each kind."""


class Scale(Record):
    """A scaled-down job that a trial launches instead of the full-scale one."""

    decision: TrainDecision
    """Decision of the scaled-down job."""
    layers: Annotated[tuple[Size, ...], Field(min_length=1)]
    """The kept layers of the model, in order."""
    global_batch_size: Count
    """Sequences per step."""

    @property
    def num_devices(self) -> int:
        """Devices that the scaled-down job needs."""
        return self.decision.num_devices


def launchable_scales(
    plan: Plan, decision: TrainDecision, *, max_devices: int
) -> tuple[Scale, ...]:
    """Return the launchable scaled-down jobs of a decision, largest first."""
    if len(plan.cluster.pools) > 1:
        return ()
    scales = [
        scale
        for scale in _smaller(plan, decision)
        if scale.num_devices <= max_devices and _is_launchable(plan, decision, scale)
    ]
    smaller = dict.fromkeys(scale for scale in scales if scale.decision != decision)
    return tuple(sorted(smaller, key=lambda scale: (-scale.num_devices, -len(scale.layers))))


def scaled_plan(plan: Plan, scale: Scale) -> Plan:
    """Return the plan of the scaled-down job, without predictions of the full-scale one."""
    kept = scale.layers
    goal = plan.goal.model_copy(update={"global_batch_size": scale.global_batch_size})
    return plan.model_copy(
        update={
            "model": plan.model.part(kept),
            "goal": goal,
            "cluster": _cluster(plan, scale),
            "decision": scale.decision,
            "alternatives": (),
            "variants": (),
            "preferred": None,
            "pareto": (),
            "unlaunchable": (),
            "placement": None,
            "load_ratio": _loads(plan, kept),
        }
    )


def _smaller(plan: Plan, decision: TrainDecision) -> Iterator[Scale]:
    for pipeline in _pipelines(decision):
        for ratio in LAYER_RATIOS:
            kept = _kept_layers(plan.model, decision, pipeline=pipeline, ratio=ratio)
            for data in _replicas(decision):
                yield _scale(plan, decision, kept, pipeline=pipeline, data=data)


def _pipelines(decision: TrainDecision) -> list[int]:
    """Pipeline sizes; at least two ranks remain, so that stages communicate."""
    ranks = decision.pipeline_model_parallel_size
    return [count for count in _divisors(ranks) if count >= min(ranks, 2)]


def _replicas(decision: TrainDecision) -> list[int]:
    """Numbers of replicas; at least two remain, so that gradients are reduced."""
    inside = decision.tensor_model_parallel_size * decision.context_parallel_size
    experts = decision.expert_model_parallel_size * decision.expert_tensor_parallel_size
    whole = decision.data_parallel_size
    return [
        count
        for count in _divisors(whole)
        if count >= min(whole, 2) and inside * count % experts == 0
    ]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(number, 0, -1) if number % divisor == 0]


def _kept_layers(
    model: ModelSpec, decision: TrainDecision, *, pipeline: int, ratio: Fraction
) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each kept stage, in execution order.

    Stages with equal layer counts stay equal: all keep what the one with most kinds needs.
    """
    starts = [sum(decision.pipeline_layout[:stage]) for stage in range(decision.num_stages)]
    stages = [
        range(starts[stage], starts[stage] + decision.pipeline_layout[stage])
        for stage in _kept_stages(decision, pipeline)
    ]
    needed = max((len(_kinds(model, stage)) for stage in stages), default=0)
    return tuple(
        _spread(model, stage, count=min(len(stage), max(needed, round(ratio * len(stage)))))
        for stage in stages
    )


def _kept_stages(decision: TrainDecision, pipeline: int) -> list[int]:
    """Stages of the kept pipeline ranks, in execution order."""
    whole = decision.pipeline_model_parallel_size
    ranks = [round(rank * (whole - 1) / max(1, pipeline - 1)) for rank in range(pipeline)]
    rounds = range(decision.virtual_pipeline_model_parallel_size)
    return [chunk * whole + rank for chunk in rounds for rank in ranks]


def _kinds(model: ModelSpec, layers: Sequence[int]) -> dict[Layer, list[int]]:
    layers_by_kind: dict[Layer, list[int]] = {}
    every = model.each_layer
    for layer in layers:
        layers_by_kind.setdefault(every[layer], []).append(layer)
    return layers_by_kind


def _spread(model: ModelSpec, layers: Sequence[int], *, count: int) -> tuple[int, ...]:
    """Choose evenly spread layers, every kind by its share and at least one of each."""
    kinds = _kinds(model, layers)
    taken = dict.fromkeys(kinds, 1)
    while sum(taken.values()) < min(count, len(layers)):
        left = (kind for kind, indices in kinds.items() if taken[kind] < len(indices))
        fewest = max(left, key=lambda kind: len(kinds[kind]) * count / len(layers) - taken[kind])
        taken[fewest] += 1
    return tuple(
        sorted(
            indices[int((place + 0.5) * len(indices) / taken[kind])]
            for kind, indices in kinds.items()
            for place in range(taken[kind])
        )
    )


def _scale(
    plan: Plan,
    decision: TrainDecision,
    kept: tuple[tuple[int, ...], ...],
    *,
    pipeline: int,
    data: int,
) -> Scale:
    inside = decision.tensor_model_parallel_size * decision.context_parallel_size
    experts = decision.expert_model_parallel_size * decision.expert_tensor_parallel_size
    stages = _kept_stages(decision, pipeline)
    layout = tuple(len(layers) for layers in kept)
    recomputed_layers = decision.recompute_num_layers
    shrunk = decision.model_copy(
        update={
            "pipeline_model_parallel_size": pipeline,
            "data_parallel_size": data,
            "expert_data_parallel_size": inside * data // experts,
            "shard_ranks": _shard_ranks(decision, inside=inside, data=data),
            "stage_recompute": tuple(decision.stage_recompute[stage] for stage in stages),
            "chunks": tuple(decision.chunks[stage] for stage in stages),
            "pipeline_layout": layout,
            "recompute_num_layers": None
            if recomputed_layers is None
            else max(1, round(recomputed_layers * max(layout) / max(decision.pipeline_layout))),
        }
    )
    return Scale(
        decision=TrainDecision.model_validate(shrunk.model_dump()),
        layers=tuple(layer for layers in kept for layer in layers),
        # Every replica has the load of the most-loaded one.
        global_batch_size=decision.num_microbatches(plan.goal.global_batch_size)
        * decision.micro_batch_size
        * data,
    )


def _shard_ranks(decision: TrainDecision, *, inside: int, data: int) -> int | None:
    """Ranks that shard one copy of the state; None (all) if fewer ranks are left."""
    ranks = data * decision.context_parallel_size
    requested = decision.shard_ranks
    experts = decision.expert_model_parallel_size * decision.expert_tensor_parallel_size
    if requested is None or requested >= ranks or ranks % requested:
        return None
    copies = ranks // requested
    fits = data % copies == 0 and (inside * data // experts) % copies == 0
    return requested if fits else None


def _is_launchable(plan: Plan, decision: TrainDecision, scale: Scale) -> bool:
    """Return whether every target can launch it, inside a node or on whole nodes as the job."""
    shrunk = scaled_plan(plan, scale)
    able = programs(plan.emit).launchable(
        model=shrunk.model,
        precision=plan.goal.precision,
        gradient_bytes=scale.decision.gradient_bytes,
        device_kind=plan.provenance.kind_of_devices,
        adapters=plan.goal.adapters,
    )
    if refusals(able, model=shrunk.model, decision=scale.decision):
        return False
    here, whole = launch_shape(shrunk, scale.decision), launch_shape(plan, decision)
    return here.nodes == 1 or here.devices_per_node == whole.devices_per_node


def _cluster(plan: Plan, scale: Scale) -> object:
    """Return the pool with as many nodes as the scaled-down job fills."""
    (pool,) = plan.cluster.pools
    nodes = -(-scale.num_devices // pool.devices_per_node)
    domain = pool.scale_up_domain
    if domain is not None:
        domain = min(domain, nodes * pool.devices_per_node)
    fewer = pool.model_copy(update={"nodes": min(nodes, pool.nodes), "scale_up_domain": domain})
    return plan.cluster.model_copy(update={"pools": (fewer,)})


def _loads(plan: Plan, kept: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    if not plan.load_ratio:
        return ()
    moe = [layer for layer, kind in enumerate(plan.model.layers) if kind is LayerKind.MOE]
    return tuple(plan.load_ratio[moe.index(layer)] for layer in kept if layer in moe)
