"""Devices, links and nodes that are slower than their peers beyond noise.

Peers do equal work: the same GEMM or copy on every rank, the same message over links of one class
(inside a node, between nodes). A member is a straggler if the median of its repeats is more than
`LEAST_EFFECT_RATIO` above the median of the others' medians, and Welch's test on the logarithms of
its repeats against all the others' rejects equality at `SIGNIFICANCE` after Holm's correction for
the number of members. The others' spread counts in that test, so that on a machine whose ranks all
differ (a busy processor) no rank is named by chance.

A node is named instead of its links if more than half of the links that it sends over, or of those
that it receives over, are slow; of two peers only the direction can be named.

Where ranks share cores or accelerators, a rank's speed depends on its neighbours, so devices are
not compared.

Not covered: what is slow everywhere (`moetune profile diff` with an earlier profile shows that).
"""

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Final, Literal, TypeVar

from profilers.compare import holm, welch_p
from profilers.links.matrix import MeasuredLink, links_of
from profilers.records import Profile, Record

Member = TypeVar("Member", bound=Hashable)

LEAST_EFFECT_RATIO: Final = 0.10
SIGNIFICANCE: Final = 0.01
MOST_DEVIATIONS: Final = 4.0
"""Deviations of the peers' own spread within which a member is not named."""
FEWEST: Final = 2
"""Members of a class; one has no peers."""


class Straggler(Record):
    """A device, link or node that is slower than its peers."""

    what: Literal["device", "link", "node"]
    where: str
    """`rank 3 on host-b`, `host-a -> host-b (rank 0 -> 2)`."""
    doing: str
    """Slow work: `gemm`, `copy`, `sending`, `receiving`, `one message`."""
    ratio: float
    """Seconds over the peers' median seconds."""
    p_value: float


def stragglers(profile: Profile) -> tuple[Straggler, ...]:
    """Find stragglers, worst first; none where there are no peers."""
    names = rank_names(profile)
    lagging_members = [*_devices(profile, names), *_links(links_of(profile), names)]
    return tuple(sorted(lagging_members, key=lambda straggler: -straggler.ratio))


def has_peers(profile: Profile) -> bool:
    """Return whether anything was compared: two members with the same work and several repeats."""
    links = links_of(profile)
    sent = [_messages(_peers(links, is_inside=is_inside)) for is_inside in (False, True)]
    repeats = [
        *(times_s.values() for times_s in _work(profile).values()),
        *(times_s.values() for times_s in sent),
    ]
    return any(sum(len(times_s) > 1 for times_s in peers) >= FEWEST for peers in repeats)


def lagging(
    times_s: Mapping[Member, Sequence[float]],
) -> dict[Member, tuple[float, float]]:
    """Stragglers among members with the same work: ratio to the peers, and p-value."""
    if len(times_s) < FEWEST:
        return {}
    medians = {member: statistics.median(repeats) for member, repeats in times_s.items()}
    ratios, raw = {}, []
    for member, repeats in times_s.items():
        others = [medians[peer] for peer in times_s if peer != member]
        ratios[member] = medians[member] / statistics.median(others)
        raw.append(_p_value(repeats, [times_s[peer] for peer in times_s if peer != member]))
    p_values = holm(raw)
    return {
        member: (ratios[member], p_value)
        for member, p_value in zip(times_s, p_values, strict=True)
        if ratios[member] > 1.0 + LEAST_EFFECT_RATIO and p_value < SIGNIFICANCE
    }


def _p_value(repeats: Sequence[float], others: Sequence[Sequence[float]]) -> float:
    """Return the p-value of a member against its peers; several peers' medians add their spread."""
    pooled = [time_s for times_s in others for time_s in times_s]
    p_value = welch_p(pooled, repeats)
    if len(others) < FEWEST + 1:
        return p_value
    logs = [math.log(max(statistics.median(times_s), 1e-12)) for times_s in others]
    middle = statistics.median(logs)
    # For normal noise the standard deviation is 1.4826 median absolute deviations.
    spread = 1.4826 * statistics.median(abs(log - middle) for log in logs)
    away = math.log(statistics.median(repeats)) - middle
    return 1.0 if away <= MOST_DEVIATIONS * spread else p_value


