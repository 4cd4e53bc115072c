"""A training plan as a report: decision, step, memory, evidence; for a terminal, too."""

from collections.abc import Iterator
from itertools import groupby
from typing import Final

from tuner.config.train import TrainDecision
from tuner.config.train_words import degrees, knobs, short_decision, train_words, unequal_words
from tuner.plans.proof import certificate_line, gap_words
from tuner.plans.stage_placement import NodeOrder, SinglePoolBaseline, StagePlacement
from tuner.plans.train import Certificate, Plan, RowPrediction, TrainPrediction
from tuner.report.candidates import candidates_figure, rivals_table
from tuner.report.content import (
    NO_EVIDENCE,
    Depth,
    Evidence,
    NamedValues,
    Notes,
    Report,
    Section,
    Table,
    maybe,
    named,
    number,
    seconds,
    share,
    size,
    some,
    word,
)
from tuner.report.expert_loads import loads_section
from tuner.report.launch_section import launch_section
from tuner.report.memory_headroom import (
    HARDLY_ANY,
    chance_sentence,
    memory_warning,
    needs_memory_warning,
    peak_band_words,
    trade_words,
)
from tuner.report.provenance import provenance_section
from tuner.report.run_section import failures_section, run_section
from tuner.report.step_figures import memory_figure, stage_time_figure, step_breakdown_figure
from tuner.report.timeline import timeline_figure
from tuner.report.trials import trials_section
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
    format_counted,
    format_ratio,
    format_s,
    format_times,
)
from tuner.verify.records import Verified

SHOWN_NODES: Final = 16


def train_report(plan: Plan, evidence: Evidence = NO_EVIDENCE) -> Report:
    """Build the report on a training plan."""
    decision, predicted, verified = plan.decision, plan.predicted, evidence.verified
    certificate = plan.certificate
    proof = f"{certificate_line(certificate)}, solved in {format_s(certificate.solve_s)}"
    if decision is None or predicted is None:
        is_open = certificate.status == "unknown"
        return Report(
            title=_title(plan),
            kind="Training plan",
            verdict="Not decided: the search ended before it found a configuration or excluded all."
            if is_open
            else "Nothing fits: no legal configuration meets the limits of the spec.",
            is_found=False,
            facts=named(
                ("sequences", number(plan.goal.global_batch_size, key="goal.global_batch_size")),
                ("tokens of each", number(plan.goal.sequence_length, key="goal.sequence_length")),
                ("not decided" if is_open else "limit not met", plan.binding_constraint),
                are_large=True,
            ),
            proof=f"Certificate: {proof}.",
            sections=(*_relaxations(plan), _provenance(plan)),
        )
    return Report(
        title=_title(plan),
        kind="Training plan",
        warning=memory_warning(plan) or "",
        verdict=_verdict(plan, decision, predicted, verified),
        is_found=True,
        facts=_headline(decision, predicted, certificate),
        proof=f"Certificate: {proof}. Bound by {plan.binding_constraint}.",
        sections=some(
            decision_section(plan, decision),
            trials_section(verified, plan),
            _step(plan, decision, predicted),
            run_section(predicted.run, currency=plan.cluster.currency) if predicted.run else None,
            _memory(predicted, plan.goal),
            loads_section(plan, evidence.trials, verified.winner if verified else None),
            failures_section(plan.failures) if plan.failures else None,
            _choice(plan, predicted),
            evidence.what_if,
            *_relaxations(plan),
            launch_section(evidence.files, names=plan.files),
            _provenance(plan),
        ),
    )


def _title(plan: Plan) -> str:
    pools = " + ".join(
        f"{pool.num_devices} {pool.device or f'devices of {pool.name}'}"
        for pool in plan.cluster.pools
    )
    is_less = plan.decision is not None and plan.decision.num_devices < plan.cluster.num_devices
    used = f"{plan.decision.num_devices} of " if is_less and plan.decision else ""
    return f"{plan.model.name} on {used}{pools}"


