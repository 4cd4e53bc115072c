"""A deployment plan as text: what to launch, what to expect, and why."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tuner.cli.text import asides, breakdown_text, columns, labelled, quote_path
from tuner.config.serve import Instances, Role, ServeRouter
from tuner.config.serve_words import (
    describe_kv_transfer,
    gain_words,
    group_degrees,
    group_steps,
    island_words,
    router_words,
    short_serve,
    target_words,
)
from tuner.plans.serve import Band, Latency, PlannedHits, ServeModeResult, ServePlan, TokenCost
from tuner.spec.accounting import active_parameters, num_parameters
from tuner.spec.serving.goal import Percentiles
from tuner.spec.serving.routers import RouterPolicy
from tuner.units import (
    format_bytes,
    format_count,
    format_counted,
    format_money,
    format_number,
    format_ratio,
    format_s,
)

SHOWN_RATIO = 0.005
"""Least saving of an unlaunchable mode that a plan mentions."""
SHOWN_POINTS = 6
"""Of the front, at most."""
NO_LIMIT: Final = Percentiles()
SHOWN_REASONS = 4
"""Why options are illegal, the most frequent."""


def serve_text(plan: ServePlan, *, folder: Path, verbose: bool = False) -> str:
    """What `moetune plan` prints of a deployment."""
    not_launchable = list(_unlaunchable(plan, verbose=verbose))
    lines = [
        *_decision(plan),
        *_prediction(plan),
        *_proof(plan),
        *_modes(plan),
        *_near_miss(plan),
        *_relaxations(plan),
        *asides("not launchable", not_launchable, verbose=verbose or plan.decision is None),
        *asides("notes", plan.provenance.notes, verbose=verbose),
        "",
        f"written to {folder}; next: moetune explain {quote_path(folder)}",
    ]
    return "\n".join(lines)


def serve_explanation(plan: ServePlan, *, verbose: bool = False) -> str:
    """What `moetune explain` prints of a deployment."""
    lines = [
        *_decision(plan),
        *_step(plan),
        *_proof(plan),
        *_illegal(plan, most=None if verbose else SHOWN_REASONS),
        *_modes(plan),
        *_alternatives(plan),
        *_near_miss(plan),
        *_front(plan),
        *_relaxations(plan),
        *asides("not launchable", list(_unlaunchable(plan, verbose=verbose)), verbose=True),
        *asides("notes", plan.provenance.notes, verbose=verbose),
    ]
    return "\n".join(lines)


def _decision(plan: ServePlan) -> Iterator[str]:
    decision = plan.decision
    yield from _model(plan)
    if decision is None:
        does = "meets the SLO" if plan.goal.slo.is_stated else "serves the traffic"
        yield from labelled("no plan", f"no deployment {does}: {plan.binding_constraint}")
        return
    devices = format_counted(decision.num_devices, "device")
    yield from labelled("plan", f"{decision.mode}, {devices}")
    for group in decision.instances:
        yield from labelled(group.role.value, group_text(group))
    for transfer in decision.handovers:
        yield from labelled("KV transfer", describe_kv_transfer(transfer))
    if decision.router is not None:
        hits = None if plan.predicted is None else plan.predicted.prefix_hits
        yield from labelled("router", _router_text(decision.router, hits))
    for words in island_words(decision):
        yield from labelled("islands", words)
    if decision.offload_above_tokens is not None:
        longest = f"prompts above {decision.offload_above_tokens:,} tokens"
        yield from labelled("remote pool", f"{longest} are prefilled there")
    yield ""


def _router_text(router: ServeRouter, hits: PlannedHits | None) -> str:
    """Say how requests are spread, and of prefixes what is found so and otherwise."""
    if router.policy is not RouterPolicy.CACHE_AWARE or hits is None:
        return router_words(router).removeprefix("router: ")
    places = {
        format_counted(hits.instances, "instance"): hits.if_instances,
        format_counted(hits.ranks, "rank"): hits.if_ranks,
    }
    (other, otherwise), (chosen, _) = places.items()
    if router.ranks is None:
        (chosen, _), (other, otherwise) = places.items()
    rest = f"; {format_ratio(otherwise)} if to {other}" if otherwise is not None else ""
    rest = rest if hits.ranks > hits.instances else ""
    text = f"by prefix, to {chosen} ({format_ratio(hits.ratio)} of prompt tokens found{rest})"
    _, decode, words = router_words(router).partition("; decode")
    return text + decode + words


def _model(plan: ServePlan) -> Iterator[str]:
    """What is served, by what, under which load."""
    model, goal, traffic = plan.model, plan.goal, plan.goal.traffic
    load = "a recorded trace"
    if traffic.rate is not None:
        load = f"{format_number(traffic.rate)} requests/s"
    if traffic.concurrency is not None:
        load = f"{traffic.concurrency:,} concurrent requests"
    yield from labelled(
        "model",
        f"{model.name}, {format_count(num_parameters(model))} parameters, "
        f"{format_count(active_parameters(model))} active per token; {goal.quantization} weights,"
        f" {goal.kv_cache_dtype} KV cache; {goal.engine.name}; {load}",
    )
    sources = plan.provenance.profile_source
    kinds = set(sources.values())
    said = ", ".join(kinds if len(kinds) == 1 else (f"{n} {one}" for n, one in sources.items()))
    yield from labelled("kernels", said)


def _proof(plan: ServePlan) -> Iterator[str]:
    """What was optimised, how near the bound is, and which SLO or limit binds."""
    if plan.decision is None:
        return
    certificate, goal = plan.certificate, plan.goal.objective
    side = "upper" if goal == "rate" else "lower"
    named = {
        "goodput": "devices for the traffic",
        "rate": f"requests/s{' within the SLO' * plan.goal.slo.is_stated}",
    }
    covers = f", for {certificate.covers}" if certificate.covers else ""
    yield from labelled(
        "certificate",
        f"{named.get(goal, goal)} {certificate.objective:.6g}, {side} bound"
        f" {certificate.bound:.6g}{covers} (gap {format_ratio(certificate.gap_ratio)},"
        f" {certificate.status}, {certificate.method}; {certificate.space.priced:,} options"
        f" priced, {certificate.space.illegal:,} illegal), solved in"
        f" {format_s(certificate.solve_s)}",
    )
    if certificate.within_band:
        least = "at least " if certificate.within_band_is_least else ""
        others = "other deployment is" if certificate.within_band == 1 else "other deployments are"
        tied = f"{least}{certificate.within_band:,} {others} within the error band"
        yield from labelled("ties", tied)
    yield from labelled("bound by", plan.binding_constraint)


def group_text(group: Instances) -> str:
    """A group of identical instances: degrees, and the batch of a step."""
    return (
        f"{group.count:,} x {format_counted(group.devices, 'device')} on {group.pool}:"
        f" {group_degrees(group)}; {', '.join(group_steps(group))}"
    )


def _prediction(plan: ServePlan) -> Iterator[str]:
    predicted, currency = plan.predicted, plan.cluster.currency
    if plan.decision is None or predicted is None:
        return
    slo = plan.goal.slo
    yield f"TTFT           {latency_text(predicted.ttft_s, predicted.ttft_s_band, slo=slo.ttft)}"
    if predicted.tpot_s.mean > 0.0:
        each = latency_text(predicted.tpot_s, predicted.tpot_s_band, slo=slo.tpot)
        yield f"TPOT           {each}"
    yield (
        f"throughput     {format_number(predicted.requests_per_s)} requests/s,"
        f" {format_number(predicted.output_tokens_per_s)} output tokens/s,"
        f" {'goodput ' * slo.is_stated}{format_number(predicted.goodput_per_device)} requests/s per"
        " device"
    )
    if predicted.cost_per_hour is not None:
        price = f"{format_money(predicted.cost_per_hour, currency)} per hour"
        tokens = predicted.token_cost
        yield from labelled("cost", f"{price}{f', {token_cost_text(tokens)}' if tokens else ''}")
    for name, ratio in predicted.utilisation_ratio.items():
        memory = format_bytes(predicted.memory_bytes[name])
        yield from labelled(
            "utilisation", f"{name}: {format_ratio(ratio)} busy, {memory} per device"
        )


def token_cost_text(cost: TokenCost) -> str:
    """Cost per million tokens, in a line."""
    unnamed = "" if cost.currency else "; cluster.currency names the unit of the prices"
    return (
        f"{format_money(cost.input_per_million, cost.currency)} per million input tokens,"
        f" {format_money(cost.output_per_million, cost.currency)} per million output tokens"
        f" (prompts take {format_ratio(cost.input_ratio)} of the device time{unnamed})"
    )


def _modes(plan: ServePlan) -> Iterator[str]:
    """Every requested mode in one table, the chosen one first."""
    if not plan.modes:
        return
    has_price = any(mode.cost_per_hour is not None for mode in plan.modes)
    has_rate = plan.goal.objective == "rate"
    further = (*(["requests/s"] * has_rate), *(["cost/h"] * has_price))
    head = ("mode", "", "devices", *further, "TTFT mean", "TPOT mean", "")
    order = sorted(plan.modes, key=lambda mode: mode.status != "chosen")
    rows = [_mode(mode, has_price=has_price, has_rate=has_rate) for mode in order]
    yield ""
    yield columns(rows, header=head)
    yield ""


def _mode(mode: ServeModeResult, *, has_price: bool, has_rate: bool) -> tuple[str, ...]:
    rate = "-" if mode.requests_per_s is None else format_number(mode.requests_per_s)
    price = "-" if mode.cost_per_hour is None else format_money(mode.cost_per_hour, None)
    return (
        mode.mode,
        mode.status.replace("unlaunchable", "not launchable"),
        "-" if mode.devices is None else str(mode.devices),
        *([rate] * has_rate),
        *([price] * has_price),
        "-" if mode.ttft_s is None else format_s(mode.ttft_s),
        "-" if mode.tpot_s is None else format_s(mode.tpot_s),
        # What a release refuses takes lines of its own.
        "" if mode.status == "unlaunchable" else mode.told,
    )


def latency_text(value: Latency, band: Band, *, slo: Percentiles = NO_LIMIT) -> str:
    """A latency in a line: its mean with the band, its percentiles, each with its SLO."""
    low, high = (format_s(one) for one in band)
    parts = [f"mean {format_s(value.mean)} (80 % band: {low} to {high}){_limit(slo.mean)}"]
    parts += [
        f"{kind.upper()} {format_s(getattr(value, kind))}{_limit(getattr(slo, kind))}"
        for kind in ("p50", "p90", "p99")
    ]
    return ", ".join(parts)


def _limit(limit_s: float | None) -> str:
    return "" if limit_s is None else f" (SLO {format_s(limit_s)})"


def _step(plan: ServePlan) -> Iterator[str]:
    if plan.decision is None or plan.predicted is None:
        return
    yield "where the time of a decode step goes, in the slowest group"
    yield breakdown_text(plan.predicted.breakdown_s)
    if any(group.role is Role.AGGREGATED for group in plan.decision.instances):
        yield "  a step that also computes a chunk of a prompt takes longer; TPOT is over both"
    yield ""


def _illegal(plan: ServePlan, *, most: int | None) -> Iterator[str]:
    space = plan.certificate.space
    reasons = sorted(_merged(space.illegal_by), key=lambda reason: -reason[1])
    if not reasons:
        return
    yield ""
    yield (
        f"{space.illegal:,} instance options are illegal, {space.bounded:,} more are dominated by"
        " another"
    )
    yield from (f"  {count:>6,} {reason}" for reason, count in reasons[:most])
    rest = [] if most is None else reasons[most:]
    if rest:
        options = sum(count for _, count in rest)
        left = format_counted(len(rest), "further reason")
        yield f"  {options:>6,} for {left}, shown by --verbose"


def _merged(counts: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Join reasons that differ only in their numbers."""
    by_pattern: dict[str, list[str]] = {}
    for reason in counts:
        by_pattern.setdefault(re.sub(r"\d+", "0", reason), []).append(reason)
    for first, *others in by_pattern.values():
        more = f" ({format_counted(len(others), 'more such reason')})" if others else ""
        yield f"{first}{more}", sum(counts[reason] for reason in (first, *others))


