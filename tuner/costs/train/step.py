"""Seconds of one optimizer step, per column: layers, stages, pipeline, and costs once a step.

Stage times are layer counts times unit costs (tuner/costs/train/units.py). With D_d the seconds
of one micro-batch, both passes, on all stages of device d, m micro-batches, p devices in the
pipeline and v stages on each,

    pipeline = (m - 1/v) max_d D_d + (1/v) sum_d D_d + boundaries

as in solvers/layout/problem.py; the second part is the fill and drain of the pipeline. A
zero-bubble schedule (Qi et al., arXiv:2401.10241, ZB-H1) fills the bubble with weight gradients, so
every other device counts D_d - 2 W_d; of two equally slow devices, the one with fewer weight
gradients decides. Boundaries: c seconds per crossing delay the first and last micro-batch by 2 (p -
1) c; with one stage per device the 1F1B schedule has only p - d micro-batches in flight on device
d, so that every further micro-batch waits 2 c (p - 1)/p as well; interleaved schedules hide that.

Once a step: gradient reduction over data and context ranks and parameter all-gather, overlapped
with the backward and forward pass of one micro-batch (the excess is exposed, and a share of the
rest), the optimizer over the local shard, and a fixed cost. ZeRO-3 (FSDP) instead all-gathers every
layer's weights in both passes of every micro-batch and reduce-scatters its gradients there; ZeRO-2
only the latter. With a pipeline, engines keep a stage's weights gathered and reduce once a step, as
ZeRO-1 does (torchtitan, parallelize_llama.py: `reshard_after_forward` is off with pipelines).

`assemble` reads of a strategy what `unit_costs` does not (pipeline, virtual_pipeline, data,
num_microbatches, zero_stage, shard_ranks, gradient_bytes, weight_bytes, overlap_gradients,
bucket_parameters, overlap_parameters, zero_bubble, the offloads) and, for groups and the bytes of a
boundary, tensor, context, expert, expert_tensor, sequence, micro_batch, element_bytes,
expert_imbalance; with activation offloading also all fields that activations.py reads.

Letters: C columns, S stages in execution order, P devices of a pipeline. Stage s runs on device
s mod p.

Not covered: the first steps, data loading that does not keep up, checkpoints (tuner/faults).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import Grid, Hardware, ModelShape, Stages
from tuner.costs.train.activations import activation_bytes
from tuner.costs.train.fold import (
    LayerCounts,
    layers_by_device,
    layers_by_stage,
    per_device,
    weighted_sum,
)
from tuner.costs.train.gathered_layers import gathered_bytes
from tuner.costs.train.gradient_buckets import (
    ReducedGradients,
    bucketed_reduction_s,
    default_bucket,
)
from tuner.costs.train.parts import is_any
from tuner.costs.train.prices import CAUSES_IN_PASSES, StepPrice
from tuner.costs.train.units import KINDS, LayerCost, UnitCosts, unit_costs
from tuner.prices.ops import Prices
from tuner.prices.train.collectives import (
    MEGATRON_ORDER,
    Group,
    Groups,
    all_gather_s,
    all_reduce_s,
    between_copies,
    groups,
    num_copies,
    of_one_copy,
    send_s,
)
from tuner.prices.train.constants import Constants
from tuner.prices.train.host_link import host_copy_s, optimizer_s


def price_step(
    model: ModelShape,
    strategies: Strategies,
    hardware: Hardware,
    constants: Constants,
    stages: Stages,
    *,
    prices: Prices | None = None,
    order: tuple[str, ...] = MEGATRON_ORDER,
) -> StepPrice:
    """Price every column from scratch."""
    units = unit_costs(model, strategies, hardware, constants, prices=prices, order=order)
    return assemble(model, units, strategies, hardware, constants, stages, order=order)


def assemble(
    model: ModelShape,
    units: UnitCosts,
    strategies: Strategies,
    hardware: Hardware,
    constants: Constants,
    stages: Stages,
    *,
    order: tuple[str, ...] = MEGATRON_ORDER,
) -> StepPrice:
    """Price every column from the unit costs of its layers."""
    inputs = _Inputs(
        model=model,
        strategies=strategies,
        hardware=hardware,
        constants=constants,
        groups=groups(strategies, hardware, order=order),
    )
    s = strategies
    units = _with_zero_traffic(inputs, units) if is_any(np.greater(s.zero_stage, 1.0)) else units
    units = _with_offload_traffic(inputs, units) if is_any(s.activation_offload) else units
    layer_counts, columns = layers_by_device(stages, s), _num_columns(inputs, units, stages)
    width = int(np.max(s.pipeline)), columns
    forward_PC = weighted_sum(layer_counts, units, "forward_s", shape=width)
    backward_PC = weighted_sum(layer_counts, units, "backward_s", shape=width)
    if stages.load_SC is not None:
        beyond_PC = per_device(stages.load_SC - stages.moe_SC * s.expert_imbalance, s)
        forward_PC += beyond_PC * units.load_forward_s
        backward_PC += beyond_PC * units.load_backward_s
    devices_PC = forward_PC + backward_PC
    weight_PC = (
        weighted_sum(layer_counts, units, "weight_s", shape=width)
        if is_any(s.zero_bubble)
        else None
    )
    boundary_s = send_s(_sent_bytes(inputs), inputs.groups.boundary, hardware, constants)
    pipeline_s = _pipeline_s(inputs, devices_PC, weight_PC, boundary_s)
    parameters_PC = weighted_sum(layer_counts, units, "trained", shape=width)
    experts_PC = weighted_sum(layer_counts, units, "expert_trained", shape=width)
    once_s = _once_s(
        inputs,
        parameters=parameters_PC.max(axis=0),
        experts=experts_PC.max(axis=0),
        forward_s=forward_PC.max(axis=0),
        backward_s=backward_PC.max(axis=0),
        in_buckets=lambda default_s: _bucketed_reduction_s(
            inputs, default_s, parameters_PC[0], experts_PC[0], backward_PC[0]
        ),
    )
    if is_any(hardware.is_processor):
        update_s = weighted_sum(layer_counts, units, "update_launch_s", shape=width).max(axis=0)
        once_s = once_s + np.where(np.greater(s.zero_stage, 2.0), update_s, 0.0)
    forward_SC, backward_SC = _by_stage(inputs, units, stages, columns)
    parts = _parts(units, layer_counts, s)
    return StepPrice(
        step_s=pipeline_s + once_s,
        forward_s_SC=forward_SC,
        backward_s_SC=backward_SC,
        boundary_s=boundary_s,
        once_s=once_s,
        bubble_s=pipeline_s - s.num_microbatches * devices_PC.sum(axis=0) / s.pipeline,
        tensor_s=parts["tensor_s"],
        context_s=parts["context_s"],
        expert_s=parts["expert_s"],
        recompute_s=parts["recompute_s"],
        host_s=parts["host_s"],
        sharding_s=parts["sharding_s"],
        offload_s=parts["offload_s"],
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Inputs:
    model: ModelShape
    strategies: Strategies
    hardware: Hardware
    constants: Constants
    groups: Groups


def forward_pipeline_s(price: StepPrice, strategies: Strategies) -> Numbers:
    """Return the seconds of the forward passes of a step's micro-batches alone."""
    forward_PC = per_device(price.forward_s_SC, strategies)
    sent_s = (strategies.pipeline - 1.0) * price.boundary_s
    total: Numbers = _critical_path_s(forward_PC, forward_PC, strategies) + sent_s
    return total


