"""A deployment's plan in words: what to launch first, then what it will do and why."""

from collections.abc import Iterator
from pathlib import Path

from tuner.serve_plan import Instances, Latency, ServeDecision, ServePlan, ServePrediction
from tuner.units import format_bytes, format_s


def serve_text(plan: ServePlan, *, folder: Path) -> str:
    """What `moetune plan` prints of a deployment."""
    lines = [*_head(plan)]
    if plan.decision is not None and plan.predicted is not None:
        lines += [*_prediction(plan.predicted), *_others(plan)]
    lines += [*_ways_out(plan), *_unlaunchable(plan)]
    lines += [f"note: {note}" for note in plan.provenance.notes]
    return "\n".join((*lines, f"written: {folder}; `moetune explain {folder}` tells more"))


def serve_explanation(plan: ServePlan) -> str:
    """What `moetune explain` prints of a deployment."""
    lines = [*_head(plan)]
    if plan.decision is not None and plan.predicted is not None:
        lines += [*_prediction(plan.predicted), *_step(plan.predicted), *_others(plan)]
    lines += [*_ways_out(plan), *_unlaunchable(plan)]
    return "\n".join((*lines, *(f"note: {note}" for note in plan.provenance.notes)))


def _head(plan: ServePlan) -> Iterator[str]:
    certificate = plan.certificate
    if plan.decision is None:
        yield f"nothing meets the targets: {plan.binding_constraint}"
        return
    yield f"{plan.decision.mode}, {plan.decision.num_devices} devices"
    yield from (f"  {_group(group)}" for group in plan.decision.instances)
    for way in plan.decision.handovers:
        yield (
            f"  {way.from_pool} to {way.to_pool}: {format_bytes(way.request_bytes)} of KV cache a"
            f" request, {format_s(way.seconds)}"
        )
    yield (
        f"objective {plan.goal.objective}: {certificate.objective:.6g}, nothing below"
        f" {certificate.bound:.6g} (gap {certificate.gap_ratio:.2%}, {certificate.status},"
        f" {certificate.method}, {certificate.solve_s:.1f} s;"
        f" {certificate.space.priced} ways priced, {certificate.space.illegal} illegal)"
    )
    if certificate.within_band:
        least = "at least " if certificate.within_band_is_least else ""
        yield f"ties: {least}{certificate.within_band} others cost about as much"
    yield f"binding: {plan.binding_constraint}"


def _group(group: Instances) -> str:
    shape = [f"TP {group.attention_tp}", f"DP {group.attention_dp}"]
    if group.ep > 1:
        shape.append(f"EP {group.ep}")
    return (
        f"{group.count} x {group.role} of {group.devices} on {group.pool}: {', '.join(shape)},"
        f" {group.max_batch} sequences a rank"
    )


def _prediction(predicted: ServePrediction) -> Iterator[str]:
    yield f"  ttft  {_latency(predicted.ttft_s)}"
    yield f"  tpot  {_latency(predicted.tpot_s)}"
    price = "" if predicted.cost_per_hour is None else f", {predicted.cost_per_hour:.4g} an hour"
    yield (
        f"  {predicted.requests_per_s:.4g} requests/s, {predicted.output_tokens_per_s:.4g} output"
        f" tokens/s, {predicted.goodput_per_device:.4g} good requests/s a device{price}"
    )
    for name, ratio in predicted.utilisation_ratio.items():
        yield f"  {name}: {ratio:.0%} busy, {format_bytes(predicted.memory_bytes[name])} a device"


def _latency(value: Latency) -> str:
    parts = (f"{kind} {format_s(getattr(value, kind))}" for kind in ("mean", "p50", "p90", "p99"))
    return ", ".join(parts)


def _step(predicted: ServePrediction) -> Iterator[str]:
    yield "a decode step of the slowest group"
    total = sum(predicted.breakdown_s.values())
    for name, seconds in sorted(predicted.breakdown_s.items(), key=lambda part: -part[1]):
        yield f"  {name:<12} {format_s(seconds):>10}  {seconds / total:.0%}"


def _others(plan: ServePlan) -> Iterator[str]:
    for other in plan.alternatives:
        yield (
            f"instead: {_short(other.decision)}, ttft p90 {format_s(other.predicted.ttft_s.p90)},"
            f" tpot p90 {format_s(other.predicted.tpot_s.p90)}; {other.lost_by}"
        )


def _ways_out(plan: ServePlan) -> Iterator[str]:
    for way in plan.relaxations:
        if way.decision is not None:
            yield f"with {way.change}: {_short(way.decision)}"


def _unlaunchable(plan: ServePlan) -> Iterator[str]:
    for one in plan.unlaunchable:
        yield f"cannot be launched: {one.feature} (would save {one.gain_ratio:.0%})"


def _short(decision: ServeDecision) -> str:
    groups = " + ".join(
        f"{group.count} x {group.devices} {group.role}" for group in decision.instances
    )
    return f"{decision.mode} {groups} on {decision.num_devices} devices"
