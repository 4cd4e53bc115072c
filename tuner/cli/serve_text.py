"""A deployment's plan in words: what to launch first, then what it will do and why."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tuner.cli.text import asides, columns
from tuner.serve_plan import (
    Band,
    Instances,
    Latency,
    ServeModeAnswer,
    ServePlan,
    ServePrediction,
    TokenCost,
)
from tuner.serve_words import (
    gain_words,
    group_degrees,
    group_steps,
    handover_words,
    island_words,
    router_words,
    short_serve,
)
from tuner.units import format_bytes, format_money, format_s

SHOWN_RATIO = 0.005
"""What a mode that cannot be launched must save to be worth a line of a plan."""
SHOWN_POINTS = 12
"""Of the front, at most."""


def serve_text(plan: ServePlan, *, folder: Path, verbose: bool = False) -> str:
    """What `moetune plan` prints of a deployment."""
    lines = [*_head(plan)]
    if plan.decision is not None and plan.predicted is not None:
        lines += [*_prediction(plan.predicted, plan.cluster.currency)]
    lines += [*_modes(plan), *_ways_out(plan), *_unlaunchable(plan, least_gain_ratio=SHOWN_RATIO)]
    lines += asides("notes: ", plan.provenance.notes, verbose=verbose)
    return "\n".join((*lines, f"written: {folder}; `moetune explain {folder}` tells more"))


def serve_explanation(plan: ServePlan, *, verbose: bool = False) -> str:
    """What `moetune explain` prints of a deployment."""
    lines = [*_head(plan)]
    if plan.decision is not None and plan.predicted is not None:
        lines += [*_prediction(plan.predicted, plan.cluster.currency), *_step(plan.predicted)]
    lines += [*_illegal(plan)]
    lines += [*_modes(plan), *_others(plan), *_front(plan), *_ways_out(plan), *_unlaunchable(plan)]
    return "\n".join((*lines, *asides("notes: ", plan.provenance.notes, verbose=verbose)))


def _head(plan: ServePlan) -> Iterator[str]:
    certificate = plan.certificate
    if plan.decision is None:
        yield f"nothing meets the targets: {plan.binding_constraint}"
        return
    yield f"{plan.decision.mode}, {_counted(plan.decision.num_devices, 'device')}"
    yield from (f"  {group_text(group)}" for group in plan.decision.instances)
    yield from (f"  {handover_words(way)}" for way in plan.decision.handovers)
    if plan.decision.router is not None:
        yield f"  {router_words(plan.decision.router)}"
    yield from (f"  {words}" for words in island_words(plan.decision))
    if plan.decision.offload_above_tokens is not None:
        yield f"  prompts above {plan.decision.offload_above_tokens} tokens go to the remote pool"
    goal = plan.goal.objective
    beyond = "above" if goal == "rate" else "below"
    named = {
        "goodput": "goodput, most on the fewest devices",
        "rate": "rate, most requests/s within the targets",
    }
    yield (
        f"objective {named.get(goal, goal)}: {certificate.objective:.6g}, nothing"
        f" {beyond} {certificate.bound:.6g} (gap {certificate.gap_ratio:.2%},"
        f" {certificate.status}, {certificate.method}, {certificate.solve_s:.1f} s;"
        f" {certificate.space.priced} ways priced, {certificate.space.illegal} illegal)"
    )
    if certificate.covers:
        yield f"  the bound holds for {certificate.covers}"
    if certificate.within_band:
        least = "at least " if certificate.within_band_is_least else ""
        others = "other costs" if certificate.within_band == 1 else "others cost"
        yield f"ties: {least}{certificate.within_band} {others} about as much"
    yield f"binding: {plan.binding_constraint}"


def group_text(group: Instances) -> str:
    """Equal instances in a line: how they are split, and what a step holds."""
    return (
        f"{group.count} x {group.role} of {group.devices} on {group.pool}: {group_degrees(group)};"
        f" {', '.join(group_steps(group))}"
    )


def _prediction(predicted: ServePrediction, currency: str | None) -> Iterator[str]:
    yield f"  ttft  {_latency(predicted.ttft_s, predicted.ttft_s_band)}"
    yield f"  tpot  {_latency(predicted.tpot_s, predicted.tpot_s_band)}"
    price = ""
    if predicted.cost_per_hour is not None:
        price = f", {format_money(predicted.cost_per_hour, currency)} an hour"
    yield (
        f"  {predicted.requests_per_s:.4g} requests/s, {predicted.output_tokens_per_s:.0f} output"
        f" tokens/s, {predicted.goodput_per_device:.4g} good requests/s a device{price}"
    )
    if predicted.token_cost is not None:
        yield f"  {token_cost_text(predicted.token_cost)}"
    for name, ratio in predicted.utilisation_ratio.items():
        yield f"  {name}: {ratio:.0%} busy, {format_bytes(predicted.memory_bytes[name])} a device"


def token_cost_text(cost: TokenCost) -> str:
    """What a million tokens cost, in a line."""
    unnamed = "" if cost.currency else "; cluster.currency names the unit of the prices"
    return (
        f"{format_money(cost.input_per_million, cost.currency)} a million input tokens,"
        f" {format_money(cost.output_per_million, cost.currency)} a million output tokens"
        f" (prompts take {cost.input_ratio:.0%} of the device time{unnamed})"
    )


def _modes(plan: ServePlan) -> Iterator[str]:
    """Every mode that was asked for, in one table, the chosen one first."""
    if not plan.modes:
        return
    has_price = any(answer.cost_per_hour is not None for answer in plan.modes)
    has_rate = plan.goal.objective == "rate"
    further = (*(["requests/s"] * has_rate), *(["an hour"] * has_price))
    head = ("mode", "", "devices", *further, "ttft", "tpot", "")
    order = sorted(plan.modes, key=lambda answer: answer.status != "chosen")
    rows = [_mode(answer, has_price=has_price, has_rate=has_rate) for answer in order]
    yield columns(rows, header=head)


def _mode(answer: ServeModeAnswer, *, has_price: bool, has_rate: bool) -> tuple[str, ...]:
    rate = "-" if answer.requests_per_s is None else f"{answer.requests_per_s:.4g}"
    price = "-" if answer.cost_per_hour is None else f"{answer.cost_per_hour:.4g}"
    return (
        answer.mode,
        answer.status,
        "-" if answer.devices is None else str(answer.devices),
        *([rate] * has_rate),
        *([price] * has_price),
        "-" if answer.ttft_s is None else format_s(answer.ttft_s),
        "-" if answer.tpot_s is None else format_s(answer.tpot_s),
        # What a release refuses takes lines of its own.
        "" if answer.status == "unlaunchable" else answer.told,
    )


def _latency(value: Latency, band: Band) -> str:
    parts = (f"{kind} {format_s(getattr(value, kind))}" for kind in ("p50", "p90", "p99"))
    low, high = (format_s(one) for one in band)
    return f"mean {format_s(value.mean)} ({low} to {high}), {', '.join(parts)}"


def _step(predicted: ServePrediction) -> Iterator[str]:
    yield "a decode step of the slowest group"
    total = sum(predicted.breakdown_s.values())
    for name, seconds in sorted(predicted.breakdown_s.items(), key=lambda part: -part[1]):
        yield f"  {name:<12} {format_s(seconds):>10}  {seconds / total:.0%}"


def _illegal(plan: ServePlan) -> Iterator[str]:
    space = plan.certificate.space
    if space.illegal_by:
        yield (
            f"{space.illegal} ways to run an instance cannot serve, {space.bounded} more are worse"
            " than another in everything"
        )
        yield from (f"  {count:>5} {reason}" for reason, count in _merged(space.illegal_by))


def _merged(counts: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Join reasons that differ in their numbers alone."""
    alike: dict[str, list[str]] = {}
    for reason in counts:
        alike.setdefault(re.sub(r"\d+", "0", reason), []).append(reason)
    for first, *others in alike.values():
        more = f" ({_counted(len(others), 'more such reason')})" if others else ""
        yield f"{first}{more}", sum(counts[reason] for reason in (first, *others))


