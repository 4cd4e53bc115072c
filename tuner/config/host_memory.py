"""Memory that a job takes of the hosts of its devices, by what takes it, and in words."""

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field

from profilers.records import Record
from tuner.units import format_bytes

Size = Annotated[int, Field(ge=0)]

STATED_AS: Final = "cluster.pools[].host: {memory, reserve}"
"""The keys by which a spec states what a machine has."""

COPIES: Final = "copies of checkpoints"
RENAMED: Final = (
    "goal.reliability.checkpoint.host_memory is an older name, which bounds copies of checkpoints"
    f" alone; state {STATED_AS}, which bounds all that a node's memory holds"
)
"""Note on a spec that has the older name."""


class HostMemory(Record):
    """Memory that a job takes of a machine beside that of its devices."""

    parts: dict[str, Size]
    """Bytes of the machine that needs most, by what takes them."""
    limit_bytes: Size | None = None
    """Bytes of a machine that a job may take; absent: not known."""

    @property
    def node_bytes(self) -> int:
        """All that it takes of one machine."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """No more than the limit is taken, as far as the limit is known."""
        return self.limit_bytes is None or self.node_bytes <= self.limit_bytes

    @property
    def words(self) -> str:
        """Bytes that the job takes, by part, and the limit, in words."""
        listed = ", ".join(f"{what} {format_bytes(size)}" for what, size in self.parts.items())
        needed = f"{format_bytes(self.node_bytes)} a node ({listed})"
        if self.limit_bytes is None:
            return f"{needed}; not checked: state {STATED_AS}"
        return f"{needed} of {format_bytes(self.limit_bytes)} that may be used"


def host_memory(parts: Mapping[str, float], *, limit_bytes: float | None) -> HostMemory | None:
    """Return what a job takes of a machine; None where it takes nothing."""
    taken = {what: round(size) for what, size in parts.items() if round(size)}
    if not taken:
        return None
    limit = None if limit_bytes is None else int(limit_bytes)
    return HostMemory(parts=taken, limit_bytes=limit)
