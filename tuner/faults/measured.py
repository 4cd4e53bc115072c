"""What a profile measured of a node's storage.

profilers/storage.py lets all ranks write (or read) files of their own at once, so a node moves as
many times one rank's bytes as it has ranks. The largest file is taken: checkpoints are larger yet.

Not covered: whether a shared storage keeps up with more nodes than were measured; state its limit
in the spec where it does not.
"""

from typing import Literal

from profilers.records import Profile


def node_bytes_per_s(profile: Profile, *, kind: Literal["write", "read"]) -> float | None:
    """Bytes per second of one node's ranks together; None where storage was not measured."""
    machine = profile.header.machine
    rows = [row for row in profile.table("storage") if row.case.kind == kind]
    if not rows:
        return None
    largest = max(rows, key=lambda row: row.case.axes["bytes"])
    per_rank = largest.case.axes["bytes"] / largest.expected_s
    return per_rank * machine.world / machine.nodes