def _verdict(
    plan: Plan, decision: TrainDecision, predicted: TrainPrediction, verified: Verified | None
) -> str:
    low, high = predicted.step_time_s_band
    said = (
        f"Launch {train_words(decision)} with {', '.join(plan.emit)}: a step of "
        f"{plan.goal.global_batch_size:,} sequences of {plan.goal.sequence_length:,} tokens is "
        f"expected to take {format_s(predicted.step_time_s)} (90 % band: {format_s(low)} to "
        f"{format_s(high)})."
    )
    if verified is None or verified.winner is None or verified.winner_step_s is None:
        return f"{said} Not measured yet."
    is_same = verified.winner == decision
    whose = "This configuration" if is_same else f"Another one, {train_words(verified.winner)},"
    measured = f"{format_s(verified.winner_step_s)} measured."
    if verified.winner_extrapolated is not None:
        error = format_ratio(verified.winner_extrapolated.error_ratio)
        measured = (
            f"{format_s(verified.winner_step_s)} ± {error}, extrapolated from smaller jobs; no job "
            "of its own size was launched."
        )
    trials = format_counted(len(verified.trials), "trial")
    if all(trial.decision != verified.winner for trial in verified.trials):
        return (
            f"{said} {whose} is expected to be faster than all of {trials}:"
            f" {format_s(verified.winner_step_s)}, corrected by them; it was not launched."
        )
    return f"{said} {whose} was the fastest of {trials}: {measured}"


def _headline(
    decision: TrainDecision, predicted: TrainPrediction, certificate: Certificate
) -> NamedValues:
    peak, own_gap = max(predicted.peak_memory_bytes), certificate.decision_gap_ratio
    rank = predicted.peak_memory_bytes.index(peak)
    run_s = predicted.run.wall_clock_s if predicted.run else None
    return named(
        ("step time", seconds(predicted.step_time_s, key="predicted.step_time_s")),
        (
            "tokens/s per device",
            number(predicted.tokens_per_s_per_device, key="predicted.tokens_per_s_per_device"),
        ),
        ("peak memory", size(peak, key=f"predicted.peak_memory_bytes.{rank}")),
        ("MFU", maybe(share, predicted.mfu_ratio, key="predicted.mfu_ratio")),
        ("devices", number(decision.num_devices)),
        ("gap to optimal", gap_words(certificate.gap_ratio if own_gap is None else own_gap)),
        ("whole run", maybe(seconds, run_s, key="predicted.run.wall_clock_s")),
        are_large=True,
    )


def decision_section(plan: Plan, decision: TrainDecision) -> Section:
    """Say what is trained, with which degrees, stages and knobs, and where."""
    model, goal = plan.model, plan.goal
    rows = None if plan.predicted is None else plan.predicted.rows
    length = goal.sequence_length if rows is None else rows.document_tokens
    flop = training_flop_per_token(
        model, sequence_length=length, mtp_layers=decision.mtp_num_layers
    )
    unequal = unequal_words(decision, global_batch_size=goal.global_batch_size)
    token = named(
        (
            "a token",
            f"{format_count(flop)} FLOP to train,"
            f" {format_bytes(kv_bytes_per_token(model, bytes_per_element=2.0))} of bf16 KV cache to"
            " serve",
        ),
        depth=Depth.MORE,
    )
    return Section(
        name="decision",
        heading="What to launch",
        blocks=(
            named(
                (
                    "model",
                    f"{model.name}, {format_count(num_parameters(model))} parameters, "
                    f"{format_count(active_parameters(model))} active per token; "
                    f"{goal.precision.value}",
                ),
                ("trained", goal.adapters and adapters_words(goal.adapters)),
                *decision_facts(decision),
                (
                    "micro-batches",
                    f"{unequal} on the replicas"
                    if unequal
                    else number(decision.num_microbatches(goal.global_batch_size)),
                ),
                ("kernels", ", ".join(sorted(set(plan.provenance.profile_source.values())))),
                *(_placement(plan.placement) if plan.placement else ()),
            ),
            token,
        ),
    )


def decision_facts(decision: TrainDecision) -> Iterator[tuple[str, str]]:
    """Yield the degrees, the knobs that are switched on, and what each stage does."""
    listed = ", ".join(f"{name} {degree}" for name, degree in degrees(decision).items())
    yield "plan", f"{format_counted(decision.num_devices, 'device')}: {listed}"
    yield "with", ", ".join(knobs(decision))
    stages = zip(decision.pipeline_layout, decision.stage_recompute, decision.chunks, strict=True)
    yield (
        "stages",
        "; ".join(
            f"{len(list(group))} of {layers} layers, recompute {recompute}"
            f"{f', {chunks} chunks of MoE layers' if chunks > 1 else ''}"
            for (layers, recompute, chunks), group in groupby(stages)
        ),
    )


