"""Recorded routing: which experts the tokens of a model went to, layer by layer.

A JSON file of the project's own layout:

    model, domain           optional texts
    num_logical_experts     experts of a layer, E
    top_k                   optional; experts that a token goes to
    layer_ids               absolute indices of the recorded layers, L of them, ascending
    logical_count           [L][E] token-expert pairs
    passes                  optional [P][L][E], the same pass by pass in order of time

Further keys (transitions and the like) are ignored here. Counts become shares of their layer, so
recordings of different length compare.
"""

from typing import Annotated

from pydantic import Field

from profilers.records import Record
from tuner.spec.goal import Phase

Ratio = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
LoadRatios = tuple[tuple[Ratio, ...], ...]
"""[recorded layers][experts]; each row sums to 1."""


class RoutingRecord(Record):
    """Shares of a layer's token copies by expert."""

    name: str
    """Model and domain as the file states them, or the file's name."""
    num_experts: Annotated[int, Field(ge=1)]
    top_k: Annotated[int, Field(ge=1)] | None = None
    layer_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    """Absolute layer indices, ascending; not every MoE layer need be recorded."""
    load_ratios: LoadRatios
    """Over the whole recording."""
    passes: tuple[LoadRatios, ...] = ()
    """Pass by pass in order of time; empty when the file holds totals only."""

    def of_phase(self, phase: Phase) -> LoadRatios:
        """Mean shares over the passes of a phase; the whole recording when it has no passes."""
        if not self.passes:
            return self.load_ratios
        if phase is Phase.EARLY:
            chosen = self.passes[: max(1, len(self.passes) // 4)]
        else:
            chosen = self.passes[len(self.passes) // 2 :]
        return tuple(
            tuple(sum(shares) / len(chosen) for shares in zip(*rows, strict=True))
            for rows in zip(*chosen, strict=True)
        )
