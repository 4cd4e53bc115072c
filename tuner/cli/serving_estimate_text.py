"""The text of a priced deployment: latency first, then what to change."""

from collections.abc import Iterator

from tuner.cli.serve_text import group_text, latency_text
from tuner.cli.text import columns, host_lines, labelled, shortened
from tuner.config.serve_words import target_words
from tuner.estimate.serving.records import ServingChange, ServingEstimate, ServingHalf, ServingLoad
from tuner.units import format_bytes, format_number, format_ratio, format_s

SHOWN_CHANGES = 6
_LISTED = {
    "manifest": "refused_by",
    "without price": "flags_unpriced",
    "no effect": "flags_timeless",
    "ignored": "flags_ignored",
    "note": "notes",
}
"""Fields of an estimate that are listed, by their label."""
_GOOD = {True: "goodput ", False: ""}
"""Requests a second are good ones only where the spec states a target."""


def serving_estimate_text(estimate: ServingHalf) -> str:
    """Describe the launch and what would beat it; both halves where there are two."""
    if not isinstance(estimate, ServingEstimate) or estimate.other is None:
        return "\n".join(_half(estimate))
    one, two = estimate, estimate.other
    both = (_together(one, two), *_listed(one, two, in_both=True))
    return "\n\n".join(
        "\n".join(part).rstrip() for part in (_half(one, two), _half(two, one), both)
    )


def _half(estimate: ServingHalf, other: ServingHalf | None = None) -> Iterator[str]:
    yield from _what(estimate)
    yield ""
    yield from _load(estimate, estimate.load) if estimate.load else ()
    yield from _memory(estimate)
    yield ""
    yield from _changes(estimate)
    yield ""
    yield from _listed(estimate, other)


def _what(estimate: ServingHalf) -> Iterator[str]:
    yield (
        f"{estimate.source}: {estimate.model} with {estimate.engine} {estimate.release} on"
        f" {estimate.device}"
    )
    yield from labelled(estimate.instance.role.value, group_text(estimate.instance))
    yield (
        f"{estimate.quantization} weights, {estimate.kv_cache_dtype} cache,"
        f" {estimate.kernels} kernels"
    )


def _together(first: ServingHalf, second: ServingHalf) -> str:
    """The two halves as one deployment: each was simulated with the other."""
    loads = [one.load for one in (first, second) if one.load is not None]
    if len(loads) < 2:
        return "both halves    do not serve: one of them does not fit"
    served = min(load.requests_per_s for load in loads)
    devices = sum(load.devices for load in loads)
    tokens = loads[1].output_tokens_per_s
    return (
        f"both halves    {devices:,} devices, {format_number(served)} requests/s,"
        f" {format_number(tokens)} output tokens/s, {format_number(served / devices)} requests/s"
        " per device"
    )


def _load(estimate: ServingHalf, load: ServingLoad) -> Iterator[str]:
    for name, value, band in (
        ("TTFT", load.ttft_s, estimate.ttft_s_band),
        ("TPOT", load.tpot_s, estimate.tpot_s_band),
    ):
        if value is not None and band is not None:
            yield f"{name:<15}{latency_text(value, band)}"
    output_rate = f" {format_number(load.output_tokens_per_s)} output tokens/s," * (
        load.tpot_s is not None
    )
    yield (
        f"throughput     {format_number(load.requests_per_s)} requests/s (capacity"
        f" {format_number(load.capacity_per_s)}),"
        f"{output_rate} {_GOOD[estimate.has_slo]}{format_number(load.goodput_per_device)}"
        " requests/s per device"
    )
    if load.missed:
        yield from labelled("MISSES", ", ".join(map(target_words, load.missed)))
    if not load.keeps_up:
        yield (
            "FALLS BEHIND   the traffic; latencies grow for as long as it lasts,"
            f" {estimate.instances_needed} instances would serve it"
        )


