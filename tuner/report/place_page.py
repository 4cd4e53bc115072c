"""The report on a placement: verdict, rank loads before and after, evidence."""

from collections.abc import Iterator
from dataclasses import dataclass

from tuner.config.place import PlaceDecision
from tuner.plans.place import (
    LinkFacts,
    MigrationCost,
    PlaceCertificate,
    PlacePlan,
    PlacePrediction,
    Verdict,
)
from tuner.report.content import (
    Cell,
    File,
    NamedValues,
    Notes,
    Paragraph,
    Report,
    Section,
    Table,
    number,
    seconds,
    share,
    size,
    some,
    word,
)
from tuner.report.heat_map import HeatMap
from tuner.report.heat_map_figure import heat_map_figure
from tuner.report.launch_section import launch_section
from tuner.report.place_figures import (
    bounds_figure,
    imbalance_figure,
    left_out_figure,
    times_figure,
)
from tuner.report.provenance import provenance_section
from tuner.spec.place import Objective
from tuner.units import format_ratio
from tuner.verify.placement_records import PlaceVerified


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaceEvidence:
    """What accompanies a placement's plan."""

    maps: tuple[HeatMap, ...]
    files: tuple[File, ...]
    verified: PlaceVerified | None
    what_if: Section | None


def place_report(plan: PlacePlan, evidence: PlaceEvidence) -> Report:
    """Build the report on a placement's plan."""
    decision, predicted, verdict = plan.decision, plan.predicted, plan.verdict
    if decision is None or predicted is None or verdict is None:
        return Report(
            title=f"Experts on {plan.goal.ranks} ranks",
            kind="Expert placement",
            verdict="No placement meets the limits of the spec.",
            is_found=False,
            facts=NamedValues(
                facts=(("certificate", word(plan.certificate.status)),), are_large=True
            ),
            proof=f"Infeasible because of: {plan.binding_constraint}.",
            sections=(*_relaxations(plan), _provenance(plan)),
        )
    return Report(
        title=f"{decision.num_experts} experts on {decision.ranks} ranks",
        kind="Expert placement",
        verdict=f"{verdict.word.capitalize()}: {verdict.reason}. {_words(decision)}",
        is_found=True,
        facts=NamedValues(facts=tuple(_headline(plan, predicted, verdict)), are_large=True),
        proof=f"{_proof(plan.certificate)} Bound by: {plan.binding_constraint}.",
        sections=(
            Section(
                name="workloads",
                heading="Before and after",
                blocks=some(
                    imbalance_figure(predicted),
                    times_figure(predicted),
                    _traffic(plan, predicted),
                    _traffic_times(predicted),
                    _links(predicted.links),
                ),
            ),
            *_maps(evidence.maps, workloads=len(predicted.outcomes)),
            *_left_out_traffic(predicted),
            *_measured(evidence.verified),
            Section(
                name="choice",
                heading="Why this one",
                blocks=some(
                    NamedValues(facts=tuple(_certificate(plan))),
                    bounds_figure(plan.certificate),
                    _alternatives(plan),
                    _dispatches(predicted),
                    Notes(notes=tuple(f"Not launchable: {one.words}" for one in plan.unlaunchable))
                    if plan.unlaunchable
                    else None,
                    _marks(plan),
                ),
            ),
            *([evidence.what_if] if evidence.what_if else []),
            *_relaxations(plan),
            *_move(predicted.migration),
            launch_section(evidence.files, names=plan.files),
            _provenance(plan),
        ),
    )


def _words(decision: PlaceDecision) -> str:
    return (
        f"{len(decision.layer_ids)} layers of {decision.num_experts} experts are placed in "
        f"{decision.num_slots} slots on {decision.ranks} ranks, {decision.redundant_experts} of "
        "them redundant."
    )


def _headline(
    plan: PlacePlan, predicted: PlacePrediction, verdict: Verdict
) -> Iterator[tuple[str, Cell]]:
    yield "verdict", word(verdict.word)
    saved = "traffic saved" if predicted.traffic else "peak load saved"
    saved = "expert time saved" if predicted.layer_times else saved
    yield saved, share(verdict.gain_ratio, key="verdict.gain_ratio")
    yield "noise of the saving", share(verdict.noise_ratio, key="verdict.noise_ratio")
    if verdict.step_gain_ratio is not None:
        yield "pass time saved", share(verdict.step_gain_ratio, key="verdict.step_gain_ratio")
    worst = max(
        range(len(predicted.outcomes)), key=lambda at: predicted.outcomes[at].imbalance_after
    )
    after = predicted.outcomes[worst].imbalance_after
    key = f"predicted.outcomes.{worst}.imbalance_after"
    yield "imbalance, worst workload", Cell(text=f"{after:.4f}", value=after, key=key)
    yield "gap to optimal", share(plan.certificate.gap_ratio, key="certificate.gap_ratio")


