"""A placement plan as text: the verdict first, then the evidence."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from solvers.placement.balance.check import LAUNCHES
from tuner.cli.text import asides, labelled, quote_path
from tuner.plans.place import (
    DispatchOutcome,
    LayerTimes,
    LeftOut,
    LinkFacts,
    MigrationCost,
    PlacePlan,
    PlacePrediction,
    Verdict,
    WorkloadOutcome,
)
from tuner.spec.place import Objective, TrafficObjective
from tuner.units import format_bytes, format_ratio, format_s
from tuner.verify.placement_records import PlaceVerified

MOST_NAME: Final = 40
"""Characters of a workload's name."""
MOST_LAYERS: Final = 5
"""Layers named of each kind."""
SLOW_RATIO: Final = 1.05
"""Of the usual cost of a link; from here on the most expensive one is named."""


def place_text(plan: PlacePlan, *, folder: Path, verbose: bool = False) -> str:
    """What `moetune plan` prints of a placement."""
    return "\n".join((*_body(plan), *_tail(plan, folder=folder, verbose=verbose)))


def place_explanation(plan: PlacePlan, *, verbose: bool = False) -> str:
    """What `moetune explain` prints of a placement."""
    lines = [*_body(plan), *_layers(plan), ""]
    for one in plan.alternatives:
        lines += labelled("alternative", f"{one.method}: {one.lost_by}")
    for relaxation in plan.relaxations:
        lines += labelled("relaxation", relaxation)
    return "\n".join((*lines, *_asides(plan, verbose=verbose)))


def place_verified_text(verified: PlaceVerified) -> str:
    """What `moetune verify` prints of a placement."""
    layers = len(verified.layers)
    lines = [f"expert GEMMs of the slowest rank on {verified.device}, mean of {layers} layers"]
    for trial in verified.trials:
        measured = trial.measured_layer_time_s
        lines.append(
            f"  {trial.decision:<20} {'failed' if measured is None else format_s(measured)}"
        )
    if verified.winner is not None and verified.regret_ratio is not None:
        lines.append(
            f"best: {verified.winner}; the plan is {format_ratio(verified.regret_ratio)} behind it"
        )
    return "\n".join((*lines, *(f"note: {note}" for note in verified.notes)))


def _body(plan: PlacePlan) -> Iterator[str]:
    certificate = plan.certificate
    if plan.decision is None or plan.verdict is None or plan.predicted is None:
        yield from labelled("no placement", plan.binding_constraint)
        return
    predicted, decision = plan.predicted, plan.decision
    yield from _judgement(plan, plan.verdict)
    ranks = "1 rank" if decision.ranks == 1 else f"{decision.ranks} ranks"
    yield from labelled(
        "placement",
        f"{len(decision.layer_ids)} layers of {decision.num_experts} experts in"
        f" {decision.num_slots} slots on {ranks} ({decision.redundant_experts} redundant)",
    )
    yield from labelled(
        "certificate",
        f"{plan.goal.objective.value.replace('_', ' ')} {_objective(plan, certificate.objective)},"
        f" lower bound {_objective(plan, certificate.bound)} (gap"
        f" {format_ratio(certificate.gap_ratio)}, {certificate.status}, {certificate.method}),"
        f" solved in {format_s(certificate.solve_s)}{_for(plan)}",
    )
    if certificate.objective_error:
        error = certificate.objective_error
        in_seconds = plan.goal.objective is Objective.LAYER_TIME
        shown = format_s(error) if in_seconds else f"{error:.2g}"
        yield from labelled("", f"a mean over {LAUNCHES} drawn launches, standard error {shown}")
    yield from labelled("bound by", plan.binding_constraint)
    width = max(8, *(min(MOST_NAME, len(one.workload)) for one in predicted.outcomes))
    yield from _workloads(predicted.outcomes, width)
    yield from _dispatches(predicted.dispatches)
    yield from _traffic(plan, predicted, width)
    yield from _folds(plan, predicted.left_out, width, predicted.links)
    yield from _times(plan, predicted.layer_times, width)
    if predicted.migration is not None:
        yield ""
        yield from labelled("migration", _move(predicted.migration))


