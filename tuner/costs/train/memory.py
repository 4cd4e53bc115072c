"""Peak bytes of the most-loaded device of every pipeline rank, by column.

    peak = state + kept activations + the larger of two moments + reserve of the software

    state       layers on the rank times the bytes of a layer's parameters (state.py)
    kept        over the rank's chunks, micro-batches in flight (in_flight.py) times what the
                chunk's layers save (activations.py), less the offloaded share
    moments     the head's backward: the last norm, L bytes a logit, the head's gradients;
                a layer's backward: what is recomputed, and activation gradients
    always      temporary weight gradients; under ZeRO 3 the all-gathered weights of two layers, or,
                in a pipeline, of the whole stage, gathered once for all micro-batches, and the
                buffers of one layer; there, and in one of FSDP2 that keeps its parameters (ZeRO 2),
                the full gradients of its chunks between their first and last backward pass
    start       where they exceed optimizer, activations and moments, copies of the weights
    step        where they exceed gradients, activations and moments, copies of gradients
    boundary    with a pipeline, one micro-batch received ahead; PyTorch's stages have a receive
                buffer for every micro-batch of a step, for activations and gradients, and older
                releases also kept the outputs
    dispatch    DeepEP's and HybridEP's own buffers
    reserve     pools of partial CUDA graphs, fragmentation of the allocator, the CUDA context

The bytes of a layer come from memory_units.py; `assemble_memory` reads `pipeline`,
`virtual_pipeline`, `num_microbatches`, `zero_bubble` and the stages, multiplies and adds. It is
fastest in blocks of about a thousand columns that share pipeline and stages.

Letters: S stages in execution order, stage s on rank s % P as chunk s // P; V chunks of a rank, P
ranks, C columns; K parts as in memory_units.py.
Not covered: temporaries of other optimizers; different imbalance by layer; temporaries of context
parallelism.
"""

from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats
from tuner.config.columns import Strategies
from tuner.config.shapes import Hardware, ModelShape, Stages
from tuner.costs.train.freed_gradients import StepBytes, freed_peak
from tuner.costs.train.in_flight import peak_bytes, summed, warmup_in_flight
from tuner.costs.train.memory_constants import MemoryConstants
from tuner.costs.train.memory_units import MemoryUnits, column, unit_bytes
from tuner.costs.train.prices import MemoryPrice


def price_memory(
    model: ModelShape,
    strategies: Strategies,
    hardware: Hardware,
    stages: Stages,
    *,
    constants: MemoryConstants,
) -> MemoryPrice:
    """Bytes on the most-loaded device of every pipeline rank."""
    units = unit_bytes(model, strategies, hardware, constants=constants)
    return assemble_memory(units, strategies, stages)


def assemble_memory(units: MemoryUnits, strategies: Strategies, stages: Stages) -> MemoryPrice:
    """Count what every rank holds of each unit; columns with fewer ranks are padded with zeros."""
    pipeline, chunks = column(strategies.pipeline), column(strategies.virtual_pipeline)
    microbatches = column(strategies.num_microbatches)
    zero_bubble = column(strategies.zero_bubble)
    if pipeline.size == 1 and chunks.size == 1:
        shape = (int(pipeline[0]), int(chunks[0]))
        return _price(units, *shape, microbatches, zero_bubble, _first(stages, shape))
    columns = _num_columns(units, strategies, stages)
    parts = {field.name: np.zeros((int(pipeline.max()), columns)) for field in fields(MemoryPrice)}
    for chosen, size, depth in _groups(pipeline, chunks, columns):
        group = _price(
            _taken(units, chosen),
            size,
            depth,
            _taken_array(microbatches, chosen),
            _taken_array(zero_bubble, chosen),
            _first(stages, (size, depth), chosen),
        )
        for field in fields(MemoryPrice):
            parts[field.name][:size, chosen] = getattr(group, field.name)
    return MemoryPrice(**parts)


