"""The report of a deployment: what is launched where, what requests will meet, how sure that is."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tuner.report.axes import axis, layout, time_axis
from tuner.report.content import (
    Cell,
    Facts,
    Figure,
    File,
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
from tuner.report.decisions import serve_words
from tuner.report.latency_figures import goodput_figure, latency_figure
from tuner.report.launch_section import launch_section
from tuner.report.palette import CYCLE, SYMBOLS, VERMILLION
from tuner.report.provenance import provenance_section
from tuner.report.replay import Replay
from tuner.report.serve_figures import (
    alternatives_rows,
    decode_figure,
    instances_figure,
    use_figure,
)
from tuner.serve_plan import (
    ServeCertificate,
    ServeDecision,
    ServeModeAnswer,
    ServePlan,
    ServePrediction,
)
from tuner.units import format_ratio, format_s

SAME_RATIO: Final = 1e-6
"""Figures that differ by less are the same."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServeEvidence:
    """What lies beside a deployment's plan."""

    files: tuple[File, ...]
    replay: Replay | None
    """The traffic played again; absent where it was not."""
    what_if: Section | None


def serve_report(plan: ServePlan, evidence: ServeEvidence) -> Report:
    """Put everything that is known of a deployment's plan into words, tables and plots."""
    decision, predicted = plan.decision, plan.predicted
    pools = " + ".join(
        f"{pool.num_devices} {pool.device or pool.name}" for pool in plan.cluster.pools
    )
    if decision is None or predicted is None:
        return Report(
            title=f"{plan.model.name} on {pools}",
            kind="Deployment",
            verdict="Nothing meets the targets on these pools.",
            is_found=False,
            facts=Facts(facts=(("certificate", word(plan.certificate.status)),), are_large=True),
            proof=f"Stands in the way: {plan.binding_constraint}.",
            sections=(*_ways_out(plan), _provenance(plan)),
        )
    return Report(
        title=f"{plan.model.name} on {_used(plan, decision)}",
        kind="Deployment",
        verdict=_verdict(plan, decision, predicted),
        is_found=True,
        facts=Facts(facts=tuple(_headline(plan, decision, predicted)), are_large=True),
        proof=f"{_proof(plan.certificate)} Bound by {plan.binding_constraint}.",
        sections=(
            Section(
                name="decision",
                heading="What to launch",
                blocks=some(
                    Facts(facts=tuple(_traffic(plan))),
                    instances_figure(plan, decision),
                    _handovers(decision),
                ),
            ),
            _requests(plan, predicted, evidence.replay),
            Section(
                name="work",
                heading="Where the time goes",
                blocks=(use_figure(predicted), decode_figure(plan, predicted)),
            ),
            _choice(plan),
            *([evidence.what_if] if evidence.what_if else []),
            *_ways_out(plan),
            launch_section(
                evidence.files, named=sum(name.startswith("launch/") for name in plan.files)
            ),
            _provenance(plan),
        ),
    )


def _used(plan: ServePlan, decision: ServeDecision) -> str:
    """Say how many devices of each pool the instances take."""
    devices = {pool.name: pool.device or pool.name for pool in plan.cluster.pools}
    used: dict[str, int] = {}
    for group in decision.instances:
        used[group.pool] = used.get(group.pool, 0) + group.count * group.devices
    return " + ".join(f"{count} {devices.get(pool, pool)}" for pool, count in used.items())


def _verdict(plan: ServePlan, decision: ServeDecision, predicted: ServePrediction) -> str:
    return (
        f"Launch {serve_words(decision)} with {plan.goal.engine.name}: "
        f"{predicted.requests_per_s:.4g} requests/s are expected at P90 "
        f"{format_s(predicted.ttft_s.p90)} to the first token and "
        f"{format_s(predicted.tpot_s.p90)} per output token. Predicted from played traffic, and "
        "nothing was launched."
    )


def _proof(certificate: ServeCertificate) -> str:
    space = certificate.space
    ties = ""
    if certificate.within_band:
        least = "at least " if certificate.within_band_is_least else ""
        count = certificate.within_band
        others = "other costs" if count == 1 else "others cost"
        ties = f" {least.capitalize()}{count} {others} about as much."
    counted = f"{space.priced:,} ways to run an instance were priced, {space.illegal:,} are illegal"
    if certificate.status == "optimal":
        return f"Counts of instances proven optimal under the model: {counted}.{ties}"
    return f"Within {certificate.gap_ratio:.2%} of optimal under the model: {counted}.{ties}"


