"""A priced deployment as sections: latency first, then what to change."""

from collections.abc import Iterator
from typing import Final

from tuner.config.serve_words import target_words
from tuner.estimate.serving.records import ServingChange, ServingEstimate, ServingHalf, ServingLoad
from tuner.plans.serve import Latency
from tuner.report.content import (
    Block,
    Cell,
    NamedValues,
    Paragraph,
    Section,
    Table,
    number,
    some,
    word,
)
from tuner.report.latency_figures import NO_LIMIT, latency_table
from tuner.report.printable import shortened
from tuner.report.serve_decision import group_text
from tuner.units import format_bytes, format_number, format_ratio, format_s

SHOWN_CHANGES: Final = 6
_LISTED: Final = {
    "manifest": "refused_by",
    "without price": "flags_unpriced",
    "no effect": "flags_timeless",
    "ignored": "flags_ignored",
    "note": "notes",
}
"""Fields of an estimate that are listed, by their label."""

Facts = Iterator[tuple[str, Cell]]


def serving_estimate_sections(estimate: ServingHalf) -> tuple[Section, ...]:
    """Describe the launch and what would beat it; both halves where there are two."""
    if not isinstance(estimate, ServingEstimate) or estimate.other is None:
        return (_half(estimate),)
    first, second = estimate, estimate.other
    facts = (("in all", word(_together(first, second))), *_listed(first, second, in_both=True))
    both = Section(name="both", heading="Both halves", blocks=(NamedValues(facts=facts),))
    return _half(first, second), _half(second, first), both


def _half(estimate: ServingHalf, other_half: ServingHalf | None = None) -> Section:
    values = (None, None) if estimate.load is None else (estimate.load.ttft_s, estimate.load.tpot_s)
    bands = (estimate.ttft_s_band, estimate.tpot_s_band)
    latencies = {
        name: (value, band, NO_LIMIT)
        for name, value, band in zip(("TTFT", "TPOT"), values, bands, strict=True)
        if value is not None and band is not None
    }
    listed = tuple(_listed(estimate, other_half))
    return Section(
        name=estimate.instance.role.value,
        heading=f"{estimate.source}: {estimate.model} with {estimate.engine} {estimate.release} on"
        f" {estimate.device}",
        blocks=some(
            NamedValues(facts=tuple(_facts(estimate))),
            latency_table(latencies) if latencies else None,
            *_changes(estimate),
            NamedValues(facts=listed) if listed else None,
        ),
    )


def _together(first: ServingHalf, second: ServingHalf) -> str:
    """Describe the two halves as one deployment: each was simulated with the other."""
    if first.load is None or second.load is None:
        return "do not serve: one of them does not fit"
    served = min(first.load.requests_per_s, second.load.requests_per_s)
    devices = first.load.devices + second.load.devices
    return (
        f"{devices:,} devices, {format_number(served)} requests/s,"
        f" {format_number(second.load.output_tokens_per_s)} output tokens/s,"
        f" {format_number(served / devices)} requests/s per device"
    )


def _facts(estimate: ServingHalf) -> Facts:
    """Yield the instances, what they serve, what they hold, and what is wrong."""
    yield estimate.instance.role.value, word(group_text(estimate.instance))
    yield (
        "model",
        word(
            f"{estimate.quantization} weights, {estimate.kv_cache_dtype} cache,"
            f" {estimate.kernels} kernels"
        ),
    )
    if estimate.load is not None:
        yield from _load(estimate, estimate.load)
    memory = estimate.memory
    total = memory.weight_bytes + memory.cache_bytes + memory.reserve_bytes
    yield (
        "memory",
        word(
            f"{format_bytes(memory.weight_bytes)} weights, {format_bytes(memory.cache_bytes)}"
            f" cache, {format_bytes(memory.reserve_bytes)} reserve: {format_bytes(total)} of"
            f" {format_bytes(memory.device_bytes)} a device"
        ),
    )
    tokens = estimate.logged_kv_tokens
    logged = f"; the engine logs {tokens:,} a rank, for its longest requests" * (tokens > 0)
    yield "KV cache", word(f"{estimate.kv_tokens:,} tokens an instance{logged}")
    if estimate.host_memory is not None and estimate.host_memory.fits:
        yield "host memory", word(estimate.host_memory.words)
    if not estimate.fits:
        yield "DOES NOT FIT", word(estimate.misfit)


