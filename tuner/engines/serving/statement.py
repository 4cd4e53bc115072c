"""The header of every emitted file of a deployment: the decision and the expected figures."""

from collections.abc import Iterator

from tuner.catalog.serve_rules.steps import lacks_units
from tuner.config.serve import Instances, Role
from tuner.config.serve_words import router_words
from tuner.costs.serve.bands import NEW_PAIR, PUBLISHED
from tuner.costs.serve.speculative import acceptance_words
from tuner.devices.datasheet import Vendor
from tuner.engines.serving.shape import (
    GroupShape,
    are_heterogeneous,
    group_release,
    group_shapes,
    is_disaggregated,
    transfer,
)
from tuner.plans.serve import Latency, VerifiedServing
from tuner.units import format_counted, format_number, format_ratio, format_s


def statement(verified: VerifiedServing) -> tuple[str, ...]:
    """Return the header's lines, for a file that starts engines."""
    plan = verified.plan
    lines = list(brief_statement(verified))
    lines += [
        f"Island {island.name} gets {format_ratio(island.share_ratio)} of all requests."
        for island in verified.decision.islands
    ]
    lines += [_line(shape) for shape in group_shapes(verified)]
    speculative = plan.goal.speculative
    if speculative is not None and any(group.draft_tokens for group in verified.decision.instances):
        lines.append(
            f"Expected if {acceptance_words(speculative.acceptance)} of the tokens drafted by"
            f" {speculative.method} are accepted, which depends on the texts."
        )
    if verified.decision.router is not None:
        words = router_words(verified.decision.router)
        lines.append(f"{words[0].upper()}{words[1:]}.")
    if is_disaggregated(verified) and are_heterogeneous(verified):
        lines.append(
            "Routers for prefill and decode have no weights: they balance outstanding requests"
            " and ignore the size of an instance; watch small ones for overload."
        )
    return (*lines, *expectation(verified))


def brief_statement(verified: VerifiedServing) -> tuple[str, ...]:
    """Return the lines of a file beside those that start engines."""
    plan, decision = verified.plan, verified.decision
    return (
        f"Written by moetune {plan.provenance.moetune_version} for the model {plan.model.name}.",
        f"{format_counted(decision.num_devices, 'device')}, mode {decision.mode}.",
        *_experiment(verified),
        *((f"NOT VERIFIED: {verified.waived}",) if verified.waived else ()),
        *((f"Measured: {verified.measured}",) if verified.measured else ()),
    )


def _experiment(verified: VerifiedServing) -> Iterator[str]:
    releases = {
        release.title: release
        for group in verified.decision.instances
        if group.role is Role.ATTENTION
        if (release := group_release(verified, group)).afd is not None
    }
    for engine in releases.values():
        assert engine.afd is not None
        version = engine.release.partition("+")[0]
        yield (
            f"EXPERIMENTAL: AFD needs exactly {engine.afd.plugin} at commit {engine.afd.commit}"
            f" with {engine.name} {version}; install both first."
        )


def expectation(verified: VerifiedServing) -> tuple[str, ...]:
    """Return what the plan predicts, for people."""
    predicted, mode = verified.predicted, verified.decision.mode
    guessed = (f"No published run supports the bands of {mode}: they are widened.",)
    return (
        _latency("TTFT", predicted.ttft_s, band=predicted.ttft_s_band),
        _latency("TPOT", predicted.tpot_s, band=predicted.tpot_s_band),
        f"Expected: {format_number(predicted.requests_per_s)} requests/s,"
        f" {format_number(predicted.output_tokens_per_s)} output tokens/s,"
        f" goodput {format_number(predicted.goodput_per_device)} requests/s per device.",
        *((f"{NEW_PAIR[0].upper()}{NEW_PAIR[1:]}.",) if predicted.is_new_pair else ()),
        *(() if mode in PUBLISHED else guessed),
    )


def group_notes(verified: VerifiedServing, shape: GroupShape) -> tuple[str, ...]:
    """Return the notes on one group."""
    quantization = verified.plan.goal.quantization
    notes = []
    if shape.group.kv_tokens:
        notes.append(f"Its KV cache should hold {shape.group.kv_tokens:,} tokens an instance.")
    if quantization != "bf16":
        notes.append(f"Planned for {quantization} weights.")
    pools = verified.plan.cluster.pools
    pool = next(pool for pool in pools if pool.name == shape.group.pool)
    known = None if pool.device is None else pool.sheet
    release = group_release(verified, shape.group)
    if release.vendor is not Vendor.NVIDIA:
        notes.append(
            f"Container: {release.image} ({release.title})"
            + (f"; {release.image_note}." if release.image_note else ".")
        )
    kv_transfer = transfer(verified)
    if kv_transfer is not None and kv_transfer.path == "host":
        notes.append(
            "KV caches pass through host memory to devices of another vendor. Both sides need the"
            " same MODEL, release and attention backend, which the connector compares."
        )
    if known is not None and lacks_units(verified.plan.goal, known):
        notes.append(
            f"{known.name} has no tensor cores for {quantization}: the engine dequantizes weights"
            " on the fly (Marlin), so prefill is slower than with native GEMMs."
        )
    return tuple(notes)


def _line(shape: GroupShape) -> str:
    group = shape.group
    machines = "a machine" if shape.nodes == 1 else f"{shape.nodes} machines"
    devices = format_counted(group.devices, "device")
    requests, tokens = (
        format_counted(group.max_batch, "request"),
        format_counted(group.max_batched_tokens, "token"),
    )
    extras = "".join(f"; {extra}" for extra in _extras(group))
    layout = (
        f"attention TP {group.attention_tp} x DP {group.attention_dp}, experts TP {group.moe_tp} x"
        f" EP {group.ep}, PP {group.pp}, all-to-all {group.a2a_backend}"
    )
    if group.role is Role.ATTENTION:
        layout = f"attention TP {group.attention_tp} x DP {group.attention_dp}, no experts"
    if group.role is Role.EXPERT:
        layout = f"experts EP {group.ep} on TP {group.attention_tp} x DP {group.attention_dp} ranks"
    return (
        f"{shape.name}: {group.count} x {devices} of {group.pool}, each on"
        f" {machines}; {layout};"
        f" {requests} and {tokens} per rank at most{extras}."
    )


def _extras(group: Instances) -> Iterator[str]:
    if group.page_size is not None:
        yield f"pages of {group.page_size} tokens"
    if group.draft_tokens:
        yield f"{group.draft_tokens} tokens drafted per step"
    if group.redundant_experts:
        yield f"{format_counted(group.redundant_experts, 'redundant expert')} per layer"
    if group.two_batch_overlap:
        yield "two-batch overlap"
    if group.prefill_share_ratio is not None:
        yield f"{format_ratio(group.prefill_share_ratio, digits=0)} of the SMs for prefill"


def _latency(name: str, latency: Latency, *, band: tuple[float, float]) -> str:
    low, high = band
    return (
        f"Expected {name}: mean {format_s(latency.mean)} (80 % band: {format_s(low)} to"
        f" {format_s(high)}), P50 {format_s(latency.p50)}, P90 {format_s(latency.p90)},"
        f" P99 {format_s(latency.p99)}."
    )
