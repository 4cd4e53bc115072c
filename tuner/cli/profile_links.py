"""What `moetune profile show` says of links and of who lags: `--links`, `--stragglers`."""

from typing import TYPE_CHECKING, Any

from tuner.cli.text import columns

if TYPE_CHECKING:
    from profilers.links.matrix import Link
    from profilers.records import Profile
    from profilers.stragglers import Straggler


def links_text(profile: "Profile") -> str:
    """Every direction with its latency, bandwidth and line; and what lanes side by side get."""
    from profilers.links.matrix import links_of, shared_ratio

    links = links_of(profile)
    if not links:
        return "no links were measured: profile with several ranks and --suite links"
    table = columns(
        [_row(link) for link in links],
        header=("from", "to", "lanes", "latency", "bandwidth", "line", "off by", "holds for"),
    )
    shared = shared_ratio(links)
    if shared is None:
        return table
    return f"{table}\n\nside by side a pair of ranks gets {shared:.0%} of what it gets alone"


def links_json(profile: "Profile") -> list[dict[str, Any]]:
    """The same as objects, in SI units."""
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
            "residual_ratio": link.fit.residual_ratio if link.fit else None,
        }
        for link in links_of(profile)
    ]


def stragglers_text(found: "tuple[Straggler, ...]") -> str:
    """Who lags, worst first."""
    if not found:
        return "nobody is slower than its peers beyond noise"
    rows = [
        (one.what, one.where, one.doing, f"x{one.ratio:.2f}", f"{one.p_value:.1e}") for one in found
    ]
    return columns(rows, header=("slower", "where", "at", "time", "p"))


def _row(link: "Link") -> tuple[object, ...]:
    from tuner.units import format_bytes, format_s

    fit = link.fit
    return (
        f"rank {link.sender} (node {link.sender_node})",
        f"rank {link.receiver} (node {link.receiver_node})",
        link.lanes,
        "" if link.latency_s is None else format_s(link.latency_s),
        f"{link.bytes_per_s * 8e-9:.3g} Gbit/s",
        "" if fit is None else f"{format_s(fit.latency_s)} + {fit.bytes_per_s * 8e-9:.3g} Gbit/s",
        "" if fit is None else f"{fit.residual_ratio:.0%}",
        ""
        if fit is None
        else f"{format_bytes(fit.lines[0].smallest_bytes)} to {format_bytes(fit.largest_bytes)}",
    )
