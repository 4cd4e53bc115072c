"""Stored profiles, their differences, links and stragglers, and recordings, as text for people."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from profilers.compare import CaseVerdict
from profilers.links.matrix import MeasuredLink, links_of, shared_ratio
from profilers.records import Profile, ProfileHeader, TableInfo
from profilers.stragglers import Straggler, rank_names
from tuner.cli.printed import ProfileDiff, ShownRecording
from tuner.cli.text import whole_text
from tuner.report.content import Paragraph, Table, words_table
from tuner.report.terminal import WIDEST
from tuner.units import format_bytes, format_ratio, format_s

NOTHING_COMPARED: Final = (
    "nothing was compared: no two ranks did the same; profile with several ranks, each on cores or"
    " accelerators of its own, and --suite links"
)
MOST_LINKS: Final = 64
"""Listed one by one; nodes beyond eight have more."""


def summary_text(header: ProfileHeader) -> str:
    """Summarise what was measured, where, and how completely."""
    machine = header.machine
    where = machine.hostname if machine.nodes == 1 else f"each of {machine.nodes} nodes"
    shared = "more ranks than cores or accelerators: latencies are not a cluster's"
    errors = "interpolation: error on random held-out sizes, median / P90"
    rows = [
        (
            name,
            info.rows,
            format_s(info.seconds),
            _between(info),
            "" if info.complete else "incomplete",
            info.note,
        )
        for name, info in header.tables.items()
    ]
    titles = ("table", "rows", "took", "interpolation", "", "note")
    return whole_text(
        Paragraph(
            text=f"{machine.num_devices} x {machine.device} on {where}, "
            f"{format_bytes(machine.memory_bytes_per_device)} each, {machine.world} ranks, "
            f"measured {header.created}"
        ),
        Paragraph(text=shared) if machine.oversubscribed else None,
        words_table("", titles, rows) if rows else None,
        Paragraph(text=errors) if any(table.checked for table in header.tables.values()) else None,
    )


def _between(info: TableInfo) -> str:
    """The table's interpolation error on held-out sizes."""
    checked = info.checked
    if checked is None:
        return ""
    return (
        f"{format_ratio(checked.median_ratio)} / {format_ratio(checked.p90_ratio)} of"
        f" {checked.sizes}"
    )


def profile_text(profile: Profile) -> str:
    """Summarise a profile, and list the median of every case."""
    rows = [
        (
            row.case.id,
            row.rank,
            format_s(row.median_s) if row.times_s else row.status.value,
            len(row.times_s),
        )
        for row in profile.measurements
    ]
    medians = words_table("", ("case", "rank", "median", "repeats"), rows) if rows else None
    return f"{summary_text(profile.header)}\n\n{whole_text(medians, width=WIDEST)}".rstrip()


def diff_text(result: ProfileDiff) -> str:
    """List the cases that changed, and count the verdicts."""
    rows = [
        (
            difference.case.id,
            difference.verdict.value.replace("_", " "),
            "" if difference.first_s is None else format_s(difference.first_s),
            "" if difference.second_s is None else format_s(difference.second_s),
            "" if difference.ratio is None else f"x{difference.ratio:.2f}",
        )
        for difference in result.differences
        if difference.verdict is not CaseVerdict.SAME
    ]
    differing = "; ".join(result.differing)
    counts = (f"{count} {name.replace('_', ' ')}" for name, count in result.counts.items())
    return whole_text(
        Paragraph(text=f"not the same machine: {differing}") if differing else None,
        words_table("", ("case", "verdict", "first", "second", "ratio"), rows) if rows else None,
        Paragraph(text=", ".join(counts)),
        width=WIDEST,
    )


def recording_text(shown: ShownRecording) -> str:
    """Describe a recording, with the skew of its layers."""
    named = " ".join(part for part in (shown.model, shown.workload) if part) or "routing"
    kept = {
        f"transitions ({shown.transitions})": shown.transitions,
        "sampled tokens": shown.sampled_tokens,
    }
    lines = (
        f"{named}: {len(shown.layer_ids)} MoE layers x {shown.num_experts} experts, top"
        f" {shown.top_k or '?'}, {shown.passes} passes, {shown.token_copies} token copies",
        " ".join(part for part in (shown.origin, shown.created) if part),
        f"most-loaded expert over mean: {shown.skew.median:.2f} in the median layer,"
        f" {shown.skew.worst:.2f} in the worst; per pass {shown.skew.pass_median:.2f}, P99"
        f" {shown.skew.pass_p99:.2f}",
        f"also kept: {', '.join(name for name, value in kept.items() if value) or 'nothing'}",
    )
    return "\n".join(line for line in lines if line)