def _alternatives(plan: ServePlan) -> Iterator[str]:
    for other in plan.alternatives:
        yield from labelled(
            "alternative",
            f"{short_serve(other.decision)}, TTFT P90 {format_s(other.predicted.ttft_s.p90)},"
            f" TPOT P90 {format_s(other.predicted.tpot_s.p90)}; {other.lost_by}",
        )


def _near_miss(plan: ServePlan) -> Iterator[str]:
    """The cheapest deployment whose miss the model cannot tell from a hit."""
    near = plan.near_miss
    if near is None:
        return
    missed = " and ".join(
        f"{target_words(one.target)} by {format_ratio(one.seconds / one.limit_s - 1.0, digits=1)}"
        f" ({format_s(one.seconds)}, SLO {format_s(one.limit_s)})"
        for one in near.missed
    )
    compared = f"; {near.comparison}" * bool(near.comparison)
    yield from labelled(
        "near miss",
        f"{short_serve(near.decision)} misses {missed}, less than the error band{compared}",
    )


def _front(plan: ServePlan) -> Iterator[str]:
    """The Pareto front over all modes, thinned; `plan --csv` writes that of every mode."""
    joint = sorted(
        (point for point in plan.pareto if point.on_joint_front),
        key=lambda point: point.tokens_per_s_per_user,
    )
    if not joint:
        return
    yield "Pareto front of tokens/s per device and per user, every instance full, no queueing"
    step = max(1, -(-len(joint) // SHOWN_POINTS))
    yield columns(
        [
            (
                f"  {format_number(point.tokens_per_s_per_user)}",
                format_number(point.tokens_per_s_per_device),
                "yes" if point.within_targets else "no",
                point.mode,
                str(point.running),
                " + ".join(_degrees(one) for one in (point.prefill, point.instance) if one),
            )
            for point in joint[::step]
        ],
        header=("  user", "device", "SLO met", "mode", "sequences", "instance"),
    )
    yield ""


def _degrees(instance: str) -> str:
    """Return the degrees of an instance without its batch."""
    before, knobs, _ = instance.partition(";")
    return f"{before})" if knobs else before


def _relaxations(plan: ServePlan) -> Iterator[str]:
    for relaxation in plan.relaxations:
        if relaxation.decision is not None:
            said = f"{relaxation.change}: {short_serve(relaxation.decision)}"
            yield from labelled("relaxation", said)


def _unlaunchable(plan: ServePlan, *, verbose: bool) -> Iterator[str]:
    """Features that no release launches, if they would save enough; all with `verbose`.

    An infeasible plan has all of them, too.
    """
    least_gain_ratio = 0.0 if verbose else SHOWN_RATIO
    for one in plan.unlaunchable:
        if plan.decision is not None and one.gain_ratio < least_gain_ratio and not one.rule:
            continue
        saved = f" (would {gain_words(one.gain_ratio, objective=plan.goal.objective)})" * (
            one.gain_ratio >= SHOWN_RATIO
        )
        yield f"{one.feature}{saved}"
