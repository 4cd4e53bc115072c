"""The most bytes that a pipeline rank holds at once, on its device of the highest peak.

    moment                  state                            beside it
    model is created        fp32 parameters, whole           the largest unit once more
    a backward begins       parameters, moments, gradients   activations in flight, the loss
    ... reaches a layer     the same                         what is not yet released, and what the
                                                             layer's backward needs for itself
    gradients are reduced   the same                         fp32 gradients of a unit once more
    optimizer               the rank's own part of it        AdamW's square roots

Saved activations are those of tuner/costs/reference/memory.py, the rest is in
tuner/costs/reference/temporaries.py. Gradients exist from the start where a step has several
micro-batches; the last of them has the peak.

Not covered: layers that are done release parameters and gradients on the way, so that a model whose
first layers are much larger than its last ones may need less.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from profilers.steps.config import LayerKind, Recompute
from tuner.config.train import TrainDecision
from tuner.costs.reference.memory import chunk_bytes, unit_state
from tuner.costs.reference.temporaries import (
    UNCOUNTED_RATIO,
    boundary_bytes,
    head_gradients,
    head_workspace,
    layer_workspace,
    optimizer_workspace,
    reduction_workspace,
    shared_gradients,
    zero3_gathered_bytes,
)
from tuner.costs.reference.update import GRADIENT_BYTES, Unit, layer_units
from tuner.search.reference.decisions import RecomputeOption, layers_of, options_of
from tuner.search.reference.layer_costs import CandidateCosts
from tuner.search.reference.schedule import moments
from tuner.spec.accounting import embedding_parameters


def peak_bytes(costs: CandidateCosts, decision: TrainDecision, *, rank: int) -> int:
    """Return the peak of a pipeline rank, margin included; what fits is decided by it."""
    degrees = costs.degrees
    stages = range(rank, decision.num_stages, degrees.pipeline)
    units = [unit for stage in stages for unit in _units(costs, decision, stage)]
    state = unit_state(units, costs.work, degrees)
    state_bytes = state.parameters + state.optimizer
    reduced = GRADIENT_BYTES * sum(unit.sharded(degrees) for unit in units)
    ids = sum(costs.non_layer_resident_bytes(stage) for stage in stages)
    made = GRADIENT_BYTES * (sum(unit.parameters for unit in units) + _largest(units))
    if costs.work.tune is not None:
        frozen = [unit.frozen for unit in units]
        made += costs.work.element_bytes * (sum(frozen) + max(frozen))
    updated = state_bytes + reduced + optimizer_workspace(units, degrees)
    backward = max(
        _backward_bytes(costs, decision, stages, expert_rank=expert_rank)
        for expert_rank in range(degrees.expert)
    )
    gathered = state.gathered + _gathered_embedding_and_head(costs, stages)
    counted = ids + max(made, updated, state_bytes + gathered + backward)
    return math.ceil(counted * (1.0 + UNCOUNTED_RATIO))


def head_peak_bytes(costs: CandidateCosts, stage: int) -> int:
    """Return the most that the loss adds to what the layers of a stage have saved."""
    if stage != costs.degrees.num_stages - 1:
        return 0
    return costs.non_layer_transient_bytes(stage) + head_workspace(costs.work, costs.degrees)


def _units(costs: CandidateCosts, decision: TrainDecision, stage: int) -> list[Unit]:
    units = list(_embedding_and_head(costs, stage))
    for layer in layers_of(decision)[stage]:
        units += layer_units(costs.work, costs.degrees, layer=layer)
    return units


def _embedding_and_head(costs: CandidateCosts, stage: int) -> tuple[Unit, ...]:
    """Embedding, last norm and head of a stage: one unit of FSDP."""
    units = costs.non_layer_units(stage)
    if not units:
        return ()
    whole = replace(
        units[0],
        parameters=sum(unit.parameters for unit in units),
        frozen=sum(unit.frozen for unit in units),
    )
    return (whole,)


def _largest(units: Sequence[Unit]) -> int:
    return max((unit.parameters for unit in units), default=0)


def _gathered_embedding_and_head(costs: CandidateCosts, stages: range) -> int:
    """Return the bytes of embedding and head that zero_stage 3 keeps gathered throughout."""
    if costs.degrees.zero_stage != 3:
        return 0
    units = [unit for stage in stages for unit in _embedding_and_head(costs, stage)]
    return costs.work.element_bytes * sum(unit.parameters + unit.frozen for unit in units)


def _pending_reduction(costs: CandidateCosts, units: Sequence[Unit]) -> int:
    """Gradients of the last reduction that zero_stage 3 holds until the next one."""
    if costs.degrees.zero_stage != 3:
        return 0
    return GRADIENT_BYTES * _largest(units)


def _backward_bytes(
    costs: CandidateCosts, decision: TrainDecision, stages: range, *, expert_rank: int
) -> int:
    """Gradients, activations and temporaries at the peak of a step's backward."""
    degrees, work = costs.degrees, costs.work
    saved = {stage: saved_bytes(costs, decision, stage, expert_rank) for stage in stages}
    gradients = {
        stage: unit_state(_units(costs, decision, stage), work, degrees).gradients
        for stage in stages
    }
    # Every backward of a stage but its first adds the same.
    added = cache(
        lambda stage, is_first: _backward_peak(
            costs, decision, stage, expert_rank, is_first=is_first
        )
    )
    largest, begun = 0, set[int]()
    for moment in moments(degrees, num_microbatches=costs.num_microbatches, rank=stages[0]):
        resident = sum(
            count * saved[stage] + boundary_bytes(work, degrees, stage=stage, in_flight=count)
            for count, stage in zip(moment.resident, stages, strict=True)
        )
        stage = stages[moment.chunk]
        peak = added(stage, stage not in begun)
        largest = max(largest, resident + sum(gradients[earlier] for earlier in begun) + peak)
        begun.add(stage)
    return largest