def links_text(profile: Profile) -> str:
    """Links by class and one by one, and bandwidth under contention."""
    links = links_of(profile)
    if not links:
        return "no links were measured: profile with several ranks and --suite links"
    names = rank_names(profile)
    single_lane = [link for link in links if link.lanes == 1]
    slowest = sorted(single_lane, key=lambda link: link.bytes_per_s)[:MOST_LINKS]
    shown = {(link.sender, link.receiver) for link in slowest}
    rows = [_row(link, names) for link in single_lane if (link.sender, link.receiver) in shown]
    more = f"the {len(shown)} slowest of {len(single_lane)}; all of them: --json"
    contended = _shared(links)
    return whole_text(
        _classes(single_lane),
        words_table("", ("from", "to", "latency", "bandwidth"), rows),
        Paragraph(text=more) if len(single_lane) > len(shown) else None,
        Paragraph(text=contended) if contended else None,
    )


def links_json(profile: Profile) -> list[dict[str, Any]]:
    """Return the links of a profile as JSON objects, in SI units."""
    return [
        {
            "sender": link.sender,
            "receiver": link.receiver,
            "sender_node": link.sender_node,
            "receiver_node": link.receiver_node,
            "lanes": link.lanes,
            "bytes_per_s": link.bytes_per_s,
            "latency_s": link.latency_s,
        }
        for link in links_of(profile)
    ]


def stragglers_text(slow: tuple[Straggler, ...], *, shares_cores: bool) -> str:
    """Stragglers, worst first."""
    if shares_cores and not slow:
        return (
            "no link or node is slower than its peers beyond noise\n"
            "ranks share cores, so their own speed is not compared"
        )
    if not slow:
        return "no rank, link or node is slower than its peers beyond noise"
    rows = [
        (
            straggler.what,
            straggler.where,
            straggler.doing,
            f"x{straggler.ratio:.2f}",
            f"{straggler.p_value:.1e}",
        )
        for straggler in slow
    ]
    return whole_text(words_table("", ("slower", "where", "at", "time", "p"), rows))


def _row(link: MeasuredLink, names: Mapping[int, str]) -> tuple[object, ...]:

    return (
        f"rank {link.sender} on {names[link.sender]}",
        f"rank {link.receiver} on {names[link.receiver]}",
        "" if link.latency_s is None else format_s(link.latency_s),
        _rate(link.bytes_per_s),
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-9:.3g} Gbit/s"


def _classes(links: Sequence[MeasuredLink]) -> Table:
    """Links inside nodes and between them: count, median and slowest of each."""
    rows = []
    for name, is_inside in (("inside nodes", True), ("between nodes", False)):
        class_links = [link for link in links if link.is_inside is is_inside]
        if class_links:
            rates = [link.bytes_per_s for link in class_links]
            waits = [link.latency_s for link in class_links if link.latency_s is not None]
            latency = format_s(statistics.median(waits)) if waits else ""
            usual, slowest = _rate(statistics.median(rates)), _rate(min(rates))
            rows.append((name, len(class_links), latency, usual, slowest))
    return words_table("", ("links", "count", "latency", "bandwidth", "slowest"), rows)


def _shared(links: tuple[MeasuredLink, ...]) -> str:

    shared = shared_ratio(links)
    lanes = max(link.lanes for link in links)
    if shared is None or lanes < 2:
        return ""
    # The geometric mean of full bandwidth and a fair share of one NIC.
    says = "each pair has its own NIC" if shared > lanes**-0.5 else "the pairs share a NIC"
    return (
        f"{lanes} concurrent pairs between two nodes get {format_ratio(shared, digits=0)} of a"
        f" single pair's: {says}"
    )
