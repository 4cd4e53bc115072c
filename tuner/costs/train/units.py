"""Cost of one layer of each kind on one device per micro-batch, independent of the stages.

These are the expensive half of a price: GEMMs by tile, collectives by group. They depend on the
model, the machine, the constants, and of a strategy on

    sequence, micro_batch, tensor, context, expert, expert_tensor, sequence_parallel, element_bytes,
    every recompute_* field, chunks, has_flash_attention, dropout, a2a_overlap, is_deepep,
    is_hybridep, overlap_tensor, partial_graph, full_graph, fused_grouped_mlp,
    expert_imbalance, buffered_ratio, gradient_bytes, reference_forwards

but not on pipeline, virtual_pipeline, data, num_microbatches, zero_stage or the layout. (Groups of
tensor, context and expert parallelism lie inside those of data and pipeline parallelism in
Megatron's order; with another order, `order`, the outer degrees count too.) A search prices the
distinct combinations once and gathers with `UnitCosts.taken`.

The host launches every kernel; a device with shorter kernels waits. Seconds of a pass are the
smooth maximum (d^4 + l^4)^(1/4) of the device's kernels d and the launches l, since queues absorb
part of the difference; on a processor, which runs its kernels itself, and in eager layers whose
dispatch reads counts back, their sum. Exposed collectives are added: they wait for the slowest
host, so no host runs ahead during them. The exponent is ours.

Letters: C columns. Not covered: hosts that are slower on some ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import Hardware, ModelShape, taken
from tuner.costs.train.adapters import adapter_counts, is_tuned
from tuner.costs.train.attention import attention_block
from tuner.costs.train.blocks import (
    dense_block,
    embedding_block,
    head_block,
    mtp_projection_block,
)
from tuner.costs.train.eager_blocks import (
    eager_attention,
    eager_dense,
    eager_head,
    eager_linear,
    eager_moe,
)
from tuner.costs.train.experts import moe_blocks
from tuner.costs.train.gathered_layers import GatheredLayer, gathered_bytes, gathered_layer
from tuner.costs.train.linear_attention import linear_block
from tuner.costs.train.parts import Block, BlockInputs, is_any, scale_block, select_block
from tuner.costs.train.state import attention_matrices, connection_matrix
from tuner.prices.datasheet import DatasheetPrices
from tuner.prices.ops import Prices
from tuner.prices.train.collectives import MEGATRON_ORDER, groups
from tuner.prices.train.constants import Constants

SMOOTHNESS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCost:
    """One layer, one micro-batch, one device."""

    forward_s: Numbers = 0.0
    """Seconds of the forward pass, exposed communication and waiting for the host included."""
    backward_s: Numbers = 0.0
    """Seconds of the backward pass, likewise, recomputation included."""
    weight_s: Numbers = 0.0
    """Part of the backward pass: GEMMs for weight gradients, which may be delayed."""
    tensor_s: Numbers = 0.0
    """Part of both passes: exposed collectives of tensor parallelism, recomputed ones included."""
    context_s: Numbers = 0.0
    expert_s: Numbers = 0.0
    recompute_s: Numbers = 0.0
    """Part of the backward pass: recomputed kernels, without collectives and launches."""
    host_s: Numbers = 0.0
    """Part of both passes: waiting for launches."""
    sharding_s: Numbers = 0.0
    """Part of both passes: exposed gathers and reductions of sharded parameters and gradients."""
    offload_s: Numbers = 0.0
    """Part of both passes: exposed copies of activations to and from host memory."""
    parameters: Numbers = 0.0
    """Parameters of one device, without experts."""
    expert_parameters: Numbers = 0.0
    """Parameters of experts of one device."""
    trained: Numbers = 0.0
    """Parameters with a gradient among `parameters`, or those of adapters beside them."""
    expert_trained: Numbers = 0.0
    copied_s: Numbers = 0.0
    """Seconds of reading and writing its parameters once, where a gather does so
    (gathered_layers.py)."""
    gather_launch_s: Numbers = 0.0
    """Seconds of launches of one gather, where they are not hidden."""
    reduce_launch_s: Numbers = 0.0
    """Seconds of launches of one reduction of its gradients, where they are not hidden."""
    update_launch_s: Numbers = 0.0
    """Seconds of launches of the optimizer, where parameters are sharded tensors."""


KINDS = ("dense", "moe", "mtp", "embedding", "head")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitCosts:
    """Costs by kind of layer."""

    dense: LayerCost
    moe: LayerCost
    mtp: LayerCost
    """A whole multi-token-prediction layer, its head included."""
    embedding: LayerCost
    head: LayerCost
    load_forward_s: Numbers
    """Additional seconds of a MoE layer's forward pass per unit of imbalance."""
    load_backward_s: Numbers

    def taken(self, chosen: npt.NDArray[np.intp]) -> "UnitCosts":
        """Keep or repeat the chosen columns."""

        def kept(value: Numbers) -> Numbers:
            return value[chosen] if isinstance(value, np.ndarray) and value.ndim else value

        return UnitCosts(
            **{kind: taken(getattr(self, kind), chosen) for kind in KINDS},
            load_forward_s=kept(self.load_forward_s),
            load_backward_s=kept(self.load_backward_s),
        )


