"""The report on a training plan: decision, step time, memory, evidence."""

from collections.abc import Iterator
from dataclasses import dataclass

from tuner.config.train import TrainDecision
from tuner.config.train_words import train_words
from tuner.plans.proof import gap_words, proof_words
from tuner.plans.train import Plan, TrainPrediction
from tuner.report.candidates import candidates_figure
from tuner.report.content import (
    Block,
    Cell,
    File,
    NamedValues,
    Notes,
    Paragraph,
    Report,
    Section,
    Table,
    between,
    number,
    seconds,
    share,
    size,
    some,
    word,
)
from tuner.report.decision_section import decision_section
from tuner.report.expert_loads import loads_section
from tuner.report.failures import failures_section
from tuner.report.launch_section import launch_section
from tuner.report.memory_headroom import (
    chance_sentence,
    memory_warning,
    peak_band_words,
    trade_words,
)
from tuner.report.provenance import provenance_section
from tuner.report.run_decisions import run_decisions
from tuner.report.step_figures import (
    breakdown_figure,
    peak_figure,
    stage_memory_figure,
    stage_time_figure,
)
from tuner.report.timeline import timeline_figure
from tuner.report.trials import trials_section
from tuner.spec.goal import TrainGoal
from tuner.units import format_ratio, format_s
from tuner.verify.records import TrialRecord, Verified


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainEvidence:
    """What accompanies a training plan."""

    verified: Verified | None
    trials: tuple[TrialRecord, ...]
    """All trials, in launch order."""
    files: tuple[File, ...]
    what_if: Section | None
    """Results under other limits, if any."""


def train_report(plan: Plan, evidence: TrainEvidence) -> Report:
    """Build the report on a training plan."""
    decision, predicted = plan.decision, plan.predicted
    title = f"{plan.model.name} on {_devices(plan, decision)}"
    if decision is None or predicted is None:
        return Report(
            title=title,
            kind="Training plan",
            verdict=(
                "Not decided: the search ended before it found a configuration or excluded all."
                if plan.certificate.status == "unknown"
                else "Nothing fits: no legal configuration meets the limits of the spec."
            ),
            is_found=False,
            facts=NamedValues(facts=tuple(_requested(plan)), are_large=True),
            proof=(
                f"{'Not decided' if plan.certificate.status == 'unknown' else 'Limit not met'}: "
                f"{plan.binding_constraint}."
            ),
            sections=(*_relaxations(plan), _provenance(plan)),
        )
    loads = loads_section(
        plan, evidence.trials, evidence.verified.winner if evidence.verified else None
    )
    failures = failures_section(plan)
    sections = [
        decision_section(plan, decision),
        *([trials_section(evidence.verified, predicted)] if evidence.verified else []),
        _step(plan, predicted),
        _memory(predicted, plan.goal),
        *([loads] if loads else []),
        *([failures] if failures else []),
        _choice(plan, predicted),
        *([evidence.what_if] if evidence.what_if else []),
        *_relaxations(plan),
        launch_section(evidence.files, names=plan.files),
        _provenance(plan),
    ]
    return Report(
        title=title,
        kind="Training plan",
        warning=memory_warning(plan, name=train_words) or "",
        verdict=_verdict(plan, decision, predicted, evidence.verified),
        is_found=True,
        facts=NamedValues(facts=tuple(_headline(plan, decision, predicted)), are_large=True),
        proof=f"{_certificate_words(plan)} Bound by {plan.binding_constraint}.",
        sections=tuple(sections),
    )


def _devices(plan: Plan, decision: TrainDecision | None) -> str:
    pools = " + ".join(
        f"{pool.num_devices} {pool.device or f'devices of {pool.name}'}"
        for pool in plan.cluster.pools
    )
    total = sum(pool.num_devices for pool in plan.cluster.pools)
    if decision is not None and decision.num_devices < total:
        return f"{decision.num_devices} of {pools}"
    return pools