def _load(estimate: ServingHalf, load: ServingLoad) -> Facts:
    output = f" {format_number(load.output_tokens_per_s)} output tokens/s,"
    yield (
        "throughput",
        word(
            f"{format_number(load.requests_per_s)} requests/s (capacity"
            f" {format_number(load.capacity_per_s)}),{output if load.tpot_s else ''}"
            f" {'goodput ' * estimate.has_slo}{format_number(load.goodput_per_device)}"
            " requests/s per device"
        ),
    )
    if load.missed:
        yield "MISSES", word(", ".join(map(target_words, load.missed)))
    if not load.keeps_up:
        yield (
            "FALLS BEHIND",
            word(
                "the traffic; latencies grow for as long as it lasts,"
                f" {estimate.instances_needed} instances would serve it"
            ),
        )


def _changes(estimate: ServingHalf) -> Iterator[Block]:
    best = estimate.smallest_change
    if best is None:
        yield Paragraph(
            text=f"smallest change that beats it: none of {estimate.num_tried} changes of one thing"
            " does"
            if estimate.fits
            else "no change of one thing makes it fit; run moetune plan"
        )
    else:
        does = "beats it" if estimate.fits else "makes it fit"
        facts = (
            (f"smallest change that {does}", word(best.what)),
            *(("", word(line)) for line in best.lines),
            *(("", word(ratios)) for ratios in _ratios(best)),
        )
        yield NamedValues(facts=facts)
    others = [change for change in estimate.changes if change != best]
    shown = [*([best] if best else []), *others[:SHOWN_CHANGES]]
    if shown:
        good = "goodput" if estimate.has_slo else "requests/s"
        slo = "missed SLOs, then " * estimate.has_slo
        more = len(others) - SHOWN_CHANGES
        yield Table(
            caption=f"changes of one thing, by {slo}{good} per device, then request latency"
            f"{f'; {more} more in --json' * (more > 0)}",
            header=("change", "devices", "TTFT", "TPOT", f"{good}/device", "gain", ""),
            rows=tuple(map(_change_row, shown)),
        )


def _change_row(change: ServingChange) -> tuple[Cell, ...]:
    load = change.load
    misses = f"misses {', '.join(map(target_words, load.missed))}" if load.missed else ""
    wrong = [*(["falls behind"] if not load.keeps_up else []), *([misses] if misses else [])]
    sign = "-" if change.gain_ratio < 0 else "+"
    gain = f"{sign}{format_ratio(abs(change.gain_ratio))}"
    return (
        word(change.what),
        number(load.devices),
        _mean(load.ttft_s),
        _mean(load.tpot_s),
        number(load.goodput_per_device),
        Cell(text=gain, value=change.gain_ratio),
        word(", ".join(wrong)),
    )


def _mean(latency: Latency | None) -> Cell:
    return word("-") if latency is None else Cell(text=format_s(latency.mean), value=latency.mean)


def _ratios(change: ServingChange) -> Iterator[str]:
    """Yield the bands of the latency ratios to the launch, where published launches give them."""
    ratios = [
        f"{name} {format_ratio(band[0])} to {format_ratio(band[1])} of the launch's"
        for name, band in (("TTFT", change.ttft_ratio_band), ("TPOT", change.tpot_ratio_band))
        if band is not None
    ]
    if ratios:
        yield f"{', '.join(ratios)} for 80 % of published pairs of layouts"


def _listed(
    estimate: ServingHalf, other_half: ServingHalf | None = None, *, in_both: bool = False
) -> Facts:
    """Yield what is listed of a launch; of two halves what one or both have."""
    for label, name in _LISTED.items():
        theirs = getattr(other_half, name, ())
        listed = [entry for entry in getattr(estimate, name) if (entry in theirs) is in_both]
        is_a_line_each = name in ("refused_by", "notes") or not listed
        for text in listed if is_a_line_each else (shortened(listed),):
            yield label, word(text)