def _num_columns(inputs: _Inputs, units: UnitCosts, stages: Stages) -> int:
    """Number of columns: the length of whichever input is an array."""
    costs = [getattr(units, kind) for kind in KINDS]
    values = [getattr(cost, field.name) for cost in costs for field in fields(LayerCost)]
    s = inputs.strategies
    values += [units.load_forward_s, s.pipeline, s.num_microbatches, s.expert_imbalance]
    values += [s.bucket_parameters]
    shapes = [np.shape(value) for value in values] + [stages.dense_SC.shape[1:]]
    return int(np.broadcast_shapes(*shapes)[0])


def _by_stage(inputs: _Inputs, units: UnitCosts, stages: Stages, columns: int) -> tuple[Grid, Grid]:
    layer_counts, shape = layers_by_stage(stages), (len(stages.dense_SC), columns)
    forward_SC = weighted_sum(layer_counts, units, "forward_s", shape=shape)
    backward_SC = weighted_sum(layer_counts, units, "backward_s", shape=shape)
    if stages.load_SC is not None:
        beyond_SC = stages.load_SC - stages.moe_SC * inputs.strategies.expert_imbalance
        forward_SC += beyond_SC * units.load_forward_s
        backward_SC += beyond_SC * units.load_backward_s
    return forward_SC, backward_SC


