"""The report on a deployment: instances, latency, goodput, evidence."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tuner.config.serve import ServeDecision
from tuner.config.serve_words import short_serve
from tuner.plans.serve import ServeCertificate, ServePlan, ServePrediction
from tuner.report.content import (
    Cell,
    File,
    NamedValues,
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
from tuner.report.latency_figures import goodput_figure, latency_figure
from tuner.report.launch_section import launch_section
from tuner.report.provenance import provenance_section
from tuner.report.replay import Replay
from tuner.report.serve_choice import choice_section
from tuner.report.serve_figures import (
    decode_figure,
    instances_figure,
    use_figure,
)
from tuner.report.serve_trials import serve_trials_section, verdict_words
from tuner.units import format_ratio, format_s
from tuner.verify.deployments.records import ServeVerified

SAME_RATIO: Final = 1e-6
"""Smaller differences are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServeEvidence:
    """What accompanies a deployment's plan."""

    files: tuple[File, ...]
    replay: Replay | None
    """The repeated simulation, if any."""
    what_if: Section | None
    verified: ServeVerified | None = None
    """The verification, if any."""


def serve_report(plan: ServePlan, evidence: ServeEvidence) -> Report:
    """Build the report on a deployment's plan."""
    decision, predicted = plan.decision, plan.predicted
    pools = " + ".join(
        f"{pool.num_devices} {pool.device or pool.name}" for pool in plan.cluster.pools
    )
    if decision is None or predicted is None:
        return Report(
            title=f"{plan.model.name} on {pools}",
            kind="Deployment",
            verdict="Nothing meets the SLO on these pools.",
            is_found=False,
            facts=NamedValues(
                facts=(("certificate", word(plan.certificate.status)),), are_large=True
            ),
            proof=f"Infeasible because of: {plan.binding_constraint}.",
            sections=(*_relaxations(plan), _provenance(plan)),
        )
    return Report(
        title=f"{plan.model.name} on {_devices_used(plan, decision)}",
        kind="Deployment",
        verdict=_verdict(plan, decision, predicted, evidence.verified),
        is_found=True,
        facts=NamedValues(facts=tuple(_headline(plan, decision, predicted)), are_large=True),
        proof=f"{_proof(plan.certificate)} Bound by {plan.binding_constraint}.",
        sections=(
            Section(
                name="decision",
                heading="What to launch",
                blocks=some(
                    NamedValues(facts=tuple(_traffic(plan))),
                    instances_figure(plan, decision),
                    _kv_transfers(decision),
                ),
            ),
            _requests(plan, predicted, evidence.replay),
            *([serve_trials_section(evidence.verified)] if evidence.verified else []),
            Section(
                name="work",
                heading="Where the time goes",
                blocks=(use_figure(predicted), decode_figure(plan, predicted)),
            ),
            choice_section(plan),
            *([evidence.what_if] if evidence.what_if else []),
            *_relaxations(plan),
            launch_section(evidence.files, names=plan.files),
            _provenance(plan),
        ),
    )


def _devices_used(plan: ServePlan, decision: ServeDecision) -> str:
    """Say how many devices of each pool the instances take."""
    devices = {pool.name: pool.device or pool.name for pool in plan.cluster.pools}
    used: dict[str, int] = {}
    for group in decision.instances:
        used[group.pool] = used.get(group.pool, 0) + group.count * group.devices
    return " + ".join(f"{count} {devices.get(pool, pool)}" for pool, count in used.items())


def _verdict(
    plan: ServePlan,
    decision: ServeDecision,
    predicted: ServePrediction,
    verified: ServeVerified | None,
) -> str:
    launched = verdict_words(verified) if verified else "and nothing was launched."
    return (
        f"Launch {short_serve(decision)} with {plan.goal.engine.name}: "
        f"{predicted.requests_per_s:.4g} requests/s are expected at P90 TTFT "
        f"{format_s(predicted.ttft_s.p90)} and P90 TPOT "
        f"{format_s(predicted.tpot_s.p90)}. Predicted from simulated traffic"
        f"{'. ' if verified else ', '}{launched}"
    )


def _proof(certificate: ServeCertificate) -> str:
    space = certificate.space
    ties = ""
    if certificate.within_band:
        least = "at least " if certificate.within_band_is_least else ""
        count = certificate.within_band
        others = "other costs" if count == 1 else "others cost"
        ties = f" {least.capitalize()}{count} {others} about as much."
    counted = f"{space.priced:,} instance configurations were priced, {space.illegal:,} are illegal"
    if certificate.status == "optimal":
        return f"Instance counts proven optimal under the model: {counted}.{ties}"
    gap = format_ratio(certificate.gap_ratio)
    return f"The gap to the bound is {gap} of the objective under the model: {counted}.{ties}"