def _traffic(plan: PlacePlan, predicted: PlacePrediction, width: int) -> Iterator[str]:
    """Token traffic and its links; nothing where traffic is not the objective."""
    links = predicted.links
    for name, values in predicted.traffic.items():
        before, rule, after = (_cost(value, links) for value in values)
        what = plan.goal.traffic or TrafficObjective.TOTAL
        yield (
            f"  {name}, {what.value}, {plan.goal.traffic_unit}: {before} before, {rule} EPLB,"
            f" {after} plan"
        )
    if links is None:
        return
    yield f"links, a token copy: {'; '.join(_links(links))}"
    if links.unit == "relative":
        yield "  relative costs: seconds need model, and a cluster whose links are known"
    if predicted.traffic_times:
        yield ""
        yield "traffic of a pass on these links, predicted"
    for one in predicted.traffic_times:
        basis = f"{one.tokens_judged} hold-out tokens" if one.tokens_judged else "the fit passes"
        yield (
            f"  {_name(one.workload, width)} {format_s(one.before_s)} before,"
            f" {format_s(one.rule_s)} EPLB, {format_s(one.after_s)} plan (evaluated on {basis})"
        )


def _links(links: LinkFacts) -> Iterator[str]:
    if links.inside_cost is not None:
        source = "" if links.inside_source == links.between_source else f" ({links.inside_source})"
        yield f"{_cost(links.inside_cost, links)} inside a domain{source}"
    if links.between_cost is not None:
        yield f"{_cost(links.between_cost, links)} between domains ({links.between_source})"
    usual = max(links.inside_cost or 0.0, links.between_cost or 0.0)
    if links.slowest_cost > SLOW_RATIO * usual:
        one, two = links.slowest_ranks
        yield f"{_cost(links.slowest_cost, links)} at most, from rank {one} to rank {two}"


def _cost(value: float, links: LinkFacts | None) -> str:
    return format_s(value) if links is not None and links.unit == "seconds" else f"{value:.4g}"


def _judgement(plan: PlacePlan, verdict: Verdict) -> Iterator[str]:
    yield from labelled("verdict", f"{verdict.word}: {verdict.reason}")
    if verdict.word == "fragile":
        whole = verdict.step_gain_ratio
        pass_text = "" if whole is None else f" ({format_ratio(whole)} of a whole pass)"
        yield from labelled(
            "",
            f"on the workloads it was made for: {format_ratio(verdict.gain_ratio)}"
            f" saved{pass_text}, noise {format_ratio(verdict.noise_ratio, digits=2)}",
        )
    rule = _rule_gain_ratio(plan)
    if rule is not None:
        limits = (plan.goal.max_moved_experts, plan.goal.max_moved_bytes)
        unlimited = "" if limits == (None, None) else ", without the migration limit,"
        gain = verdict.gain_ratio
        yield from labelled(
            "against EPLB",
            f"EPLB's rule{unlimited} would {'save' if rule >= 0.0 else 'add'}"
            f" {format_ratio(abs(rule))}, the plan {'saves' if gain >= 0.0 else 'adds'}"
            f" {format_ratio(abs(gain))}{_unseen(plan)}",
        )


def _unseen(plan: PlacePlan) -> str:
    """On how many workloads that were left out of the planning the plan is the more even one."""
    folds = () if plan.predicted is None else plan.predicted.left_out
    if not folds:
        return ""
    better = sum(one.imbalance_after < one.imbalance_rule for one in folds)
    return (
        f"; left out of the planning, {better} of {len(folds)} workloads are more even than by it"
    )