def _sent_bytes(inputs: _Inputs) -> Numbers:
    s = inputs.strategies
    return s.element_bytes * s.tokens * inputs.model.residual_width / s.tensor


def _pipeline_s(
    inputs: _Inputs, devices_PC: Grid, weight_PC: Grid | None, boundary_s: Numbers
) -> Numbers:
    s = inputs.strategies
    v, p = s.virtual_pipeline, s.pipeline
    once_PC = devices_PC
    if weight_PC is not None:
        filled_PC = np.maximum(devices_PC - 2.0 * weight_PC, 0.0)
        once_PC = np.where(np.greater(s.zero_bubble, 0.0), filled_PC, devices_PC)
    visible_s = boundary_s * inputs.constants.boundary_exposed_ratio
    crossings = 2.0 * (p - 1.0)
    steady_crossings = np.where(np.equal(v, 1.0), crossings / p * (s.num_microbatches - 1.0), 0.0)
    total: Numbers = (
        _critical_path_s(devices_PC, once_PC, s) + (crossings + steady_crossings) * visible_s
    )
    return total


def _critical_path_s(devices_PC: Grid, once_PC: Grid, s: Strategies) -> Numbers:
    """Return the critical path: all micro-batches on one device, one on every other device."""
    past_PC = (once_PC.sum(axis=0) - once_PC) / s.virtual_pipeline
    longest: Numbers = (s.num_microbatches * devices_PC + past_PC).max(axis=0)
    return longest


def _once_s(
    inputs: _Inputs,
    *,
    parameters: Numbers,
    experts: Numbers,
    forward_s: Numbers,
    backward_s: Numbers,
    in_buckets: Callable[[Numbers], Numbers],
) -> Numbers:
    """Price what runs once a step on the device with the most parameters.

    Collectives overlap with the longest passes.
    """
    s, constants = inputs.strategies, inputs.constants
    reduction_s = _reduction_s(inputs, parameters, inputs.groups.shared)
    parameter_gather_s = _parameter_gather_s(inputs, parameters, inputs.groups.shared)
    if is_any(experts):
        reduction_s = reduction_s + _reduction_s(inputs, experts, inputs.groups.expert_data)
        parameter_gather_s = parameter_gather_s + _parameter_gather_s(
            inputs, experts, inputs.groups.expert_data
        )
    exposed = _exposed(inputs, constants.gradient_exposed_ratio)
    visible_s = in_buckets(_visible_s(reduction_s, backward_s, s.overlap_gradients, exposed))
    exposed = _exposed(inputs, constants.parameter_exposed_ratio)
    visible_s = visible_s + _visible_s(parameter_gather_s, forward_s, s.overlap_parameters, exposed)
    update_s = optimizer_step_s(
        s, inputs.groups, inputs.hardware, constants, parameters=parameters, experts=experts
    )
    return visible_s + update_s + constants.step_fixed_s


def optimizer_step_s(
    strategies: Strategies,
    groups: Groups,
    hardware: Hardware,
    constants: Constants,
    *,
    parameters: Numbers,
    experts: Numbers,
) -> Numbers:
    """Price the optimizer on a device's share of its stage's parameters, experts' apart."""
    sharded, copies = np.greater(strategies.zero_stage, 0.0), num_copies(strategies)
    parts = of_one_copy(groups.shared, copies).ranks
    expert_parts = of_one_copy(groups.expert_data, copies).ranks
    local = np.where(sharded, parameters / parts, parameters)
    local = local + np.where(sharded, experts / expert_parts, experts)
    return local * optimizer_s(strategies.optimizer_offload, hardware, constants)