def _proof(certificate: PlaceCertificate) -> str:
    if certificate.status == "optimal":
        return "Proven optimal under the model."
    gap = format_ratio(certificate.gap_ratio)
    return f"The gap to the proven lower bound is {gap} of the objective."


def _certificate(plan: PlacePlan) -> Iterator[tuple[str, Cell]]:
    certificate = plan.certificate
    links = None if plan.predicted is None else plan.predicted.links
    in_seconds = links is not None and links.unit == "seconds"
    is_time = in_seconds or plan.goal.objective is Objective.LAYER_TIME
    write = seconds if is_time else number
    yield "objective", word(plan.goal.objective.value.replace("_", " "))
    yield "certificate", word(certificate.status)
    if certificate.objective is not None:
        yield "reached", write(certificate.objective, key="certificate.objective")
    if certificate.bound is not None:
        yield "lower bound", write(certificate.bound, key="certificate.bound")
    yield "method", word(certificate.method.replace("_", " "))
    yield "solved in", seconds(certificate.solve_s, key="certificate.solve_s")


def _traffic(plan: PlacePlan, predicted: PlacePrediction) -> Table | None:
    if not predicted.traffic:
        return None
    in_seconds = predicted.links is not None and predicted.links.unit == "seconds"
    write = seconds if in_seconds else number
    unit = "" if in_seconds else ", relative to a copy inside a domain"
    return Table(
        caption=f"Traffic of {plan.goal.traffic_unit}, all layers{unit}",
        header=("", "before", "EPLB", "the plan"),
        rows=tuple(
            (
                word(name),
                *(
                    write(value, key=f"predicted.traffic.{name}.{at}")
                    for at, value in enumerate(values)
                ),
            )
            for name, values in predicted.traffic.items()
        ),
    )


def _traffic_times(predicted: PlacePrediction) -> Table | None:
    if not predicted.traffic_times:
        return None
    path = "predicted.traffic_times"
    return Table(
        caption="Predicted traffic of a pass on these links",
        header=("workload", "before", "EPLB", "the plan", "evaluated on"),
        rows=tuple(
            (
                word(one.workload),
                seconds(one.before_s, key=f"{path}.{at}.before_s"),
                seconds(one.rule_s, key=f"{path}.{at}.rule_s"),
                seconds(one.after_s, key=f"{path}.{at}.after_s"),
                word(
                    f"{one.tokens_judged} hold-out tokens" if one.tokens_judged else "planned from"
                ),
            )
            for at, one in enumerate(predicted.traffic_times)
        ),
    )


def _links(links: LinkFacts | None) -> Table | None:
    if links is None:
        return None
    write = seconds if links.unit == "seconds" else number
    path = "predicted.links"
    one, two = links.slowest_ranks
    rows = []
    if links.inside_cost is not None:
        cost = write(links.inside_cost, key=f"{path}.inside_cost")
        rows.append((word("inside a domain"), cost, word(links.inside_source or "")))
    if links.between_cost is not None:
        cost = write(links.between_cost, key=f"{path}.between_cost")
        rows.append((word("between domains"), cost, word(links.between_source or "")))
    slowest = write(links.slowest_cost, key=f"{path}.slowest_cost")
    rows.append((word("at most"), slowest, word(f"from rank {one} to rank {two}")))
    return Table(
        caption="Cost of a token copy from rank to rank",
        header=("", "cost", "from"),
        rows=tuple(rows),
    )


def _maps(maps: tuple[HeatMap, ...], *, workloads: int) -> Iterator[Section]:
    if not maps:
        return
    figures = tuple(
        heat_map_figure(
            heat,
            name=f"heat-map-{at}",
            title=f"Rank loads of {heat.title}",
            reading="Load of every rank in every layer over the layer's mean, on hold-out passes; "
            "both panels have one scale.",
            across="rank",
        )
        for at, heat in enumerate(maps)
    )
    rest = workloads - len(maps)
    more = Paragraph(text=f"Maps of {rest} more workloads are in the plan's folder, in report/.")
    yield Section(
        name="loads",
        heading="Loads by layer and rank",
        blocks=some(*figures, more if rest > 0 else None),
    )