def _rule_gain_ratio(plan: PlacePlan) -> float | None:
    """Share of the verdict's quantity that EPLB's rule saves."""
    predicted = plan.predicted
    if predicted is None:
        return None
    weights = [workload.weight for workload in plan.goal.workloads]
    if predicted.layer_times:
        pairs = [(one.before_s, one.rule_s) for one in predicted.layer_times]
    elif predicted.traffic:
        ((before, rule, _),) = predicted.traffic.values()
        weights, pairs = [1.0], [(before, rule)]
    else:
        pairs = [(one.imbalance_before, one.imbalance_rule) for one in predicted.outcomes]
    total = sum(weight * before for weight, (before, _) in zip(weights, pairs, strict=True))
    left = sum(weight * rule for weight, (_, rule) in zip(weights, pairs, strict=True))
    return 1.0 - left / total if total > 0.0 else None


def _objective(plan: PlacePlan, value: float | None) -> str:
    if value is None:
        return "nothing proven"
    if plan.goal.objective is Objective.LAYER_TIME:
        return format_s(value)
    links = None if plan.predicted is None else plan.predicted.links
    if links is None:
        return f"{value:.6g}"
    cost = _cost(value, links) if links.unit == "seconds" else f"{value:.6g}"
    return f"{cost} {plan.goal.traffic_unit}"


def _workloads(outcomes: Sequence[WorkloadOutcome], width: int) -> Iterator[str]:
    yield ""
    yield "largest rank load over the mean, hold-out passes"
    yield (
        f"  {'workload':<{width}} {'passes':>9} {'before':>8} {'EPLB':>8} {'plan':>8}"
        "   P50 / P99 over passes and layers: before, EPLB, plan"
    )
    for one in outcomes:
        passes = f"{one.passes_planned_from}+{one.passes_judged}"
        spreads = ", ".join(
            f"{spread.p50:.2f} / {spread.p99:.2f}"
            for spread in (one.pass_before, one.pass_rule, one.pass_after)
        )
        yield (
            f"  {_name(one.workload, width)} {passes:>9} {one.imbalance_before:>8.4f}"
            f" {one.imbalance_rule:>8.4f} {one.imbalance_after:>8.4f}   {spreads}"
        )


def _for(plan: PlacePlan) -> str:
    """The dispatch rule that the certificate is about, unless it is the even split."""
    rule = plan.certificate.dispatch
    runs = (
        plan.predicted.dispatches[0].rule if plan.predicted and plan.predicted.dispatches else rule
    )
    other = "" if runs == rule else f" (it runs under {runs})"
    return other if rule == "even" else f", dispatch {rule}{other}"


def _dispatches(outcomes: Sequence[DispatchOutcome]) -> Iterator[str]:
    if not outcomes:
        return
    yield ""
    tokens = outcomes[0].tokens_per_rank
    what = "token copies" if outcomes[0].counts_copies else "tokens"
    yield (
        "dispatch rules of the engine on this placement, hold-out passes: largest rank load over"
        f" the mean, given each pass's counts / with replicas drawn for {tokens:.0f} {what} a rank"
    )
    for one in outcomes:
        backend = "with all-to-all" if one.has_backend else "without all-to-all"
        yield (
            f"  {one.dispatch:<8} {backend:<21} {one.imbalance:.4f} {one.imbalance_sampled:>8.4f}"
            f"   {one.words}"
        )
    static = next((one for one in outcomes if one.rule == "static"), None)
    if static is not None:
        above = " (the workloads above: under one)" if outcomes[0] is static else ""
        of = (
            f"mean over {static.tables} tables that a launch may draw{above}, as not all layers"
            " that it draws for were recorded"
            if static.tables > 1
            else "the engine's own table"
        )
        yield f"  static: {of}"
    if not outcomes[0].rule.endswith("lp"):
        yield "  the objective is that of the mean fit pass"