def _bucketed_reduction_s(
    inputs: _Inputs, default_s: Numbers, parameters: Numbers, experts: Numbers, backward_s: Numbers
) -> Numbers:
    """Exposed gradient reduction in buckets of the stated size, where one is stated.

    Only the first pipeline rank's first chunk has buckets.
    """
    s = inputs.strategies
    if not is_any(s.bucket_parameters):
        return default_s
    v, shared = s.virtual_pipeline, inputs.groups.shared
    kinds = [
        ReducedGradients(
            parameters=parameters / v, reduce_s=lambda part: _reduction_s(inputs, part, shared)
        )
    ]
    if is_any(experts):
        spread = inputs.groups.expert_data
        kinds.append(
            ReducedGradients(
                parameters=experts / v, reduce_s=lambda part: _reduction_s(inputs, part, spread)
            )
        )
    default = default_bucket(shared.ranks)
    is_stated = np.greater(s.bucket_parameters, 0.0) & np.greater(s.overlap_gradients, 0.0)
    bucket = np.where(is_stated, s.bucket_parameters, default)
    return bucketed_reduction_s(
        default_s, tuple(kinds), bucket=bucket, default=default, backward_s=backward_s / v
    )


def _exposed(inputs: _Inputs, ratio: Numbers) -> Numbers:
    """A processor hides no collective behind its kernels: the same cores run both."""
    return np.maximum(ratio, inputs.hardware.is_processor)


def _visible_s(moved_s: Numbers, beside_s: Numbers, overlaps: Numbers, exposed: Numbers) -> Numbers:
    hidden = np.maximum(moved_s - beside_s, exposed * moved_s)
    return np.where(np.greater(overlaps, 0.0), hidden, moved_s)


def _reduction_s(inputs: _Inputs, parameters: Numbers, group: Group) -> Numbers:
    """Gradient reduction once a step: none beyond ZeRO-1."""
    s, machine, constants = inputs.strategies, inputs.hardware, inputs.constants
    total = parameters * s.gradient_bytes
    reduced = all_reduce_s(total, group, machine, constants)
    scattered = _sharded_reduction_s(inputs, total, group)
    return np.select(
        [np.equal(_zero_stage(s), 0.0), np.equal(_zero_stage(s), 1.0)], [reduced, scattered], 0.0
    )


def _sharded_reduction_s(inputs: _Inputs, total_bytes: Numbers, group: Group) -> Numbers:
    """Reduce-scatter inside a copy, then all-reduce over the copies' ranks of the same shard."""
    machine, constants, copies = inputs.hardware, inputs.constants, num_copies(inputs.strategies)
    near = of_one_copy(group, copies)
    summed_s = _gathered_s(inputs, total_bytes, near)
    if not is_any(np.greater(copies, 1.0)):
        return summed_s
    return summed_s + all_reduce_s(
        total_bytes / near.ranks, between_copies(group, copies), machine, constants
    )


def _gathered_s(inputs: _Inputs, total_bytes: Numbers, group: Group) -> Numbers:
    """Gather shards, which first come from the host where they live there; a reduction likewise."""
    offloaded_bytes = inputs.strategies.parameter_offload * total_bytes / group.ranks
    copied_s = host_copy_s(offloaded_bytes, inputs.hardware)
    return all_gather_s(total_bytes, group, inputs.hardware, inputs.constants) + copied_s


def _parameter_gather_s(inputs: _Inputs, parameters: Numbers, group: Group) -> Numbers:
    s = inputs.strategies
    total = parameters * s.weight_bytes
    near = of_one_copy(group, num_copies(s))
    gathered = _gathered_s(inputs, total, near)
    once = np.equal(_zero_stage(s), 1.0) | np.equal(_zero_stage(s), 2.0)
    return np.where(once, gathered, 0.0)


def _zero_stage(s: Strategies) -> Numbers:
    """Return the stage as traffic has it: in a pipeline FSDP communicates once a step."""
    return np.where(np.greater(s.pipeline, 1.0), np.minimum(s.zero_stage, 1.0), s.zero_stage)


def _with_zero_traffic(inputs: _Inputs, units: UnitCosts) -> UnitCosts:
    """Add what ZeRO-2 and ZeRO-3 move in every micro-batch, overlapped layer by layer.

    The fine-tuning loop's FSDP2 keeps the outermost module, embedding and head, until its backward
    pass.
    """
    is_kept = inputs.strategies.eager_modules
    changed: dict[str, Any] = {
        kind: _layer_with_zero_traffic(
            inputs,
            getattr(units, kind),
            num_backward=1.0 - is_kept * (kind in ("embedding", "head")),
        )
        for kind in KINDS
    }
    return replace(units, **changed)