def _verdict(
    plan: Plan, decision: TrainDecision, predicted: TrainPrediction, verified: Verified | None
) -> str:
    low, high = predicted.step_time_s_band
    said = (
        f"Launch {train_words(decision)} with {', '.join(plan.emit)}: a step of "
        f"{plan.goal.global_batch_size:,} sequences of {plan.goal.sequence_length:,} tokens is "
        f"expected to take {format_s(predicted.step_time_s)} (between {format_s(low)} and "
        f"{format_s(high)})."
    )
    if verified is None or verified.winner_step_s is None:
        return f"{said} Not measured yet."
    is_same = verified.winner == decision
    whose = (
        "This configuration"
        if is_same
        else f"Another configuration, {train_words(verified.winner)},"
        if verified.winner
        else ""
    )
    measured = f"{format_s(verified.winner_step_s)} measured."
    if verified.winner_extrapolated is not None:
        error = format_ratio(verified.winner_extrapolated.error_ratio)
        measured = (
            f"{format_s(verified.winner_step_s)} ± {error}, extrapolated from smaller jobs; no job "
            "of its own size was launched."
        )
    return f"{said} {whose} was the fastest of {len(verified.trials)} trials: {measured}"


def _headline(
    plan: Plan, decision: TrainDecision, predicted: TrainPrediction
) -> Iterator[tuple[str, Cell]]:
    yield "step time, predicted", seconds(predicted.step_time_s, key="predicted.step_time_s")
    yield (
        "tokens/s per device",
        number(predicted.tokens_per_s_per_device, key="predicted.tokens_per_s_per_device"),
    )
    peak = max(predicted.peak_memory_bytes)
    rank = predicted.peak_memory_bytes.index(peak)
    yield "peak memory per device", size(peak, key=f"predicted.peak_memory_bytes.{rank}")
    if predicted.host_memory is not None:
        yield "host memory per node", size(predicted.host_memory.node_bytes)
    if predicted.mfu_ratio is not None:
        yield "MFU", share(predicted.mfu_ratio, key="predicted.mfu_ratio")
    yield "devices", number(decision.num_devices)
    key = "gap_ratio" if plan.certificate.decision_gap_ratio is None else "decision_gap_ratio"
    yield "gap to optimal", share(getattr(plan.certificate, key), key=f"certificate.{key}")
    run = predicted.run
    if run is not None and run.wall_clock_s is not None:
        yield "whole run", seconds(run.wall_clock_s, key="predicted.run.wall_clock_s")


def _certificate_words(plan: Plan) -> str:
    """Return the certificate in words: of the fastest found, and of the preferred decision."""
    certificate = plan.certificate
    space = certificate.space
    parts = (
        (space.priced, "candidates were priced"),
        (space.bounded, "proven slower by their bounds"),
        (space.illegal, "are illegal"),
        (space.open, "were neither solved nor ruled out"),
    )
    counted = ", ".join(f"{count:,} {said}" for count, said in parts if count)
    proven = proof_words(certificate)
    if plan.preferred is None:
        return f"{proven[:1].upper()}{proven[1:]}: {counted}."
    gap = certificate.decision_gap_ratio
    own = "" if gap is None else f" The decision itself is within {gap_words(gap)} of optimal."
    return f"The fastest found is {proven}: {counted}.{own}"


def _step(plan: Plan, predicted: TrainPrediction) -> Section:
    timeline = timeline_figure(plan, predicted)
    missing = Paragraph(
        text="The schedule is not drawn: the plan lacks what the simulation needs, or it has too "
        "many passes."
    )
    facts: list[tuple[str, Cell]] = [
        ("step time", seconds(predicted.step_time_s, key="predicted.step_time_s")),
        ("its band", between(predicted.step_time_s_band)),
        (
            "exposed communication and waiting",
            seconds(predicted.communication_s, key="predicted.communication_s"),
        ),
    ]
    if predicted.played_step_time_s is not None:
        simulated = seconds(predicted.played_step_time_s, key="predicted.played_step_time_s")
        facts.append(("schedule simulated pass by pass", simulated))
    return Section(
        name="step",
        heading="One step",
        blocks=some(
            NamedValues(facts=tuple(facts)),
            breakdown_figure(plan, predicted),
            timeline or missing,
            stage_time_figure(predicted),
            _run(predicted, plan.cluster.currency),
        ),
    )


def _run(predicted: TrainPrediction, currency: str | None) -> NamedValues | None:
    run = predicted.run
    if run is None:
        return None
    facts: list[tuple[str, Cell]] = []
    if run.effective_time_ratio is not None:
        facts.append(
            (
                "of the time training",
                share(run.effective_time_ratio, key="predicted.run.effective_time_ratio"),
            )
        )
    if run.device_hours is not None:
        facts.append(("device hours", number(run.device_hours, key="predicted.run.device_hours")))
    if run.cost is not None:
        key = "predicted.run.cost"
        facts.append(("cost", number(run.cost, key=key, unit=currency or "")))
    if run.expected_failures:
        facts.append(
            (
                "failures expected",
                number(run.expected_failures, key="predicted.run.expected_failures"),
            )
        )
    facts += [(label, word(sentence)) for label, sentence in run_decisions(run)]
    return NamedValues(facts=tuple(facts)) if facts else None


