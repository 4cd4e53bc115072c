"""Peak bytes of every pipeline rank's fullest device, for columns of strategies or published runs.

    peak = state + kept activations + the larger of two moments + what software sets aside

    state       layers on the rank times the bytes of a layer's parameters (state.py)
    kept        over the rank's chunks, micro-batches held (in_flight.py) times what the chunk's
                layers save (activations.py), less the share that is offloaded
    moments     the head's backward: the last norm, L bytes a logit, the head's gradients;
                a layer's backward: what is computed again, gradients on their way back
    always      one temporary weight gradient per shape of weight, which Transformer Engine keeps;
                under ZeRO 3 the gathered weights of two layers and the whole gradients of one, or,
                in a pipeline, those of all of a stage, gathered once for all micro-batches
    boundary    one micro-batch received ahead where there is a pipeline
    dispatch    DeepEP's and HybridEP's own buffers
    set aside   pools of partial CUDA graphs, blocks that the allocator cannot use, the context

So that a search repeats little, `unit_bytes` depends on model, hardware, constants and every field
of the strategies but `pipeline`, `virtual_pipeline`, `num_microbatches`, `zero_bubble` and those of
time alone: one column for each different (TP, CP, DP, EP, ETP, micro-batch, ZeRO, recompute,
chunks, dispatcher). `assemble_memory` reads those four fields and the stages; it multiplies and
adds.

Letters: S stages in execution order, stage s on rank s % P as chunk s // P; V chunks of a rank, P
ranks, C columns; B bytes: weights, gradients, optimizer, gathered; K parts: dense layers, layers
with experts, vocabulary matrices, multi-token-prediction layers.
Not covered: the optimizer's temporaries; that uneven routing differs from layer to layer;
temporaries of context parallelism.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from tuner.costs.analytic.activations import ActivationBytes, LayerBytes, activation_bytes
from tuner.costs.analytic.in_flight import held
from tuner.costs.analytic.memory_constants import MemoryConstants
from tuner.costs.analytic.prices import MemoryPrice
from tuner.costs.analytic.shapes import Hardware, ModelShape, Numbers, Stages, Strategies
from tuner.costs.analytic.state import Parameters, parameters, shard_ranks, state_bytes

Floats = npt.NDArray[np.float64]

DEEPEP_CHANNELS = 10.0
"""Half of DeepEP's default of 20 multiprocessors (deep_ep/buffer.py)."""

DEEPEP_SCALE_UP_TOKENS = 8.0 * 256.0
"""Peers in a server and tokens queued from each, per channel (csrc/config.hpp)."""

DEEPEP_NODE_TOKENS = 2.0 * 128.0
"""Tokens queued to and from each node, per channel (csrc/config.hpp)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryUnits:
    """Bytes of one layer, end or micro-batch; every array ends in columns, or in 1."""

    state_BKC: Floats
    saved_KC: Floats
    """Per micro-batch; of the vocabulary matrices the embedding's share."""
    head_saved_C: Floats
    """Last norm and logits."""
    head_moment_C: Floats
    """On top of them at the head's backward."""
    dense_moment_C: Floats
    moe_moment_C: Floats
    always_layer_C: Floats
    """Throughout, where a rank has layers."""
    always_dense_C: Floats
    always_moe_C: Floats
    dispatch_C: Floats
    boundary_C: Floats
    """Received ahead from another stage."""
    is_gathered_C: Floats
    """ZeRO 3: layers read gathered parameters."""
    is_tied_C: Floats
    live_C: Floats
    unused_ratio_C: Floats
    pool_ratio_C: Floats
    context_C: Floats


def price_memory(
    model: ModelShape,
    strategies: Strategies,
    hardware: Hardware,
    stages: Stages,
    *,
    constants: MemoryConstants,
) -> MemoryPrice:
    """Bytes on the fullest device of every pipeline rank."""
    units = unit_bytes(model, strategies, hardware, constants=constants)
    return assemble_memory(units, strategies, stages)