def _layer_with_zero_traffic(
    inputs: _Inputs, cost: LayerCost, *, num_backward: Numbers
) -> LayerCost:
    """Add a layer's gathers and reductions; `num_backward`: of its gathers in the backward pass."""
    s, constants = inputs.strategies, inputs.constants
    shared, copies = inputs.groups.shared, num_copies(s)
    near = of_one_copy(shared, copies)
    gathered = gathered_bytes(s, cost.parameters, cost.trained)
    gather_s = _gathered_s(inputs, gathered, near) + cost.gather_launch_s
    gather_s = gather_s + cost.copied_s * (1.0 + 1.0 / near.ranks)
    sum_s = _sharded_reduction_s(inputs, cost.trained * s.gradient_bytes, shared)
    if is_any(cost.expert_parameters):
        group = inputs.groups.expert_data
        near = of_one_copy(group, copies)
        gathered = gathered_bytes(s, cost.expert_parameters, cost.expert_trained)
        gather_s = gather_s + _gathered_s(inputs, gathered, near)
        sum_s = sum_s + _sharded_reduction_s(inputs, cost.expert_trained * s.gradient_bytes, group)
    gather_s = np.where(np.greater(_zero_stage(s), 2.0), gather_s, 0.0)
    sum_s = np.where(np.greater(_zero_stage(s), 1.0), sum_s + cost.reduce_launch_s, 0.0)
    exposed = _exposed(inputs, constants.fsdp_exposed_ratio)
    return _with_passes(
        cost,
        cause="sharding_s",
        forward_s=_overlapped_s(gather_s, cost.forward_s, exposed),
        backward_s=_overlapped_s(num_backward * gather_s + sum_s, cost.backward_s, exposed),
    )


def _overlapped_s(moved_s: Numbers, work_s: Numbers, exposed: Numbers) -> Numbers:
    return np.maximum(moved_s, work_s) + exposed * np.minimum(moved_s, work_s)


def _with_offload_traffic(inputs: _Inputs, units: UnitCosts) -> UnitCosts:
    """Offload saved activations during the forward pass and fetch them back during backward.

    Each layer moves what it keeps (activations.py); what its own pass does not hide is exposed,
    since its neighbours' passes hide their own copies.
    """
    s = inputs.strategies
    kept = activation_bytes(inputs.model, s, cp_output_copy_ratio=1.0)
    has_experts = np.greater(inputs.model.mtp_has_experts, 0.0)
    last = np.where(has_experts, kept.moe.saved, kept.dense.saved)
    saved = {"dense": kept.dense.saved, "moe": kept.moe.saved, "mtp": last + 2.0 * kept.boundary}
    changed: dict[str, Any] = {}
    for kind, kept_bytes in saved.items():
        cost = getattr(units, kind)
        moved_s = host_copy_s(s.activation_offload * kept_bytes, inputs.hardware)
        if kind == "mtp" and not is_any(inputs.model.mtp_layers):
            continue
        changed[kind] = _with_passes(
            cost,
            cause="offload_s",
            forward_s=np.maximum(cost.forward_s, moved_s),
            backward_s=np.maximum(cost.backward_s, moved_s),
        )
    return replace(units, **changed)


def _with_passes(
    cost: LayerCost, *, cause: str, forward_s: Numbers, backward_s: Numbers
) -> LayerCost:
    """Lengthen both passes and book what they take longer under its cause."""
    added_s = forward_s - cost.forward_s + (backward_s - cost.backward_s)
    return replace(cost, forward_s=forward_s, backward_s=backward_s, **{cause: added_s})


def _parts(
    units: UnitCosts, layer_counts: Mapping[str, LayerCounts], strategies: Strategies
) -> dict[str, Numbers]:
    """Seconds of a step on the average device, by cause."""
    totals: dict[str, Numbers] = dict.fromkeys(CAUSES_IN_PASSES, 0.0)
    for kind, (rows, count_RC) in layer_counts.items():
        if not len(rows):
            continue
        count, cost = count_RC.sum(axis=0), getattr(units, kind)
        for name in totals:
            totals[name] = totals[name] + count * getattr(cost, name)
    share = strategies.num_microbatches / strategies.pipeline
    return {name: total * share for name, total in totals.items()}
