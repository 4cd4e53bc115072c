"""Seconds of one optimizer step, per column: layers to stages to pipeline, and what comes once.

Stage times are counts of layers times unit costs (tuner/costs/analytic/units.py). With D_d the
seconds of one micro-batch, both passes, on all stages of device d, m micro-batches, p devices in
the pipeline and v stages on each,

    pipeline = (m - 1/v) max_d D_d + (1/v) sum_d D_d + boundaries

as in solvers/layout/problem.py; the second part is the first micro-batch's way to the slowest
device and the last one's way back. A zero-bubble schedule (Qi et al., arXiv:2401.10241, ZB-H1)
fills weight gradients into that way, where every other device then counts D_d - 2 W_d. Boundaries:
c seconds per crossing delay the first and last micro-batch by 2 (p - 1) c; with one stage per
device the 1F1B schedule has only p - d micro-batches in flight on device d, so that every further
micro-batch waits 2 c (p - 1)/p as well; interleaved schedules hide that.

Once a step: gradient sums over data and context ranks and parameter gathers, beside the backward
and forward pass of one micro-batch (what does not fit is visible, and of the rest a share), the
optimizer over the local shard, and a fixed cost. ZeRO-3 (FSDP) instead gathers every layer's
weights in both passes of every micro-batch and sums its gradients there; ZeRO-2 only the latter.
In a pipeline, where the weights of a stage would be fetched for each of many micro-batches, engines
keep them gathered and sum once a step, as ZeRO-1 does (torchtitan, parallelize_llama.py:
`reshard_after_forward` is off with pipelines).

Letters: C columns, S stages in execution order, P devices of a pipeline. Stage s runs on device
s mod p.

Not covered: the first steps, data loading that does not keep up, checkpoints (tuner/faults).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tuner.costs.analytic.constants import Constants
from tuner.costs.analytic.kernels import Kernels
from tuner.costs.analytic.links import (
    MEGATRON_ORDER,
    Group,
    Groups,
    all_gather_s,
    all_reduce_s,
    groups,
    send_s,
)
from tuner.costs.analytic.parts import is_any
from tuner.costs.analytic.prices import StepPrice
from tuner.costs.analytic.shapes import Grid, Hardware, ModelShape, Numbers, Stages, Strategies
from tuner.costs.analytic.units import KINDS, LayerCost, UnitCosts, unit_costs

OFFLOAD_BYTES = 34.0
"""Per parameter whose optimizer state is in host memory: gradient down and weight up (6 bytes over
the link), and fp32 moments and weight read and written by the host (28)."""
SAVED_VECTORS = 17.0
"""Hidden-sized vectors that a layer saves per token; 34 s b h bytes in Korthikanti et al."""


def price_step(
    model: ModelShape,
    strategies: Strategies,
    hardware: Hardware,
    constants: Constants,
    stages: Stages,
    *,
    kernels: Kernels | None = None,
    order: tuple[str, ...] = MEGATRON_ORDER,
) -> StepPrice:
    """Price every column from scratch."""
    units = unit_costs(model, strategies, hardware, constants, kernels=kernels, order=order)
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
    asked = _Asked(
        model=model,
        strategies=strategies,
        hardware=hardware,
        constants=constants,
        groups=groups(strategies, hardware, order=order),
    )
    s = strategies
    units = _sharded(asked, units) if is_any(np.greater(s.zero_stage, 1.0)) else units
    units = _offloaded(asked, units) if is_any(s.activation_offload) else units
    forward_SC = _per_stage(units, stages, "forward_s") + _load(stages, s, units.load_forward_s)
    backward_SC = _per_stage(units, stages, "backward_s") + _load(stages, s, units.load_backward_s)
    devices_PC = per_device(forward_SC + backward_SC, s)
    boundary_s = send_s(_sent_bytes(asked), asked.groups.boundary, hardware, constants)
    pipeline_s = _pipeline_s(asked, units, stages, devices_PC, boundary_s)
    once_s = _once_s(asked, units, stages, forward_SC, backward_SC)
    parts = _parts(units, stages, s)
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
    )


def per_device(stage_SC: Grid, strategies: Strategies) -> Grid:
    """Sum the stages of every pipeline device, stage s on device s mod p: [P, C]."""
    pipeline = np.asarray(strategies.pipeline, dtype=np.float64)
    num_stages, num_columns = stage_SC.shape
    degrees = np.unique(pipeline)
    if len(degrees) == 1:
        return _folded(stage_SC, int(degrees[0]))
    most = int(degrees[-1])
    total_PC = np.zeros((most, num_columns))
    by_column = np.broadcast_to(pipeline, (num_columns,))
    if num_stages <= degrees[0]:
        total_PC[:num_stages] = stage_SC
        return total_PC
    for degree in degrees:
        here = np.flatnonzero(by_column == degree)
        total_PC[: int(degree), here] = _folded(stage_SC[:, here], int(degree))
    return total_PC


def _folded(stage_SC: Grid, degree: int) -> Grid:
    num_stages, num_columns = stage_SC.shape
    if num_stages == degree:
        return stage_SC
    rounds = -(-num_stages // degree)
    padded = np.zeros((rounds * degree, num_columns))
    padded[:num_stages] = stage_SC
    folded: Grid = padded.reshape(rounds, degree, num_columns).sum(axis=0)
    return folded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    model: ModelShape
    strategies: Strategies
    hardware: Hardware
    constants: Constants
    groups: Groups


def _counts(stages: Stages) -> dict[str, Grid]:
    return {
        "dense": stages.dense_SC,
        "moe": stages.moe_SC,
        "mtp": stages.mtp_SC,
        "embedding": stages.embedding_SC,
        "head": stages.head_SC,
    }


def _per_stage(units: UnitCosts, stages: Stages, name: str) -> Grid:
    total: Grid = np.zeros((1, 1))
    for kind, count_SC in _counts(stages).items():
        value = getattr(getattr(units, kind), name)
        if is_any(value) and count_SC.any():
            total = total + count_SC * value
    return total


def _load(stages: Stages, strategies: Strategies, slope_s: Numbers) -> Grid | float:
    """What recorded loads add to the mean busiest ratio that unit costs were priced at."""
    if stages.load_SC is None:
        return 0.0
    beyond = stages.load_SC - stages.moe_SC * strategies.busiest_ratio
    added: Grid = beyond * slope_s
    return added


def _sent_bytes(asked: _Asked) -> Numbers:
    s = asked.strategies
    return s.element_bytes * s.tokens * asked.model.hidden / s.tensor


def _pipeline_s(
    asked: _Asked, units: UnitCosts, stages: Stages, devices_PC: Grid, boundary_s: Numbers
) -> Numbers:
    s = asked.strategies
    v, p = s.virtual_pipeline, s.pipeline
    slowest_s = devices_PC.max(axis=0)
    way_s = devices_PC.sum(axis=0) - slowest_s
    if is_any(s.zero_bubble):
        weights_PC = per_device(
            np.broadcast_to(_per_stage(units, stages, "weight_s"), _shape(stages, devices_PC)), s
        )
        filled_PC = np.maximum(devices_PC - 2.0 * weights_PC, 0.0)
        filled_s = (
            filled_PC.sum(axis=0)
            - np.take_along_axis(filled_PC, devices_PC.argmax(axis=0)[None, :], axis=0)[0]
        )
        way_s = np.where(s.zero_bubble > 0.0, filled_s, way_s)
    visible_s = boundary_s * asked.constants.boundary_exposed_ratio
    crossings = 2.0 * (p - 1.0)
    each = np.where(np.equal(v, 1.0), crossings / p * (s.num_microbatches - 1.0), 0.0)
    total: Numbers = s.num_microbatches * slowest_s + way_s / v + (crossings + each) * visible_s
    return total


def _shape(stages: Stages, devices_PC: Grid) -> tuple[int, int]:
    return stages.dense_SC.shape[0], devices_PC.shape[1]


def _once_s(
    asked: _Asked, units: UnitCosts, stages: Stages, forward_SC: Grid, backward_SC: Grid
) -> Numbers:
    s, own, machine = asked.strategies, asked.constants, asked.hardware
    shape = forward_SC.shape
    dense_P = per_device(np.broadcast_to(_per_stage(units, stages, "parameters"), shape), s)
    dense = dense_P.max(axis=0)
    experts: Numbers = 0.0
    if is_any(units.moe.expert_parameters):
        held = np.broadcast_to(_per_stage(units, stages, "expert_parameters"), shape)
        experts = per_device(held, s).max(axis=0)
    sums_s = _sums_s(asked, dense, asked.groups.shared)
    gathers_s = _gathers_s(asked, dense, asked.groups.shared)
    if is_any(experts):
        sums_s = sums_s + _sums_s(asked, experts, asked.groups.expert_data)
        gathers_s = gathers_s + _gathers_s(asked, experts, asked.groups.expert_data)
    backward_s = per_device(backward_SC, s).max(axis=0)
    forward_s = per_device(forward_SC, s).max(axis=0)
    visible_s = _visible_s(sums_s, backward_s, s.overlap_gradients, own.gradient_exposed_ratio)
    visible_s = visible_s + _visible_s(
        gathers_s, forward_s, s.overlap_parameters, own.parameter_exposed_ratio
    )
    sharded = np.greater(s.zero_stage, 0.0)
    local = np.where(sharded, dense / _shards(s, asked.groups.shared), dense)
    local = local + np.where(sharded, experts / asked.groups.expert_data.ranks, experts)
    on_device = own.optimizer_bytes * (1.0 - s.optimizer_offload) / machine.memory_bytes_per_s
    on_host = OFFLOAD_BYTES * s.optimizer_offload / machine.host_bytes_per_s
    total: Numbers = visible_s + local * (on_device + on_host) + own.step_fixed_s
    return total


def _visible_s(moved_s: Numbers, beside_s: Numbers, overlaps: Numbers, exposed: Numbers) -> Numbers:
    hidden = np.maximum(moved_s - beside_s, exposed * moved_s)
    return np.where(np.greater(overlaps, 0.0), hidden, moved_s)


def _shards(s: Strategies, shared: Group) -> Numbers:
    return np.where(np.greater(s.shard_ranks, 0.0), s.shard_ranks, shared.ranks)


def _sums_s(asked: _Asked, parameters: Numbers, group: Group) -> Numbers:
    """Gradient sums that come once a step: none beyond ZeRO-1, except between HSDP's replicas."""
    s, machine, own = asked.strategies, asked.hardware, asked.constants
    total = parameters * s.gradient_bytes
    reduced = all_reduce_s(total, group, machine, own)
    scattered = all_gather_s(total, group, machine, own)
    return np.select(
        [np.equal(_zero_stage(s), 0.0), np.equal(_zero_stage(s), 1.0)], [reduced, scattered], 0.0
    )


