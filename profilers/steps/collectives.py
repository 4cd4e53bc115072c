"""The step's own collectives with their gradients; FSDP and the pipeline bring theirs.

PyTorch's differentiable all-gather is refused by gloo, hence these few lines. A group of one rank
communicates nothing.

Letters: B sequences, S tokens of a sequence, P ranks of the group, M rows, H columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# PyTorch renamed these two and warns on the old names; older releases have only those.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """A group for the all-to-all of rows, and which of its ranks are on other nodes."""

    group: dist.ProcessGroup
    is_far_P: tuple[bool, ...]
    note_far_bytes: Callable[[int], None]
    """Callback that gets the bytes of each send to other nodes."""


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collect the shards of every sequence: [B, S / P, H] -> [B, S, H]; backward scatters sums."""
    return x if group.size() == 1 else _Gather.apply(x, group)  # type: ignore[no-untyped-call]  # torch


def scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks and keep this rank's shard: [B, S, H] -> [B, S / P, H]."""
    return x if group.size() == 1 else _Scatter.apply(x, group)  # type: ignore[no-untyped-call]  # torch


def all_to_all_rows(x: Tensor, peers: Peers, *, send: list[int], receive: list[int]) -> Tensor:
    """Send `send[p]` consecutive rows to rank p: [sum(send), H] -> [sum(receive), H]."""
    if peers.group.size() == 1:
        return x
    return _AllToAll.apply(x, peers, send, receive)  # type: ignore[no-any-return, no-untyped-call]  # torch


def all_to_all_counts(counts_PN: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Tell every rank how many rows it will get: row p goes to rank p, and comes from it [P, N]."""
    if group.size() == 1:
        return counts_PN
    received = torch.empty_like(counts_PN)
    dist.all_to_all_single(received, counts_PN.contiguous(), group=group)
    return received


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    batch, shard, hidden = x.shape
    parts = x.new_empty(group.size() * batch, shard, hidden)
    _all_gather(parts, x.contiguous(), group=group)
    ranks = group.size()
    gathered = parts.view(ranks, batch, shard, hidden).transpose(0, 1)
    return gathered.reshape(batch, ranks * shard, hidden)


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    batch, sequence, hidden = x.shape
    ranks = group.size()
    shard = sequence // ranks
    parts = x.view(batch, ranks, shard, hidden).transpose(0, 1).contiguous()
    local_shard = x.new_empty(batch, shard, hidden)
    _reduce_scatter(local_shard, parts.view(ranks * batch, shard, hidden), group=group)
    return local_shard


def _exchanged(x: Tensor, peers: Peers, send: list[int], receive: list[int]) -> Tensor:
    far = sum(rows for rows, is_far in zip(send, peers.is_far_P, strict=True) if is_far)
    peers.note_far_bytes(far * x.shape[1] * x.element_size())
    received = x.new_empty(sum(receive), x.shape[1])
    dist.all_to_all_single(
        received,
        x.contiguous(),
        output_split_sizes=receive,
        input_split_sizes=send,
        group=peers.group,
    )
    return received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scattered(grad.contiguous(), ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, send: list[int], receive: list[int]) -> Tensor:
        ctx.peers, ctx.send, ctx.receive = peers, send, receive
        return _exchanged(x, peers, send, receive)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.peers, ctx.receive, ctx.send), None, None, None