def _memory(estimate: ServingHalf) -> Iterator[str]:
    own = estimate.memory
    total = own.weight_bytes + own.cache_bytes + own.reserve_bytes
    yield (
        f"memory         {format_bytes(own.weight_bytes)} weights, {format_bytes(own.cache_bytes)}"
        f" cache, {format_bytes(own.reserve_bytes)} reserve: {format_bytes(total)} of"
        f" {format_bytes(own.device_bytes)} a device"
    )
    logged = f"; the engine logs {estimate.logged_kv_tokens:,} a rank, for its longest requests"
    yield (
        f"KV cache       {estimate.kv_tokens:,} tokens an instance"
        f"{logged if estimate.logged_kv_tokens else ''}"
    )
    if estimate.host_memory is not None and estimate.host_memory.fits:
        yield from host_lines(estimate.host_memory)
    if not estimate.fits:
        yield from labelled("DOES NOT FIT", estimate.misfit)


def _changes(estimate: ServingHalf) -> Iterator[str]:
    best = estimate.smallest_change
    if best is None:
        yield (
            f"smallest change that beats it: none of {estimate.num_tried} changes of one thing does"
            if estimate.fits
            else "no change of one thing makes it fit; run moetune plan"
        )
    else:
        beats = "beats it" if estimate.fits else "makes it fit"
        yield f"smallest change that {beats}: {best.what}"
        yield f"    {_brief(best, has_slo=estimate.has_slo)}"
        yield from _ratios(best)
        yield from (f"    {line}" for line in best.lines)
    others = [change for change in estimate.changes if change is not best and change != best]
    if others:
        good = "goodput" if estimate.has_slo else "requests/s"
        slo = "missed SLOs, then " * estimate.has_slo
        yield f"other changes of one thing, by {slo}{good} per device, then request latency"
        rows = [(f"  {change.what}", *_cells(change)) for change in others[:SHOWN_CHANGES]]
        yield columns(rows, header=("  change", "devices", "TTFT", "TPOT", f"{good}/device", ""))
        if len(others) > SHOWN_CHANGES:
            yield f"  and {len(others) - SHOWN_CHANGES} more in --json"


def _ratios(change: ServingChange) -> Iterator[str]:
    """Bands of the latency ratios to the launch, where published launches give them."""
    ratios = [
        f"{name} {format_ratio(band[0])} to {format_ratio(band[1])} of the launch's"
        for name, band in (("TTFT", change.ttft_ratio_band), ("TPOT", change.tpot_ratio_band))
        if band is not None
    ]
    if ratios:
        yield f"    {', '.join(ratios)} for 80 % of published pairs of layouts"


def _brief(change: ServingChange, *, has_slo: bool) -> str:
    devices, first, each, good, missed = _cells(change)
    return (
        f"{devices} devices, TTFT {first}, TPOT {each}, {_GOOD[has_slo]}{good} requests/s"
        f" per device{', ' * bool(missed)}{missed}"
    )


def _cells(change: ServingChange) -> tuple[str, str, str, str, str]:
    load = change.load
    return (
        str(load.devices),
        "-" if load.ttft_s is None else format_s(load.ttft_s.mean),
        "-" if load.tpot_s is None else format_s(load.tpot_s.mean),
        f"{format_number(load.goodput_per_device)} ({_signed(change.gain_ratio)})",
        ", ".join((*("falls behind" for _ in range(not load.keeps_up)), *_missed(load))),
    )


def _missed(load: ServingLoad) -> Iterator[str]:
    if load.missed:
        yield f"misses {', '.join(map(target_words, load.missed))}"


def _signed(ratio: float) -> str:
    return f"{'-' if ratio < 0 else '+'}{format_ratio(abs(ratio))}"


def _listed(
    estimate: ServingHalf, other: ServingHalf | None = None, *, in_both: bool = False
) -> Iterator[str]:
    """Yield what is listed of a launch; of two halves what one or both have."""
    for label, name in _LISTED.items():
        theirs = getattr(other, name, ())
        listed = [one for one in getattr(estimate, name) if (one in theirs) is in_both]
        is_a_line_each = name in ("refused_by", "notes") or not listed
        for text in listed if is_a_line_each else (shortened(listed),):
            yield from labelled(label, text)