def _work(profile: Profile) -> dict[str, dict[int, Sequence[float]]]:
    """Repeats by kind of work and rank; empty if ranks share cores or accelerators."""
    by_kind: dict[str, dict[int, Sequence[float]]] = {}
    if not profile.header.machine.oversubscribed:
        for row in profile.rows("every_rank"):
            by_kind.setdefault(row.case.kind, {})[row.rank] = row.times_s
    return by_kind


def _devices(profile: Profile, names: Mapping[int, str]) -> Iterator[Straggler]:
    for kind, times_s in _work(profile).items():
        for rank, (ratio, p_value) in lagging(times_s).items():
            yield Straggler(
                what="device",
                where=f"rank {rank} on {names[rank]}",
                doing=kind,
                ratio=ratio,
                p_value=p_value,
            )


def _links(links: Sequence[MeasuredLink], names: Mapping[int, str]) -> Iterator[Straggler]:
    for is_inside in (False, True):
        peers = _peers(links, is_inside=is_inside)
        times_s = _messages(peers)
        slow = lagging(times_s)
        explained: set[tuple[int, int]] = set()
        if not is_inside:
            for node, its_links in _slow_nodes(peers, slow, names):
                explained |= its_links
                yield node
        for (sender, receiver), (ratio, p_value) in slow.items():
            if (sender, receiver) not in explained:
                where = f"{names[sender]} -> {names[receiver]} (rank {sender} -> {receiver})"
                yield Straggler(
                    what="link", where=where, doing="one message", ratio=ratio, p_value=p_value
                )


def _peers(links: Sequence[MeasuredLink], *, is_inside: bool) -> list[MeasuredLink]:
    return [link for link in links if link.is_inside is is_inside and link.lanes == 1]


def _messages(peers: Sequence[MeasuredLink]) -> dict[tuple[int, int], Sequence[float]]:
    """Repeats of the largest message that most of the peers were sent, by pair."""
    sizes = Counter(row.case.axes["bytes"] for link in peers for row in link.rows)
    if not sizes:
        return {}
    highest_count = max(sizes.values())
    largest = max(size for size, count in sizes.items() if count == highest_count)
    return {
        (link.sender, link.receiver): row.times_s
        for link in peers
        for row in link.rows
        if row.case.axes["bytes"] == largest
    }


def _slow_nodes(
    peers: Sequence[MeasuredLink],
    slow: Mapping[tuple[int, int], tuple[float, float]],
    names: Mapping[int, str],
) -> Iterator[tuple[Straggler, set[tuple[int, int]]]]:
    """Nodes that explain most of their links' lag, those with most lag first."""
    left = set(slow)
    for doing, side in (("sending", 0), ("receiving", 1)):
        for rank in sorted({(link.sender, link.receiver)[side] for link in peers}):
            node_links = {
                (link.sender, link.receiver)
                for link in peers
                if (link.sender, link.receiver)[side] == rank
            }
            lag = node_links & left
            if 2 * len(lag) > len(node_links):
                left -= lag
                yield (
                    Straggler(
                        what="node",
                        where=names[rank],
                        doing=doing,
                        ratio=statistics.median(slow[pair][0] for pair in lag),
                        p_value=max(slow[pair][1] for pair in lag),
                    ),
                    lag,
                )


def rank_names(profile: Profile) -> dict[int, str]:
    """The name of each rank's host; hosts of one name are distinguished by their node number."""
    machine = profile.header.machine
    hosts = machine.hosts or (machine.hostname,) * machine.world
    per_node = max(machine.ranks_per_node, 1)
    nodes_of: dict[str, set[int]] = {}
    for rank, host in enumerate(hosts):
        nodes_of.setdefault(host, set()).add(rank // per_node)
    return {
        rank: host if len(nodes_of[host]) == 1 else f"{host} (node {rank // per_node})"
        for rank, host in enumerate(hosts)
    }