def _left_out_traffic(predicted: PlacePrediction) -> Iterator[Section]:
    figure = left_out_figure(predicted)
    if figure is not None:
        yield Section(name="unseen", heading="Unrecorded traffic", blocks=(figure,))


def _measured(verified: PlaceVerified | None) -> Iterator[Section]:
    if verified is None:
        return
    nothing = word("-")
    table = Table(
        caption=f"Expert GEMMs of the slowest rank, mean of {len(verified.layers)} layers",
        header=("placement", "status", "predicted", "measured"),
        rows=tuple(
            (
                word(trial.decision),
                word(trial.status),
                nothing
                if trial.predicted_layer_time_s is None
                else seconds(trial.predicted_layer_time_s),
                nothing
                if trial.measured_layer_time_s is None
                else seconds(trial.measured_layer_time_s),
            )
            for trial in verified.trials
        ),
    )
    yield Section(
        name="verified",
        heading="Predicted and measured",
        blocks=some(
            NamedValues(facts=(("measured on", word(verified.device)),)),
            table,
            Notes(notes=verified.notes) if verified.notes else None,
        ),
    )


def _alternatives(plan: PlacePlan) -> Table | None:
    if not plan.alternatives:
        return None
    return Table(
        caption="Other placements",
        header=("placement", "objective", "meets the limits", "why it lost"),
        rows=tuple(
            (
                word(one.method),
                number(one.objective, key=f"alternatives.{at}.objective"),
                word("yes" if one.is_legal else "no"),
                word(one.lost_by),
            )
            for at, one in enumerate(plan.alternatives)
        ),
    )


def _dispatches(predicted: PlacePrediction) -> Table | None:
    if not predicted.dispatches:
        return None
    tokens = predicted.dispatches[0].tokens_per_rank
    what = "token copies" if predicted.dispatches[0].counts_copies else "tokens"
    return Table(
        caption="Dispatch rules of the engine: largest rank load over the mean, expected and with "
        f"the noise of {tokens:.0f} {what} per rank",
        header=("rule", "all-to-all backend", "expected", "with noise", "cost"),
        rows=tuple(
            (
                word(one.dispatch),
                word("yes" if one.has_backend else "none"),
                number(one.imbalance, key=f"predicted.dispatches.{at}.imbalance"),
                number(one.imbalance_sampled, key=f"predicted.dispatches.{at}.imbalance_sampled"),
                word(one.words),
            )
            for at, one in enumerate(predicted.dispatches)
        ),
    )


def _marks(plan: PlacePlan) -> Notes | None:
    if not plan.made_for:
        return None
    return Notes(
        notes=tuple(
            f"Made for {mark.words}; plan again when one of these changes."
            for mark in plan.made_for
        )
    )


def _relaxations(plan: PlacePlan) -> Iterator[Section]:
    if plan.relaxations:
        yield Section(
            name="ways-out",
            heading="Relaxations",
            blocks=(Notes(notes=plan.relaxations),),
        )


def _move(moved: MigrationCost | None) -> Iterator[Section]:
    if moved is None:
        return
    path = "predicted.migration"
    facts = [("experts to load", number(moved.moved_experts, key=f"{path}.moved_experts"))]
    if moved.moved_bytes is not None:
        facts.append(("bytes", size(moved.moved_bytes, key=f"{path}.moved_bytes")))
    if moved.transfer_s is not None:
        facts.append(("transfer", seconds(moved.transfer_s, key=f"{path}.transfer_s")))
    if moved.break_even_s is not None:
        facts.append(("break-even after", seconds(moved.break_even_s, key=f"{path}.break_even_s")))
    yield Section(name="move", heading="Migration", blocks=(NamedValues(facts=tuple(facts)),))


def _provenance(plan: PlacePlan) -> Section:
    own = plan.provenance
    return provenance_section(
        version=own.moetune_version,
        spec_sha256=own.spec_sha256,
        sources={},
        hashes={f"recording {name}": sha for name, sha in own.recording_sha256.items()},
        notes=own.notes,
    )
