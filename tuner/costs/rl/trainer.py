"""Passes of the training side: updates, and forward passes for log-probabilities.

An update is an optimizer step of the analytic model (tuner/costs/train/step.py) over the
micro-batches that the responses were packed into. A forward pass for old or reference
log-probabilities, or for a critic's values, runs the forward passes of the same stages through the
pipeline, and nothing after them.

Not covered: other layouts of reference and critic; response masks and entropies, which are small
beside the head.
"""

from dataclasses import dataclass, replace
from typing import Final

from tuner.config.columns import Strategies
from tuner.config.shapes import Hardware, ModelShape, Stages, number
from tuner.costs.rl.packing import MicroBatches
from tuner.costs.train.memory import price_memory
from tuner.costs.train.memory_constants import MemoryConstants
from tuner.costs.train.prices import MemoryPrice, StepPrice
from tuner.costs.train.step import forward_pipeline_s, price_step
from tuner.prices.train.constants import Constants

ATTENTION_TENSORS: Final = 8.0
"""Tensors of a layer beside its network: four projections, two norms, norms of queries and keys."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trainer:
    """The training side: one model in one layout, without its batch."""

    shape: ModelShape
    strategy: Strategies
    """The layout; its sequence and micro-batches are replaced."""
    hardware: Hardware
    constants: Constants
    memory_constants: MemoryConstants
    stages: Stages

    @property
    def data_ranks(self) -> int:
        """Return the data-parallel ranks, which share the sequences."""
        return int(number(self.strategy.data))

    @property
    def devices(self) -> int:
        """Return the devices of the training side."""
        return int(number(self.strategy.world))

    @property
    def link_bytes_per_s(self) -> float:
        """Return the bandwidth of one device to the others, the network's beyond one domain."""
        machine = self.hardware
        is_inside = self.devices <= number(machine.domain)
        return number(machine.scale_up_bytes_per_s if is_inside else machine.scale_out_bytes_per_s)

    def update_s(self, micro: MicroBatches) -> float:
        """Return the seconds of one update."""
        return number(self.price(micro).step_s)

    def forward_s(self, micro: MicroBatches) -> float:
        """Return the seconds of one forward pass over the micro-batches."""
        return number(forward_pipeline_s(self.price(micro), self.packed(micro)))

    def packed(self, micro: MicroBatches) -> Strategies:
        """Return the layout with micro-batches of packed sequences."""
        return replace(
            self.strategy,
            sequence=micro.sequence_tokens,
            micro_batch=micro.tokens / micro.sequence_tokens,
            num_microbatches=float(micro.count),
        )

    def price(self, micro: MicroBatches) -> StepPrice:
        """Price one update."""
        packed = self.packed(micro)
        return price_step(self.shape, packed, self.hardware, self.constants, self.stages)

    def memory(self, micro: MicroBatches) -> MemoryPrice:
        """Price the memory of one update."""
        return price_memory(
            self.shape,
            self.packed(micro),
            self.hardware,
            self.stages,
            constants=self.memory_constants,
        )


def num_tensors(shape: ModelShape) -> float:
    """Return the tensors of a checkpoint, with one of every matrix of every expert."""
    matrices = 3.0 if number(shape.is_gated) else 2.0
    layers = number(shape.dense_layers) + number(shape.moe_layers)
    routed = number(shape.moe_layers) * (matrices * number(shape.experts) + 1.0)
    return layers * (ATTENTION_TENSORS + matrices) + routed + 3.0
