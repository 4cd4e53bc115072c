"""The state of a rank as pieces of global tensors, whose names do not depend on the layout.

    model.layers.3.attention.qkv.q      weights; fused ones in their parts: q, k, v; gate, up
    optimizer.exp_avg.layers. ...       AdamW's moments, exp_avg_sq likewise
    optimizer.step.layers. ...          updates of a weight so far
    router.layers.3.ffn.router.bias     of loss-free balancing
    rng.cpu.0, rng.cuda.0               PyTorch's generators of rank 0

Layers count from the first of the model, experts from the first of a layer. A weight lies in parts
for four reasons, from the outside in: pipeline stages hold layers, expert ranks blocks of experts
(axis 0), tensor ranks rows (axis 0) or columns (axis 1), and FSDP shards of what is left. Frozen
weights are drawn from the seed again and are no state.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from profilers.steps.config import StepConfig
from profilers.steps.layout import ParallelState
from profilers.steps.moe import MoeLayer
from profilers.steps.training import Training

Key = tuple[str, tuple[int, ...]]
"""Name and offsets: what tells the pieces of a rank apart, and equal ones of several ranks not."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A box of a global tensor that this rank holds."""

    name: str
    size: tuple[int, ...]
    """Of the global tensor."""
    offsets: tuple[int, ...]
    """Of the box in it."""
    values: Tensor
    """The box; an alias of what is trained, so that copying into it restores."""

    @property
    def key(self) -> Key:
        """Its identity among the pieces of a rank."""
        return self.name, self.offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """Rows of a weight's shard, and the box of a global tensor that they are."""

    name: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: slice


def training_pieces(training: Training, config: StepConfig, layout: ParallelState) -> list[Piece]:
    """List weights, moments and router biases of this rank; no box is empty."""
    pieces: list[Piece] = []
    for name, weight, shard, state in training.optimized():
        for box in _boxes(_global_name(name, config, layout), weight, config, layout):
            for kind, values in (
                ("model", shard),
                ("optimizer.exp_avg", state["exp_avg"]),
                ("optimizer.exp_avg_sq", state["exp_avg_sq"]),
            ):
                pieces.append(
                    Piece(
                        name=f"{kind}.{box.name}",
                        size=box.size,
                        offsets=box.offsets,
                        values=values[box.rows],
                    )
                )
            pieces.append(_whole(f"optimizer.step.{box.name}", state["step"]))
    for name, part in training.modules.named_modules():
        if isinstance(part, MoeLayer):
            router = f"router.{_global_name(name, config, layout)}.router.bias"
            pieces.append(_whole(router, part.router.bias))
    return pieces


def generator_pieces(layout: ParallelState) -> list[Piece]:
    """Make pieces for the states of PyTorch's generators, which have to be copied both ways."""
    pieces = [_whole(f"rng.cpu.{layout.rank}", torch.get_rng_state())]
    if layout.device.type == "cuda":
        state = torch.cuda.get_rng_state(layout.device)
        pieces.append(_whole(f"rng.cuda.{layout.rank}", state))
    return pieces


def note_generators(pieces: Sequence[Piece], layout: ParallelState) -> None:
    """Copy the states of PyTorch's generators into their pieces."""
    for piece, now in zip(pieces, generator_pieces(layout), strict=True):
        piece.values.copy_(now.values)


def set_generators(pieces: Sequence[Piece], layout: ParallelState) -> None:
    """Let PyTorch's generators go on from the states in their pieces."""
    for piece in pieces:
        if piece.name.startswith("rng.cpu."):
            torch.set_rng_state(piece.values)
        else:
            torch.cuda.set_rng_state(piece.values, layout.device)


def _whole(name: str, values: Tensor) -> Piece:
    size = tuple(values.size())
    return Piece(name=name, size=size, offsets=(0,) * len(size), values=values)


def _global_name(name: str, config: StepConfig, layout: ParallelState) -> str:
    """Name what is called `chunk.layers.layer.` here by its layer of the whole model."""
    chunk, _, rest = name.partition(".")
    kind, _, below = rest.partition(".")
    if kind != "layers":
        return rest
    stage = int(chunk) * layout.degrees.pipeline + layout.pipeline_rank
    first = sum(before.num_layers for before in config.stages[:stage])
    layer, _, leaf = below.partition(".")
    return f"layers.{first + int(layer)}.{leaf}"


def _boxes(name: str, weight: DTensor, config: StepConfig, layout: ParallelState) -> Iterator[_Box]:
    """Cut this rank's shard of a weight where global tensors begin in it."""
    (chunk,) = weight.__create_chunk_list__()  # type: ignore[no-untyped-call]  # torch
    size, offsets = tuple(weight.size()), tuple(chunk.offsets)
    if not chunk.sizes.numel():
        return
    if ".routed." in name:
        size = (config.model.num_experts, *size[1:])
        first = layout.expert_rank * len(weight)
        rows = slice(0, chunk.sizes[0])
        yield _Box(name=name, size=size, offsets=(first + offsets[0], *offsets[1:]), rows=rows)
        return
    leaf, ranks, rank = name.rpartition(".")[2], layout.degrees.tensor, layout.tensor_rank
    begin, end = offsets[0], offsets[0] + chunk.sizes[0]
    if leaf in ("down", "output"):
        size = (size[0], size[1] * ranks)
        offsets = (begin, rank * weight.size(1))
        yield _Box(name=name, size=size, offsets=offsets, rows=slice(0, end - begin))
        return
    start = 0
    for part, length in _fused_parts(leaf, len(weight), config, ranks).items():
        low, high = max(begin, start), min(end, start + length)
        if low < high:
            first = rank * length if part else 0
            yield _Box(
                name=f"{name}.{part}" if part else name,
                size=(length * ranks if part else length, *size[1:]),
                offsets=(first + low - start, *offsets[1:]),
                rows=slice(low - begin, high - begin),
            )
        start += length


def _fused_parts(leaf: str, rows: int, config: StepConfig, ranks: int) -> dict[str, int]:
    """Give the rows of each matrix in a fused one; what is not fused is one without a name."""
    if leaf == "qkv":
        keys = config.model.num_kv_heads * config.model.head_dim // ranks
        return {"q": rows - 2 * keys, "k": keys, "v": keys}
    if leaf == "gate_up":
        return {"gate": rows // 2, "up": rows // 2}
    return {"": rows}