def _others(plan: ServePlan) -> Iterator[str]:
    for other in plan.alternatives:
        yield (
            f"instead: {short_serve(other.decision)},"
            f" ttft p90 {format_s(other.predicted.ttft_s.p90)},"
            f" tpot p90 {format_s(other.predicted.tpot_s.p90)}; {other.lost_by}"
        )


def _front(plan: ServePlan) -> Iterator[str]:
    """The front over all modes, thinned; `plan --csv` writes every mode's whole."""
    joint = sorted(
        (point for point in plan.pareto if point.on_joint_front),
        key=lambda point: point.tokens_per_s_per_user,
    )
    if not joint:
        return
    yield "tokens/s of a device against tokens/s of a user, every instance full and none waiting"
    step = max(1, -(-len(joint) // SHOWN_POINTS))
    yield columns(
        [
            (
                f"  {point.tokens_per_s_per_user:.4g}",
                f"{point.tokens_per_s_per_device:.4g}",
                "yes" if point.within_targets else "no",
                point.mode,
                str(point.running),
                " + ".join(_degrees(one) for one in (point.prefill, point.instance) if one),
            )
            for point in joint[::step]
        ],
        header=("  user", "device", "targets", "mode", "sequences", "instance"),
    )


def _degrees(instance: str) -> str:
    """Return an instance in words without what its steps hold."""
    before, knobs, _ = instance.partition(";")
    return f"{before})" if knobs else before


def _ways_out(plan: ServePlan) -> Iterator[str]:
    for way in plan.relaxations:
        if way.decision is not None:
            yield f"with {way.change}: {short_serve(way.decision)}"


def _unlaunchable(plan: ServePlan, *, least_gain_ratio: float = 0.0) -> Iterator[str]:
    """What no release launches, where it would save so much; of an infeasible plan all of it."""
    for one in plan.unlaunchable:
        if plan.decision is not None and one.gain_ratio < least_gain_ratio and not one.rule:
            continue
        saved = f" (would {gain_words(one.gain_ratio, objective=plan.goal.objective)})" * (
            one.gain_ratio >= SHOWN_RATIO
        )
        yield f"cannot be launched: {one.feature}{saved}"


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"