def _placement(placement: StagePlacement) -> Iterator[tuple[str, str]]:
    """Yield which pool runs which stages, and what each pool would do by itself."""
    runs = ((pool, list(run)) for pool, run in groupby(placement.stages, lambda stage: stage.pool))
    listed = (
        f"{format_counted(len(stages), 'stage')} of "
        f"{'/'.join(dict.fromkeys(str(stage.layers) for stage in stages))} layers on {pool}"
        for pool, stages in runs
    )
    yield "placement", ", then ".join(listed)
    yield from (("single pool", _single_pool(baseline)) for baseline in placement.alone)
    yield from (("node order", _node_order(node_order)) for node_order in placement.node_orders)
    for pool, devices in placement.unused_devices.items():
        yield "unused", f"{format_counted(devices, 'device')} of {pool}"
    yield from (("note", note) for note in placement.notes)


def _single_pool(baseline: SinglePoolBaseline) -> str:
    takes = "does not fit" if baseline.step_time_s is None else format_s(baseline.step_time_s)
    chance = baseline.out_of_memory_probability
    if chance is not None:
        some_chance = "hardly any" if chance < HARDLY_ANY else format_ratio(chance)
        takes += f", {some_chance} chance of running out of memory"
    return f"{baseline.pool}, {format_counted(baseline.devices, 'device')}: {takes}"


def _node_order(order: NodeOrder) -> str:
    spare = f"; spare: {_listed(order.spare)}" if order.spare else ""
    return (
        f"{order.pool}: {format_s(order.step_time_after_s)} a step instead of "
        f"{format_s(order.step_time_before_s)} in the listed order; no order is faster than "
        f"{format_s(order.bound_s)}: {_listed(order.nodes)}{spare}"
    )


def _listed(names: tuple[str, ...]) -> str:
    left = len(names) - SHOWN_NODES
    return ", ".join(names[:SHOWN_NODES]) + (f" and {left} more" if left > 0 else "")


def _step(plan: Plan, decision: TrainDecision, predicted: TrainPrediction) -> Section:
    simulated_s = predicted.played_step_time_s
    return Section(
        name="step",
        heading="One step",
        blocks=some(
            named(
                ("simulated", maybe(seconds, simulated_s, key="predicted.played_step_time_s")),
                depth=Depth.MORE,
            ),
            _rows(plan.goal, predicted.rows) if predicted.rows else None,
            step_breakdown_figure(plan, predicted),
            timeline_figure(plan, predicted),
            stage_time_figure(decision, predicted),
        ),
    )


def _rows(goal: TrainGoal, rows: RowPrediction) -> NamedValues:
    """Say how documents lie in rows, and what a step loses for them."""
    documents = goal.global_batch_size * rows.documents_per_row
    return named(
        (
            "documents",
            f"{documents:,.0f} a step, {rows.documents_per_row:.1f} a row of"
            f" {goal.sequence_length:,} tokens ({rows.rule}), {format_ratio(rows.fill_ratio)} full;"
            f" a token's has {rows.document_tokens:,.0f} tokens on average",
        ),
        (
            "by its rows",
            f"eight of ten steps take {format_s(rows.step_time_s_p10)} to"
            f" {format_s(rows.step_time_s_p90)}",
        ),
        (
            "of a step",
            f"padding takes {format_s(rows.padding_s)}, waiting for the most expensive rows"
            f" {format_s(rows.waiting_s)}, the order of micro-batches {format_s(rows.order_s)}",
        ),
        (
            "sorted",
            f"{format_s(rows.sorted_step_time_s)} a step if each step's rows were sorted before"
            " training, which no target does: expensive rows together, cheap ones at both ends of"
            " the pipeline; it keeps what a step trains on, and a resumed run needs the same rows"
            " a step and data-parallel size",
        ),
        (
            "longer rows",
            rows.wider
            and f"{rows.wider.rows:,} rows of {rows.wider.tokens:,} tokens would take"
            f" {format_s(rows.wider.step_time_s)} for as many documents, and"
            f" {format_bytes(rows.wider.peak_memory_bytes)} of a device",
        ),
    )