def _headline(
    plan: ServePlan, decision: ServeDecision, predicted: ServePrediction
) -> Iterator[tuple[str, Cell]]:
    yield "TTFT P90", seconds(predicted.ttft_s.p90, key="predicted.ttft_s.p90")
    yield "TPOT P90", seconds(predicted.tpot_s.p90, key="predicted.tpot_s.p90")
    yield (
        "goodput, requests/s per device",
        number(predicted.goodput_per_device, key="predicted.goodput_per_device"),
    )
    yield (
        "output tokens/s",
        number(predicted.output_tokens_per_s, key="predicted.output_tokens_per_s"),
    )
    yield "devices", number(decision.num_devices)
    if predicted.cost_per_hour is not None:
        unit = plan.cluster.currency or ""
        key = "predicted.cost_per_hour"
        yield "cost per hour", number(predicted.cost_per_hour, key=key, unit=unit)
    if predicted.token_cost is not None:
        cost = predicted.token_cost
        for name, value in (("input", cost.input_per_million), ("output", cost.output_per_million)):
            key = f"predicted.token_cost.{name}_per_million"
            yield f"per million {name} tokens", number(value, key=key, unit=cost.currency)
    yield "gap to optimal", share(plan.certificate.gap_ratio, key="certificate.gap_ratio")


def _traffic(plan: ServePlan) -> Iterator[tuple[str, Cell]]:
    goal = plan.goal
    traffic = goal.traffic
    if traffic.rate is not None:
        yield "offered load", number(traffic.rate, key="goal.traffic.rate", unit="requests/s")
    if traffic.concurrency is not None:
        key = "goal.traffic.concurrency"
        yield "offered load", number(traffic.concurrency, key=key, unit="concurrent requests")
    if plan.decision is not None:
        yield "mode", word(plan.decision.mode)
        router = plan.decision.router
        if router is not None:
            yield "router", word(router.policy.value)
            if router.decode_policy is not None:
                yield "router of decode", word(router.decode_policy.value)
    yield "engine", word(f"{goal.engine.name} {goal.engine.version}".strip())
    for pool, engine in goal.engines.items():
        yield f"engine on {pool}", word(f"{engine.name} {engine.version}".strip())
    yield "objective", word(goal.objective)
    yield "weights", word(goal.quantization)
    yield "KV cache", word(goal.kv_cache_dtype)


def _kv_transfers(decision: ServeDecision) -> Table | None:
    if not decision.handovers:
        return None
    return Table(
        caption="KV transfers",
        header=("from", "to", "connector", "path", "bytes per request", "exposed time"),
        rows=tuple(
            (
                word(transfer.from_pool),
                word(transfer.to_pool),
                word(transfer.connector),
                word("one machine" if transfer.link == "scale_up" else transfer.path),
                size(transfer.request_bytes, key=f"decision.handovers.{index}.request_bytes"),
                seconds(transfer.seconds, key=f"decision.handovers.{index}.seconds"),
            )
            for index, transfer in enumerate(decision.handovers)
        ),
    )


def _requests(plan: ServePlan, predicted: ServePrediction, replay: Replay | None) -> Section:
    slo = plan.goal.slo
    return Section(
        name="requests",
        heading="Latency and goodput",
        blocks=some(
            latency_figure(
                "ttft",
                predicted.ttft_s,
                predicted.ttft_s_band,
                slo.ttft,
                key="predicted.ttft_s",
                simulated_s=replay.ttft_s if replay else (),
            ),
            latency_figure(
                "tpot",
                predicted.tpot_s,
                predicted.tpot_s_band,
                slo.tpot,
                key="predicted.tpot_s",
                simulated_s=replay.tpot_s if replay else (),
            ),
            goodput_figure(replay) if replay else None,
            _replay_difference(predicted, replay) if replay else None,
        ),
    )


def _replay_difference(predicted: ServePrediction, replay: Replay) -> Paragraph | None:
    """Say so if the repeated simulation differs from the plan's figures."""
    simulated = replay.as_planned
    pairs = (
        (simulated.ttft_s.p90, predicted.ttft_s.p90),
        (simulated.tpot_s.p90, predicted.tpot_s.p90),
    )
    if all(math.isclose(one, other, rel_tol=SAME_RATIO) for one, other in pairs):
        return None
    (first_s, _), (each_s, _) = pairs
    return Paragraph(
        text="Simulated again, this version and these tables give other figures than the plan: P90 "
        f"TTFT {format_s(first_s)} and P90 TPOT {format_s(each_s)}."
    )


def _relaxations(plan: ServePlan) -> Iterator[Section]:
    if plan.relaxations:
        table = Table(
            caption="Limits that make it infeasible",
            header=("limit", "effect of relaxing it", "decision"),
            rows=tuple(
                (
                    word(transfer.limit),
                    word(transfer.change),
                    word(short_serve(transfer.decision) if transfer.decision else "-"),
                )
                for transfer in plan.relaxations
            ),
        )
        yield Section(name="ways-out", heading="Relaxations", blocks=(table,))


def _provenance(plan: ServePlan) -> Section:
    own, predicted = plan.provenance, plan.predicted
    more: list[tuple[str, Cell]] = []
    if predicted is not None:
        more.append(("band of mean TTFT", between(predicted.ttft_s_band)))
        more.append(("band of mean TPOT", between(predicted.tpot_s_band)))
    return provenance_section(
        version=own.moetune_version,
        spec_sha256=own.spec_sha256,
        sources=own.profile_source,
        hashes={},
        notes=own.notes,
        more=more,
    )
