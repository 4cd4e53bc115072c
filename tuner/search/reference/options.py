"""Recomputation options of a layer: how much is recomputed, and in how many chunks.

`none` keeps everything. `selective/cN` recomputes dispatch, experts and combine in N chunks
(MemFine). `full/cN` recomputes the whole layer, its experts in N chunks.
"""

from dataclasses import dataclass

from profilers.steps.config import Recompute
from tuner.catalog.manifest import Capabilities
from tuner.errors import SpecError
from tuner.spec.search import Search

MEMFINE_CHUNKS = (1, 2, 4, 8)
"""The bins of the paper (arXiv 2511.21431, section 6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeOption:
    """One recomputation option for every layer of a stage."""

    recompute: Recompute
    chunks: int

    @property
    def name(self) -> str:
        """E.g. `selective/c4`."""
        if self.recompute is Recompute.NONE:
            return "none"
        return f"{self.recompute.value}/c{self.chunks}"


def options(
    *, has_experts: bool, capabilities: Capabilities, search: Search
) -> tuple[RecomputeOption, ...]:
    """List the options that the target can launch and the user allows, in a fixed order.

    Raises:
        SpecError: none is left.
    """
    levels = [
        level
        for level in Recompute
        if level in capabilities.recompute
        and (search.recompute is None or level in search.recompute)
        and (has_experts or level is not Recompute.SELECTIVE)
    ]
    largest = capabilities.largest_chunks if has_experts else 1
    chunks = sorted({count for count in search.chunks or MEMFINE_CHUNKS if count <= largest})
    allowed = tuple(
        RecomputeOption(recompute=level, chunks=count)
        for level in levels
        for count in chunks
        if count == 1 or level in capabilities.chunks_need
    )
    if not allowed:
        names = ", ".join(capabilities.names)
        raise SpecError(
            f"search: no recomputation option is left by recompute {search.recompute} and "
            f"chunks {search.chunks} on {names}; chunks above 1 need recompute, 1 always works"
        )
    return allowed