def unit_costs(
    model: ModelShape,
    strategies: Strategies,
    hardware: Hardware,
    constants: Constants,
    *,
    prices: Prices | None = None,
    order: tuple[str, ...] = MEGATRON_ORDER,
) -> UnitCosts:
    """Price one layer of each kind; see the module for what the result depends on."""
    setting = BlockInputs(
        model=model,
        strategies=strategies,
        hardware=hardware,
        constants=constants,
        prices=prices or DatasheetPrices(hardware=hardware, constants=constants),
        groups=groups(strategies, hardware, order=order),
    )
    attention = _eager_or(setting, eager_attention, attention_block)
    linear = _eager_or(setting, eager_linear, linear_block) if model.has_linear else Block()
    has_moe = is_any(model.moe_layers)
    mixer = scale_block(model.dense_attention, attention) + scale_block(model.dense_linear, linear)
    network = _eager_or(setting, eager_dense, dense_block)
    dense = _layer(setting, mixer + scale_block(model.dense_network, network))
    head = _embedding_or_head(setting, _eager_or(setting, eager_head, head_block))
    moe = dense
    slopes: tuple[Numbers, Numbers] = (0.0, 0.0)
    if has_moe:
        fixed, routed = _moe_blocks(setting)
        mixer = scale_block(model.moe_attention, attention) + scale_block(model.moe_linear, linear)
        moe, slopes = _moe_layer(setting, mixer + fixed, routed)
    mtp = LayerCost()
    if is_any(model.mtp_layers):
        joined = _layer(setting, mtp_projection_block(setting))
        bare = attention
        if is_any(model.output_groups):
            bare = attention_block(replace(setting, model=model.without_compressors))
        last = _layer(setting, bare + network)
        if has_moe:
            with_experts, _ = _moe_layer(setting, bare + fixed, routed)
            last = _where(np.greater(model.mtp_has_experts, 0.0), with_experts, last)
        mtp = _sum(last, joined, head)
    counted = _counted_parameters(model, strategies)
    trains = _trained_parameters(model, strategies, counted)
    units = UnitCosts(
        dense=replace(dense, parameters=counted["dense"], trained=trains["dense"]),
        moe=replace(
            moe,
            parameters=counted["moe"],
            expert_parameters=counted["experts"],
            trained=trains["moe"],
            expert_trained=trains["experts"],
        ),
        mtp=replace(
            mtp,
            parameters=model.mtp_weight_ratio * counted["mtp"],
            expert_parameters=model.mtp_weight_ratio
            * np.where(np.greater(model.mtp_has_experts, 0.0), counted["experts"], 0.0),
            trained=model.mtp_weight_ratio * trains["mtp"],
            expert_trained=model.mtp_weight_ratio
            * np.where(np.greater(model.mtp_has_experts, 0.0), trains["experts"], 0.0),
        ),
        embedding=replace(
            _embedding_or_head(setting, embedding_block(setting)),
            parameters=counted["table"],
            trained=trains["table"],
        ),
        head=replace(head, parameters=counted["table"], trained=trains["table"]),
        load_forward_s=slopes[0],
        load_backward_s=slopes[1],
    )
    if not is_any(hardware.is_processor):
        return units
    changed: dict[str, Any] = {kind: _gathered(setting, kind, units) for kind in KINDS}
    return replace(units, **changed)


def _gathered(setting: BlockInputs, kind: str, units: UnitCosts) -> LayerCost:
    """Add what FSDP2 adds to a layer on a processor."""
    cost: LayerCost = getattr(units, kind)
    trained = cost.trained + cost.expert_trained
    size = gathered_bytes(setting.strategies, cost.parameters + cost.expert_parameters, trained)
    more = gathered_layer(setting, kind, layer_bytes=size)
    return replace(
        cost, **{field.name: getattr(more, field.name) for field in fields(GatheredLayer)}
    )


