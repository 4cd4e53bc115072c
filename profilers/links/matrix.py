"""The measured links: between nodes, inside them, and with side-by-side traffic.

Of the `link` table, per ordered pair of ranks:

    latency    half the shortest round trip of 8 bytes: that of the wire; the longer ones include
               how busy the hosts were
    bandwidth  bytes of the largest message / (its median seconds - one round trip)

The bandwidth is that of the largest message, because smaller ones are still paced by the ramp of a
connection. A message without bytes has no bandwidth and is left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from profilers.records import Measurement, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """One direction of one pair of ranks."""

    sender: int
    receiver: int
    sender_node: int
    receiver_node: int
    lanes: int
    """Pairs of the same two nodes that sent at the same time."""
    bytes_per_s: float
    """Bandwidth of this pair only, whatever its neighbours got."""
    latency_s: float | None
    """Latency of the link; None if no round trip was timed."""
    rows: tuple[Measurement, ...]
    """One-way messages by size."""

    @property
    def is_inside(self) -> bool:
        """Return whether both ranks share a node."""
        return self.sender_node == self.receiver_node


def links_of(profile: Profile) -> tuple[MeasuredLink, ...]:
    """Every measured direction, by lanes, then sender, then receiver."""
    per_node = max(profile.header.machine.ranks_per_node, 1)
    trips: dict[tuple[int, int], float] = {}
    messages: dict[tuple[int, int, int], list[Measurement]] = {}
    for row in profile.rows("link"):
        axes = row.case.axes
        pair = axes["sender"], axes["receiver"]
        if row.case.kind == "round_trip":
            trips[pair] = min(row.times_s)
        elif axes["bytes"] > 0:
            messages.setdefault((axes["lanes"], *pair), []).append(row)
    return tuple(_links(messages, trips, per_node=per_node))


def _links(
    messages: Mapping[tuple[int, int, int], list[Measurement]],
    trips: Mapping[tuple[int, int], float],
    *,
    per_node: int,
) -> Iterator[MeasuredLink]:
    for (lanes, sender, receiver), rows in sorted(messages.items()):
        rows.sort(key=lambda row: row.case.axes["bytes"])
        trip_s = trips.get((sender, receiver)) or trips.get((receiver, sender))
        # A message that is all latency still has a bandwidth of its bytes over its time.
        largest = rows[-1]
        moving_s = max(largest.median_s - (trip_s or 0.0), 0.1 * largest.median_s)
        yield MeasuredLink(
            sender=sender,
            receiver=receiver,
            sender_node=sender // per_node,
            receiver_node=receiver // per_node,
            lanes=lanes,
            bytes_per_s=float(largest.case.axes["bytes"]) / moving_s,
            latency_s=None if trip_s is None else trip_s / 2.0,
            rows=tuple(rows),
        )


def shared_ratio(links: tuple[MeasuredLink, ...]) -> float | None:
    """The share of its isolated bandwidth that a pair gets while all lanes send; None: unknown.

    1 if every lane has a NIC of its own, 1 / lanes if all share one.
    """
    isolated = {
        (link.sender_node, link.receiver_node): link.bytes_per_s
        for link in links
        if link.lanes == 1 and not link.is_inside
    }
    crowded = [
        link.bytes_per_s / isolated[key]
        for link in links
        if link.lanes > 1 and (key := (link.sender_node, link.receiver_node)) in isolated
    ]
    return sum(crowded) / len(crowded) if crowded else None