def _gathers_s(asked: _Asked, parameters: Numbers, group: Group) -> Numbers:
    s = asked.strategies
    total = parameters * np.minimum(s.weight_bytes, 2.0)
    gathered = all_gather_s(total, group, asked.hardware, asked.constants)
    once = np.equal(_zero_stage(s), 1.0) | np.equal(_zero_stage(s), 2.0)
    return np.where(once, gathered, 0.0)


def _zero_stage(s: Strategies) -> Numbers:
    """Return the stage as traffic has it: in a pipeline FSDP gathers and sums once a step."""
    return np.where(np.greater(s.pipeline, 1.0), np.minimum(s.zero_stage, 1.0), s.zero_stage)


def _sharded(asked: _Asked, units: UnitCosts) -> UnitCosts:
    """Add what ZeRO-2 and ZeRO-3 move in every micro-batch, per layer, beside its kernels."""
    return _mapped(units, lambda cost: _sharded_layer(asked, cost))


def _sharded_layer(asked: _Asked, cost: LayerCost) -> LayerCost:
    s, machine, own = asked.strategies, asked.hardware, asked.constants
    shared = asked.groups.shared
    shards = _shards(s, shared)
    near = Group(ranks=shards, inside=np.minimum(shared.inside, shards))
    replicas = Group(ranks=shared.ranks / shards, inside=np.maximum(shared.inside / shards, 1.0))
    weight_bytes = np.minimum(s.weight_bytes, 2.0)
    gather_s = all_gather_s(cost.parameters * weight_bytes, near, machine, own)
    sum_s = all_gather_s(cost.parameters * s.gradient_bytes, near, machine, own)
    sum_s = sum_s + all_reduce_s(
        cost.parameters * s.gradient_bytes / shards, replicas, machine, own
    )
    if is_any(cost.expert_parameters):
        group = asked.groups.expert_data
        gather_s = gather_s + all_gather_s(
            cost.expert_parameters * weight_bytes, group, machine, own
        )
        sum_s = sum_s + all_gather_s(cost.expert_parameters * s.gradient_bytes, group, machine, own)
    gather_s = np.where(np.greater(_zero_stage(s), 2.0), gather_s, 0.0)
    sum_s = np.where(np.greater(_zero_stage(s), 1.0), sum_s, 0.0)
    exposed = own.fsdp_exposed_ratio
    return _with_passes(
        cost,
        forward_s=_beside(gather_s, cost.forward_s, exposed),
        backward_s=_beside(gather_s + sum_s, cost.backward_s, exposed),
    )


