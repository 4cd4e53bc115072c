"""A placement's plan in words: the verdict first, then what it rests on."""

from collections.abc import Iterator
from pathlib import Path

from tuner.place_plan import PlacePlan, WorkloadOutcome
from tuner.units import format_bytes, format_s
from tuner.verify.placement_records import PlaceVerified


def place_text(plan: PlacePlan, *, folder: Path) -> str:
    """What `moetune plan` prints of a placement."""
    return "\n".join((*_head(plan), *_workloads(plan), *_times(plan), *_tail(plan, folder=folder)))


def place_explanation(plan: PlacePlan) -> str:
    """What `moetune explain` prints of a placement."""
    lines = [*_head(plan), *_workloads(plan), *_times(plan), *_folds(plan), *_layers(plan)]
    lines += [f"instead: {one.method}, {one.lost_by}" for one in plan.alternatives]
    lines += [f"with {line}" for line in plan.relaxations]
    return "\n".join((*lines, *(f"note: {note}" for note in plan.provenance.notes)))


def place_verified_text(verified: PlaceVerified) -> str:
    """What `moetune verify` prints of a placement."""
    layers = len(verified.layers)
    lines = [f"products of the slowest rank on {verified.device}, mean of {layers} layers"]
    for trial in verified.trials:
        measured = trial.measured_layer_time_s
        lines.append(
            f"  {trial.decision:<20} {'failed' if measured is None else format_s(measured)}"
        )
    if verified.winner is not None and verified.regret_ratio is not None:
        lines.append(f"best: {verified.winner}; the plan is {verified.regret_ratio:.1%} behind it")
    return "\n".join((*lines, *(f"note: {note}" for note in verified.notes)))


def _head(plan: PlacePlan) -> Iterator[str]:
    certificate = plan.certificate
    if plan.decision is None or plan.verdict is None:
        yield f"no placement: {plan.binding_constraint}"
        return
    verdict, decision = plan.verdict, plan.decision
    yield f"{verdict.word}: {verdict.reason}"
    yield (
        f"{len(decision.layer_ids)} layers of {decision.num_experts} experts in"
        f" {decision.num_slots} slots on {decision.ranks} ranks"
        f" ({decision.redundant_experts} redundant)"
    )
    unit = "s" if plan.goal.objective.value == "layer_time" else ""
    yield (
        f"objective {plan.goal.objective.value}: {certificate.objective:.6g} {unit}".rstrip()
        + f", nothing below {certificate.bound:.6g} (gap {certificate.gap_ratio:.3%},"
        f" {certificate.status}, {certificate.method}, {certificate.solve_s:.1f} s)"
    )
    yield f"binding: {plan.binding_constraint}"


def _workloads(plan: PlacePlan) -> Iterator[str]:
    if plan.predicted is None:
        return
    yield ""
    yield "largest rank load over the mean, judged passes"
    yield (
        f"  {'workload':<20} {'passes':>9} {'before':>8} {'EPLB':>8} {'plan':>8}"
        "   P50 / P99 over passes and layers: before, EPLB, plan"
    )
    for one in plan.predicted.outcomes:
        yield _workload(one)
    for name, (before, rule, after) in plan.predicted.traffic.items():
        yield f"  {name}: {before:.4g} before, {rule:.4g} EPLB, {after:.4g} plan"


def _workload(one: WorkloadOutcome) -> str:
    passes = f"{one.passes_planned_from}+{one.passes_judged}"
    spreads = ", ".join(
        f"{spread.p50:.2f} / {spread.p99:.2f}"
        for spread in (one.pass_before, one.pass_rule, one.pass_after)
    )
    return (
        f"  {one.workload[:20]:<20} {passes:>9} {one.imbalance_before:>8.4f}"
        f" {one.imbalance_rule:>8.4f} {one.imbalance_after:>8.4f}   {spreads}"
    )


def _times(plan: PlacePlan) -> Iterator[str]:
    if plan.predicted is None or not plan.predicted.layer_times:
        return
    yield ""
    yield "expert layers of a pass, predicted"
    layers = len(plan.decision.layer_ids) if plan.decision is not None else 1
    for one in plan.predicted.layer_times:
        low, high = one.after_s_band
        yield (
            f"  {one.workload[:20]:<20} {format_s(one.before_s)} before, {format_s(one.rule_s)}"
            f" EPLB, {format_s(one.after_s)} plan ({format_s(low)} to {format_s(high)});"
            f" saves {format_s((one.before_s - one.after_s) / layers)} a layer"
        )
    if plan.verdict is not None and plan.verdict.step_gain_ratio is not None:
        yield f"  of a whole pass: {plan.verdict.step_gain_ratio:.1%} saved"
    moved = plan.predicted.migration
    if moved is not None:
        size = "" if moved.moved_bytes is None else f", {format_bytes(moved.moved_bytes)}"
        pays = (
            ""
            if moved.break_even_s is None
            else f", paid back after {format_s(moved.break_even_s)}"
        )
        yield f"  to load: {moved.moved_experts} experts{size}{pays}"


def _folds(plan: PlacePlan) -> Iterator[str]:
    if plan.predicted is None or not plan.predicted.left_out:
        return
    yield ""
    yield "planned without the workload, judged on it: before, EPLB, plan; worst layer"
    for one in plan.predicted.left_out:
        yield (
            f"  {one.workload[:20]:<20} {one.imbalance_before:>8.4f} {one.imbalance_rule:>8.4f}"
            f" {one.imbalance_after:>8.4f}   {one.worst_rank_ratio:.2f}" + _ways(one.traffic)
        )


def _ways(traffic: tuple[float, float, float] | None) -> str:
    if traffic is None:
        return ""
    before, rule, after = traffic
    return f"   traffic {before:.4g}, {rule:.4g}, {after:.4g}"


def _layers(plan: PlacePlan) -> Iterator[str]:
    if not plan.certificate.layers:
        return
    worst = sorted(plan.certificate.layers, key=lambda one: one.objective - one.bound, reverse=True)
    yield ""
    yield "layers with the largest distance to their bound"
    for one in worst[:5]:
        yield f"  layer {one.layer}: {one.objective:.6f}, bound {one.bound:.6f}"


def _tail(plan: PlacePlan, *, folder: Path) -> Iterator[str]:
    yield ""
    yield from (f"note: {note}" for note in plan.provenance.notes)
    yield f"written: {folder}; `moetune explain {folder}` tells more"
