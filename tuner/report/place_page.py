"""The report on a placement: verdict, rank loads before and after, evidence.

`moetune plan`, `explain` and `verify` print the parts of it that are marked for their screens.
"""

from collections.abc import Iterator

from solvers.placement.balance.check import LAUNCHES
from tuner.config.place import PlaceDecision
from tuner.plans.place import (
    LinkFacts,
    MigrationCost,
    PlacePlan,
    PlacePrediction,
    Verdict,
)
from tuner.report.content import (
    NO_EVIDENCE,
    Cell,
    Depth,
    Evidence,
    NamedValues,
    Paragraph,
    Report,
    Section,
    Table,
    bullets,
    maybe,
    named,
    number,
    seconds,
    section,
    share,
    size,
    some,
    word,
)
from tuner.report.heat_map import HeatMap, heat_map_figure
from tuner.report.launch_section import launch_section
from tuner.report.place_figures import (
    bounds_figure,
    imbalance_figure,
    left_out_figure,
    times_figure,
)
from tuner.report.provenance import provenance_section
from tuner.report.trials import trials_section
from tuner.spec.place import Objective
from tuner.units import format_ratio, format_s


def place_report(plan: PlacePlan, evidence: Evidence = NO_EVIDENCE) -> Report:
    """Build the report on a placement's plan."""
    decision, predicted, verdict = plan.decision, plan.predicted, plan.verdict
    if decision is None or predicted is None or verdict is None:
        is_open = plan.certificate.status == "unknown"
        return Report(
            title=f"Experts on {plan.goal.ranks} ranks",
            kind="Expert placement",
            verdict="Not decided: the search ended before it found a placement."
            if is_open
            else "No placement meets the limits of the spec.",
            is_found=False,
            facts=named(("certificate", plan.certificate.status), are_large=True),
            proof=f"{'Not decided' if is_open else 'Infeasible because of'}:"
            f" {plan.binding_constraint}.",
            sections=some(_provenance(plan)),
        )
    return Report(
        title=f"{decision.num_experts} experts on {decision.ranks} ranks",
        kind="Expert placement",
        verdict=f"{verdict.word.capitalize()}: {verdict.reason}. {_words(decision)}",
        is_found=True,
        facts=named(*_headline(plan, predicted, verdict), are_large=True),
        proof=f"{_proof(plan)} Bound by: {plan.binding_constraint}.",
        sections=some(
            section(
                "workloads",
                "Before and after",
                _against_eplb(plan, predicted, verdict),
                imbalance_figure(predicted),
                times_figure(predicted),
                _traffic(plan, predicted),
                _traffic_times(predicted),
                _links(predicted.links),
            ),
            _maps(evidence.maps, workloads=len(predicted.outcomes)),
            section("unseen", "Unrecorded traffic", left_out_figure(predicted)),
            trials_section(evidence.verified, plan),
            section(
                "choice",
                "Why this one",
                bounds_figure(plan.certificate),
                _alternatives(plan),
                _dispatches(predicted),
                bullets(
                    f"Made for {mark.words}; plan again when one of these changes."
                    for mark in plan.made_for
                ),
            ),
            evidence.what_if,
            section("move", "Migration", _move(predicted.migration)),
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


def _against_eplb(
    plan: PlacePlan, predicted: PlacePrediction, verdict: Verdict
) -> NamedValues | None:
    """Compare the saving with that of EPLB's rule; nothing where that has none to compare."""
    weights = [workload.weight for workload in plan.goal.workloads]
    if predicted.layer_times:
        pairs = [(times.before_s, times.rule_s) for times in predicted.layer_times]
    elif predicted.traffic:
        ((before, rule, _),) = predicted.traffic.values()
        weights, pairs = [1.0], [(before, rule)]
    else:
        pairs = [
            (outcome.imbalance_before, outcome.imbalance_rule) for outcome in predicted.outcomes
        ]
    total = sum(weight * before for weight, (before, _) in zip(weights, pairs, strict=True))
    left = sum(weight * rule for weight, (_, rule) in zip(weights, pairs, strict=True))
    if total <= 0.0:
        return None
    limits = (plan.goal.max_moved_experts, plan.goal.max_moved_bytes)
    unlimited = "" if limits == (None, None) else ", without the migration limit,"
    folds = predicted.left_out
    better = sum(fold.imbalance_after < fold.imbalance_rule for fold in folds)
    unseen = (
        "; on workloads left out of planning, the plan is more even than EPLB's on"
        f" {better} of {len(folds)}"
    )
    said = (
        f"EPLB's rule{unlimited} would {_saved(1.0 - left / total, 'save', 'add')}, the plan"
        f" {_saved(verdict.gain_ratio, 'saves', 'adds')}{unseen if folds else ''}"
    )
    return NamedValues(facts=(("against EPLB", word(said)),))


def _saved(ratio: float, saves: str, adds: str) -> str:
    return f"{saves if ratio >= 0.0 else adds} {format_ratio(abs(ratio))}"


def _proof(plan: PlacePlan) -> str:
    """State objective, bound, method and rule; the gap is in the headline."""
    certificate, predicted = plan.certificate, plan.predicted
    links = None if predicted is None else predicted.links
    in_seconds = links is not None and links.unit == "seconds"
    is_time = in_seconds or plan.goal.objective is Objective.LAYER_TIME
    unit = "" if links is None else f" {plan.goal.traffic_unit}"
    reached, bound = (
        "nothing proven" if value is None else f"{format_s(value) if is_time else f'{value:.6g}'}"
        for value in (certificate.objective, certificate.bound)
    )
    error = certificate.objective_error
    sampled = f" (a mean over {LAUNCHES} drawn launches, standard error {error:.2g})"
    rule = certificate.dispatch
    dispatches = () if predicted is None else predicted.dispatches
    runs = dispatches[0].rule if dispatches else rule
    return (
        f"Certificate ({certificate.status}, {certificate.method.replace('_', ' ')}):"
        f" {plan.goal.objective.value.replace('_', ' ')} {reached}{unit}{sampled * (error > 0.0)},"
        f" lower bound {bound}{unit}{f', dispatch {rule}' * (rule != 'even')}"
        f"{f' (it runs under {runs})' * (runs != rule)}; solved in {format_s(certificate.solve_s)}."
    )


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
                word(times.workload),
                seconds(times.before_s, key=f"{path}.{at}.before_s"),
                seconds(times.rule_s, key=f"{path}.{at}.rule_s"),
                seconds(times.after_s, key=f"{path}.{at}.after_s"),
                word(
                    f"{times.tokens_judged} hold-out tokens"
                    if times.tokens_judged
                    else "planned from"
                ),
            )
            for at, times in enumerate(predicted.traffic_times)
        ),
    )