def _memory(predicted: TrainPrediction, goal: TrainGoal) -> Section:
    host, limit = predicted.host_memory, predicted.memory_limit_bytes
    chance, errors = chance_sentence(predicted, goal), "by the largest errors of published peaks"
    if predicted.out_of_memory_probability is None:
        chance = "bytes were counted on the reference step, without a probability"
        errors = "for what was not counted"
    peaks = predicted.peak_memory_bytes
    return Section(
        name="memory",
        heading="Memory",
        blocks=(
            named(
                ("usable", maybe(size, limit, key="predicted.memory_limit_bytes")),
                (
                    "peak",
                    f"{format_bytes(max(peaks))} on pipeline rank {peaks.index(max(peaks))}, the "
                    f"highest of {len(peaks):,}; the lowest is {format_bytes(min(peaks))}",
                ),
                ("memory band", f"{peak_band_words(predicted)}, {errors}"),
                ("OOM risk", "see the warning" if needs_memory_warning(predicted) else chance),
                *((("host memory" if host.fits else "DOES NOT FIT", host.words),) if host else ()),
            ),
            memory_figure(predicted),
        ),
    )


def _choice(plan: Plan, predicted: TrainPrediction) -> Section:
    certificate, preferred = plan.certificate, plan.preferred
    least = "at least " if certificate.within_band_is_least else ""
    missing = tuple(
        f"{option.feature} would save {format_ratio(option.gain_ratio)} of a step; {option.why}"
        for option in plan.unlaunchable
    )
    return Section(
        name="choice",
        heading="Why this one",
        blocks=some(
            named(
                (
                    "preferred",
                    preferred
                    and f"{format_ratio(preferred.slower_ratio)} slower than the fastest found "
                    f"({short_decision(preferred.fastest)}, {format_s(preferred.fastest_step_s)})",
                ),
                ("reason", preferred and ", ".join(preferred.reasons)),
                ("trade", "; ".join(trade_words(plan))),
                (
                    "ties",
                    f"{least}{certificate.within_band:,} other parallel layouts are within the "
                    "error band",
                ),
                *(
                    (
                        "runner-up",
                        f"{short_decision(alternative.decision)}: a step takes "
                        f"{format_times(alternative.ratio_band)} as long",
                    )
                    for alternative in plan.alternatives[:1]
                    if alternative.ratio_band is not None
                ),
            ),
            Notes(notes=missing, counted_as="features not launchable") if missing else None,
            rivals_table(plan, predicted),
            candidates_figure(plan, predicted),
        ),
    )


def _relaxations(plan: Plan) -> Iterator[Section]:
    if plan.relaxations:
        rows = tuple(
            (
                word(relaxation.limit),
                word(relaxation.change),
                word(short_decision(relaxation.decision) if relaxation.decision else "-"),
                maybe(
                    seconds,
                    relaxation.predicted.step_time_s if relaxation.predicted else None,
                    key=f"relaxations.{index}.predicted.step_time_s",
                ),
            )
            for index, relaxation in enumerate(plan.relaxations)
        )
        # With a decision, relaxations are changes that lower its risk of running out of memory.
        heading, caption = (
            ("Relaxations", "Changes that make a configuration fit")
            if plan.decision is None
            else ("More memory headroom", "Changes that give a configuration memory headroom")
        )
        header = ("limit", "change", "it would allow", "step")
        table = Table(caption=caption, header=header, rows=rows)
        yield Section(name="ways-out", heading=heading, blocks=(table,))


def _provenance(plan: Plan) -> Section:
    provenance = plan.provenance
    hashes = {f"profile of {pool}": sha for pool, sha in provenance.profile_sha256.items()}
    hashes |= {f"links of {pool}": sha for pool, sha in provenance.links_sha256.items()}
    outside = ", ".join(provenance.extrapolated)
    notes = (f"priced outside the measured range: {outside}",) if outside else ()
    return provenance_section(provenance, hashes=hashes, notes=notes)
