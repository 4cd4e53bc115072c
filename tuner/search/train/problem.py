"""The problem of one search: a model and a batch on identical devices, under limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tuner.catalog.manifest import Capabilities
from tuner.config.columns import Numbers
from tuner.config.shapes import Hardware, ModelShape
from tuner.costs.train.expert_imbalance import ExpertImbalance
from tuner.costs.train.memory_constants import MemoryConstants
from tuner.costs.train.packing import PackedRows
from tuner.prices.ops import Prices
from tuner.prices.train.constants import Constants, Software
from tuner.spec.accounting import training_flop_per_token
from tuner.spec.model import ModelSpec
from tuner.spec.search import Search

FP8_BYTES: Final = 1.0 + 4.0 / 128.0
"""Bytes of a value in fp8 and of its part of a scale: fp32 per 128 values; MXFP8's byte per 32 is
as much."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainProblem:
    """Everything that does not change during one search."""

    model: ModelSpec
    shape: ModelShape
    """The model in the numbers of the analytic formulas."""
    hardware: Hardware
    constants: Constants
    software: Software
    """Training framework; decides the error band of a peak."""
    memory_constants: MemoryConstants
    prices: Prices | None = None
    """Measured prices; None: those of the datasheet."""
    num_devices: int
    memory_limit_bytes: float
    """Bytes of one device's memory that a plan may use."""
    sequence_length: int
    global_batch_size: int
    """Sequences of one step."""
    capabilities: Capabilities
    """Capabilities of all targets together."""
    limits: Search = field(default_factory=Search)
    precision: str = "bf16"
    linear_bytes: float = 0.0
    """Bytes of an element of a linear layer's saved input; 0: those of an activation."""
    gradient_bytes: float = 4.0
    expert_imbalance: ExpertImbalance | None = None
    """Imbalance from recorded routing; None: balanced experts."""
    price_per_device_hour: float | None = None
    tuned: Mapping[str, float] = field(default_factory=dict)
    """Columns of what is trained, where it is not all weights of an engine's own layers."""
    rows: PackedRows | None = None
    """Rows that documents are packed into; None: a sequence is one document."""
    packed: Mapping[str, float] = field(default_factory=dict)
    """Columns of packed rows."""
    usable_memory_ratio: float = 0.95
    """`memory_limit_bytes` as a share of what the device has."""
    host_limit_bytes: float | None = None
    """Bytes of a node's memory that a plan may use beside the devices'; None: not known."""
    devices_per_node: int = 8
    """Consecutive ranks that share a node."""

    @property
    def flop_per_token(self) -> float:
        """Model FLOPs of a step over its tokens, those of padding included, which has none."""
        classes = ((float(self.sequence_length), 1.0),) if self.rows is None else self.rows.classes
        mtp_layers = int(self.shape.mtp_layers)
        return sum(
            share
            * training_flop_per_token(self.model, sequence_length=length, mtp_layers=mtp_layers)
            for length, share in classes
        )

    def packed_columns(self, *, micro_batch: Numbers, has_graphs: Numbers) -> dict[str, Numbers]:
        """Return the columns of packed rows; 0 where each document is padded to a sequence."""
        packs: Numbers = 1.0
        if self.capabilities.packing_needs_single_rows:
            packs = np.equal(micro_batch, 1.0) * np.equal(has_graphs, 0.0) * 1.0
        return {name: value * packs for name, value in self.packed.items()}

    @property
    def dispatch_bytes(self) -> float:
        """Bytes of a value on its way to the experts; 0: those of an activation."""
        is_narrow = self.capabilities.fp8_dispatch and "fp8" in self.precision
        return FP8_BYTES if is_narrow and self.model.num_moe_layers else 0.0

    @property
    def capacity_bytes(self) -> float:
        """Return all bytes of a device's memory."""
        return self.memory_limit_bytes / self.usable_memory_ratio
