"""The report on a deployment: instances, latency, goodput, evidence.

`moetune plan`, `explain` and `verify` print the parts of it that are marked for their screens.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

from tuner.config.serve import ServeDecision
from tuner.config.serve_words import short_serve
from tuner.plans.serve import ServePlan, ServePrediction
from tuner.report.content import (
    NO_EVIDENCE,
    Cell,
    Evidence,
    Paragraph,
    Report,
    Section,
    Table,
    named,
    number,
    seconds,
    section,
    share,
    some,
    word,
)
from tuner.report.latency_figures import goodput_figure, latency_figure, latency_table
from tuner.report.launch_section import launch_section
from tuner.report.provenance import provenance_section
from tuner.report.replay import Replay
from tuner.report.serve_choice import choice_section
from tuner.report.serve_decision import decision_facts
from tuner.report.serve_figures import decode_figure, instances_figure, use_figure
from tuner.report.trials import trials_section, verdict_words
from tuner.spec.accounting import active_parameters, num_parameters
from tuner.units import format_count, format_counted, format_s
from tuner.verify.deployments.records import ServeVerified

SAME_RATIO: Final = 1e-6
"""Smaller differences are ignored."""


def serve_report(plan: ServePlan, evidence: Evidence = NO_EVIDENCE) -> Report:
    """Build the report on a deployment's plan."""
    decision, predicted = plan.decision, plan.predicted
    goal = named(*_goal(plan))
    if decision is None or predicted is None:
        pools = (f"{pool.num_devices} {pool.device or pool.name}" for pool in plan.cluster.pools)
        does = "meets the SLO" if plan.goal.slo.is_stated else "serves the traffic"
        return Report(
            title=f"{plan.model.name} on {' + '.join(pools)}",
            kind="Deployment",
            verdict=f"No deployment on these pools {does}.",
            is_found=False,
            facts=named(("certificate", plan.certificate.status), are_large=True),
            proof=f"Infeasible because of: {plan.binding_constraint}.",
            sections=some(
                section("decision", "What was asked", goal),
                choice_section(plan),
                _relaxations(plan),
                provenance_section(plan.provenance),
            ),
        )
    return Report(
        title=f"{plan.model.name} on {_devices_used(plan, decision)}",
        kind="Deployment",
        verdict=_verdict(plan, decision, predicted, evidence.verified),
        is_found=True,
        facts=named(*_headline(plan, decision, predicted), are_large=True),
        proof=f"{_proof(plan)} Bound by {plan.binding_constraint}.",
        sections=some(
            section(
                "decision",
                "What to launch",
                named(*decision_facts(decision, predicted.prefix_hits), *_autoscaler(plan)),
                goal,
                instances_figure(plan, decision),
            ),
            _requests(plan, predicted, evidence.replay),
            trials_section(evidence.verified, plan),
            section(
                "work",
                "Where the time goes",
                use_figure(predicted),
                decode_figure(plan, predicted),
            ),
            choice_section(plan),
            evidence.what_if,
            _relaxations(plan),
            launch_section(evidence.files, names=plan.files),
            provenance_section(plan.provenance),
        ),
    )


def _autoscaler(plan: ServePlan) -> Iterator[tuple[str, Cell]]:
    if plan.autoscaling is not None:
        yield "autoscaler", word("; ".join(plan.autoscaling.words()))


def _devices_used(plan: ServePlan, decision: ServeDecision) -> str:
    """Say how many devices of each pool the instances take."""
    devices = {pool.name: pool.device or pool.name for pool in plan.cluster.pools}
    used: Counter[str] = Counter()
    for group in decision.instances:
        used[group.pool] += group.count * group.devices
    return " + ".join(f"{count} {devices.get(pool, pool)}" for pool, count in used.items())


def _verdict(
    plan: ServePlan,
    decision: ServeDecision,
    predicted: ServePrediction,
    verified: ServeVerified | None,
) -> str:
    launched = verdict_words(verified) if verified else "and nothing was launched."
    return (
        f"Launch {decision.mode.replace('_', ' ')} on"
        f" {format_counted(decision.num_devices, 'device')} with {plan.goal.engine.name}: "
        f"{predicted.requests_per_s:.4g} requests/s are expected at P90 TTFT "
        f"{format_s(predicted.ttft_s.p90)} and P90 TPOT "
        f"{format_s(predicted.tpot_s.p90)}. Predicted from simulated traffic"
        f"{'. ' if verified else ', '}{launched}"
    )


def _proof(plan: ServePlan) -> str:
    """State objective, bound, method and what was searched; the gap is in the headline."""
    certificate, objective = plan.certificate, plan.goal.objective
    named = {
        "goodput": "devices for the traffic",
        "rate": f"requests/s{' within the SLO' * plan.goal.slo.is_stated}",
    }
    covers = f", for {certificate.covers}" if certificate.covers else ""
    count = certificate.within_band
    least = "At least " if certificate.within_band_is_least else ""
    others = "other deployment is" if count == 1 else "other deployments are"
    ties = f" {least}{count:,} {others} within the error band."
    return (
        f"Certificate ({certificate.status}, {certificate.method}):"
        f" {named.get(objective, objective)} {certificate.objective:.6g},"
        f" {'upper' if objective == 'rate' else 'lower'} bound {certificate.bound:.6g}{covers};"
        f" {certificate.space.priced:,} instance options priced, {certificate.space.illegal:,}"
        f" illegal; solved in {format_s(certificate.solve_s)}.{ties if count else ''}"
    )


