"""A plan as text for people: the decision first, then what it costs, then how sure that is."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from tuner.cli.text import asides, columns, format_times
from tuner.equal_stages import equal_stages
from tuner.faults.forecast import RunForecast
from tuner.placement import StagePlacement
from tuner.plan import Certificate, Plan, TrainDecision, TrainPrediction
from tuner.planner.layout_groups import layout_of, variants_of, variants_words
from tuner.planner.plan_profiled import certificate_line, gap_words, proof_words
from tuner.report.memory_headroom import (
    HARDLY_ANY,
    chance_sentence,
    memory_warning,
    needs_memory_warning,
    peak_band_words,
    trade_words,
)
from tuner.spec.accounting import (
    active_parameters,
    kv_bytes_per_token,
    num_parameters,
    training_flop_per_token,
)
from tuner.spec.goal import TrainGoal
from tuner.train_words import knobs, short_decision, short_layout, train_changes
from tuner.units import format_bytes, format_count, format_ratio, format_s

SHOWN_ALTERNATIVES = 8
SHOWN_RANKS = 4
SHOWN_NODES = 16
SHOWN_CHANGES = 2


def plan_text(plan: Plan, *, folder: Path, verbose: bool = False) -> str:
    """Say what was planned and what to do next; `verbose` prints every note."""
    if plan.decision is None or plan.predicted is None:
        return "\n".join(_nothing_fits(plan, verbose=verbose))
    lines = [
        *_warning_lines(plan),
        *decision_lines(plan.decision),
        "",
        *_prediction_lines(plan.predicted, plan.goal, currency=plan.cluster.currency),
        f"certificate    {certificate_line(plan.certificate)}, "
        f"solved in {format_s(plan.certificate.solve_s)}",
        *_preference_lines(plan),
        f"ties           {_ties(plan.certificate)} other parallel layouts are within the error "
        "band",
        *(
            f"runner-up      {short_decision(one.decision)}: a step takes "
            f"{format_times(one.ratio_band)} as long"
            for one in plan.alternatives[:1]
            if one.ratio_band is not None
        ),
        f"bound by       {plan.binding_constraint}",
        *asides("not launchable ", _unlaunchable(plan), verbose=verbose),
        *_placement_lines(plan.placement),
        *_notes(plan, verbose=verbose),
        "",
        f"written to {folder}; next: {_next_step(plan, folder)}",
    ]
    return "\n".join(lines)


def _next_step(plan: Plan, folder: Path) -> str:
    if plan.provenance.device_kind:
        return f"moetune verify {folder}"
    return f"moetune explain {folder}; launch files are in {folder / 'launch'}"


def explanation(plan: Plan, *, verbose: bool = False) -> str:
    """Explain why this plan was chosen, by stage and by runner-up."""
    if plan.decision is None or plan.predicted is None:
        return "\n".join(_nothing_fits(plan, verbose=verbose))
    lines = [
        *_warning_lines(plan),
        _model_line(plan),
        *decision_lines(plan.decision),
        "",
        "where a step's time goes",
        _breakdown(plan.predicted),
        "",
        "each stage",
        _stages(plan.decision, plan.predicted),
        "",
        *_where(plan.placement),
        "why this one",
        f"  {certificate_line(plan.certificate)}",
        *(f"  {line}" for line in _preference_lines(plan)),
        *_fastest(plan),
        f"  bound by {plan.binding_constraint}",
        *(f"  {one}" for one in _unlaunchable(plan)),
        "",
        f"why not the others ({_ties(plan.certificate)} parallel layouts are within the error "
        "band: ties)",
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
        yield f"WARNING        {message}"
        yield ""


def _ties(certificate: Certificate) -> str:
    least = "at least " if certificate.within_band_is_least else ""
    return f"{least}{certificate.within_band}"


def _preference_lines(plan: Plan) -> Iterable[str]:
    """What the preferred decision costs against the fastest, and its own optimality gap."""
    if plan.preferred is None or plan.decision is None:
        return
    one, gap = plan.preferred, plan.certificate.decision_gap_ratio
    yield (
        f"preferred      {format_ratio(one.slower_ratio)} slower than the fastest found "
        f"({_distinguishing_name(one.fastest, plan.decision)}, {format_s(one.fastest_step_s)}), "
        f"within {gap_words(gap or 0.0)} of optimal"
    )
    yield f"reason         {', '.join(one.reasons)}"
    message = "; ".join(trade_words(plan))
    if message:
        yield f"trade          {message}"


def _fastest(plan: Plan) -> Iterable[str]:
    """The fastest decision in full, where another was preferred: the certificate is about it."""
    if plan.preferred is not None:
        fastest = short_decision(plan.preferred.fastest)
        yield f"  the fastest found ({proof_words(plan.certificate)}): {fastest}"


def _distinguishing_name(one: TrainDecision, other: TrainDecision) -> str:
    """Name a decision by its layout; by its other differences where both share the layout."""
    if short_layout(one) != short_layout(other):
        return short_layout(one)
    return ", ".join(train_changes(other, one)[:SHOWN_CHANGES])


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
        f"TP {decision.tensor_model_parallel_size}, CP {decision.context_parallel_size}, "
        f"PP {decision.pipeline_model_parallel_size}"
        f" (x{decision.virtual_pipeline_model_parallel_size} chunks), "
        f"DP {decision.data_parallel_size}, EP {decision.expert_model_parallel_size}, "
        f"ETP {decision.expert_tensor_parallel_size}, "
        f"EDP {decision.expert_data_parallel_size}, ZeRO {decision.zero_stage}, "
        f"micro-batch {decision.micro_batch_size}"
    )
    stages = zip(decision.pipeline_layout, decision.stage_recompute, decision.chunks, strict=True)
    with_knobs = ", ".join(knobs(decision))
    if with_knobs:
        yield f"with {with_knobs}"
    yield "stages: " + "; ".join(
        f"{f'{len(list(group))} x ' if len(decision.pipeline_layout) > 1 else ''}"
        f"{layers} layers, recompute {recompute}, {chunks} MemFine chunk{'s' * (chunks > 1)}"
        for (layers, recompute, chunks), group in groupby(stages)
    )


def _prediction_lines(
    predicted: TrainPrediction, goal: TrainGoal, *, currency: str | None
) -> Iterable[str]:
    low, high = predicted.step_time_s_band
    yield (
        f"step time      {format_s(predicted.step_time_s)} "
        f"(between {format_s(low)} and {format_s(high)}), "
        f"{predicted.tokens_per_s_per_device:.4g} tokens/s per device"
    )
    if predicted.mfu_ratio is not None:
        yield f"MFU            {format_ratio(predicted.mfu_ratio)}"
    if predicted.run is not None:
        yield from _run_lines(predicted.run, currency)
    peaks = predicted.peak_memory_bytes
    if len(peaks) > SHOWN_RANKS:
        highest = peaks.index(max(peaks))
        yield (
            f"peak memory    {format_bytes(peaks[highest])} on pipeline rank {highest}, the "
            f"highest of {len(peaks)} ranks; the lowest is {format_bytes(min(peaks))}"
        )
    else:
        listed = ", ".join(format_bytes(peak) for peak in peaks)
        yield f"peak memory    {listed} (by pipeline rank, the highest of its devices)"
    yield from _room_lines(predicted, goal)


def _room_lines(predicted: TrainPrediction, goal: TrainGoal) -> Iterable[str]:
    """The chance of running out of memory, unless a warning said it, and the peak-memory band."""
    if predicted.out_of_memory_probability is None:
        return
    message = (
        "see the warning" if needs_memory_warning(predicted) else chance_sentence(predicted, goal)
    )
    yield f"OOM risk       {message}"
    yield (f"memory band    {peak_band_words(predicted)}, by the largest errors of published peaks")


def _run_lines(run: RunForecast, currency: str | None) -> Iterable[str]:
    """The whole run with failures and checkpoints."""
    if not run.finishes:
        yield f"whole run      never finishes: {run.reason}"
        return
    effective = f"{format_ratio(run.effective_time_ratio)} of the time trains"
    if run.checkpoint_interval_s is not None and run.checkpoint_write_s is not None:
        effective += (
            f"; checkpoint every {format_s(run.checkpoint_interval_s)} "
            f"({format_s(run.checkpoint_write_s)} to write)"
        )
    if run.wall_clock_s is None or run.device_hours is None:
        yield f"whole run      {effective}"
        return
    cost = "" if run.cost is None else f", cost {run.cost:,.0f} {currency or ''}".rstrip()
    failures = "" if not run.expected_failures else f", {run.expected_failures:.0f} failures"
    yield (
        f"whole run      {format_s(run.wall_clock_s)}, {run.device_hours:,.0f} device hours"
        f"{cost}{failures}; {effective}"
    )


def _placement_lines(placement: StagePlacement | None) -> Iterable[str]:
    """Which pool runs which stages, and what each pool would do by itself."""
    if placement is None:
        return
    runs = [
        (pool, list(stages)) for pool, stages in groupby(placement.stages, lambda one: one.pool)
    ]
    yield "placement      " + ", then ".join(
        f"{len(stages)} stage{'s' * (len(stages) > 1)} of "
        f"{'/'.join(dict.fromkeys(str(one.layers) for one in stages))} layers on {pool}"
        for pool, stages in runs
    )
    for single_pool in placement.alone:
        takes = (
            "does not fit"
            if single_pool.step_time_s is None
            else f"{format_s(single_pool.step_time_s)}"
        )
        if single_pool.out_of_memory_probability is not None:
            takes += f", {_chance(single_pool.out_of_memory_probability)} of running out of memory"
        yield f"single pool    {single_pool.pool}, {single_pool.devices} devices: {takes}"
    for order in placement.node_orders:
        yield (
            f"node order     {order.pool}: {format_s(order.step_time_after_s)} a step instead of "
            f"{format_s(order.step_time_before_s)} in the listed order; no order is faster "
            f"than {format_s(order.bound_s)}"
        )
        spare = f"; spare: {_listed(order.spare)}" if order.spare else ""
        yield f"nodes          {_listed(order.nodes)}{spare}"
    for pool, devices in placement.unused_devices.items():
        yield f"unused         {devices} devices of {pool}"
    yield from (f"note           {note}" for note in placement.notes)


def _chance(probability: float) -> str:
    """Format a probability; what would round to zero is `hardly any`."""
    return (
        "hardly any chance" if probability < HARDLY_ANY else f"{format_ratio(probability)} chance"
    )


def _where(placement: StagePlacement | None) -> Iterable[str]:
    if placement is not None:
        yield "where it runs"
        yield from (f"  {line}" for line in _placement_lines(placement))
        yield ""


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:SHOWN_NODES])
    left = len(names) - SHOWN_NODES
    return f"{shown} and {left} more" if left > 0 else shown


def _breakdown(predicted: TrainPrediction) -> str:
    step_s = predicted.step_time_s
    rows = [
        (f"  {cause}", format_s(seconds), format_ratio(seconds / step_s))
        for cause, seconds in sorted(predicted.breakdown_s.items(), key=lambda item: -item[1])
    ]
    return columns([*rows, ("  step", format_s(step_s), "")])


def _stages(decision: TrainDecision, predicted: TrainPrediction) -> str:
    """A row for each kind of stage; equal ones share theirs."""
    rows = [
        (
            str(stage.layers),
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
    table = [(f"  {equal.label}", *equal.row) for equal in equal_stages(rows)]
    header = ("  stages", "layers", "recompute", "forward", "backward", "parameters", "gradients")
    return columns(table, header=(*header, "optimizer", "activations", "gathered", "total"))


def _alternatives(plan: Plan) -> Iterable[str]:
    """A row for each other layout, with the range of its variants."""
    if not plan.alternatives:
        yield "  no other layout was kept by the search"
        return
    rows = [
        (
            f"  {short_decision(other.decision)}",
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
        for other in plan.alternatives[:SHOWN_ALTERNATIVES]
    ]
    header = (
        "  decision",
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
    yield f"no plan: {certificate_line(plan.certificate)}"
    is_open = plan.certificate.status == "unknown"
    yield f"{'not decided:' if is_open else 'limit not met:'} {plan.binding_constraint}"
    for index, relaxation in enumerate(plan.relaxations):
        label = "or:" if index else "to make it fit:"
        yield f"{label:<16} {relaxation.limit}: {relaxation.change}"
        if relaxation.decision is not None and relaxation.predicted is not None:
            yield f"  it would allow {short_decision(relaxation.decision)}"
            yield f"  at {format_s(relaxation.predicted.step_time_s)} a step"
    yield from _notes(plan, verbose=verbose)


def _notes(plan: Plan, *, verbose: bool) -> Iterable[str]:
    yield from asides("notes          ", plan.provenance.notes, verbose=verbose)
    if plan.provenance.extrapolated:
        outside = ", ".join(plan.provenance.extrapolated)
        yield f"note           priced outside the measured range: {outside}"
