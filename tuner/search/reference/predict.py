"""Prediction of one decision on a profiled machine, with its error band.

The step time is the layout problem's objective (solvers/layout/problem.py) on the same costs, so a
solved candidate and its prediction agree to rounding. Memory is counted rank by rank, exactly,
where the problem had to bound it.

A band of ratio b around a prediction p holds the measurements m with |p - m| / m <= b.
"""

from collections.abc import Mapping
from itertools import pairwise

from profilers.steps.config import Recompute
from tuner.config.train import TrainDecision
from tuner.costs.reference.hierarchical_dispatch import far_rows, row_bytes
from tuner.costs.reference.layer_time import PartSeconds, scale_parts, sum_parts
from tuner.costs.reference.memory import (
    ModelStates,
    chunk_bytes,
    most_chunk_copies,
    unit_state,
)
from tuner.costs.reference.operations import COMMUNICATION
from tuner.costs.reference.update import layer_units
from tuner.plans.train import Band, StagePrediction, TrainPrediction
from tuner.search.reference.decisions import RecomputeOption, layers_of, options_of
from tuner.search.reference.layer_costs import CandidateCosts
from tuner.search.reference.peak import peak_bytes, saved_bytes
from tuner.search.reference.schedule import moments

MEMORY_BAND_RATIO = 0.05
"""Activations and state are counted, not fitted; the band covers what is not counted."""