def _links(links: LinkFacts | None) -> Table | None:
    if links is None:
        return None
    write = seconds if links.unit == "seconds" else number
    sender, receiver = links.slowest_ranks
    costs = (
        ("inside a domain", "inside_cost", links.inside_source),
        ("between domains", "between_cost", links.between_source),
        ("at most", "slowest_cost", f"from rank {sender} to rank {receiver}"),
    )
    relative = ", relative: seconds need model, and a cluster whose links are known"
    return Table(
        caption=f"Cost of a token copy from rank to rank{relative * (links.unit == 'relative')}",
        header=("", "cost", "from"),
        rows=tuple(
            (word(name), write(cost, key=f"predicted.links.{field}"), word(source or ""))
            for name, field, source in costs
            if (cost := getattr(links, field)) is not None
        ),
    )


def _maps(maps: tuple[HeatMap, ...], *, workloads: int) -> Section | None:
    figures = (
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
    said = f"Maps of {rest} more workloads are in the plan's folder, in report/."
    more = Paragraph(text=said) if maps and rest > 0 else None
    return section("loads", "Loads by layer and rank", *figures, more, depth=Depth.PAGE)


def _alternatives(plan: PlacePlan) -> Table | None:
    if not plan.alternatives:
        return None
    return Table(
        depth=Depth.MORE,
        caption="Other placements",
        header=("placement", "objective", "meets the limits", "why it lost"),
        rows=tuple(
            (
                word(alternative.method),
                number(alternative.objective, key=f"alternatives.{at}.objective"),
                word("yes" if alternative.is_legal else "no"),
                word(alternative.lost_by),
            )
            for at, alternative in enumerate(plan.alternatives)
        ),
    )


def _dispatches(predicted: PlacePrediction) -> Table | None:
    if not predicted.dispatches:
        return None
    path = "predicted.dispatches"
    return Table(
        caption="Dispatch rules with this placement: largest rank load over the mean, and time of "
        "the expert layers",
        header=("rule", "all-to-all backend", "load", "time", "cost"),
        rows=tuple(
            (
                word(outcome.dispatch),
                word("yes" if outcome.has_backend else "none"),
                number(outcome.imbalance, key=f"{path}.{at}.imbalance"),
                maybe(seconds, outcome.layer_time_s, key=f"{path}.{at}.layer_time_s"),
                word(outcome.words),
            )
            for at, outcome in enumerate(predicted.dispatches)
        ),
    )


def _move(moved: MigrationCost | None) -> NamedValues | None:
    if moved is None:
        return None
    path = "predicted.migration"
    return named(
        ("experts to load", number(moved.moved_experts, key=f"{path}.moved_experts")),
        ("bytes", maybe(size, moved.moved_bytes, key=f"{path}.moved_bytes")),
        ("transfer", maybe(seconds, moved.transfer_s, key=f"{path}.transfer_s")),
        ("break-even after", maybe(seconds, moved.break_even_s, key=f"{path}.break_even_s")),
    )


def _provenance(plan: PlacePlan) -> Section:
    recordings = plan.provenance.recording_sha256.items()
    hashes = {f"recording {name}": sha for name, sha in recordings}
    return provenance_section(plan.provenance, hashes=hashes)