def _eager_or(
    setting: BlockInputs,
    eager: Callable[[BlockInputs], Block],
    fused: Callable[[BlockInputs], Block],
) -> Block:
    """Pick per column: Transformers' modules, or an engine's own layers."""
    if not is_any(setting.strategies.eager_modules):
        return fused(setting)
    is_eager = np.greater(setting.strategies.eager_modules, 0.0)
    return select_block(is_eager, eager(setting), fused(setting))


def _moe_blocks(setting: BlockInputs) -> tuple[Block, Block]:
    """Both blocks of a MoE layer, picked likewise."""
    fused = moe_blocks(setting)
    if not is_any(setting.strategies.eager_modules):
        return fused
    is_eager = np.greater(setting.strategies.eager_modules, 0.0)
    fixed, routed = (
        select_block(is_eager, eager_block, fused_block)
        for eager_block, fused_block in zip(eager_moe(setting), fused, strict=True)
    )
    return fixed, routed


def _layer(setting: BlockInputs, block: Block, *, waits: Numbers = 0.0) -> LayerCost:
    """A layer to which full recomputation applies."""
    return _cost(setting, block, full=_recomputed_share(setting.strategies), waits=waits)


def _recomputed_share(s: Strategies) -> Numbers:
    """Share of a layer's forward pass that is recomputed.

    By operation: about half of the GEMMs and all memory-bound kernels, but not attention.
    """
    return np.maximum(s.recompute_full, 0.5 * s.recompute_by_op)


def _embedding_or_head(setting: BlockInputs, block: Block) -> LayerCost:
    """Embedding and head are never recomputed."""
    return _cost(setting, block, full=0.0)


def _cost(setting: BlockInputs, block: Block, *, full: Numbers, waits: Numbers = 0.0) -> LayerCost:
    """Price a block; kernels of a processor, and those where it waits, wait for every launch."""
    waits = np.maximum(waits, setting.hardware.is_processor)
    slower = setting.constants.straggler_factor
    once_s = block.tensor_s + block.context_s + block.expert_s
    visible_s = once_s * slower
    visible_back_s = block.tensor_backward_s + block.context_backward_s + block.expert_s
    visible_back_s = (visible_back_s + full * once_s) * slower
    kernels_s = block.forward_s * slower
    repeated_s = (full * block.forward_s + (1.0 - full) * block.recomputed_s) * slower
    repeated_expert_s = full * block.expert_s + (1.0 - full) * block.recomputed_expert_s
    kernels_back_s = block.backward_s * slower + repeated_s
    launched_s = _launched_s(setting, block)
    repeated = repeated_s / np.maximum(kernels_s, 1e-30)
    launched_back_s = launched_s * (setting.constants.backward_launches + repeated)
    waited_s = _waited_s(kernels_s, launched_s, waits=waits)
    waited_back_s = _waited_s(kernels_back_s, launched_back_s, waits=waits)
    beside = setting.strategies.reference_forwards
    return LayerCost(
        forward_s=(1.0 + beside) * (kernels_s + waited_s + visible_s),
        backward_s=kernels_back_s + waited_back_s + visible_back_s,
        weight_s=block.weight_s * slower,
        tensor_s=(block.tensor_s * (1.0 + beside + full) + block.tensor_backward_s) * slower,
        context_s=(block.context_s * (1.0 + beside + full) + block.context_backward_s) * slower,
        expert_s=((2.0 + beside) * block.expert_s + repeated_expert_s) * slower,
        recompute_s=repeated_s - (1.0 - full) * block.recomputed_expert_s * slower,
        host_s=(1.0 + beside) * waited_s + waited_back_s,
    )


def _moe_layer(
    setting: BlockInputs, fixed: Block, routed: Block
) -> tuple[LayerCost, tuple[Numbers, Numbers]]:
    """A MoE layer at `expert_imbalance`, and the slopes of its passes in it."""
    s, constants = setting.strategies, setting.constants
    cost = _layer(setting, fixed + routed, waits=_reads_counts(setting))
    full = _recomputed_share(s)
    device_s = routed.forward_s + routed.expert_s
    recomputed_s = full * device_s + (1.0 - full) * routed.recomputed_s
    device_back_s = routed.backward_s - routed.accumulation_s + routed.expert_s + recomputed_s
    per_unit = constants.straggler_factor / s.expert_imbalance
    return cost, (device_s * per_unit, device_back_s * per_unit)