def predict(costs: CandidateCosts, decision: TrainDecision) -> TrainPrediction:
    """Price a decision whose degrees are those of `costs`."""
    seconds_S = [_stage_seconds(costs, decision, stage) for stage in range(decision.num_stages)]
    ranks = decision.pipeline_model_parallel_size
    seconds_D = [sum_parts(seconds_S[rank::ranks]) for rank in range(ranks)]
    slowest = max(seconds_D, key=_total)
    waiting = (_total(sum_parts(seconds_D)) - _total(slowest)) / (decision.num_stages // ranks)
    busy = scale_parts(slowest, costs.num_microbatches)
    step_s = _total(busy) + waiting
    recompute_s = _recompute_seconds(costs, decision, seconds_D.index(slowest))
    tokens = costs.work.global_batch_size * costs.work.sequence_length
    rate = tokens / step_s / decision.num_devices
    band = costs.machine.residual.band_ratio
    stages = tuple(_stage(costs, decision, stage) for stage in range(decision.num_stages))
    peaks = tuple(peak_bytes(costs, decision, rank=rank) for rank in range(ranks))
    stages = tuple(
        stage.model_copy(
            update={
                "max_chunk_tokens": _max_chunk_tokens(
                    costs, decision, index, peak_bytes=peaks[index % ranks]
                )
            }
        )
        for index, stage in enumerate(stages)
    )
    return TrainPrediction(
        step_time_s=step_s,
        step_time_s_band=band_around(step_s, ratio=band),
        tokens_per_s_per_device=rate,
        tokens_per_s_per_device_band=(rate * (1.0 - min(band, 1.0)), rate * (1.0 + band)),
        peak_memory_bytes=peaks,
        peak_memory_bytes_band=tuple(band_around(peak, ratio=MEMORY_BAND_RATIO) for peak in peaks),
        activation_bytes=tuple(
            _activation_bytes(costs, decision, range(rank, decision.num_stages, ranks))
            for rank in range(ranks)
        ),
        breakdown_s=_breakdown(busy, waiting=waiting, recompute_s=recompute_s),
        inter_node_bytes=_inter_node_bytes(costs, decision),
        communication_s=_communication(seconds_D, costs, waiting_share=waiting),
        stages=stages,
    )


def band_around(predicted: float, *, ratio: float) -> Band:
    """Return the band of measurements m with |predicted - m| / m of at most `ratio`."""
    high = predicted / (1.0 - ratio) if ratio < 1.0 else float("inf")
    return predicted / (1.0 + ratio), min(high, predicted * 1e6)


def _stage_seconds(costs: CandidateCosts, decision: TrainDecision, stage: int) -> PartSeconds:
    option = options_of(decision)[stage]
    parts = [
        costs.per_microbatch(costs.time(layer, option), costs.update(layer))
        for layer in layers_of(decision)[stage]
    ]
    parts.append(costs.per_microbatch(costs.non_layer_time(stage), costs.non_layer_update(stage)))
    return sum_parts(parts)


def _recompute_seconds(costs: CandidateCosts, decision: TrainDecision, rank: int) -> PartSeconds:
    """Seconds per step of recomputation on one pipeline rank."""
    options, layers = options_of(decision), layers_of(decision)
    stages = range(rank, decision.num_stages, decision.pipeline_model_parallel_size)
    recomputed = sum_parts(
        costs.time(layer, options[stage]).recompute_s for stage in stages for layer in layers[stage]
    )
    return scale_parts(recomputed, costs.num_microbatches)


def _breakdown(busy: PartSeconds, *, waiting: float, recompute_s: PartSeconds) -> dict[str, float]:
    """Split the slowest rank's step by cause; recomputation is a cause of its own."""
    named = {
        str(part): seconds - recompute_s.get(part, 0.0) for part, seconds in sorted(busy.items())
    }
    named["recompute"] = _total(recompute_s)
    named["bubble"] = waiting
    return {cause: seconds for cause, seconds in named.items() if seconds > 0.0}


def _communication(
    seconds_D: list[PartSeconds], costs: CandidateCosts, *, waiting_share: float
) -> float:
    slowest = max(seconds_D, key=_total)
    everyone = sum_parts(seconds_D)
    others = _total(everyone) - _total(slowest)
    inside = _communicating(slowest) * costs.num_microbatches
    if others <= 0.0:
        return inside
    waiting = (_communicating(everyone) - _communicating(slowest)) / others
    return inside + waiting * waiting_share


def _inter_node_bytes(costs: CandidateCosts, decision: TrainDecision) -> float | None:
    """Bytes that dispatch and combine send between nodes in a step, over all devices."""
    work, degrees, ranks_per_node = costs.work, costs.degrees, costs.machine.ranks_per_node
    if ranks_per_node is None:
        return None
    total = 0.0
    for stage, (option, layers) in enumerate(
        zip(options_of(decision), layers_of(decision), strict=True)
    ):
        forwards = 1 if option.recompute is Recompute.NONE else 2
        for layer in layers:
            index = work.moe_index[layer]
            if index is None:
                continue
            rows = far_rows(
                work,
                degrees,
                moe_layer=index,
                stage_rank=stage % degrees.pipeline,
                ranks_per_node=ranks_per_node,
            )
            total += rows * row_bytes(work, degrees, forwards=forwards)
    return total * costs.num_microbatches


def _communicating(seconds: PartSeconds) -> float:
    return sum(value for part, value in seconds.items() if part in COMMUNICATION)


def _total(seconds: Mapping[object, float] | PartSeconds) -> float:
    return sum(seconds.values())


def _stage(costs: CandidateCosts, decision: TrainDecision, stage: int) -> StagePrediction:
    option, layers = options_of(decision)[stage], layers_of(decision)[stage]
    times = [costs.time(layer, option) for layer in layers] + [costs.non_layer_time(stage)]
    state = _state(costs, decision, stage)
    return StagePrediction(
        layers=len(layers),
        forward_s=sum(_total(time.forward_s) for time in times),
        backward_s=sum(_total(time.backward_s) + _total(time.recompute_s) for time in times),
        parameter_bytes=state.parameters,
        gradient_bytes=state.gradients,
        optimizer_bytes=state.optimizer,
        activation_bytes=_activation_bytes(costs, decision, (stage,)),
        other_bytes=state.gathered,
    )


def _state(costs: CandidateCosts, decision: TrainDecision, stage: int) -> ModelStates:
    units = list(costs.non_layer_units(stage))
    for layer in layers_of(decision)[stage]:
        units += layer_units(costs.work, costs.degrees, layer=layer)
    return unit_state(units, costs.work, costs.degrees)


def _activation_bytes(
    costs: CandidateCosts, decision: TrainDecision, stages: range | tuple[int, ...]
) -> int:
    """Largest sum of saved activations of these stages of one rank, on its fullest device."""
    always = sum(costs.non_layer_resident_bytes(stage) for stage in stages)
    ranks = decision.pipeline_model_parallel_size
    mine = [stage // ranks for stage in stages]
    seen = set(
        moments(costs.degrees, num_microbatches=costs.num_microbatches, rank=stages[0] % ranks)
    )
    largest = 0
    for expert_rank in range(costs.degrees.expert):
        saved = [saved_bytes(costs, decision, stage, expert_rank) for stage in stages]
        peaks = {
            chunk: max(
                costs.non_layer_transient_bytes(stage),
                _recompute_peak(costs, decision, stage, expert_rank),
            )
            for chunk, stage in zip(mine, stages, strict=True)
        }
        in_flight = max(
            sum(moment.resident[chunk] * kept for chunk, kept in zip(mine, saved, strict=True))
            + peaks.get(moment.chunk, 0)
            for moment in seen
        )
        largest = max(largest, in_flight)
    return always + largest


def _max_chunk_tokens(
    costs: CandidateCosts, decision: TrainDecision, stage: int, *, peak_bytes: int
) -> int | None:
    """MemFine's s'_max of a stage: tokens of one chunk that fit beside the peak of the rest."""
    option = options_of(decision)[stage]
    layers = layers_of(decision)[stage]
    chunked = [layer for layer in layers if costs.work.moe_index[layer] is not None]
    if not chunked or option.recompute is Recompute.NONE:
        return None
    ranks = decision.pipeline_model_parallel_size
    mine = range(stage % ranks, decision.num_stages, ranks)
    state_bytes = peak_bytes - _activation_bytes(costs, decision, mine)
    beside = max(
        _held_bytes(costs, decision, mine, expert_rank)
        + max(_beside_chunk(costs, layer, option, expert_rank) for layer in chunked)
        for expert_rank in range(costs.degrees.expert)
    )
    free_bytes = costs.machine.memory_limit_bytes - state_bytes - beside
    return most_chunk_copies(costs.work, costs.degrees, free_bytes=free_bytes)


def _held_bytes(
    costs: CandidateCosts, decision: TrainDecision, stages: range, expert_rank: int
) -> int:
    """The most that a rank keeps for the backward pass, recomputation left aside."""
    ranks = decision.pipeline_model_parallel_size
    saved = [saved_bytes(costs, decision, stage, expert_rank) for stage in stages]
    seen = moments(costs.degrees, num_microbatches=costs.num_microbatches, rank=stages[0] % ranks)
    kept = max(
        sum(count * stage_bytes for count, stage_bytes in zip(moment.resident, saved, strict=True))
        for moment in seen
    )
    return kept + sum(costs.non_layer_resident_bytes(stage) for stage in stages)


def _beside_chunk(
    costs: CandidateCosts, layer: int, option: RecomputeOption, expert_rank: int
) -> int:
    """Return the bytes that a layer adds while it is recomputed, without its chunk of experts."""
    transient = costs.activations(layer, option, expert_rank=expert_rank).transient
    chunk = chunk_bytes(
        costs.work, costs.degrees, layer=layer, chunks=option.chunks, expert_rank=expert_rank
    )
    return max(0, transient - chunk)


def _recompute_peak(
    costs: CandidateCosts, decision: TrainDecision, stage: int, expert_rank: int
) -> int:
    """Most that recomputation adds while a stage runs backward, layers behind it released."""
    option = options_of(decision)[stage]
    activations = [
        costs.activations(layer, option, expert_rank=expert_rank)
        for layer in layers_of(decision)[stage]
    ]
    released = 0
    peak = activations[-1].transient if activations else 0
    for later, earlier in pairwise(reversed(activations)):
        released += later.saved
        peak = max(peak, earlier.transient - released)
    return peak