def _beside(moved_s: Numbers, work_s: Numbers, exposed: Numbers) -> Numbers:
    return np.maximum(moved_s, work_s) + exposed * np.minimum(moved_s, work_s)


def _offloaded(asked: _Asked, units: UnitCosts) -> UnitCosts:
    """Saved activations go to host memory beside the forward pass and come back beside backward."""
    s = asked.strategies
    saved = SAVED_VECTORS * s.element_bytes * s.tokens * asked.model.hidden / s.tensor
    moved_s = s.activation_offload * saved / asked.hardware.host_bytes_per_s

    def changed(cost: LayerCost) -> LayerCost:
        return _with_passes(
            cost,
            forward_s=np.maximum(cost.forward_s, moved_s),
            backward_s=np.maximum(cost.backward_s, moved_s),
        )

    return _mapped(units, changed, kinds=("dense", "moe", "mtp"))


def _mapped(
    units: UnitCosts,
    change: Callable[[LayerCost], LayerCost],
    *,
    kinds: tuple[str, ...] = KINDS,
) -> UnitCosts:
    changed: dict[str, Any] = {kind: change(getattr(units, kind)) for kind in kinds}
    return replace(units, **changed)


def _with_passes(cost: LayerCost, *, forward_s: Numbers, backward_s: Numbers) -> LayerCost:
    return replace(cost, forward_s=forward_s, backward_s=backward_s)


def _parts(units: UnitCosts, stages: Stages, strategies: Strategies) -> dict[str, Numbers]:
    """Seconds of a step on the average device, by cause."""
    names = ("tensor_s", "context_s", "expert_s", "recompute_s", "host_s")
    totals: dict[str, Numbers] = dict.fromkeys(names, 0.0)
    for kind, count_SC in _counts(stages).items():
        count = count_SC.sum(axis=0)
        cost = getattr(units, kind)
        for name in names:
            totals[name] = totals[name] + count * getattr(cost, name)
    share = strategies.num_microbatches / strategies.pipeline
    return {name: total * share for name, total in totals.items()}