def _launched_s(setting: BlockInputs, block: Block) -> Numbers:
    s, constants = setting.strategies, setting.constants
    partly = np.where(np.greater(s.partial_graph, 0.0), constants.partial_graph_ratio, 1.0)
    whole = np.where(np.greater(s.full_graph, 0.0), constants.full_graph_ratio, 1.0)
    return constants.launch_s * whole * (partly * block.launches + block.expert_launches)


def _reads_counts(setting: BlockInputs) -> Numbers:
    """Share of the launches that kernels wait for because dispatch reads counts back.

    The host needs the split sizes of an all-to-all, and what DeepEP or HybridEP received, before it
    launches what follows, unless buffers have a stated size (torchtitan, distributed/
    expert_parallel.py of 0.2.2, distributed/deepep of main, `non_blocking_capacity_factor`).
    """
    s = setting.strategies
    is_read = np.greater(s.expert, 1.0) & np.equal(s.buffered_ratio, 0.0)
    return np.where(is_read, setting.constants.unhidden_launch_ratio, 0.0)


def _waited_s(device_s: Numbers, launched_s: Numbers, *, waits: Numbers) -> Numbers:
    """Seconds that launches add to the kernels."""
    longer_s = _larger(device_s, launched_s) - device_s
    return waits * launched_s + (1.0 - waits) * longer_s


def _larger(device_s: Numbers, launched_s: Numbers) -> Numbers:
    # (d^4 + l^4)^(1/4) without under- or overflow, and without powers where it is plain.
    larger = np.maximum(device_s, launched_s)
    ratio = np.minimum(device_s, launched_s) / np.maximum(larger, 1e-30)
    return larger * (1.0 + ratio**SMOOTHNESS) ** (1.0 / SMOOTHNESS)


def _counted_parameters(m: ModelShape, s: Strategies) -> dict[str, Numbers]:
    """Matrices of one device by kind; norms and biases are below a thousandth."""
    around = connection_matrix(m)
    attention = attention_matrices(m, s.tensor) + around
    linear = m.hidden * (m.linear_inputs + m.linear_values) + m.linear_rank * m.linear_rank_outputs
    linear = linear / s.tensor + around
    matrices = np.where(np.greater(m.is_gated, 0.0), 3.0, 2.0)
    network = matrices * m.hidden * m.dense_ffn / s.tensor + around
    shared = matrices * m.hidden * m.shared_ffn / s.tensor
    shared = shared + m.hidden * (m.router_outputs + 2.0 * m.moe_latent) + around
    experts = matrices * m.expert_hidden * m.moe_ffn * m.experts / (s.expert * s.expert_tensor)
    last = np.where(np.greater(m.mtp_has_experts, 0.0), shared, network)
    return {
        "dense": m.dense_attention * attention
        + m.dense_linear * linear
        + m.dense_network * network,
        "moe": m.moe_attention * attention + m.moe_linear * linear + shared,
        "experts": experts,
        "mtp": attention_matrices(m.without_compressors, s.tensor)
        + around
        + last
        + 2.0 * m.hidden * m.hidden / s.tensor,
        "table": m.vocab * m.hidden / s.tensor,
    }


def _trained_parameters(
    m: ModelShape, s: Strategies, counted: dict[str, Numbers]
) -> dict[str, Numbers]:
    """Count the trained parameters of one device by kind: all, or those of adapters."""
    if not is_tuned(s):
        return counted
    adapters = adapter_counts(m, s)
    tuned = {
        "dense": adapters.dense_layer(m),
        "moe": adapters.moe_layer(m),
        "experts": adapters.experts,
        "mtp": 0.0,
        "table": 0.0,
    }
    return {
        kind: np.where(np.greater(s.adapter_rank, 0.0), tuned[kind], every)
        for kind, every in counted.items()
    }


def _sum(*costs: LayerCost) -> LayerCost:
    return LayerCost(
        **{
            field.name: sum(getattr(cost, field.name) for cost in costs)
            for field in fields(LayerCost)
        }
    )


def _where(condition: npt.NDArray[np.bool_], yes: LayerCost, no: LayerCost) -> LayerCost:
    return LayerCost(
        **{
            field.name: np.where(condition, getattr(yes, field.name), getattr(no, field.name))
            for field in fields(LayerCost)
        }
    )