def _memory(predicted: TrainPrediction, goal: TrainGoal) -> Section:
    return Section(
        name="memory",
        heading="Memory",
        blocks=(peak_figure(predicted), stage_memory_figure(predicted), _room(predicted, goal)),
    )


def _room(predicted: TrainPrediction, goal: TrainGoal) -> Paragraph:
    """Say how likely a rank runs out of memory, with the band of its peak."""
    band = f"With the largest errors of published peaks, {peak_band_words(predicted)}"
    if predicted.out_of_memory_probability is None:
        return Paragraph(
            text=f"{band}; bytes were counted on the reference step, without a probability."
        )
    return Paragraph(text=f"{band}: {chance_sentence(predicted, goal)}.")


def _choice(plan: Plan, predicted: TrainPrediction) -> Section:
    certificate = plan.certificate
    facts: list[tuple[str, Cell]] = [
        ("certificate", word(certificate.status)),
        ("method", word(certificate.method)),
        ("solved in", seconds(certificate.solve_s, key="certificate.solve_s")),
    ]
    if certificate.objective is not None:
        is_resized = certificate.objective > predicted.step_time_s
        said = (
            "fastest found, with the engine's gradient buckets" if is_resized else "fastest found"
        )
        facts.insert(1, (said, seconds(certificate.objective, key="certificate.objective")))
    if certificate.bound is not None:
        facts.insert(2, ("lower bound", seconds(certificate.bound, key="certificate.bound")))
    if certificate.decision_gap_ratio is not None:
        gap = share(certificate.decision_gap_ratio, key="certificate.decision_gap_ratio")
        facts.append(("the decision's own gap", gap))
    preferred: Block | None = None
    if plan.preferred is not None:
        one = plan.preferred
        preferred = Paragraph(
            text=f"The decision is {format_ratio(one.slower_ratio)} slower than the fastest found "
            f"({train_words(one.fastest)}, {format_s(one.fastest_step_s)}; "
            f"{proof_words(certificate)}). It was preferred because of {', '.join(one.reasons)}."
            + "".join(f" Trade: {said}." for said in trade_words(plan))
        )
    missing = tuple(
        f"{one.feature} would save {format_ratio(one.gain_ratio)} of a step; {one.why}"
        for one in plan.unlaunchable
    )
    return Section(
        name="choice",
        heading="Why this one",
        blocks=some(
            NamedValues(facts=tuple(facts)),
            preferred,
            candidates_figure(plan, predicted),
            Notes(notes=missing) if missing else None,
        ),
    )


def _requested(plan: Plan) -> Iterator[tuple[str, Cell]]:
    yield "sequences per step", number(plan.goal.global_batch_size, key="goal.global_batch_size")
    yield "sequence length", number(plan.goal.sequence_length, key="goal.sequence_length")
    yield "certificate", word(plan.certificate.status)


def _relaxations(plan: Plan) -> Iterator[Section]:
    if plan.relaxations:
        rows = tuple(
            (
                word(relaxation.limit),
                word(relaxation.change),
                word(train_words(relaxation.decision) if relaxation.decision else "-"),
                seconds(
                    relaxation.predicted.step_time_s,
                    key=f"relaxations.{index}.predicted.step_time_s",
                )
                if relaxation.predicted
                else word("-"),
            )
            for index, relaxation in enumerate(plan.relaxations)
        )
        # With a decision, relaxations are changes that lower its risk of running out of memory.
        heading, caption = (
            ("Relaxations", "Changes that make a configuration fit")
            if plan.decision is None
            else ("More memory headroom", "Changes that give a configuration memory headroom")
        )
        table = Table(
            caption=caption, header=("limit", "change", "configuration", "step"), rows=rows
        )
        yield Section(name="ways-out", heading=heading, blocks=(table,))


def _provenance(plan: Plan) -> Section:
    own = plan.provenance
    hashes = {f"profile of {pool}": sha for pool, sha in own.profile_sha256.items()}
    hashes |= {f"links of {pool}": sha for pool, sha in own.links_sha256.items()}
    notes = [*own.notes, *(f"priced outside the measured range: {one}" for one in own.extrapolated)]
    return provenance_section(
        version=own.moetune_version,
        spec_sha256=own.spec_sha256,
        sources=own.profile_source,
        hashes=hashes,
        notes=notes,
    )