def _headline(
    plan: ServePlan, decision: ServeDecision, predicted: ServePrediction
) -> Iterator[tuple[str, Cell]]:
    yield "first token, P90", seconds(predicted.ttft_s.p90, key="predicted.ttft_s.p90")
    yield "per output token, P90", seconds(predicted.tpot_s.p90, key="predicted.tpot_s.p90")
    yield (
        "good requests/s a device",
        number(predicted.goodput_per_device, key="predicted.goodput_per_device"),
    )
    yield (
        "output tokens/s",
        number(predicted.output_tokens_per_s, key="predicted.output_tokens_per_s"),
    )
    yield "devices", number(decision.num_devices)
    if predicted.cost_per_hour is not None:
        yield "cost per hour", number(predicted.cost_per_hour, key="predicted.cost_per_hour")
    yield "gap to optimal", share(plan.certificate.gap_ratio, key="certificate.gap_ratio")


def _traffic(plan: ServePlan) -> Iterator[tuple[str, Cell]]:
    goal = plan.goal
    traffic = goal.traffic
    if traffic.rate is not None:
        yield "asked", number(traffic.rate, key="goal.traffic.rate", unit="requests/s")
    if traffic.concurrency is not None:
        key = "goal.traffic.concurrency"
        yield "asked", number(traffic.concurrency, key=key, unit="requests under way")
    if plan.decision is not None:
        yield "mode", word(plan.decision.mode)
    yield "engine", word(f"{goal.engine.name} {goal.engine.version}".strip())
    yield "objective", word(goal.objective)
    yield "weights", word(goal.quantization)
    yield "KV cache", word(goal.kv_cache_dtype)


def _handovers(decision: ServeDecision) -> Table | None:
    if not decision.handovers:
        return None
    return Table(
        caption="Handovers of KV caches",
        header=("from", "to", "connector", "path", "bytes a request", "visible time"),
        rows=tuple(
            (
                word(way.from_pool),
                word(way.to_pool),
                word(way.connector),
                word(way.path),
                size(way.request_bytes, key=f"decision.handovers.{index}.request_bytes"),
                seconds(way.seconds, key=f"decision.handovers.{index}.seconds"),
            )
            for index, way in enumerate(decision.handovers)
        ),
    )


def _requests(plan: ServePlan, predicted: ServePrediction, replay: Replay | None) -> Section:
    slo = plan.goal.slo
    return Section(
        name="requests",
        heading="What requests meet",
        blocks=some(
            latency_figure(
                "ttft",
                predicted.ttft_s,
                predicted.ttft_s_band,
                slo.ttft,
                key="predicted.ttft_s",
                again_s=replay.ttft_s if replay else (),
            ),
            latency_figure(
                "tpot",
                predicted.tpot_s,
                predicted.tpot_s_band,
                slo.tpot,
                key="predicted.tpot_s",
                again_s=replay.tpot_s if replay else (),
            ),
            goodput_figure(replay) if replay else None,
            _differs(predicted, replay) if replay else None,
        ),
    )


def _differs(predicted: ServePrediction, replay: Replay) -> Paragraph | None:
    """Say so where playing again does not give the plan's own figures."""
    again = replay.as_planned
    pairs = ((again.ttft_s.p90, predicted.ttft_s.p90), (again.tpot_s.p90, predicted.tpot_s.p90))
    if all(math.isclose(one, other, rel_tol=SAME_RATIO) for one, other in pairs):
        return None
    (first_s, _), (each_s, _) = pairs
    return Paragraph(
        text="Played again, this version and these tables give other figures than the plan: P90 "
        f"{format_s(first_s)} to the first token and {format_s(each_s)} per output token."
    )


def _choice(plan: ServePlan) -> Section:
    certificate = plan.certificate
    facts: list[tuple[str, Cell]] = [("certificate", word(certificate.status))]
    if certificate.objective is not None:
        said = f"objective ({plan.goal.objective})"
        facts.append((said, number(certificate.objective, key="certificate.objective")))
    if certificate.bound is not None:
        facts.append(("nothing is beyond", number(certificate.bound, key="certificate.bound")))
    facts.append(("method", word(certificate.method)))
    facts.append(("solved in", seconds(certificate.solve_s, key="certificate.solve_s")))
    missing = tuple(
        f"{one.feature} (would save {format_ratio(one.gain_ratio)})" for one in plan.unlaunchable
    )
    return Section(
        name="choice",
        heading="Why this one",
        blocks=some(
            Facts(facts=tuple(facts)),
            _candidates(plan),
            _modes(plan),
            Notes(notes=tuple(f"Cannot be launched: {one}" for one in missing))
            if missing
            else None,
        ),
    )