def saved_bytes(
    costs: CandidateCosts, decision: TrainDecision, stage: int, expert_rank: int
) -> int:
    """Return the bytes of activations that one micro-batch keeps on a stage."""
    option = options_of(decision)[stage]
    return sum(
        costs.activations(layer, option, expert_rank=expert_rank).saved
        for layer in layers_of(decision)[stage]
    )


def _backward_peak(
    costs: CandidateCosts,
    decision: TrainDecision,
    stage: int,
    expert_rank: int,
    *,
    is_first: bool,
) -> int:
    """Most that a stage's backward adds to what its layers have saved, the last layer first.

    The first backward of a stage creates the fp32 gradients, layer by layer.
    """
    option = options_of(decision)[stage]
    work, degrees = costs.work, costs.degrees
    is_last = stage == degrees.num_stages - 1
    end_units = _embedding_and_head(costs, stage)
    adds_in_place = work.element_bytes == GRADIENT_BYTES and not is_first
    firsts = [layer_units(work, degrees, layer=layer)[0] for layer in layers_of(decision)[stage]]
    # Of the micro-batch before.
    behind = _pending_reduction(costs, end_units) if costs.num_microbatches > 1 else 0
    peak = behind + head_peak_bytes(costs, stage)
    behind = max(behind, _pending_reduction(costs, firsts))
    # A tied table needs the gradients of both its uses, and then their sum.
    is_tied = work.model.tie_word_embeddings
    waiting = head_gradients(work) if is_last and (is_tied or not adds_in_place) else 0
    turn = zero3_gathered_bytes(work, degrees, layers=layers_of(decision)[stage])
    batches, is_piped = costs.num_microbatches, degrees.pipeline > 1
    released, reduced, released_state = 0, 0, 0
    for layer in reversed(layers_of(decision)[stage]):
        units = layer_units(work, degrees, layer=layer)
        saved = costs.activations(layer, option, expert_rank=expert_rank).saved
        level = waiting + reduced - released + turn
        # Only the last micro-batch releases state.
        workspace = (
            level
            + behind
            + _working(costs, layer, option, expert_rank, adds_in_place=adds_in_place)
        )
        peak = max(peak, workspace - (released_state if batches == 1 else 0))
        if not is_piped:
            gone = _released_before_reduction(costs, layer, option, expert_rank, saved=saved)
            reduction = behind + _reduction_peak(costs, units, is_first=is_first)
            peak = max(peak, level - released_state - gone + reduction)
            released_state += _released_state(costs, units, is_first=is_first)
        behind = _pending_reduction(costs, firsts)
        released += saved
        if is_first:
            reduced += _first_gradients(costs, units)
    if stage == 0:
        # The embedding's gradient comes last, whole.
        peak = max(peak, waiting + reduced - released + _embedding_gradients(costs))
    level = reduced - released
    if not is_piped:
        return max(
            peak, level - released_state + _reduction_peak(costs, end_units, is_first=is_first)
        )
    if is_first:
        level += _first_gradients(costs, end_units)
    layers = [layer_units(work, degrees, layer=layer) for layer in layers_of(decision)[stage]]
    return max(peak, level + _peak_of_reductions(costs, (end_units, *layers)))