def unit_bytes(
    model: ModelShape,
    strategies: Strategies,
    hardware: Hardware,
    *,
    constants: MemoryConstants,
) -> MemoryUnits:
    """Price what a column has regardless of its pipeline; see the module for the fields read."""
    count = parameters(model, strategies)
    kept = activation_bytes(model, strategies, exchanged_ratio=constants.exchanged_ratio)
    moe = np.where(np.asarray(model.moe_layers) > 0.0, 1.0, 0.0)
    scale = constants.activation_ratio
    on_device = scale * (1.0 - strategies.activation_offload)
    prediction = kept.dense.saved + moe * (kept.moe.saved - kept.dense.saved) + 2.0 * kept.boundary
    dense_S, experts_S = shard_ranks(strategies)
    gathered = np.where(np.asarray(strategies.zero_stage) >= 3.0, 1.0, 0.0)
    always = _always(count, strategies, constants, gathered)
    return MemoryUnits(
        state_BKC=_state(count, strategies, constants, moe, (dense_S, experts_S), gathered),
        saved_KC=_columns(
            kept.dense.saved * on_device,
            kept.moe.saved * on_device,
            kept.embedding * on_device,
            prediction * on_device,
        ),
        head_saved_C=_column(kept.norm + _logit_bytes(strategies, constants) * kept.logit),
        head_moment_C=_column(
            kept.head_gradient
            + count.vocab
            * (
                strategies.element_bytes
                + gathered * (strategies.weight_bytes + strategies.gradient_bytes)
            )
        ),
        dense_moment_C=_column(_moment(kept.dense) * scale),
        moe_moment_C=_column(_moment(kept.moe) * scale),
        always_layer_C=_column(always * count.attention),
        always_dense_C=_column(always * count.dense_ffn),
        always_moe_C=_column(
            always * (count.moe_outside + count.one_expert)
            + gathered * always * (count.experts - count.one_expert)
        ),
        dispatch_C=_column(_dispatch(model, strategies, hardware, kept)),
        boundary_C=_column(kept.boundary),
        is_gathered_C=_column(gathered),
        is_tied_C=_column(model.is_tied),
        live_C=_column(constants.live_bytes),
        unused_ratio_C=_column(constants.unused_ratio),
        pool_ratio_C=_column(constants.graph_ratio * strategies.partial_graph),
        context_C=_column(constants.context_bytes),
    )


def _logit_bytes(strategies: Strategies, constants: MemoryConstants) -> Numbers:
    is_split = np.asarray(strategies.tensor) > 1.0
    return constants.logit_bytes + np.where(is_split, constants.split_logit_bytes, 0.0)


def _moment(layer: LayerBytes) -> Numbers:
    return layer.again + layer.gradients


def _state(
    count: Parameters,
    strategies: Strategies,
    constants: MemoryConstants,
    moe: Numbers,
    ranks: tuple[Numbers, Numbers],
    gathered: Numbers,
) -> Floats:
    dense, expert = (
        state_bytes(
            strategies,
            ranks=sharing,
            master_bytes=constants.master_bytes,
            moments_bytes=constants.moments_bytes,
        )
        for sharing in ranks
    )
    whole = gathered * (strategies.weight_bytes + strategies.gradient_bytes)
    rows = []
    for of_dense, of_expert in (
        (dense.weight, expert.weight),
        (dense.gradient, expert.gradient),
        (dense.optimizer, expert.optimizer),
        (whole, whole),
    ):
        with_dense = of_dense * (count.attention + count.dense_ffn)
        with_experts = of_dense * (count.attention + count.moe_outside) + of_expert * count.experts
        prediction = with_dense + moe * (with_experts - with_dense)
        rows.append(
            _columns(
                with_dense,
                with_experts,
                of_dense * count.vocab,
                prediction + of_dense * count.mtp_projection,
            )
        )
    return np.stack(np.broadcast_arrays(*rows))


def _always(
    count: Parameters, strategies: Strategies, constants: MemoryConstants, gathered: Numbers
) -> Numbers:
    """Bytes per parameter of the layer that is worked on."""
    temporary = constants.weight_gradient_ratio * strategies.element_bytes
    fetched = 3.0 * strategies.weight_bytes + strategies.gradient_bytes
    return temporary + gathered * (fetched - temporary)


def _dispatch(
    model: ModelShape, strategies: Strategies, hardware: Hardware, kept: ActivationBytes
) -> Numbers:
    token = model.hidden * strategies.element_bytes
    nodes = np.maximum(1.0, strategies.expert / hardware.devices_per_node)
    queued = DEEPEP_SCALE_UP_TOKENS + np.where(nodes > 1.0, DEEPEP_NODE_TOKENS * nodes, 0.0)
    deepep = strategies.is_deepep * DEEPEP_CHANNELS * queued * token
    return deepep + strategies.is_hybridep * strategies.expert * kept.boundary


def assemble_memory(units: MemoryUnits, strategies: Strategies, stages: Stages) -> MemoryPrice:
    """Count what every rank holds of each unit; columns with fewer ranks are padded with zeros."""
    columns = _num_columns(units, strategies, stages)
    pipeline, chunks = _column(strategies.pipeline), _column(strategies.virtual_pipeline)
    ranks = int(pipeline.max())
    parts = {field.name: np.zeros((ranks, columns)) for field in fields(MemoryPrice)}
    for chosen, size, depth in _groups(pipeline, chunks, columns):
        group = _rank_parts(
            _taken(units, chosen),
            size,
            depth,
            microbatches=_taken_array(_column(strategies.num_microbatches), chosen),
            zero_bubble=_taken_array(_column(strategies.zero_bubble), chosen),
            stages=_taken_stages(stages, chosen, size * depth),
        )
        for field in fields(MemoryPrice):
            parts[field.name][:size, chosen] = getattr(group, field.name)
    return MemoryPrice(**parts)