def _modes(plan: ServePlan) -> Table | None:
    """Say what every mode that was asked for comes to."""
    if not plan.modes:
        return None
    nothing = word("-")

    def row(at: int, one: ServeModeAnswer) -> tuple[Cell, ...]:
        path = f"modes.{at}"
        return (
            word(one.mode.replace("_", " ")),
            word(one.status),
            nothing if one.devices is None else number(one.devices, key=f"{path}.devices"),
            nothing
            if one.cost_per_hour is None
            else number(one.cost_per_hour, key=f"{path}.cost_per_hour"),
            nothing if one.ttft_s is None else seconds(one.ttft_s, key=f"{path}.ttft_s"),
            nothing if one.tpot_s is None else seconds(one.tpot_s, key=f"{path}.tpot_s"),
            word(one.told),
        )

    header = ("mode", "outcome", "devices", "cost per hour", "first token", "per token", "why")
    return Table(
        caption="Every mode that was asked for, means over requests",
        header=header,
        rows=tuple(row(at, one) for at, one in enumerate(plan.modes)),
    )


def _candidates(plan: ServePlan) -> Figure:
    rows = list(alternatives_rows(plan))
    lost = ["", *(one.lost_by for one in plan.alternatives)]
    has_cost = all(one.cost_per_hour is not None for *_, one in rows)
    return Figure(
        name="candidates",
        title="The candidates: latency against devices",
        reading="The plan and the runners-up that it keeps, each the best of its kind; other "
        "candidates were priced and are not stored. Point at one for its decision.",
        traces=tuple(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [decision.num_devices],
                "y": [one.tpot_s.p90],
                "marker": {
                    "color": VERMILLION if at == 0 else CYCLE[(at - 1) % len(CYCLE)],
                    "symbol": "star" if at == 0 else SYMBOLS[at % len(SYMBOLS)],
                    "size": 18 if at == 0 else 12,
                },
                "hovertext": [
                    f"{name}\n{serve_words(decision)}\nfirst token P90 "
                    f"{format_s(one.ttft_s.p90)}, per token P90 {format_s(one.tpot_s.p90)}"
                ],
                "hoverinfo": "text",
            }
            for at, (name, _, decision, one) in enumerate(rows)
        ),
        layout=layout(
            x=axis("devices", rangemode="tozero"),
            y=time_axis("time per output token, P90", rangemode="tozero"),
            hovermode="closest",
        ),
        table=Table(
            caption="The plan and its runners-up",
            header=(
                "",
                "devices",
                "first token, P90",
                "per token, P90",
                "good requests/s a device",
                *(("cost per hour",) if has_cost else ()),
                "decision",
                "why it lost",
            ),
            rows=tuple(
                (
                    word(name),
                    number(decision.num_devices),
                    seconds(one.ttft_s.p90, key=f"{key}.ttft_s.p90"),
                    seconds(one.tpot_s.p90, key=f"{key}.tpot_s.p90"),
                    number(one.goodput_per_device, key=f"{key}.goodput_per_device"),
                    *_cost(one, key=key, is_shown=has_cost),
                    word(serve_words(decision)),
                    word(why),
                )
                for (name, key, decision, one), why in zip(rows, lost, strict=True)
            ),
        ),
        height=380,
    )


def _cost(one: ServePrediction, *, key: str, is_shown: bool) -> Iterator[Cell]:
    if is_shown and one.cost_per_hour is not None:
        yield number(one.cost_per_hour, key=f"{key}.cost_per_hour")


def _ways_out(plan: ServePlan) -> Iterator[Section]:
    if plan.relaxations:
        table = Table(
            caption="Targets that stand in the way",
            header=("limit", "what moving it buys", "decision"),
            rows=tuple(
                (
                    word(way.limit),
                    word(way.change),
                    word(serve_words(way.decision) if way.decision else "-"),
                )
                for way in plan.relaxations
            ),
        )
        yield Section(name="ways-out", heading="Ways out", blocks=(table,))


def _provenance(plan: ServePlan) -> Section:
    own, predicted = plan.provenance, plan.predicted
    more: list[tuple[str, Cell]] = []
    if predicted is not None:
        more.append(("band of the mean first token", between(predicted.ttft_s_band)))
        more.append(("band of the mean output token", between(predicted.tpot_s_band)))
    return provenance_section(
        version=own.moetune_version,
        spec_sha256=own.spec_sha256,
        sources=own.profile_source,
        hashes={},
        notes=own.notes,
        more=more,
    )