def _folds(
    plan: PlacePlan, folds: Sequence[LeftOut], width: int, links: LinkFacts | None
) -> Iterator[str]:
    if not folds:
        return
    yield ""
    yield "leave-one-out (planned without the workload): before, EPLB, plan; the plan's worst layer"
    for one in folds:
        traffic = ""
        if one.traffic is not None:
            costs = ", ".join(_cost(value, links) for value in one.traffic)
            traffic = f"   {plan.goal.traffic_unit} {costs}"
        yield (
            f"  {_name(one.workload, width)} {'':>9} {one.imbalance_before:>8.4f}"
            f" {one.imbalance_rule:>8.4f} {one.imbalance_after:>8.4f}   {one.worst_rank_ratio:.2f}"
            f"{traffic}"
        )


def _times(plan: PlacePlan, times: Sequence[LayerTimes], width: int) -> Iterator[str]:
    if not times or plan.decision is None:
        return
    layers = len(plan.decision.layer_ids)
    yield ""
    yield "expert layers of a pass, predicted"
    for one in times:
        low, high = one.after_s_band
        yield (
            f"  {_name(one.workload, width)} {format_s(one.before_s)} before,"
            f" {format_s(one.rule_s)} EPLB, {format_s(one.after_s)} plan ({format_s(low)} to"
            f" {format_s(high)}, {format_s(one.exchange_after_s)} of it all-to-all);"
            f" {_saved((one.before_s - one.after_s) / layers)} a layer"
        )
    if plan.verdict is not None and plan.verdict.step_gain_ratio is not None:
        yield f"  of a whole pass: {format_ratio(plan.verdict.step_gain_ratio)} saved"


def _saved(seconds: float) -> str:
    return f"saves {format_s(seconds)}" if seconds >= 0.0 else f"costs {format_s(-seconds)}"


def _move(moved: MigrationCost) -> str:
    size = "" if moved.moved_bytes is None else f", {format_bytes(moved.moved_bytes)}"
    takes = "" if moved.transfer_s is None else f", {format_s(moved.transfer_s)} to transfer"
    pays = "" if moved.break_even_s is None else f", paid back after {format_s(moved.break_even_s)}"
    return f"{moved.moved_experts} experts{size}{takes}{pays}"


def _layers(plan: PlacePlan) -> Iterator[str]:
    if plan.decision is not None and plan.predicted is not None:
        for one in plan.predicted.layer_times:
            saved = [b - a for b, a in zip(one.before_layers_s, one.after_layers_s, strict=True)]
            most = sorted(range(len(saved)), key=lambda index: -saved[index])[:MOST_LAYERS]
            yield ""
            yield f"layers with the largest gain on {one.workload}"
            for index in most:
                yield (
                    f"  layer {plan.decision.layer_ids[index]}:"
                    f" {format_s(one.before_layers_s[index])} before,"
                    f" {format_s(one.after_layers_s[index])} plan"
                )
    if not plan.certificate.layers:
        return
    worst = sorted(plan.certificate.layers, key=lambda layer: layer.bound - layer.objective)
    yield ""
    yield "layers with the largest gap to their bound"
    for layer in worst[:MOST_LAYERS]:
        yield (
            f"  layer {layer.layer}: {_objective(plan, layer.objective)}, bound"
            f" {_objective(plan, layer.bound)}"
        )


def _name(workload: str, width: int) -> str:
    short = workload if len(workload) <= MOST_NAME else f"{workload[: MOST_NAME - 3]}..."
    return f"{short:<{width}}"


def _asides(plan: PlacePlan, *, verbose: bool) -> Iterator[str]:
    # All lines: a goal that names such a rule asks what it would gain.
    yield from asides("not launchable", [one.words for one in plan.unlaunchable], verbose=True)
    yield from asides("notes", plan.provenance.notes, verbose=verbose)


def _tail(plan: PlacePlan, *, folder: Path, verbose: bool) -> Iterator[str]:
    yield ""
    for mark in plan.made_for:
        yield from labelled("made for", f"{mark.words}; plan again when one of these changes")
    yield from _asides(plan, verbose=verbose)
    if plan.decision is not None:
        launch = ", ".join(f"launch/{name}" for name in dict.fromkeys(plan.emit))
        written = f"written to {folder} ({launch or 'plan.json'})"
        yield f"{written}; next: moetune explain {quote_path(folder)}"