def _rank_parts(
    units: MemoryUnits,
    size: int,
    depth: int,
    *,
    microbatches: Floats,
    zero_bubble: Floats,
    stages: Stages,
) -> MemoryPrice:
    """Price pipelines of one size and depth."""
    dense_VPC, moe_VPC, embedding_VPC, head_VPC, mtp_VPC = (
        grid.reshape(depth, size, -1)
        for grid in (
            stages.dense_SC,
            stages.moe_SC,
            stages.embedding_SC,
            stages.head_SC,
            stages.mtp_SC,
        )
    )
    dense, moe, mtp = dense_VPC.sum(axis=0), moe_VPC.sum(axis=0), mtp_VPC.sum(axis=0)
    embedding, head = embedding_VPC.sum(axis=0), head_VPC.sum(axis=0)
    reads_words = np.maximum(embedding, np.minimum(mtp, 1.0))
    vocab = reads_words + head - units.is_tied_C * np.minimum(reads_words, head)
    weight, gradient, optimizer, whole = (
        dense * state[0] + moe * state[1] + vocab * state[2] + mtp * state[3]
        for state in units.state_BKC
    )
    chunk = dense_VPC * units.saved_KC[0] + moe_VPC * units.saved_KC[1]
    chunk = chunk + embedding_VPC * units.saved_KC[2] + mtp_VPC * units.saved_KC[3]
    in_flight = held(size, depth, microbatches=microbatches, zero_bubble=zero_bubble)
    kept = (in_flight * chunk).sum(axis=0)

    has_dense, has_moe = np.minimum(dense, 1.0), np.minimum(moe + mtp, 1.0)
    logits = (head + mtp) * units.head_saved_C
    at_head = logits + np.minimum(head, 1.0) * units.head_moment_C
    at_layer = np.maximum(has_dense * units.dense_moment_C, has_moe * units.moe_moment_C)
    head_is_fuller = at_head > at_layer
    by_network = (has_dense * units.always_dense_C, has_moe * units.always_moe_C)
    always = np.maximum(has_dense, has_moe) * units.always_layer_C + np.where(
        units.is_gathered_C > 0.0, np.maximum(*by_network), by_network[0] + by_network[1]
    )
    if size > 1:
        always = np.where(units.is_gathered_C > 0.0, whole, always) + units.boundary_C
    activations = kept + np.where(head_is_fuller, logits, 0.0)
    buffers = (
        np.where(head_is_fuller, at_head - logits, at_layer)
        + always
        + has_moe * units.dispatch_C
        + units.live_C
    )
    reserve = units.pool_ratio_C * kept + units.unused_ratio_C * (activations + buffers)
    shape = np.broadcast_shapes(weight.shape, kept.shape, buffers.shape)
    return MemoryPrice(
        weights_PC=weight,
        gradients_PC=gradient,
        optimizer_PC=optimizer,
        activations_PC=activations,
        buffers_PC=buffers,
        reserve_PC=reserve,
        context_PC=np.broadcast_to(units.context_C, shape),
    )


def _groups(
    pipeline: Floats, chunks: Floats, columns: int
) -> Iterator[tuple[slice | npt.NDArray[np.intp], int, int]]:
    """Yield the columns that share a number of ranks and of chunks, and both numbers."""
    if pipeline.size == 1 and chunks.size == 1:
        yield slice(None), int(pipeline[0]), int(chunks[0])
        return
    pairs = np.stack(np.broadcast_arrays(pipeline, chunks, np.empty(columns))[:2])
    kinds, kind = np.unique(pairs, axis=1, return_inverse=True)
    for index, (size, depth) in enumerate(kinds.T):
        yield np.flatnonzero(kind.ravel() == index), int(size), int(depth)


def _column(value: Numbers) -> Floats:
    return np.atleast_1d(np.asarray(value, dtype=np.float64))


def _columns(*values: Numbers) -> Floats:
    return np.stack(np.broadcast_arrays(*(_column(value) for value in values)))


def _taken_array(array: Floats, chosen: slice | npt.NDArray[np.intp]) -> Floats:
    return array if array.shape[-1] == 1 else array[..., chosen]


def _taken(units: MemoryUnits, chosen: slice | npt.NDArray[np.intp]) -> MemoryUnits:
    if isinstance(chosen, slice):
        return units
    return MemoryUnits(
        **{
            field.name: _taken_array(getattr(units, field.name), chosen)
            for field in fields(MemoryUnits)
        }
    )


def _taken_stages(stages: Stages, chosen: slice | npt.NDArray[np.intp], count: int) -> Stages:
    return replace(
        stages,
        **{
            name: _taken_array(getattr(stages, name)[:count], chosen)
            for name in ("dense_SC", "moe_SC", "embedding_SC", "head_SC", "mtp_SC")
        },
    )


def _num_columns(units: MemoryUnits, strategies: Strategies, stages: Stages) -> int:
    widths = [getattr(units, field.name).shape[-1] for field in fields(MemoryUnits)]
    widths += [
        grid.shape[-1]
        for grid in (stages.dense_SC, stages.moe_SC, stages.embedding_SC, stages.mtp_SC)
    ]
    widths += [
        np.size(value)
        for value in (
            strategies.pipeline,
            strategies.virtual_pipeline,
            strategies.num_microbatches,
            strategies.zero_bubble,
        )
    ]
    return int(max(widths))
