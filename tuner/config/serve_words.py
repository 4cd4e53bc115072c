"""A deployment in words: every field is stated, or follows from those that are.

`explain`, the report and the text of a plan take their words from here, so that two deployments
that differ in a field never read the same.

    group_degrees   how one instance is split
    group_steps     what its steps hold and how they run
    short_group     a group of instances in one cell
    short_serve     a deployment in one cell
    group_changes   how one kind of instance differs from another
    router_words    how its requests are spread
    target_words    an SLO target
"""

from collections.abc import Iterator
from typing import Final

from tuner.config.serve import Instances, PlannedKvTransfer, ServeDecision, ServeRouter
from tuner.spec.serving.routers import RouterPolicy
from tuner.units import format_bytes, format_counted, format_ratio, format_s

DEGREES: Final = {
    "attention_tp": "TP",
    "dcp": "DCP",
    "pp": "PP",
    "attention_dp": "DP",
    "ep": "EP",
    "moe_tp": "MoE-TP",
}
"""Fields of an instance that are degrees, and their usual names."""

_LABELS: Final = DEGREES | {
    "count": "instances",
    "devices": "devices each",
    "stage_machines": "machines of the stages",
    "max_batch": "sequences",
    "max_batched_tokens": "batched tokens per rank",
    "kv_tokens": "KV cache tokens",
    "prefill_share_ratio": "share of SMs for prefill",
    "memory_ratio": "share of memory for weights and KV cache",
}


def group_degrees(group: Instances) -> str:
    """Say how one instance is split, e.g. `TP 2, DP 4, EP 8`."""
    always = {"TP": group.attention_tp, "DP": group.attention_dp}
    further = {"DCP": group.dcp, "PP": group.pp, "EP": group.ep, "MoE-TP": group.moe_tp}
    shown = always | {name: degree for name, degree in further.items() if degree > 1}
    degrees = ", ".join(f"{name} {shown[name]}" for name in DEGREES.values() if name in shown)
    return degrees + (
        f", stages on {group.stage_machines} machines" if group.stage_machines > 1 else ""
    )


def group_steps(group: Instances) -> Iterator[str]:
    """Say what the steps of an instance hold, and what differs from the engine's default."""
    if group.island:
        yield f"island {group.island}"
    yield format_counted(group.max_batch, "sequence")
    tokens = f"{group.max_batched_tokens:,} batched tokens per rank"
    yield f"{tokens}, chunked prefill" if group.chunked_prefill else tokens
    if group.draft_tokens:
        yield format_counted(group.draft_tokens, "draft token")
    if group.two_batch_overlap:
        yield "two-batch overlap"
    if group.redundant_experts:
        yield format_counted(group.redundant_experts, "redundant expert")
    if group.a2a_backend != "none":
        yield group.a2a_backend.replace("_", " ")
    if group.page_size is not None:
        yield f"pages of {group.page_size}"
    if group.prefill_share_ratio is not None:
        yield f"{format_ratio(group.prefill_share_ratio, digits=0)} of SMs for prefill"
    if group.kv_tokens:
        yield f"KV cache of {group.kv_tokens:,} tokens"
    if group.memory_ratio is not None:
        yield f"{group.memory_ratio:.3g} of memory for it and the weights"


def group_changes(before: Instances, after: Instances) -> Iterator[str]:
    """Yield how equal instances of one role and pool differ from others, e.g. `TP 1 -> 2`."""
    for field in dict.fromkeys((*_LABELS, *Instances.model_fields)):
        old, new = getattr(before, field), getattr(after, field)
        if old != new:
            label = _LABELS.get(field, field.replace("_", " "))
            yield f"{label} {_value(old)} -> {_value(new)}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value in (None, "") else str(value).replace("_", " ")


def short_group(group: Instances) -> str:
    """Name equal instances in one cell, e.g. `2 x 8 decode on h100 (TP 1, DP 8; 64 sequences)`."""
    role = "" if group.role.value == "aggregated" else f"{group.role.value} "
    return (
        f"{group.count} x {group.devices} {role}on {group.pool} "
        f"({group_degrees(group)}; {', '.join(group_steps(group))})"
    )


def short_serve(decision: ServeDecision) -> str:
    """Name a deployment in one cell."""
    above = decision.offload_above_tokens
    groups = " + ".join(short_group(group) for group in decision.instances)
    transfers = "".join(f"; {describe_kv_transfer(transfer)}" for transfer in decision.handovers)
    transfers += "".join(f"; {words}" for words in island_words(decision))
    router = "" if decision.router is None else f"; {router_words(decision.router)}"
    return f"{decision.mode} {groups}{transfers}{router}" + (
        "" if above is None else f"; prompts above {above:,} tokens go to the remote pool"
    )


def island_words(decision: ServeDecision) -> Iterator[str]:
    """Say which share of the requests each island gets."""
    for island in decision.islands:
        yield f"island {island.name} gets {format_ratio(island.share_ratio)} of the requests"


def describe_kv_transfer(transfer: PlannedKvTransfer) -> str:
    """Say how KV caches get from prefill to decode."""
    over = "" if transfer.connector == "none" else f" by {transfer.connector}"
    path = " through host memory" if transfer.path == "host" else ""
    path += " inside machines" if transfer.link == "scale_up" else ""
    return (
        f"{transfer.from_pool} to {transfer.to_pool}{over}{path}:"
        f" {format_bytes(transfer.request_bytes)} of KV cache a request,"
        f" {format_s(transfer.seconds)}"
    )


def target_words(target: str) -> str:
    """Name an SLO target, e.g. `TTFT P90` of `ttft p90`."""
    latency, _, kind = target.partition(" ")
    return f"{latency.upper()} {kind.upper() if kind.startswith('p') else kind}"


def gain_words(ratio: float, *, objective: str) -> str:
    """Say what a mode would gain; a rate's `ratio` is the time of a request that it saves."""
    if objective == "rate" and ratio < 1.0:
        return f"serve {format_ratio(ratio / (1.0 - ratio), digits=0)} more"
    return f"save {format_ratio(ratio, digits=0)}"


_POLICY: Final = {
    RouterPolicy.ROUND_ROBIN: "round robin",
    RouterPolicy.RANDOM: "at random",
    RouterPolicy.POWER_OF_TWO: "to the less loaded of two drawn at random",
    RouterPolicy.LEAST_REQUESTS: "to the fewest outstanding requests",
    RouterPolicy.WEIGHTED_LEAST_REQUESTS: (
        "to the fewest outstanding requests, weighted by what an instance may run at once"
    ),
    RouterPolicy.CACHE_AWARE: "to the instance with the prefix, unless loads are uneven",
}


def router_words(router: ServeRouter) -> str:
    """Say how requests are spread over instances."""
    text = f"router: requests {_POLICY[router.policy]}"
    if router.ranks is not None:
        text = text.replace("to the instance", f"to the rank (of {router.ranks} an instance)")
    if router.cache_threshold is not None:
        text += f" (prefixes above {format_ratio(router.cache_threshold, digits=0)} of a prompt)"
    if router.decode_policy is not None:
        text += f"; decode {_POLICY[router.decode_policy]}"
    return text
