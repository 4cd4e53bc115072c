"""One rank's training run: its model chunks, its optimizer, and what a step does, in order.

Sequences go to data ranks in contiguous blocks, micro-batch after micro-batch: with as many
micro-batches each, rank d of D takes [d, d + 1) * G / D of the global batch of G. Which experts a
forced step uses is decided here too.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from profilers.steps.config import LayerKind, StepConfig
from profilers.steps.data import read_corpus, sample_sequences
from profilers.steps.instruments import Instruments
from profilers.steps.layout import ParallelState
from profilers.steps.loads import forced_copies, forced_experts
from profilers.steps.memory import ActivationMeter, storage_bytes
from profilers.steps.model import StageModel, TransformerLayer
from profilers.steps.moe import MoeLayer
from profilers.steps.pipeline import build_pass
from profilers.steps.sharding import (
    gradients_now,
    local_gradients,
    local_shards,
    owned_bytes,
    shard_stage,
    trained,
    weights_now,
)


class Training:
    """A run on this rank; a step is `prepare`, `compute_gradients`, `update`, `settle`."""

    def __init__(self, config: StepConfig, layout: ParallelState) -> None:
        self._config = config
        self._layout = layout
        self._moe_layers = config.model.layers.count(LayerKind.MOE)
        self.instruments = Instruments(
            moe_layers=self._moe_layers,
            num_experts=config.model.num_experts,
            device=layout.device,
        )
        degrees = layout.degrees
        self.modules = nn.ModuleList(
            StageModel(config, layout, self.instruments, stage=stage)
            for stage in range(layout.pipeline_rank, len(config.stages), degrees.pipeline)
        )
        for module in self._chunks():
            shard_stage(module, config, layout)
        self._shards = local_shards(self.modules)
        self._optimizer = torch.optim.AdamW(self._shards, lr=config.learning_rate, foreach=True)
        self._run = build_pass(config, layout, self._chunks(), self.instruments)
        self._corpus = read_corpus()
        self._tokens = self._targets = torch.empty(0, dtype=torch.int64)

    def prepare(self, step: int) -> None:
        """Lay out a step's tokens and forced experts; not part of the step's time."""
        config = self._config
        sequences = config.sequences_of(self._layout.data_rank)
        windows = sample_sequences(
            self._corpus,
            sequences,
            step=step,
            seed=config.seed,
            length=config.sequence_length,
            vocab_size=config.model.vocab_size,
        )
        self._tokens = self._on_device(windows[:, :-1])
        self._targets = self._on_device(windows[:, 1:])
        self.instruments.begin_step()
        for module in self._chunks():
            module.begin_step(
                {
                    layer: self._forced(step, layer, sequences)
                    for layer in _moe_layers_of(module)
                    if config.routing.mode == "forced"
                }
            )

    def compute_gradients(self) -> Tensor:
        """Run every micro-batch forward and backward; this rank's share of the loss."""
        return self._run(self._tokens, self._targets)

    def update(self) -> None:
        """Step the optimizer and drop the gradients."""
        for shard, gradient in zip(self._shards, local_gradients(self.modules), strict=True):
            shard.grad = gradient
        self._optimizer.step()
        for shard, weight in zip(self._shards, trained(self.modules), strict=True):
            shard.grad = weight.grad = None

    def settle(self) -> tuple[Tensor, Tensor, Tensor]:
        """Share what the step saw, move the loss-free bias.

        Returns:
            [L, E] loads, [L] chunk counts, and the bytes that crossed nodes.
        """
        load_LE = self.instruments.load_LE.clone()
        chunks_L = self.instruments.chunks_L.clone()
        far_bytes = torch.tensor(self.instruments.far_bytes, device=load_LE.device)
        dist.all_reduce(load_LE)
        dist.all_reduce(far_bytes)
        dist.all_reduce(chunks_L, op=dist.ReduceOp.MAX)
        if self._config.routing.balancing == "loss_free":
            for part in self.modules.modules():
                if isinstance(part, MoeLayer):
                    part.router.move_bias(load_LE[part.router.moe_layer])
        return load_LE, chunks_L, far_bytes

    def metered(self, step: int) -> ActivationMeter:
        """Run one whole step with the meter on; far slower than a plain one."""
        meter = ActivationMeter(
            parameters=lambda: weights_now(self.modules),
            gradient_bytes=self.gradient_bytes,
        )
        self.prepare(step)
        self.instruments.meter = meter
        self.compute_gradients()
        self.instruments.meter = None
        meter.peak_gradient_bytes = max(meter.peak_gradient_bytes, self.gradient_bytes())
        self.update()
        self.settle()
        return meter

    def parameter_bytes(self) -> int:
        """Bytes of this rank's shards."""
        return owned_bytes(self.modules)

    def gradient_bytes(self) -> int:
        """Bytes of all gradients in memory right now."""
        return storage_bytes(gradients_now(self.modules))

    def optimizer_bytes(self) -> int:
        """Bytes of AdamW's two moments; zero before the first update."""
        return sum(
            moment.numel() * moment.element_size()
            for state in self._optimizer.state.values()
            for name, moment in state.items()
            if name != "step"
        )

    def _chunks(self) -> list[StageModel]:
        return [module for module in self.modules if isinstance(module, StageModel)]

    def _on_device(self, values: np.ndarray) -> Tensor:
        """Keep this tensor rank's part of the sequence, axis 1."""
        ranks = self._layout.degrees.tensor
        part = torch.from_numpy(values).chunk(ranks, dim=1)[self._layout.tensor_rank]
        return part.contiguous().to(self._layout.device)

    def _forced(self, step: int, moe_layer: int, sequences: Sequence[int]) -> list[Tensor]:
        config = self._config
        experts, top_k = config.model.num_experts, config.model.top_k
        rows = config.routing.load_ratio or ((1.0 / experts,) * experts,) * self._moe_layers
        copies = forced_copies(rows[moe_layer], tokens=config.sequence_length, top_k=top_k)
        assigned = [
            forced_experts(copies, top_k=top_k, seed=(config.seed, step, sequence, moe_layer))
            for sequence in sequences
        ]
        batch, counts = config.micro_batch_size, config.microbatches_by_rank
        batches = [
            self._on_device(np.stack(assigned[start : start + batch]))
            for start in range(0, len(assigned), batch)
        ]
        return batches + [batches[0][:0]] * (max(counts) - len(batches))


def _moe_layers_of(module: StageModel) -> list[int]:
    return [
        layer.moe_layer
        for layer in module.layers
        if isinstance(layer, TransformerLayer) and layer.moe_layer is not None
    ]