def _peak_of_reductions(costs: CandidateCosts, parts: Sequence[Sequence[Unit]]) -> int:
    """Most that a pipeline's reductions add to its state, after all micro-batches."""
    peak, released_state = 0, 0
    for units in parts:
        for unit in units:
            peak = max(peak, _reduction_peak(costs, (unit,), is_first=False) - released_state)
            released_state += _released_state(costs, (unit,), is_first=False)
    return peak


def _first_gradients(costs: CandidateCosts, units: Sequence[Unit]) -> int:
    """The fp32 gradients after a first backward; reduced already where it is the only one."""
    if costs.num_microbatches > 1 or costs.degrees.pipeline > 1:
        return unit_state(units, costs.work, costs.degrees).gradients
    return GRADIENT_BYTES * sum(unit.sharded(costs.degrees) for unit in units)


def _released_state(costs: CandidateCosts, units: Sequence[Unit], *, is_first: bool) -> int:
    """Bytes that a layer's units release once their gradients are reduced over ranks."""
    work, degrees = costs.work, costs.degrees
    state = unit_state(units, work, degrees)
    kept = GRADIENT_BYTES * sum(unit.sharded(degrees) for unit in units)
    return state.gathered + (0 if is_first else state.gradients - kept)


def _working(
    costs: CandidateCosts,
    layer: int,
    option: RecomputeOption,
    expert_rank: int,
    *,
    adds_in_place: bool,
) -> int:
    return layer_workspace(
        costs.work,
        costs.degrees,
        layer=layer,
        recompute=option.recompute,
        chunks=option.chunks,
        expert_rank=expert_rank,
        adds_in_place=adds_in_place,
    )


def _released_before_reduction(
    costs: CandidateCosts, layer: int, option: RecomputeOption, expert_rank: int, *, saved: int
) -> int:
    """Bytes of a layer that are released before the gradients of its largest unit are reduced.

    The gradients of its output and input are there, and where it has experts those of its copies.
    """
    work, degrees = costs.work, costs.degrees
    hidden = work.tokens(degrees) * work.model.hidden_size * work.element_bytes
    moe = work.model.moe
    if moe is None or work.model.layers[layer] is LayerKind.DENSE:
        return saved - 2 * hidden
    copies, chunks = moe.top_k * hidden, option.chunks
    waiting = 2 * hidden + shared_gradients(work, degrees)
    inside = chunk_bytes(work, degrees, layer=layer, chunks=chunks, expert_rank=expert_rank)
    if option.recompute is Recompute.NONE:
        return inside - waiting - copies
    # What was recomputed outside of the experts is there, and parts of the input's gradient.
    transient = costs.activations(layer, option, expert_rank=expert_rank).transient
    return min(0, inside - transient) - waiting - 2 * hidden - copies // chunks


def _reduction_peak(costs: CandidateCosts, units: Sequence[Unit], *, is_first: bool) -> int:
    return max(
        (
            reduction_workspace(unit, costs.work, costs.degrees, has_gradients=not is_first)
            for unit in units
        ),
        default=0,
    )


def _embedding_gradients(costs: CandidateCosts) -> int:
    model = costs.work.model
    if costs.work.tune is not None:
        return 0
    tables = 2 if model.tie_word_embeddings else 1
    return tables * costs.work.element_bytes * embedding_parameters(model)
