"""An expert placement: which expert is in each slot."""

from typing import Annotated

from pydantic import Field, model_validator

from profilers.records import Record
from profilers.steps.config import Count, Size


class PlaceDecision(Record):
    """Logical expert in each slot of each MoE layer."""

    physical_to_logical: Annotated[tuple[tuple[Size, ...], ...], Field(min_length=1)]
    """[MoE layers in `layer_ids` order][slots], rank by rank."""
    layer_ids: Annotated[tuple[Size, ...], Field(min_length=1)]
    """Absolute decoder layers, ascending."""
    num_experts: Count
    """Logical experts of a layer."""
    num_layers: Count | None = None
    """All decoder layers of the model, from the model or the recordings; None: unknown."""
    ranks: Count
    ranks_per_node: Count
    slots_per_rank: Annotated[tuple[Count, ...], Field(min_length=1)]
    """Expert slots of each rank in one layer, by rank."""

    @property
    def num_slots(self) -> int:
        """Slots of one layer."""
        return sum(self.slots_per_rank)

    @property
    def redundant_experts(self) -> int:
        """Slots beyond one per expert."""
        return self.num_slots - self.num_experts

    @property
    def num_devices(self) -> int:
        """Ranks of the decision."""
        return self.ranks

    @model_validator(mode="after")
    def _consistent(self) -> "PlaceDecision":
        if len(self.slots_per_rank) != self.ranks:
            raise ValueError(f"{self.ranks} ranks, slots of {len(self.slots_per_rank)}")
        if len(self.layer_ids) != len(self.physical_to_logical):
            raise ValueError(f"{len(self.layer_ids)} layers, {len(self.physical_to_logical)} rows")
        if list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError("layer_ids must ascend")
        if self.num_layers is not None and self.layer_ids[-1] >= self.num_layers:
            raise ValueError(f"layer {self.layer_ids[-1]} of a model of {self.num_layers}")
        for layer, row in zip(self.layer_ids, self.physical_to_logical, strict=True):
            if len(row) != self.num_slots:
                raise ValueError(f"layer {layer}: {len(row)} entries for {self.num_slots} slots")
            if set(row) != set(range(self.num_experts)):
                raise ValueError(f"layer {layer}: not every expert 0..{self.num_experts - 1} once")
        return self
