"""What stands at the top of every emitted file of a deployment: what it is, what to expect."""

from collections.abc import Iterator

from tuner.emit.serving.shape import GroupShape, group_shapes
from tuner.serve_plan import Instances, Latency, VerifiedServing
from tuner.units import format_s


def statement(verified: VerifiedServing) -> tuple[str, ...]:
    """Return the lines that say what is started and what supports it."""
    plan = verified.plan
    lines = [
        f"Written by moetune {plan.provenance.moetune_version} for the model {plan.model.name}.",
        f"{verified.decision.num_devices} devices, mode {verified.decision.mode}.",
    ]
    if verified.waived:
        lines.append(f"NOT VERIFIED: {verified.waived}")
    lines += [_line(shape) for shape in group_shapes(verified)]
    speculative = plan.goal.speculative
    if speculative is not None and any(each.draft_tokens for each in verified.decision.instances):
        lines.append(
            f"Expected where {speculative.acceptance:.0%} of the tokens drafted by"
            f" {speculative.method} are kept, which depends on the texts."
        )
    return (*lines, *expectation(verified))


def expectation(verified: VerifiedServing) -> tuple[str, ...]:
    """Return what the plan predicts, for people."""
    predicted = verified.predicted
    return (
        _latency("TTFT", predicted.ttft_s, band=predicted.ttft_s_band),
        _latency("TPOT", predicted.tpot_s, band=predicted.tpot_s_band),
        f"Expected: {predicted.requests_per_s:.4g} requests/s,"
        f" {predicted.output_tokens_per_s:.4g} output tokens/s,"
        f" goodput {predicted.goodput_per_device:.4g} requests/s per device.",
    )


def group_notes(verified: VerifiedServing, shape: GroupShape) -> tuple[str, ...]:
    """Return what the reader of one group's file should know of it."""
    quantization = verified.plan.goal.quantization
    notes = []
    if shape.group.kv_tokens:
        notes.append(f"Its KV cache should hold {shape.group.kv_tokens} tokens an instance.")
    if quantization != "bf16":
        notes.append(f"Planned for {quantization} weights.")
    return tuple(notes)


def _line(shape: GroupShape) -> str:
    group = shape.group
    machines = "a machine" if shape.nodes == 1 else f"{shape.nodes} machines"
    return (
        f"{shape.name}: {group.count} x {group.devices} devices of {group.pool}, each on"
        f" {machines}; attention TP {group.attention_tp} x DP {group.attention_dp}, experts"
        f" TP {group.moe_tp} x EP {group.ep}, PP {group.pp}, all-to-all {group.a2a_backend};"
        f" {group.max_batch} requests and {group.max_batched_tokens} tokens a rank at"
        f" most{''.join(f'; {extra}' for extra in _extras(group))}."
    )


def _extras(group: Instances) -> Iterator[str]:
    if group.page_size is not None:
        yield f"pages of {group.page_size} tokens"
    if group.draft_tokens:
        yield f"{group.draft_tokens} tokens drafted a step"
    if group.two_batch_overlap:
        yield "two-batch overlap"
    if group.prefill_share_ratio is not None:
        yield f"{group.prefill_share_ratio:.0%} of each device for prefill"


def _latency(name: str, latency: Latency, *, band: tuple[float, float]) -> str:
    low, high = band
    return (
        f"Expected {name}: mean {format_s(latency.mean)} (between {format_s(low)} and"
        f" {format_s(high)}), P50 {format_s(latency.p50)}, P90 {format_s(latency.p90)},"
        f" P99 {format_s(latency.p99)}."
    )