def _headline(
    plan: ServePlan, decision: ServeDecision, predicted: ServePrediction
) -> Iterator[tuple[str, Cell]]:
    yield "TTFT P90", seconds(predicted.ttft_s.p90, key="predicted.ttft_s.p90")
    if predicted.tpot_s.mean > 0.0:
        yield "TPOT P90", seconds(predicted.tpot_s.p90, key="predicted.tpot_s.p90")
    for name, field in (
        ("requests/s", "requests_per_s"),
        (f"{'goodput, ' * plan.goal.slo.is_stated}requests/s per device", "goodput_per_device"),
        ("output tokens/s", "output_tokens_per_s"),
    ):
        yield name, number(getattr(predicted, field), key=f"predicted.{field}")
    yield "devices", number(decision.num_devices)
    if predicted.cost_per_hour is not None:
        unit = plan.cluster.currency or ""
        key = "predicted.cost_per_hour"
        yield "cost per hour", number(predicted.cost_per_hour, key=key, unit=unit)
    if predicted.token_cost is not None:
        cost = predicted.token_cost
        unit = cost.currency or "(cluster.currency names the unit of the prices)"
        for name, value in (("input", cost.input_per_million), ("output", cost.output_per_million)):
            key = f"predicted.token_cost.{name}_per_million"
            yield f"cost per million {name} tokens", number(value, key=key, unit=unit)
        key = "predicted.token_cost.input_ratio"
        yield "device time of prompts", share(cost.input_ratio, key=key)
    yield "gap to optimal", share(plan.certificate.gap_ratio, key="certificate.gap_ratio")


def _goal(plan: ServePlan) -> Iterator[tuple[str, Cell]]:
    """Yield what is served, by what, under which load."""
    goal, traffic, model = plan.goal, plan.goal.traffic, plan.model
    yield (
        "model",
        word(
            f"{model.name}, {format_count(num_parameters(model))} parameters, "
            f"{format_count(active_parameters(model))} active per token; {goal.quantization}"
            f" weights, {goal.kv_cache_dtype} KV cache"
        ),
    )
    if traffic.rate is not None:
        yield "load", number(traffic.rate, key="goal.traffic.rate", unit="requests/s")
    elif traffic.concurrency is not None:
        key = "goal.traffic.concurrency"
        yield "load", number(traffic.concurrency, key=key, unit="concurrent requests")
    else:
        yield "load", word("a recorded trace")
    yield "engine", word(f"{goal.engine.name} {goal.engine.version}".strip())
    for pool, engine in goal.engines.items():
        yield f"engine on {pool}", word(f"{engine.name} {engine.version}".strip())
    sources = plan.provenance.profile_source
    by_pool = (f"{pool} {source}" for pool, source in sources.items())
    kinds = set(sources.values())
    yield "kernels", word(", ".join(kinds if len(kinds) == 1 else by_pool))


def _requests(plan: ServePlan, predicted: ServePrediction, replay: Replay | None) -> Section | None:
    slo = plan.goal.slo
    rows = {
        "TTFT": (predicted.ttft_s, predicted.ttft_s_band, slo.ttft),
        "TPOT": (predicted.tpot_s, predicted.tpot_s_band, slo.tpot),
    }
    return section(
        "requests",
        f"Latency{' and goodput' * slo.is_stated}",
        latency_table({name: row for name, row in rows.items() if row[0].mean > 0.0}),
        *(
            latency_figure(
                name.lower(),
                *row,
                key=f"predicted.{name.lower()}_s",
                simulated_s=getattr(replay, f"{name.lower()}_s") if replay else (),
            )
            for name, row in rows.items()
        ),
        goodput_figure(replay) if replay else None,
        _replay_difference(predicted, replay) if replay else None,
    )


def _replay_difference(predicted: ServePrediction, replay: Replay) -> Paragraph | None:
    """Say so if the repeated simulation differs from the plan's figures."""
    simulated = replay.as_planned
    pairs = (
        (simulated.ttft_s.p90, predicted.ttft_s.p90),
        (simulated.tpot_s.p90, predicted.tpot_s.p90),
    )
    if all(
        math.isclose(simulated_s, planned_s, rel_tol=SAME_RATIO) for simulated_s, planned_s in pairs
    ):
        return None
    (ttft_s, _), (tpot_s, _) = pairs
    return Paragraph(
        text="Simulated again, this version and these tables give other figures than the plan: P90 "
        f"TTFT {format_s(ttft_s)} and P90 TPOT {format_s(tpot_s)}."
    )


def _relaxations(plan: ServePlan) -> Section | None:
    if not plan.relaxations:
        return None
    table = Table(
        caption="Limits that make it infeasible",
        header=("limit", "effect of relaxing it", "decision"),
        rows=tuple(
            (
                word(relaxation.limit),
                word(relaxation.change),
                word(short_serve(relaxation.decision) if relaxation.decision else "-"),
            )
            for relaxation in plan.relaxations
        ),
    )
    return section("ways-out", "Relaxations", table)
