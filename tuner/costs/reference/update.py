"""Costs of data parallelism: parameter all-gather, gradient reduction, the optimizer step.

FSDP2 works on units: of each layer one for its dense parameters and one for its experts; embedding
and head are units too. Per unit of P parameters on this rank, its gradients reduced over G ranks:

    every step          parameters fp32 -> compute type; AdamW on P / (G if sharded else 1)
    zero_stage 0        all-reduce 4 P once a step
    zero_stage 1        reduce-scatter 4 P and all-gather e P once a step (e: compute bytes)
    zero_stage 2        all-gather e P once a step, reduce-scatter 4 P every micro-batch
    zero_stage 3        all-gather e P twice, reduce-scatter 4 P, every micro-batch
    every gather        copies e P out of the collective's buffer
    every reduction     copies 4 P into the collective's buffer
    every micro-batch   zero_stage 0 and 1: gradients -> fp32 and accumulated; 2: those that it owns

With an engine that synchronizes in every micro-batch (torchtitan), S ranks that share the
parameters (1 at zero_stage 0):

    S > 1               casts P / S, all-gathers e P and copies it out, twice at zero_stage 3;
                        copies 4 P into a buffer, reduce-scatters it, adds up P / S
    S = 1               casts P; copies 4 P into a buffer, divides it into a second, copies that to
                        a third; all-reduces 4 P between replicas; adds up P
    every step          reads the gradients for their norm and scales them; AdamW on P / S

Beside adapters the units hold those alone; frozen parameters take part in the gathers of zero_stage
3 and in nothing else. Layers before the first adapter have no backward pass, and embedding and head
are not resharded before it: they are gathered once. FSDP2 prefetches the last of those layers in
vain, which is not counted.

No overlap is assumed: gloo's collectives block, and overlap on a GPU is part of the residual.
Sources: torch.distributed.fsdp.fully_shard as profilers/steps uses it. zero_stage 2: DeepSpeed
0.19.8, runtime/zero/stage_1_and_2.py: every backward reduces the gradients of stage 2, the last one
those of stage 1. In every micro-batch: torch 2.13, distributed/fsdp/_fully_shard (`foreach_reduce`
of _fsdp_collectives.py, with its branch for a group of one) and torchtitan 0.3.0, trainer.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from profilers.steps.config import LayerKind
from tuner.config.columns import Strategies
from tuner.config.tune_columns import Stack, tune_columns
from tuner.costs.reference.layer_time import PartSeconds, sum_parts
from tuner.costs.reference.operations import Part, collective, device_copy
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.costs.train.adapters import adapter_counts
from tuner.costs.train.columns_of import shape_of_model
from tuner.prices.ops import Op
from tuner.prices.profile import ProfilePrices
from tuner.spec.accounting import (
    attention_weights,
    embedding_parameters,
    final_norm_parameters,
    head_parameters,
    layer_norm_parameters,
    one_expert_parameters,
    router_parameters,
)
from tuner.spec.model import ModelSpec

GRADIENT_BYTES = 4
"""Gradients are summed in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered and reduced together."""

    parameters: int
    """Trained parameters on one rank, before any sharding over data parallelism."""
    ranks: int
    """Ranks that reduce its gradients."""
    stride: int
    """Distance between the ids of these ranks."""
    frozen: int = 0
    """Frozen parameters on one rank, in the compute type; sharded at zero_stage 3 alone."""
    frozen_gathers: int = 2
    """Times that zero_stage 3 gathers them in a micro-batch."""

    def sharded(self, degrees: StepDegrees) -> int:
        """Trained parameters that one rank owns at rest."""
        return -(-self.parameters // self.ranks) if degrees.zero_stage else self.parameters

    def frozen_share(self, degrees: StepDegrees) -> int:
        """Frozen parameters that one rank owns at rest."""
        return -(-self.frozen // self.ranks) if degrees.zero_stage == 3 else self.frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTime:
    """Seconds once a step, and seconds every micro-batch."""

    once_s: PartSeconds
    every_microbatch_s: PartSeconds


def layer_units(work: Workload, degrees: StepDegrees, *, layer: int) -> tuple[Unit, ...]:
    """Group one layer's parameters by the ranks that reduce their gradients."""
    model = work.model
    replicated = layer_norm_parameters(model)
    split = attention_weights(model) // degrees.tensor
    experts = 0
    if model.layers[layer] is LayerKind.DENSE:
        split += _swiglu_weights(model, model.dense_ffn_size) // degrees.tensor
    elif model.moe is not None:
        replicated += router_parameters(model)
        split += _swiglu_weights(model, model.moe.shared_ffn_size) // degrees.tensor
        experts = model.moe.num_experts // degrees.expert * one_expert_parameters(model)
    if work.tune is not None:
        return _adapted_units(
            work, degrees, layer=layer, frozen=replicated + split, frozen_experts=experts
        )
    return (
        *_dense_units(degrees, replicated=replicated, split=split),
        *_expert_unit(degrees, experts),
    )


