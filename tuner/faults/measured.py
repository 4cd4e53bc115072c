"""Storage, host memory and network of a node, from a profile.

In profilers/storage.py all ranks write (or read) their own files at once, so a node's bandwidth is
the slowest rank's times the ranks per node. The largest file counts, since checkpoints are larger
still.

Not covered: whether a shared storage keeps up with more nodes than were measured; state its limit
in the spec where it does not.
"""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from profilers.records import Profile

LEAST_MEMORY_BYTES: Final = 2**26
"""Smallest measured size of host memory that counts; smaller rows are ignored."""


def node_bytes_per_s(profile: Profile, *, kind: Literal["write", "read"]) -> float | None:
    """Bytes per second of one node's ranks together; None where storage was not measured."""
    machine, slowest = profile.header.machine, _slowest(profile, "storage", kind=kind)
    if slowest is None:
        return None
    # A checkpoint is there once the last rank has written its own.
    return slowest.num_bytes / slowest.seconds * machine.world / machine.nodes


def load_bytes_per_s(profile: Profile, *, ranks: int) -> float | None:
    """Bytes per second of checkpoint that so many ranks of one node load; None: not measured.

    Every rank loads its own share, by a thread of its own.
    """
    slowest = _slowest(profile, "checkpoint_load", kind="distributed")
    return None if slowest is None else slowest.num_bytes / slowest.seconds * ranks


def sent_bytes_per_s(profile: Profile) -> float | None:
    """Bytes per second that one node's ranks send to others at once; None: not measured.

    Of groups of ranks that each lie on a node of their own (`send_recv` of profilers/links), the
    slowest at the largest size.
    """
    machine = profile.header.machine
    local = machine.world // machine.nodes
    rows = [
        row
        for row in profile.rows("collective")
        if row.case.kind == "send_recv" and row.times_s and row.case.axes["stride"] >= local
    ]
    if machine.nodes < 2 or not rows:
        return None
    largest = max(row.case.axes["bytes"] for row in rows)
    seconds = max(row.median_s for row in rows if row.case.axes["bytes"] == largest)
    return local * largest / seconds


def host_memory_rates(profile: Profile) -> Mapping[str, float]:
    """Bytes per second by kind (profilers/host_memory.py), of the slowest rank at the largest size.

    Kinds that were not measured at sizes beyond a processor's caches are left out.
    """
    kinds = dict.fromkeys(row.case.kind for row in profile.rows("host_memory"))
    slowest = {kind: _slowest(profile, "host_memory", kind=kind) for kind in kinds}
    return {
        kind: rank.num_bytes / rank.seconds
        for kind, rank in slowest.items()
        if rank is not None and rank.num_bytes >= LEAST_MEMORY_BYTES
    }


class _Slowest(NamedTuple):
    """The slowest rank at the largest size that was measured."""

    num_bytes: int
    seconds: float


def _slowest(profile: Profile, operation: str, *, kind: str) -> _Slowest | None:
    rows = [row for row in profile.rows(operation) if row.case.kind == kind and row.times_s]
    if not rows:
        return None
    largest = max(row.case.axes["bytes"] for row in rows)
    seconds = max(row.median_s for row in rows if row.case.axes["bytes"] == largest)
    return _Slowest(num_bytes=largest, seconds=seconds)
