"""Workload that is priced: a model on a batch, split by parallel degrees, with its expert loads.

Letters: E experts, L MoE layers.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from profilers.steps.config import LayerKind
from profilers.steps.loads import forced_copies
from tuner.config.microbatches import most_microbatches
from tuner.costs.reference.training import LayerTraining, layer_trainings
from tuner.spec.model import ModelSpec
from tuner.spec.tune import Adapters

ZeroStage = Literal[0, 1, 2, 3]

ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
"""Bytes of one element by precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDegrees:
    """Parallel degrees of a step; the ranks of a stage are data * tensor, tensor fastest."""

    tensor: int
    pipeline: int
    virtual_pipeline: int
    data: int
    expert: int
    micro_batch_size: int
    zero_stage: ZeroStage
    ranks_per_node: int | None = None
    """Consecutive ranks of a node, to which hierarchical dispatch sends a token once; None: flat
    dispatch."""

    @property
    def ranks_per_stage(self) -> int:
        """Devices that share the layers of one stage."""
        return self.tensor * self.data

    @property
    def expert_data(self) -> int:
        """Devices of a stage that hold the same experts."""
        return self.ranks_per_stage // self.expert

    @property
    def world(self) -> int:
        """Devices in all."""
        return self.ranks_per_stage * self.pipeline

    @property
    def num_stages(self) -> int:
        """Stages in execution order, model chunks of interleaving counted."""
        return self.pipeline * self.virtual_pipeline


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, a batch and the loads of its experts."""

    model: ModelSpec
    sequence_length: int
    global_batch_size: int
    precision: str
    load_ratio: tuple[tuple[float, ...], ...] = ()
    """[L][E], rows sum to 1; empty means balanced."""
    tune: Adapters | None = None
    """Adapters that are trained; None: all weights."""
    synchronizes_every_microbatch: bool = False
    """Whether, without a pipeline, every micro-batch gathers parameters and reduces gradients, as
    the engine's manifest says (tuner/catalog/manifest.py)."""
    ragged_experts: bool = False
    """Whether experts multiply rows as they fall, not in whole blocks, as the engine's manifest
    says."""

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation element."""
        return ELEMENT_BYTES[self.precision]

    @cached_property
    def copies_LE(self) -> tuple[tuple[int, ...], ...]:
        """Token copies of one sequence that each expert of each MoE layer receives."""
        moe = self.model.moe
        if moe is None:
            return ()
        uniform = (1.0 / moe.num_experts,) * moe.num_experts
        rows = self.load_ratio or (uniform,) * self.model.num_moe_layers
        by_row = {
            row: forced_copies(row, tokens=self.sequence_length, top_k=moe.top_k)
            for row in set(rows)
        }
        return tuple(by_row[row] for row in rows)

    @cached_property
    def moe_index(self) -> tuple[int | None, ...]:
        """Return each layer's place among the MoE layers; None for other layers."""
        index = -1
        indices: list[int | None] = []
        for kind in self.model.layers:
            index += kind is LayerKind.MOE
            indices.append(index if kind is LayerKind.MOE else None)
        return tuple(indices)

    @cached_property
    def trainings(self) -> tuple[LayerTraining, ...]:
        """Return what each layer trains."""
        return layer_trainings(self.model, self.tune)

    def num_microbatches(self, degrees: StepDegrees) -> int:
        """Micro-batches of the most-loaded pipeline in a step."""
        size, data = degrees.micro_batch_size, degrees.data
        return int(most_microbatches(self.global_batch_size, micro_batch=size, data=data))

    def tokens(self, degrees: StepDegrees) -> int:
        """Tokens of a micro-batch that one rank holds between blocks (sequence parallelism)."""
        return degrees.micro_batch_size * self.sequence_length // degrees.tensor

    def received(self, degrees: StepDegrees, moe_layer: int) -> tuple[tuple[int, ...], ...]:
        """Token copies of one micro-batch by [expert rank][local expert] of one MoE layer.

        The loads are exact per sequence; a group smaller than the tensor-parallel one holds parts
        of sequences, for which the copies are spread evenly.
        """
        moe = self.model.moe
        if moe is None:
            raise ValueError("a model without experts receives no copies")
        local = moe.num_experts // degrees.expert
        sequences = degrees.expert * degrees.micro_batch_size / degrees.tensor
        counts = [round(count * sequences) for count in self.copies_LE[moe_layer]]
        return tuple(
            tuple(counts[rank * local : (rank + 1) * local]) for rank in range(degrees.expert)
        )