def embedding_units(work: Workload, degrees: StepDegrees) -> tuple[Unit, ...]:
    """The token embedding, replicated over tensor ranks."""
    return _end_units(work, degrees, embedding_parameters(work.model))


def head_units(work: Workload, degrees: StepDegrees) -> tuple[Unit, ...]:
    """The final norm and the head, replicated over tensor ranks."""
    parameters = final_norm_parameters(work.model) + head_parameters(work.model)
    return _end_units(work, degrees, parameters)


def update_time(
    units: tuple[Unit, ...], work: Workload, degrees: StepDegrees, prices: ProfilePrices
) -> UpdateTime:
    """Price what a group of units costs per step and per micro-batch."""
    once, every = update_ops(units, work, degrees)
    return UpdateTime(once_s=_seconds(once, prices), every_microbatch_s=_seconds(every, prices))


def update_ops(
    units: tuple[Unit, ...], work: Workload, degrees: StepDegrees
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """List the operations of a group of units as (once a step, every micro-batch)."""
    once: list[Op] = []
    every: list[Op] = []
    for unit in units:
        if degrees.zero_stage == 3 and unit.frozen:
            every += _frozen_gather_ops(unit, work, degrees)
        if not unit.parameters:
            continue
        if work.synchronizes_every_microbatch and degrees.pipeline == 1:
            every += _synchronized_ops(unit, work, degrees)
            once += _clipped_update_ops(unit, degrees)
            continue
        gather = _gather_ops(unit, work, degrees)
        reduction = _reduction_ops(unit, degrees)
        if degrees.zero_stage == 3:
            every += [*(replace(op, count=2) for op in gather), *reduction]
        else:
            once += gather
            (every if degrees.zero_stage == 2 else once).extend(reduction)
            added_up = unit.sharded(degrees) if degrees.zero_stage == 2 else unit.parameters
            every.append(_parameter_op("accumulate", added_up, dtype=work.precision))
        adamw = _parameter_op("adamw", unit.sharded(degrees), dtype="fp32")
        once.append(replace(adamw, part=Part.OPTIMIZER))
    return tuple(once), tuple(every)


def adapter_parameters(work: Workload, degrees: StepDegrees, *, layer: int) -> tuple[int, int]:
    """Return the parameters of one layer's adapters on a rank: of matrices, and of its experts."""
    counts = adapter_counts(
        shape_of_model(work.model, mtp_layers=0),
        Strategies(
            sequence=float(work.sequence_length),
            micro_batch=float(degrees.micro_batch_size),
            num_microbatches=float(work.num_microbatches(degrees)),
            tensor=float(degrees.tensor),
            expert=float(degrees.expert),
            **tune_columns(work.tune, work.model, Stack.PYTORCH),
        ),
    )
    attention = int(counts.attention)
    if work.model.layers[layer] is LayerKind.DENSE:
        return attention + int(counts.dense), 0
    return attention + int(counts.shared), int(counts.experts)


def _adapted_units(
    work: Workload,
    degrees: StepDegrees,
    *,
    layer: int,
    frozen: int,
    frozen_experts: int,
) -> tuple[Unit, ...]:
    """Units of a layer whose adapters alone are trained, as of one tensor rank."""
    matrices, experts = adapter_parameters(work, degrees, layer=layer)
    training = work.trainings[layer]
    gathers = 2 if training.has_input_gradient or training.names else 1
    unrouted = Unit(
        parameters=matrices,
        frozen=frozen,
        frozen_gathers=gathers,
        ranks=degrees.data,
        stride=1,
    )
    if not frozen_experts:
        return (unrouted,)
    routed = Unit(
        parameters=experts,
        frozen=frozen_experts,
        frozen_gathers=gathers,
        ranks=degrees.expert_data,
        stride=degrees.expert,
    )
    return unrouted, routed


def _end_units(work: Workload, degrees: StepDegrees, parameters: int) -> tuple[Unit, ...]:
    if work.tune is not None:
        # Not resharded after the forward pass.
        unit = Unit(parameters=0, frozen=parameters, frozen_gathers=1, ranks=degrees.data, stride=1)
        return (unit,)
    return _dense_units(degrees, replicated=parameters, split=0)


def _swiglu_weights(model: ModelSpec, width: int) -> int:
    return 3 * model.hidden_size * width


def _dense_units(degrees: StepDegrees, *, replicated: int, split: int) -> tuple[Unit, ...]:
    """Return the units of dense parameters; without tensor parallelism both scopes are one unit."""
    if degrees.tensor == 1:
        return (Unit(parameters=replicated + split, ranks=degrees.data, stride=1),)
    everyone = Unit(parameters=replicated, ranks=degrees.ranks_per_stage, stride=1)
    data = Unit(parameters=split, ranks=degrees.data, stride=degrees.tensor)
    return (everyone, data) if split else (everyone,)


def _expert_unit(degrees: StepDegrees, parameters: int) -> tuple[Unit, ...]:
    if not parameters:
        return ()
    return (Unit(parameters=parameters, ranks=degrees.expert_data, stride=degrees.expert),)


def _gather_ops(unit: Unit, work: Workload, degrees: StepDegrees) -> list[Op]:
    num_bytes = unit.parameters * work.element_bytes
    ops = [device_copy(num_bytes, part=Part.DATA_COMMUNICATION)]
    if unit.ranks > 1 and degrees.zero_stage:
        ops.insert(0, _unit_collective("all_gather", unit, degrees, num_bytes=num_bytes))
    if work.element_bytes != GRADIENT_BYTES:
        ops.insert(0, _parameter_op("convert", unit.parameters, dtype=work.precision))
    return ops


def _frozen_gather_ops(unit: Unit, work: Workload, degrees: StepDegrees) -> list[Op]:
    num_bytes = unit.frozen * work.element_bytes
    ops = [device_copy(num_bytes, part=Part.DATA_COMMUNICATION)]
    if unit.ranks > 1:
        ops.append(_unit_collective("all_gather", unit, degrees, num_bytes=num_bytes))
    return [replace(op, count=unit.frozen_gathers) for op in ops]


def _reduction_ops(unit: Unit, degrees: StepDegrees) -> list[Op]:
    num_bytes = unit.parameters * GRADIENT_BYTES
    ops = [device_copy(num_bytes, part=Part.DATA_COMMUNICATION)]
    if unit.ranks > 1:
        kind = "reduce_scatter" if degrees.zero_stage else "all_reduce"
        ops.insert(0, _unit_collective(kind, unit, degrees, num_bytes=num_bytes))
    return ops


def _synchronized_ops(unit: Unit, work: Workload, degrees: StepDegrees) -> list[Op]:
    """List what FSDP2 does with a unit in one micro-batch."""
    part, reduced_bytes = Part.DATA_COMMUNICATION, unit.parameters * GRADIENT_BYTES
    copy = device_copy(reduced_bytes, part=part)
    owned = unit.sharded(degrees)
    added_up = _parameter_op("accumulate", owned, dtype="fp32")
    cast = [_parameter_op("convert", owned, dtype=work.precision)]
    if work.element_bytes == GRADIENT_BYTES:
        cast = []
    if owned == unit.parameters:
        reduction = [replace(copy, count=3)]
        if unit.ranks > 1:
            reduction.append(_unit_collective("all_reduce", unit, degrees, num_bytes=reduced_bytes))
        return [*cast, *reduction, added_up]
    gathered_bytes = unit.parameters * work.element_bytes
    gathers = [
        *cast,
        _unit_collective("all_gather", unit, degrees, num_bytes=gathered_bytes),
        device_copy(gathered_bytes, part=part),
    ]
    times = 2 if degrees.zero_stage == 3 else 1
    scattered = _unit_collective("reduce_scatter", unit, degrees, num_bytes=reduced_bytes)
    return [*(replace(op, count=times) for op in gathers), copy, scattered, added_up]


def _clipped_update_ops(unit: Unit, degrees: StepDegrees) -> list[Op]:
    """List the update of a unit whose gradients are clipped to a norm before."""
    owned = unit.sharded(degrees)
    ops = [
        device_copy(owned * GRADIENT_BYTES),
        _parameter_op("adamw", owned, dtype="fp32"),
    ]
    return [replace(op, part=Part.OPTIMIZER) for op in ops]


def _unit_collective(kind: str, unit: Unit, degrees: StepDegrees, *, num_bytes: int) -> Op:
    op = collective(
        kind, num_bytes=num_bytes, ranks=unit.ranks, stride=unit.stride, world=degrees.world
    )
    return replace(op, part=Part.DATA_COMMUNICATION)


def _parameter_op(kind: str, parameters: int, *, dtype: str) -> Op:
    return Op(
        part=Part.DATA_COMMUNICATION,
        operation="optimizer",
        kind=kind,
        dtype=dtype,
        axes={"parameters": max(1, parameters)},
    )


def _seconds(ops: Iterable[Op], prices: ProfilePrices) -> PartSeconds:
    return sum_parts({op.part: op.count * prices.seconds(op)} for op in ops)
