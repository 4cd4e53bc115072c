"""Links and stragglers of a stored profile: `moetune profile show --links --stragglers`."""

import statistics
from typing import TYPE_CHECKING, Any, Final

from tuner.cli.text import columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from profilers.links.matrix import MeasuredLink
    from profilers.records import Profile
    from profilers.stragglers import Straggler

NOTHING_COMPARED: Final = (
    "nothing was compared: no two ranks did the same; profile with several ranks, each on cores or"
    " accelerators of its own, and --suite links"
)
MOST_LINKS: Final = 64
"""Listed one by one; nodes beyond eight have more."""


def links_text(profile: "Profile") -> str:
    """Links by class and one by one, and bandwidth under contention."""
    from profilers.links.matrix import links_of
    from profilers.stragglers import rank_names

    links = links_of(profile)
    if not links:
        return "no links were measured: profile with several ranks and --suite links"
    names = rank_names(profile)
    single_lane = [link for link in links if link.lanes == 1]
    slowest = sorted(single_lane, key=lambda link: link.bytes_per_s)[:MOST_LINKS]
    shown = {(link.sender, link.receiver) for link in slowest}
    table = columns(
        [_row(link, names) for link in single_lane if (link.sender, link.receiver) in shown],
        header=("from", "to", "latency", "bandwidth"),
    )
    if len(single_lane) > len(shown):
        table += f"\nthe {len(shown)} slowest of {len(single_lane)}; all of them: --json"
    parts = [_classes(single_lane), table, _shared(links)]
    return "\n\n".join(part for part in parts if part)


def links_json(profile: "Profile") -> list[dict[str, Any]]:
    """Return the links of a profile as JSON objects, in SI units."""
    from profilers.links.matrix import links_of

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


def stragglers_text(slow: "tuple[Straggler, ...]", *, shares_cores: bool) -> str:
    """Stragglers, worst first."""
    if shares_cores and not slow:
        return (
            "no link or node is slower than its peers beyond noise\n"
            "ranks share cores, so their own speed is not compared"
        )
    if not slow:
        return "no rank, link or node is slower than its peers beyond noise"
    rows = [
        (one.what, one.where, one.doing, f"x{one.ratio:.2f}", f"{one.p_value:.1e}") for one in slow
    ]
    return columns(rows, header=("slower", "where", "at", "time", "p"))


def _row(link: "MeasuredLink", names: "Mapping[int, str]") -> tuple[object, ...]:
    from tuner.units import format_s

    return (
        f"rank {link.sender} on {names[link.sender]}",
        f"rank {link.receiver} on {names[link.receiver]}",
        "" if link.latency_s is None else format_s(link.latency_s),
        _rate(link.bytes_per_s),
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-9:.3g} Gbit/s"


def _classes(links: "Sequence[MeasuredLink]") -> str:
    """Links inside nodes and between them: count, median and slowest of each."""
    from tuner.units import format_s

    rows = []
    for name, is_inside in (("inside nodes", True), ("between nodes", False)):
        own = [link for link in links if link.is_inside is is_inside]
        if own:
            rates = [link.bytes_per_s for link in own]
            waits = [link.latency_s for link in own if link.latency_s is not None]
            latency = format_s(statistics.median(waits)) if waits else ""
            usual, slowest = _rate(statistics.median(rates)), _rate(min(rates))
            rows.append((name, len(own), latency, usual, slowest))
    return columns(rows, header=("links", "count", "latency", "bandwidth", "slowest"))


def _shared(links: "tuple[MeasuredLink, ...]") -> str:
    from profilers.links.matrix import shared_ratio
    from tuner.units import format_ratio

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
