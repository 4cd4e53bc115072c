"""The Mixture-of-Experts layer: router, dispatch, experts, combine, in MemFine's chunks.

MemFine (arXiv 2511.21431): the tokens of a rank are cut into c contiguous chunks; each is
dispatched, computed and combined in turn and recomputed in the backward pass, so that at most
one chunk's expert activations are in memory. c is fixed, or picked at run time as the smallest
power of two that keeps the copies which any rank of the expert group has at once under a
threshold. The paper leaves open how ranks agree; here they take the largest count of the group,
because a rank that runs the all-to-all for fewer chunks than its peers would leave them waiting
forever.

Letters: T tokens of this rank, H hidden size, K experts per token, E experts, P expert ranks,
R copies received.

Not covered: capacity limits and dropped tokens; expert tensor parallelism.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from profilers.steps.adapters import LowRank
from profilers.steps.collectives import Peers, all_to_all_counts
from profilers.steps.config import Recompute, Stage, StepConfig
from profilers.steps.dispatch import dispatch_flat, dispatch_hierarchical
from profilers.steps.experts import ExpertAdapters, expert_ffn
from profilers.steps.feed_forward import FeedForward
from profilers.steps.instruments import Instruments
from profilers.steps.layout import ParallelState
from profilers.steps.recompute import has_trained, recomputed
from profilers.steps.routing import TopKRouter
from profilers.steps.weights import kept_type, normal, parameter


class MoeLayer(nn.Module):
    """x[B, S', H] -> [B, S', H]: routed experts plus, where configured, the shared expert."""

    def __init__(
        self,
        config: StepConfig,
        layout: ParallelState,
        instruments: Instruments,
        *,
        stage: Stage,
        moe_layer: int,
        name: str,
    ) -> None:
        super().__init__()
        self.router = TopKRouter(
            config, layout, instruments, moe_layer=moe_layer, name=f"{name}.router"
        )
        self.routed = RoutedExperts(
            config, layout, instruments, stage=stage, moe_layer=moe_layer, name=name
        )
        width = config.model.shared_ffn_size
        self.shared = (
            FeedForward(config, layout, width=width, name=f"{name}.shared") if width else None
        )

    def forward(self, x: Tensor, forced: Tensor | None, *, is_first_pass: bool) -> Tensor:
        experts_TK, weight_TK = self.router(x, forced, is_first_pass=is_first_pass)
        y: Tensor = self.routed(x.flatten(0, 1), experts_TK, weight_TK).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        return y


class RoutedExperts(nn.Module):
    """The experts of this rank with dispatch and combine: x[T, H], [T, K], [T, K] -> [T, H]."""

    def __init__(
        self,
        config: StepConfig,
        layout: ParallelState,
        instruments: Instruments,
        *,
        stage: Stage,
        moe_layer: int,
        name: str,
    ) -> None:
        super().__init__()
        model = config.model
        local = model.num_experts // layout.degrees.expert
        gain = (2 * len(model.layers)) ** -0.5
        gate_up, down, kept = [], [], kept_type(config)
        local_experts = range(layout.expert_rank * local, (layout.expert_rank + 1) * local)
        for expert in local_experts:
            shape = (2 * model.moe_ffn_size, model.hidden_size)
            fused = normal(
                f"{name}.{expert}.gate_up", shape, seed=config.seed, device=layout.device
            )
            gate_up.append(fused.to(kept))
            gated = normal(
                f"{name}.{expert}.down",
                (shape[1], shape[0] // 2),
                seed=config.seed,
                device=layout.device,
                gain=gain,
            )
            down.append(gated.to(kept))
        self.gate_up = parameter(torch.stack(gate_up), layout.device, config)
        self.down = parameter(torch.stack(down), layout.device, config)
        self.gate_up_adapter: LowRank | None = None
        self.down_adapter: LowRank | None = None
        self._scale = 1.0
        if config.adapters is not None and "experts" in config.adapters.targets:
            self._scale = config.adapters.scale
            self.gate_up_adapter, self.down_adapter = (
                LowRank(
                    config,
                    layout.device,
                    name=f"{name}.{matrix}.adapter",
                    inputs=weight.shape[2],
                    outputs=weight.shape[1],
                    experts=local_experts,
                )
                for matrix, weight in (("gate_up", self.gate_up), ("down", self.down))
            )
        self._num_experts = model.num_experts
        self._peers = _peers(layout.expert_group, layout, instruments)
        self._hops = tuple(
            _peers(group, layout, instruments)
            for group in (layout.across_group, layout.inside_group)
            if group is not None
        )
        self._trains = has_trained(self)
        self._instruments = instruments
        self._stage = stage
        self._moe_layer = moe_layer

    def forward(self, x_TH: Tensor, experts_TK: Tensor, weight_TK: Tensor) -> Tensor:
        chunks = self._num_chunks(experts_TK)
        self._instruments.note_chunks(self._moe_layer, chunks)
        recompute = self._stage.recompute
        if recompute is Recompute.NONE or (recompute is Recompute.FULL and chunks == 1):
            return self._dispatch_and_compute(x_TH, experts_TK, weight_TK)
        sizes = even_parts(len(x_TH), parts=chunks)
        parts = zip(
            torch.split_with_sizes(x_TH, sizes),
            torch.split_with_sizes(experts_TK, sizes),
            torch.split_with_sizes(weight_TK, sizes),
            strict=True,
        )
        return torch.cat(
            [
                recomputed(
                    self._dispatch_and_compute,
                    *part,
                    instruments=self._instruments,
                    is_inside_another=recompute is Recompute.FULL,
                    trains=self._trains,
                )
                for part in parts
            ]
        )

    def _dispatch_and_compute(self, x_TH: Tensor, experts_TK: Tensor, weight_TK: Tensor) -> Tensor:
        if not self._hops:
            copies_PE = self._copies(experts_TK)
            return dispatch_flat(
                x_TH, experts_TK, weight_TK, copies_PE=copies_PE, peers=self._peers, ffn=self._ffn
            )
        across, inside = self._hops
        return dispatch_hierarchical(
            x_TH,
            experts_TK,
            weight_TK,
            num_experts=self._num_experts,
            across=across,
            inside=inside,
            ffn=self._ffn,
        )

    def _ffn(self, rows_RH: Tensor, counts_E: Sequence[int]) -> Tensor:
        adapters = None
        if self.gate_up_adapter is not None and self.down_adapter is not None:
            adapters = ExpertAdapters(
                gate_up=(self.gate_up_adapter.a, self.gate_up_adapter.b),
                down=(self.down_adapter.a, self.down_adapter.b),
                scale=self._scale,
            )
        return expert_ffn(rows_RH, counts_E, self.gate_up, self.down, adapters)

    def _copies(self, experts_TK: Tensor) -> Tensor:
        copies_E = experts_TK.flatten().bincount(minlength=self._num_experts)
        return copies_E.view(self._peers.group.size(), -1)

    def _num_chunks(self, experts_TK: Tensor) -> int:
        limit = self._stage.max_chunk_tokens
        if limit is None:
            return self._stage.chunks
        received = all_to_all_counts(self._copies(experts_TK), self._peers.group).sum()
        if self._peers.group.size() > 1:
            dist.all_reduce(received, op=dist.ReduceOp.MAX, group=self._peers.group)
        return chunks_needed(int(received), limit=limit, max_chunks=self._stage.max_chunks)


def chunks_needed(received: int, *, limit: int, max_chunks: int) -> int:
    """Pick the smallest power of two of chunks of `limit` copies each, at most `max_chunks`."""
    needed = max(1, math.ceil(received / limit))
    return int(min(2 ** (needed - 1).bit_length(), max_chunks))


def even_parts(total: int, *, parts: int) -> list[int]:
    """Cut a total into contiguous parts that differ by one at most, larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _peers(group: dist.ProcessGroup, layout: ParallelState, instruments: Instruments) -> Peers:
    return Peers(
        group=group, is_far_P=layout.is_far(group), note_far_bytes=instruments.note_far_bytes
    )
