"""A plan as text for people: the decision first, then what it costs, then how sure that is."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from tuner.cli.text import columns
from tuner.plan import Alternative, Plan, TrainDecision, TrainPrediction
from tuner.planner.planning import certificate_line
from tuner.spec.accounting import (
    active_parameters,
    kv_bytes_per_token,
    num_parameters,
    training_flop_per_token,
)
from tuner.units import format_bytes, format_count, format_ratio, format_s

SHOWN_ALTERNATIVES = 8
SHOWN_RANKS = 4


def plan_text(plan: Plan, *, folder: Path) -> str:
    """Say what was planned and what to do next."""
    if plan.decision is None or plan.predicted is None:
        return "\n".join(_nothing_fits(plan))
    lines = [
        *decision_lines(plan.decision),
        "",
        *_prediction_lines(plan.predicted),
        f"certificate    {certificate_line(plan.certificate)}, "
        f"solved in {format_s(plan.certificate.solve_s)}",
        f"inside band    {plan.certificate.within_band} other combinations of degrees that the "
        "model cannot tell from this one",
        f"bound by       {plan.binding_constraint}",
        *(
            f"not launchable {missing.feature} would save {format_ratio(missing.gain_ratio)}; "
            f"{missing.target} lacks it"
            for missing in plan.unlaunchable
        ),
        *_notes(plan),
        "",
        f"written to {folder}; next: moetune verify {folder}",
    ]
    return "\n".join(lines)


def explanation(plan: Plan) -> str:
    """Say why this plan and not another, stage by stage and runner-up by runner-up."""
    if plan.decision is None or plan.predicted is None:
        return "\n".join(_nothing_fits(plan))
    lines = [
        _model_line(plan),
        *decision_lines(plan.decision),
        "",
        "where a step's time goes",
        _breakdown(plan.predicted),
        "",
        "each stage",
        _stages(plan.decision, plan.predicted),
        "",
        "why this one",
        f"  {certificate_line(plan.certificate)}",
        f"  bound by {plan.binding_constraint}",
        *(
            f"  {missing.feature} would save {format_ratio(missing.gain_ratio)}, "
            f"but {missing.target} cannot launch it"
            for missing in plan.unlaunchable
        ),
        "",
        f"why not the others ({plan.certificate.within_band} of them inside the error band: ties)",
        _alternatives(plan.alternatives),
        *_notes(plan),
    ]
    return "\n".join(lines)


def _model_line(plan: Plan) -> str:
    model, sequence = plan.model, plan.goal.sequence_length
    flop = training_flop_per_token(model, sequence_length=sequence)
    cached = kv_bytes_per_token(model, bytes_per_element=2.0)
    return (
        f"{model.name}: {format_count(num_parameters(model))} parameters, "
        f"{format_count(active_parameters(model))} active per token; "
        f"{format_count(flop)} FLOP per token to train on {sequence} tokens, "
        f"{format_bytes(cached)} of bf16 KV cache per token"
    )


def decision_lines(decision: TrainDecision) -> Iterable[str]:
    """Two lines: the degrees, and what each stage does."""
    yield (
        f"{decision.num_devices} devices: "
        f"TP {decision.tensor_model_parallel_size}, PP {decision.pipeline_model_parallel_size}"
        f" (x{decision.virtual_pipeline_model_parallel_size} chunks), "
        f"DP {decision.data_parallel_size}, EP {decision.expert_model_parallel_size}, "
        f"ETP {decision.expert_tensor_parallel_size}, "
        f"EDP {decision.expert_data_parallel_size}, ZeRO {decision.zero_stage}, "
        f"micro-batch {decision.micro_batch_size}"
    )
    stages = zip(decision.pipeline_layout, decision.stage_recompute, decision.chunks, strict=True)
    yield "stages: " + "; ".join(
        f"{f'{len(list(alike))} x ' if len(decision.pipeline_layout) > 1 else ''}"
        f"{layers} layers, recompute {recompute}, {chunks} MemFine chunk{'s' * (chunks > 1)}"
        for (layers, recompute, chunks), alike in groupby(stages)
    )


def short_decision(decision: TrainDecision) -> str:
    """Name a decision in one cell, e.g. `tp1 pp2 dp1 ep1 z0 b2 selective/c4`."""
    options = dict.fromkeys(
        f"{recompute}/c{chunks}"
        for recompute, chunks in zip(decision.stage_recompute, decision.chunks, strict=True)
    )
    virtual = decision.virtual_pipeline_model_parallel_size
    return (
        f"tp{decision.tensor_model_parallel_size} pp{decision.pipeline_model_parallel_size}"
        f"{f'x{virtual}' if virtual > 1 else ''} dp{decision.data_parallel_size} "
        f"ep{decision.expert_model_parallel_size} z{decision.zero_stage} "
        f"b{decision.micro_batch_size} {'|'.join(options)}"
    )


def _prediction_lines(predicted: TrainPrediction) -> Iterable[str]:
    low, high = predicted.step_time_s_band
    yield (
        f"step time      {format_s(predicted.step_time_s)} "
        f"(between {format_s(low)} and {format_s(high)}), "
        f"{predicted.tokens_per_s_per_device:.4g} tokens/s per device"
    )
    peaks = predicted.peak_memory_bytes
    if len(peaks) > SHOWN_RANKS:
        fullest = peaks.index(max(peaks))
        yield (
            f"peak memory    {format_bytes(peaks[fullest])} on pipeline rank {fullest}, the fullest "
            f"of {len(peaks)}; {format_bytes(min(peaks))} on the emptiest"
        )
        return
    listed = ", ".join(format_bytes(peak) for peak in peaks)
    yield f"peak memory    {listed} (each pipeline rank, its fullest device)"


def _breakdown(predicted: TrainPrediction) -> str:
    step_s = predicted.step_time_s
    rows = [
        (f"  {cause}", format_s(seconds), format_ratio(seconds / step_s))
        for cause, seconds in sorted(predicted.breakdown_s.items(), key=lambda item: -item[1])
    ]
    return columns([*rows, ("  step", format_s(step_s), "")])


def _stages(decision: TrainDecision, predicted: TrainPrediction) -> str:
    rows = [
        (
            f"  {index}",
            stage.layers,
            f"{decision.stage_recompute[index]}/c{decision.chunks[index]}",
            format_s(stage.forward_s),
            format_s(stage.backward_s),
            *(
                format_bytes(size)
                for size in (
                    stage.parameter_bytes,
                    stage.gradient_bytes,
                    stage.optimizer_bytes,
                    stage.activation_bytes,
                    stage.other_bytes,
                    stage.total_bytes,
                )
            ),
        )
        for index, stage in enumerate(predicted.stages)
    ]
    header = ("  stage", "layers", "recompute", "forward", "backward", "parameters", "gradients")
    return columns(rows, header=(*header, "optimizer", "activations", "gathered", "total"))


def _alternatives(alternatives: Iterable[Alternative]) -> str:
    rows = [
        (
            f"  {short_decision(other.decision)}",
            format_s(other.predicted.step_time_s),
            format_bytes(max(other.predicted.peak_memory_bytes)),
            "tie" if other.within_band else "",
            other.lost_by,
        )
        for other in alternatives
    ]
    shown = columns(
        rows[:SHOWN_ALTERNATIVES], header=("  decision", "step", "memory", "", "lost by")
    )
    left = len(rows) - SHOWN_ALTERNATIVES
    return f"{shown}\n  and {left} more in plan.json" if left > 0 else shown


def _nothing_fits(plan: Plan) -> Iterable[str]:
    yield f"no plan: {certificate_line(plan.certificate)}"
    yield f"what stands in the way: {plan.binding_constraint}"
    for relaxation in plan.relaxations:
        yield f"nearest way out: {relaxation.limit}: {relaxation.change}"
        if relaxation.decision is not None and relaxation.predicted is not None:
            yield f"  it would allow {short_decision(relaxation.decision)}"
            yield f"  at {format_s(relaxation.predicted.step_time_s)} a step"
    yield from _notes(plan)


def _notes(plan: Plan) -> Iterable[str]:
    for note in plan.provenance.notes:
        yield f"note           {note}"
    if plan.provenance.extrapolated:
        outside = ", ".join(plan.provenance.extrapolated)
        yield f"note           priced outside the measured range: {outside}"
