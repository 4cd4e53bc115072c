"""A plan as text for people: the decision first, then what it costs, then how sure that is."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from tuner.cli.text import (
    asides,
    breakdown_text,
    columns,
    format_times,
    host_lines,
    labelled,
    quote_path,
)
from tuner.config.equal_stages import equal_stages
from tuner.config.train import TrainDecision
from tuner.config.train_words import (
    degrees,
    knobs,
    short_decision,
    short_layout,
    train_changes,
    unequal_words,
)
from tuner.faults.forecast import RunForecast
from tuner.plans.proof import certificate_line, gap_words
from tuner.plans.stage_placement import StagePlacement
from tuner.plans.train import Plan, TrainPrediction
from tuner.report.checkpoint_levels import interval_doubt
from tuner.report.memory_headroom import (
    HARDLY_ANY,
    chance_sentence,
    memory_warning,
    needs_memory_warning,
    peak_band_words,
    trade_words,
)
from tuner.report.run_decisions import run_decisions
from tuner.search.layout_groups import layout_of, variants_of, variants_words
from tuner.spec.accounting import (
    active_parameters,
    kv_bytes_per_token,
    num_parameters,
    training_flop_per_token,
)
from tuner.spec.goal import TrainGoal
from tuner.spec.tune import adapters_words
from tuner.units import (
    format_bytes,
    format_count,
    format_money,
    format_number,
    format_ratio,
    format_s,
)

SHOWN_ALTERNATIVES = 8
SHOWN_RANKS = 4
SHOWN_NODES = 16
SHOWN_CHANGES = 2
LEAST_COMMON = 3
"""From so many runners-up on, the settings that all have are named once."""

_DEGREE: Final = re.compile(r"[a-z]{1,3}\d+(x\d+)?")


def plan_text(plan: Plan, *, folder: Path, verbose: bool = False) -> str:
    """Say what was planned and what to do next; `verbose` prints every note."""
    if plan.decision is None or plan.predicted is None:
        return "\n".join(_nothing_fits(plan, verbose=verbose))
    lines = [
        *_warning_lines(plan),
        *_model_lines(plan),
        *decision_lines(plan.decision),
        *_replica_lines(plan.decision, plan.goal),
        "",
        *_prediction_lines(plan.predicted, plan.goal, currency=plan.cluster.currency),
        *_proof_lines(plan),
        *_runner_up(plan),
        *labelled("bound by", plan.binding_constraint),
        *asides("not launchable", _unlaunchable(plan), verbose=verbose),
        *_placement_lines(plan.placement),
        *_notes(plan, verbose=verbose),
        "",
        f"written to {folder}; next: {_next_step(plan, folder)}",
    ]
    return "\n".join(lines)


def _next_step(plan: Plan, folder: Path) -> str:
    if plan.provenance.device_kind:
        return f"moetune verify {quote_path(folder)}"
    return f"moetune explain {quote_path(folder)}; launch files are in {folder / 'launch'}"


def explanation(plan: Plan, *, verbose: bool = False) -> str:
    """Explain why this plan was chosen, by stage and by runner-up."""
    if plan.decision is None or plan.predicted is None:
        return "\n".join(_nothing_fits(plan, verbose=verbose))
    lines = [
        *_warning_lines(plan),
        *_model_lines(plan, verbose=True),
        *decision_lines(plan.decision),
        *_replica_lines(plan.decision, plan.goal),
        "",
        "where a step's time goes",
        breakdown_text(plan.predicted.breakdown_s),
        "",
        "a micro-batch on each stage",
        _stage_times(plan.decision, plan.predicted),
        "",
        "highest memory of a device, by pipeline rank",
        _rank_memory(plan.predicted),
        *host_lines(plan.predicted.host_memory),
        "",
        *_where(plan.placement),
        "why this one",
        *_proof_lines(plan),
        *_fastest(plan),
        *labelled("bound by", plan.binding_constraint),
        *asides("not launchable", _unlaunchable(plan), verbose=True),
        "",
        "why not the others (z ZeRO stage, b micro-batch, c chunks of MoE layers, pp4x8: VPP 8)",
        *_alternatives(plan),
        *_own_variants(plan),
        *_notes(plan, verbose=verbose),
    ]
    return "\n".join(lines)


def _unlaunchable(plan: Plan) -> list[str]:
    return [
        f"{missing.feature} would save {format_ratio(missing.gain_ratio)} of a step; {missing.why}"
        for missing in plan.unlaunchable
    ]


def _warning_lines(plan: Plan) -> Iterable[str]:
    """The warning that comes before everything else."""
    message = memory_warning(plan, name=short_decision)
    if message is not None:
        yield from labelled("WARNING", message)
        yield ""


def _proof_lines(plan: Plan) -> Iterable[str]:
    """How near the optimum is, what was preferred to it, and what the model cannot tell apart."""
    certificate = plan.certificate
    solved = f"solved in {format_s(certificate.solve_s)}"
    yield from labelled("certificate", f"{certificate_line(certificate)}, {solved}")
    yield from _preference_lines(plan)
    least = "at least " if certificate.within_band_is_least else ""
    others = f"{least}{certificate.within_band:,} other parallel layouts"
    yield from labelled("ties", f"{others} are within the error band")


def _runner_up(plan: Plan) -> Iterable[str]:
    for one in plan.alternatives[:1]:
        if one.ratio_band is not None:
            times = f"a step takes {format_times(one.ratio_band)} as long"
            yield from labelled("runner-up", f"{short_decision(one.decision)}: {times}")


def _preference_lines(plan: Plan) -> Iterable[str]:
    """What the preferred decision costs against the fastest, and its own optimality gap."""
    if plan.preferred is None or plan.decision is None:
        return
    one, gap = plan.preferred, plan.certificate.decision_gap_ratio
    yield from labelled(
        "preferred",
        f"{format_ratio(one.slower_ratio)} slower than the fastest found "
        f"({_distinguishing_name(one.fastest, plan.decision)}, {format_s(one.fastest_step_s)}), "
        f"within {gap_words(gap or 0.0)} of optimal",
    )
    yield from labelled("reason", ", ".join(one.reasons))
    message = "; ".join(trade_words(plan))
    if message:
        yield from labelled("trade", message)


def _fastest(plan: Plan) -> Iterable[str]:
    """The fastest decision in full, where another was preferred: the certificate is about it."""
    if plan.preferred is not None:
        yield from labelled("fastest found", short_decision(plan.preferred.fastest))


def _distinguishing_name(one: TrainDecision, other: TrainDecision) -> str:
    """Name a decision by its layout; by its other differences where both share the layout."""
    if short_layout(one) != short_layout(other):
        return short_layout(one)
    return ", ".join(train_changes(other, one)[:SHOWN_CHANGES])


def _model_lines(plan: Plan, *, verbose: bool = False) -> Iterable[str]:
    """What is trained, on how much at a time; with `verbose` what a token costs too."""
    model, goal = plan.model, plan.goal
    yield from labelled(
        "model",
        f"{model.name}, {format_count(num_parameters(model))} parameters, "
        f"{format_count(active_parameters(model))} active per token; "
        f"{goal.global_batch_size:,} x {goal.sequence_length:,} tokens a step, "
        f"{goal.precision.value}",
    )
    if goal.adapters is not None:
        yield from labelled("trained", adapters_words(goal.adapters))
    if verbose:
        flop = training_flop_per_token(
            model,
            sequence_length=goal.sequence_length,
            mtp_layers=0 if plan.decision is None else plan.decision.mtp_num_layers,
        )
        cached = kv_bytes_per_token(model, bytes_per_element=2.0)
        yield from labelled(
            "a token",
            f"{format_count(flop)} FLOP to train, {format_bytes(cached)} of bf16 KV cache to serve",
        )


def decision_lines(decision: TrainDecision) -> Iterable[str]:
    """Two lines: the degrees, and what each stage does."""
    listed_degrees = (f"{name} {degree}" for name, degree in degrees(decision).items())
    yield from labelled("plan", f"{decision.num_devices:,} devices: {', '.join(listed_degrees)}")
    stages = zip(decision.pipeline_layout, decision.stage_recompute, decision.chunks, strict=True)
    with_knobs = ", ".join(knobs(decision))
    if with_knobs:
        yield from labelled("with", with_knobs)
    listed_stages = (
        f"{len(list(group))} of {layers} layers, recompute {recompute}"
        f"{f', {chunks} chunks of MoE layers' if chunks > 1 else ''}"
        for (layers, recompute, chunks), group in groupby(stages)
    )
    yield from labelled("stages", "; ".join(listed_stages))


def _replica_lines(decision: TrainDecision, goal: TrainGoal) -> Iterable[str]:
    unequal = unequal_words(decision, global_batch_size=goal.global_batch_size)
    if unequal:
        yield from labelled("micro-batches", f"{unequal} on the replicas")


def _prediction_lines(
    predicted: TrainPrediction, goal: TrainGoal, *, currency: str | None
) -> Iterable[str]:
    low, high = predicted.step_time_s_band
    yield (
        f"step time      {format_s(predicted.step_time_s)} "
        f"(90 % band: {format_s(low)} to {format_s(high)}), "
        f"{format_number(predicted.tokens_per_s_per_device)} tokens/s per device"
    )
    if predicted.mfu_ratio is not None:
        yield f"MFU            {format_ratio(predicted.mfu_ratio)}"
    if predicted.run is not None:
        yield from _run_lines(predicted.run, currency)
        for label, sentence in run_decisions(predicted.run):
            yield from labelled(label, sentence)
    peaks = predicted.peak_memory_bytes
    if len(peaks) > SHOWN_RANKS:
        highest = peaks.index(max(peaks))
        yield (
            f"peak memory    {format_bytes(peaks[highest])} on pipeline rank {highest}, the "
            f"highest of {len(peaks):,} ranks; the lowest is {format_bytes(min(peaks))}"
        )
    else:
        listed = ", ".join(format_bytes(peak) for peak in peaks)
        yield f"peak memory    {listed} (by pipeline rank, the highest of its devices)"
    yield from host_lines(predicted.host_memory)
    yield from _room_lines(predicted, goal)


def _room_lines(predicted: TrainPrediction, goal: TrainGoal) -> Iterable[str]:
    """The chance of running out of memory, unless a warning said it, and the peak-memory band."""
    if predicted.out_of_memory_probability is None:
        return
    message = (
        "see the warning" if needs_memory_warning(predicted) else chance_sentence(predicted, goal)
    )
    yield from labelled("OOM risk", message)
    band = f"{peak_band_words(predicted)}, by the largest errors of published peaks"
    yield from labelled("memory band", band)


def _run_lines(run: RunForecast, currency: str | None) -> Iterable[str]:
    """The whole run with failures and checkpoints."""
    if not run.finishes:
        yield from labelled("whole run", f"never finishes: {run.reason}")
        return
    effective = f"{format_ratio(run.effective_time_ratio)} of the time trains"
    if run.checkpoint_interval_s is not None and run.checkpoint_write_s is not None:
        effective += (
            f"; checkpoint every {format_s(run.checkpoint_interval_s)} "
            f"({format_s(run.checkpoint_write_s)} to write)"
        )
    doubt = interval_doubt(run)
    doubts = tuple(labelled("checkpoints", doubt)) if doubt else ()
    if run.wall_clock_s is None or run.device_hours is None:
        yield from (*labelled("whole run", effective), *doubts)
        return
    cost = "" if run.cost is None else f", cost {format_money(run.cost, currency)}"
    failures = "" if not run.expected_failures else f", {run.expected_failures:,.0f} failures"
    yield from labelled(
        "whole run",
        f"{format_s(run.wall_clock_s)}, {run.device_hours:,.0f} device hours{cost}{failures}; "
        f"{effective}",
    )
    yield from doubts


def _placement_lines(placement: StagePlacement | None) -> Iterable[str]:
    """Which pool runs which stages, and what each pool would do by itself."""
    if placement is None:
        return
    runs = [
        (pool, list(stages)) for pool, stages in groupby(placement.stages, lambda one: one.pool)
    ]
    listed = (
        f"{len(stages)} stage{'s' * (len(stages) > 1)} of "
        f"{'/'.join(dict.fromkeys(str(one.layers) for one in stages))} layers on {pool}"
        for pool, stages in runs
    )
    yield from labelled("placement", ", then ".join(listed))
    for single_pool in placement.alone:
        takes = (
            "does not fit"
            if single_pool.step_time_s is None
            else f"{format_s(single_pool.step_time_s)}"
        )
        if single_pool.out_of_memory_probability is not None:
            takes += f", {_chance(single_pool.out_of_memory_probability)} of running out of memory"
        yield from labelled(
            "single pool", f"{single_pool.pool}, {single_pool.devices:,} devices: {takes}"
        )
    for order in placement.node_orders:
        yield from labelled(
            "node order",
            f"{order.pool}: {format_s(order.step_time_after_s)} a step instead of "
            f"{format_s(order.step_time_before_s)} in the listed order; no order is faster "
            f"than {format_s(order.bound_s)}",
        )
        spare = f"; spare: {_listed(order.spare)}" if order.spare else ""
        yield from labelled("nodes", f"{_listed(order.nodes)}{spare}")
    for pool, devices in placement.unused_devices.items():
        yield from labelled("unused", f"{devices:,} devices of {pool}")
    for note in placement.notes:
        yield from labelled("note", note)


def _chance(probability: float) -> str:
    """Format a probability; what would round to zero is `hardly any`."""
    return (
        "hardly any chance" if probability < HARDLY_ANY else f"{format_ratio(probability)} chance"
    )


def _where(placement: StagePlacement | None) -> Iterable[str]:
    if placement is not None:
        yield "where it runs"
        yield from _placement_lines(placement)
        yield ""


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:SHOWN_NODES])
    left = len(names) - SHOWN_NODES
    return f"{shown} and {left} more" if left > 0 else shown


def _stage_times(decision: TrainDecision, predicted: TrainPrediction) -> str:
    """A row for each kind of stage; settings that all have are left out."""
    settings = [
        (str(layers), f"{recompute}{f', {chunks} chunks' if chunks > 1 else ''}")
        for layers, recompute, chunks in zip(
            decision.pipeline_layout, decision.stage_recompute, decision.chunks, strict=True
        )
    ]
    is_uniform = len(set(settings)) == 1
    rows = [
        (
            *(() if is_uniform else settings[index]),
            format_s(stage.forward_s),
            format_s(stage.backward_s),
        )
        for index, stage in enumerate(predicted.stages)
    ]
    table = [(f"  {equal.label}", *equal.row) for equal in equal_stages(rows)]
    of_each = () if is_uniform else ("layers", "recompute")
    return columns(table, header=("  stages", *of_each, "forward", "backward"))


def _rank_memory(predicted: TrainPrediction) -> str:
    """A row for each kind of pipeline rank at its peak, equal ones once."""
    ranks = len(predicted.peak_memory_bytes)
    rows = []
    for rank, peak in enumerate(predicted.peak_memory_bytes):
        own = predicted.stages[rank::ranks]
        parts = (
            sum(stage.parameter_bytes for stage in own),
            sum(stage.gradient_bytes for stage in own),
            sum(stage.optimizer_bytes for stage in own),
            predicted.activation_bytes[rank],
        )
        rows.append(tuple(map(format_bytes, (*parts, max(0, peak - sum(parts)), peak))))
    table = [(f"  {equal.label}", *equal.row) for equal in equal_stages(rows)]
    header = ("  ranks", "weights", "gradients", "optimizer", "activations", "buffers", "total")
    return columns(table, header=header)


def _alternatives(plan: Plan) -> Iterable[str]:
    """A row for each other layout, with the range of its variants."""
    if not plan.alternatives:
        yield "  no other layout was kept by the search"
        return
    shown = [short_decision(other.decision) for other in plan.alternatives[:SHOWN_ALTERNATIVES]]
    common = _common_settings(shown)
    rows = [
        (
            f"  {' '.join(word for word in name.split() if word not in common)}",
            format_s(other.predicted.step_time_s),
            format_bytes(max(other.predicted.peak_memory_bytes)),
            ""
            if other.predicted.out_of_memory_probability is None
            else format_ratio(other.predicted.out_of_memory_probability),
            "" if other.ratio_band is None else format_times(other.ratio_band),
            "tie" if other.within_band else "",
            variants_words(plan, other),
            other.lost_by,
        )
        for name, other in zip(shown, plan.alternatives, strict=False)
    ]
    header = (
        f"  decision (all {' '.join(common)})" if common else "  decision",
        "step",
        "memory",
        "OOM risk",
        "vs chosen",
        "",
        "variants",
        "lost by",
    )
    yield columns(rows, header=header)
    left = len(plan.alternatives) - SHOWN_ALTERNATIVES
    if left > 0:
        yield f"  and {left} more in plan.json"


def _common_settings(names: Sequence[str]) -> tuple[str, ...]:
    """Return the knobs that all of several decisions have set; degrees are never left out."""
    if len(names) < LEAST_COMMON:
        return ()
    knobs_of = [[word for word in name.split() if not _DEGREE.fullmatch(word)] for name in names]
    return tuple(word for word in knobs_of[0] if all(word in other for other in knobs_of[1:]))


def _own_variants(plan: Plan) -> Iterable[str]:
    """The other variants of the plan's own layout."""
    assert plan.decision is not None
    own = variants_of(layout_of(plan.decision), plan.variants)
    if own:
        seconds = [one.predicted.step_time_s for one in own]
        least, most = format_s(min(seconds)), format_s(max(seconds))
        yield (
            f"  the plan's own layout: {len(own)} variant{'s' * (len(own) > 1)}, "
            f"{least if least == most else f'{least} to {most}'} (in plan.json)"
        )


def _nothing_fits(plan: Plan, *, verbose: bool) -> Iterable[str]:
    yield from labelled("no plan", certificate_line(plan.certificate))
    is_open = plan.certificate.status == "unknown"
    yield from labelled("not decided" if is_open else "limit not met", plan.binding_constraint)
    for index, relaxation in enumerate(plan.relaxations):
        label = "or" if index else "to make it fit"
        allowed = ""
        if relaxation.decision is not None and relaxation.predicted is not None:
            step = format_s(relaxation.predicted.step_time_s)
            allowed = f"; it would allow {short_decision(relaxation.decision)} at {step} a step"
        yield from labelled(label, f"{relaxation.limit}: {relaxation.change}{allowed}")
    yield from _notes(plan, verbose=verbose)


def _notes(plan: Plan, *, verbose: bool) -> Iterable[str]:
    yield from asides("notes", plan.provenance.notes, verbose=verbose)
    if plan.provenance.extrapolated:
        outside = ", ".join(plan.provenance.extrapolated)
        yield from labelled("note", f"priced outside the measured range: {outside}")
