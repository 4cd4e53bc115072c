"""`moetune estimate` where the goal is to serve: latency first, then what to change."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap

import typer

from tuner.cli.serve_text import group_text
from tuner.cli.text import columns, print_exact, print_text
from tuner.estimate.serving.records import ServingChange, ServingEstimate, ServingLoad
from tuner.serve_plan import Latency
from tuner.units import format_bytes, format_ratio, format_s

SHOWN_CHANGES = 6
LINE_WIDTH = 100


def estimate_serving(
    spec: Path,
    *,
    launch: str,
    format_name: str | None,
    profiles: Sequence[Path],
    pool: str | None,
    instances: int | None,
    role: str | None,
    as_json: bool,
) -> None:
    """Price a server's launch and print it."""
    from tuner import api
    from tuner.cli.progress import planning
    from tuner.planner.progress import Told

    with planning() as watch:
        watch(Told(stage="pricing", text="the launch, and changes of one thing"))
        found = api.estimate_serving(
            spec,
            launch=launch,
            format_name=format_name,
            profiles=profiles,
            pool=pool,
            instances=instances,
            role=role,
        )
    if as_json:
        print_exact(found.model_dump_json(indent=2))
    else:
        print_text(serving_estimate_text(found))
    if found.load is None or not found.load.keeps_up:
        raise typer.Exit(1)


def serving_estimate_text(found: ServingEstimate) -> str:
    """Say what the launch does and what would beat it."""
    return "\n".join(
        [
            *_what(found),
            "",
            *(_load(found, found.load) if found.load else ()),
            *_memory(found),
            "",
            *_changes(found),
            "",
            *_listed(found),
        ]
    )


def _what(found: ServingEstimate) -> Iterator[str]:
    yield f"{found.source}: {found.model} with {found.engine} {found.release} on {found.device}"
    yield group_text(found.instance)
    yield (f"{found.quantization} weights, {found.kv_cache_dtype} cache, {found.kernels} kernels")


def _load(found: ServingEstimate, load: ServingLoad) -> Iterator[str]:
    for name, value, band in (
        ("ttft", load.ttft_s, found.ttft_s_band),
        ("tpot", load.tpot_s, found.tpot_s_band),
    ):
        if value is not None and band is not None:
            yield (
                f"{name:<15}{_latency(value)} (mean between {format_s(band[0])} and"
                f" {format_s(band[1])})"
            )
    answers = f" {load.output_tokens_per_s:.0f} output tokens/s," * (load.tpot_s is not None)
    yield (
        f"load           {load.requests_per_s:.4g} requests/s of {load.capacity_per_s:.4g} at most,"
        f"{answers} {load.goodput_per_device:.4g} good requests/s a device"
    )
    if load.missed:
        yield f"MISSES         {', '.join(load.missed)}"
    if not load.keeps_up:
        yield (
            "FALLS BEHIND   the traffic; latencies grow for as long as it lasts,"
            f" {found.instances_needed} instances would serve it"
        )


def _latency(value: Latency) -> str:
    parts = (f"{kind} {format_s(getattr(value, kind))}" for kind in ("mean", "p50", "p90", "p99"))
    return ", ".join(parts)


def _memory(found: ServingEstimate) -> Iterator[str]:
    own = found.memory
    total = own.weight_bytes + own.cache_bytes + own.reserve_bytes
    yield (
        f"memory         {format_bytes(own.weight_bytes)} weights, {format_bytes(own.cache_bytes)}"
        f" cache, {format_bytes(own.reserve_bytes)} reserve: {format_bytes(total)} of"
        f" {format_bytes(own.device_bytes)} a device"
    )
    yield f"KV cache       {found.kv_tokens} tokens an instance"
    if not found.fits:
        yield from _wrapped("DOES NOT FIT   ", found.misfit)


def _changes(found: ServingEstimate) -> Iterator[str]:
    best = found.smallest_change
    if best is None:
        yield (
            f"smallest change that beats it: none of {found.num_tried} changes of one thing does"
            if found.fits
            else "no change of one thing makes it fit; ask moetune plan"
        )
    else:
        beats = "beats it" if found.fits else "makes it fit"
        yield f"smallest change that {beats}: {best.what}"
        yield f"    {_brief(best)}"
        yield from _ratios(best)
        yield from (f"    {line}" for line in best.lines)
    yield "judged by missed targets, then good requests/s a device, then the length of requests"
    others = [change for change in found.changes if change is not best and change != best]
    if others:
        yield "other changes of one thing"
        rows = [(f"  {change.what}", *_cells(change)) for change in others[:SHOWN_CHANGES]]
        yield columns(rows, header=("  change", "devices", "ttft", "tpot", "good/s a device", ""))
        if len(others) > SHOWN_CHANGES:
            yield f"  and {len(others) - SHOWN_CHANGES} more in --json"


def _ratios(change: ServingChange) -> Iterator[str]:
    """Say how the latencies stand to the launch's, as far as published launches tell."""
    told = [
        f"{name} {format_ratio(band[0])} to {format_ratio(band[1])} of the launch's"
        for name, band in (("ttft", change.ttft_ratio_band), ("tpot", change.tpot_ratio_band))
        if band is not None
    ]
    if told:
        yield f"    {', '.join(told)} in four of five published pairs of layouts"


def _brief(change: ServingChange) -> str:
    devices, first, each, good, missed = _cells(change)
    return (
        f"{devices} devices, ttft {first}, tpot {each}, {good} good requests/s a device"
        f"{', ' * bool(missed)}{missed}"
    )


def _cells(change: ServingChange) -> tuple[str, str, str, str, str]:
    load = change.load
    return (
        str(load.devices),
        "-" if load.ttft_s is None else format_s(load.ttft_s.mean),
        "-" if load.tpot_s is None else format_s(load.tpot_s.mean),
        f"{load.goodput_per_device:.4g} ({_signed(change.gain_ratio)})",
        ", ".join((*("falls behind" for _ in range(not load.keeps_up)), *_missed(load))),
    )


def _missed(load: ServingLoad) -> Iterator[str]:
    if load.missed:
        yield f"misses {', '.join(load.missed)}"


def _signed(ratio: float) -> str:
    return f"{'-' if ratio < 0 else '+'}{format_ratio(abs(ratio))}"


def _listed(found: ServingEstimate) -> Iterator[str]:
    for refusal in found.refused_by:
        yield from _wrapped("manifest       ", refusal)
    if found.flags_unpriced:
        yield from _wrapped("without price  ", ", ".join(found.flags_unpriced))
    if found.flags_timeless:
        yield from _wrapped("no effect      ", ", ".join(found.flags_timeless))
    if found.flags_ignored:
        yield from _wrapped("ignored        ", ", ".join(found.flags_ignored))
    for note in found.notes:
        yield from _wrapped("note           ", note)


def _wrapped(label: str, text: str) -> Iterator[str]:
    yield from wrap(
        text,
        LINE_WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