def _price(
    units: MemoryUnits,
    size: int,
    depth: int,
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
    parts = _stacked(dense, moe, vocab, mtp)
    weight, gradient, optimizer = (summed(parts, state) for state in units.state_BKC[:3])
    kept = peak_bytes(
        _stacked(dense_VPC, moe_VPC, embedding_VPC, mtp_VPC),
        units.saved_KC,
        microbatches=microbatches,
        zero_bubble=zero_bubble,
    )

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
        if units.state_BKC[3:].any():
            of_chunks = _stacked(dense_VPC, moe_VPC, embedding_VPC + head_VPC, mtp_VPC)
            whole = summed(parts, units.state_BKC[3])
            whole = whole + _unreduced(of_chunks, units.state_BKC[4], microbatches)
            always = np.where(units.is_gathered_C > 0.0, units.staged_ratio_C * always, always)
            always = always + whole
        always = always + units.boundary_C
        if any(waiting.any() for waiting in _waiting_units(units)):
            counts = warmup_in_flight(
                size, depth, microbatches=microbatches, zero_bubble=zero_bubble
            )
            always = always + _waiting(units, counts, microbatches)
    activations = kept + np.where(head_is_fuller, logits, 0.0)
    buffers = (
        np.where(head_is_fuller, at_head - logits, at_layer)
        + always
        + has_moe * units.dispatch_C
        + units.live_C
    )
    if units.frees_gradients_C.any():
        late = np.maximum(has_dense * units.dense_late_C, has_moe * units.moe_late_C)
        step = StepBytes(
            kept=kept,
            logits=logits,
            at_head=at_head,
            at_layer=at_layer,
            late=late,
            gradients=gradient,
            of_vocab=units.state_BKC[1, 2],
            layers=dense + moe,
        )
        freed = freed_peak(step, accumulates=microbatches > 1.0)
        is_freed = units.frees_gradients_C > 0.0
        gradient = np.where(is_freed, freed.gradients, gradient)
        activations = np.where(is_freed, freed.activations, activations)
        beside = always + units.live_C
        buffers = np.where(is_freed, freed.buffers + beside, buffers)
    if units.copies_weights_C.any():
        of_experts = moe * units.expert_weight_C
        copied = np.maximum(weight - of_experts, of_experts) * units.copies_weights_C
        buffers = buffers + np.maximum(0.0, copied - optimizer - activations - buffers)
    reserve = units.pool_ratio_C * kept + units.unused_ratio_C * (activations + buffers)
    if units.flattened_ratio_C.any():
        joined = units.flattened_ratio_C * optimizer
        buffers = buffers + np.maximum(0.0, joined - gradient - activations - buffers)
    shape = (size, max(part.shape[-1] for part in (weight, kept, buffers, reserve)))
    return MemoryPrice(
        weights_PC=np.broadcast_to(weight, shape),
        gradients_PC=np.broadcast_to(gradient, shape),
        optimizer_PC=np.broadcast_to(optimizer, shape),
        activations_PC=np.broadcast_to(activations, shape),
        buffers_PC=np.broadcast_to(buffers, shape),
        reserve_PC=np.broadcast_to(reserve, shape),
        context_PC=np.broadcast_to(
            units.context_C + (units.pipeline_group_C if size > 1 else 0.0), shape
        ),
    )


def _unreduced(counts_KVPC: Floats, gradient_KC: Floats, microbatches: Floats) -> Floats:
    """Full gradients that micro-batches are accumulated in, [P, C].

    A chunk's exist from its first backward pass to its last. Backward passes take each chunk P
    times in turn, so with at most P micro-batches one chunk ends before the next begins.
    """
    ranks = counts_KVPC.shape[2]
    gradients_VPC = summed(counts_KVPC, gradient_KC)
    total: Floats = np.where(
        microbatches > ranks, gradients_VPC.sum(axis=0), gradients_VPC.max(axis=0)
    )
    return total


def _waiting(units: MemoryUnits, in_flight_VPC: Floats, microbatches: Floats) -> Floats:
    """Bytes of micro-batches in a stage's send and receive buffers, [P, C].

    The first layer's input is the receive buffer, so activations in flight are not counted twice.
    """
    has_former, has_next = np.ones(in_flight_VPC.shape[:2]), np.ones(in_flight_VPC.shape[:2])
    has_former[0, 0] = has_next[-1, -1] = 0.0
    idle = microbatches - np.minimum(in_flight_VPC, microbatches)
    received = (has_former[..., None] * idle + has_next[..., None] * microbatches).sum(axis=0)
    outputs = has_next.sum(axis=0)[:, None] * microbatches
    input_gradients = has_former.sum(axis=0)[:, None] * microbatches
    logits = (1.0 - has_next[-1])[:, None] * (microbatches - 1.0)
    counts = (received, outputs, input_gradients, logits)
    total: Floats = sum(
        (count * unit for count, unit in zip(counts, _waiting_units(units), strict=True)),
        np.zeros(1),
    )
    return total


def _waiting_units(units: MemoryUnits) -> tuple[Floats, Floats, Floats, Floats]:
    return units.received_C, units.output_C, units.input_gradient_C, units.logits_C


def _stacked(*counts: Floats) -> Floats:
    return np.stack(np.broadcast_arrays(*counts))


def _groups(
    pipeline: Floats, chunks: Floats, columns: int
) -> Iterator[tuple[npt.NDArray[np.intp], int, int]]:
    """Yield the columns that share a number of ranks and of chunks, and both numbers."""
    pairs = np.stack(np.broadcast_arrays(pipeline, chunks, np.empty(columns))[:2])
    kinds, kind = np.unique(pairs, axis=1, return_inverse=True)
    for index, (size, depth) in enumerate(kinds.T):
        yield np.flatnonzero(kind.ravel() == index), int(size), int(depth)


def _taken_array(array: Floats, chosen: npt.NDArray[np.intp]) -> Floats:
    return array if array.shape[-1] == 1 else array[..., chosen]


def _taken(units: MemoryUnits, chosen: npt.NDArray[np.intp]) -> MemoryUnits:
    return MemoryUnits(
        **{
            field.name: _taken_array(getattr(units, field.name), chosen)
            for field in fields(MemoryUnits)
        }
    )


def _first(
    stages: Stages, shape: tuple[int, int], chosen: npt.NDArray[np.intp] | None = None
) -> Stages:
    """Keep the stages of a pipeline of some ranks and chunks, and the chosen columns."""
    grids = {
        name: getattr(stages, name)[: shape[0] * shape[1]]
        for name in ("dense_SC", "moe_SC", "embedding_SC", "head_SC", "mtp_SC")
    }
    if chosen is not None:
        grids = {name: _taken_array(grid, chosen) for name, grid in grids.items()}
    return Stages(**grids)


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
