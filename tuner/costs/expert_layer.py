"""Seconds of the expert layers of one forward pass, from the token copies that each rank gets.

    P passes   L MoE layers   G ranks   C columns
    h hidden size   f width of an expert   e bytes of an element

A rank with n token copies on a active experts computes the grouped products of a experts with n/a
rows each and moves 6 e h bytes a copy to permute and 3 e f to activate; reading the weights of
active experts is part of the products, and all there is to them in decode. The busiest rank sets
the time of a layer. Dispatch and combine wait for the rank that gets most copies:

    plain       every copy is sent
    merged      a token is sent once to each domain and there once to each rank that it reaches

Of a pass the time without experts is priced too, roughly, so that a gain can be stated as a share
of the whole: projections, attention over a stated context, shared experts and dense layers, data
parallel over the ranks.

Not covered: overlap of exchange and products, launch overhead of the host, tensor parallelism
inside an expert. Rows of a rank's experts are taken as equal; tiles that an uneven split starts on
top are a few per cent at ten rows a tile and less.
"""

from dataclasses import dataclass

import numpy as np

from profilers.steps.config import LayerKind
from tuner.costs.analytic.constants import Constants
from tuner.costs.analytic.kernels import AttentionShape, Kernels
from tuner.costs.analytic.links import Group, all_to_all_s
from tuner.costs.analytic.shapes import Hardware, number
from tuner.spec.model import ModelSpec, Moe

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertMachine:
    """Devices, links and sizes that decide the time."""

    model: ModelSpec
    kernels: Kernels
    hardware: Hardware
    constants: Constants
    ranks: int
    element_bytes: float
    """Of weights and activations in the products."""
    exchange_bytes: float = 2.0
    """Of one element that is dispatched or combined."""

    @property
    def group(self) -> Group:
        """The expert-parallel ranks on the machine, neighbours inside a domain."""
        inside = min(float(self.ranks), number(self.hardware.domain))
        return Group(ranks=float(self.ranks), inside=inside)

    @property
    def expert_bytes(self) -> float:
        """Weights of one expert."""
        moe = self.moe
        matrices = 3.0 if self.model.ffn_is_gated else 2.0
        return matrices * self.model.hidden_size * moe.expert_ffn_size * self.element_bytes

    @property
    def moe(self) -> Moe:
        """The experts of the model."""
        if self.model.moe is None:
            raise ValueError(f"{self.model.name} has no experts")
        return self.model.moe


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSeconds:
    """One entry per pass and layer."""

    experts_PL: Floats
    """Products and permutation of the busiest rank."""
    exchange_PL: Floats
    """Dispatch and combine."""

    @property
    def pass_P(self) -> Floats:
        """All layers of each pass."""
        return np.asarray((self.experts_PL + self.exchange_PL).sum(axis=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Distinct places that one token's experts stand on, on average."""

    ranks: float
    domains: float


def layer_seconds(
    machine: ExpertMachine, *, copies_PLG: Floats, active_PLG: Floats, reach: Reach | None = None
) -> LayerSeconds:
    """Price every layer of every pass.

    Args:
        machine: devices and sizes.
        copies_PLG: token copies of each rank.
        active_PLG: experts of each rank that at least one token reaches.
        reach: of a merged exchange; None: every copy is sent.
    """
    shape = copies_PLG.shape
    # Time grows with copies and with active experts, so one of these two ranks is the slowest.
    candidates = (copies_PLG.argmax(axis=2), active_PLG.argmax(axis=2))
    seconds = [
        _experts_s(
            machine,
            copies=np.take_along_axis(copies_PLG, rank_PL[:, :, None], axis=2).ravel(),
            active=np.take_along_axis(active_PLG, rank_PL[:, :, None], axis=2).ravel(),
        )
        for rank_PL in candidates
    ]
    experts_PL = np.maximum(*seconds).reshape(shape[:2])
    total_PL = copies_PLG.sum(axis=2)
    exchange_PL = _exchange_s(
        machine, most=copies_PLG.max(axis=2).ravel(), total=total_PL.ravel(), reach=reach
    ).reshape(shape[:2])
    return LayerSeconds(experts_PL=experts_PL, exchange_PL=exchange_PL)


def products_s(machine: ExpertMachine, *, copies: Floats, active: Floats) -> Floats:
    """Seconds of the grouped products of ranks with so many token copies and active experts."""
    model, moe = machine.model, machine.moe
    groups = np.maximum(active, 1.0)
    width = float(moe.expert_ffn_size)
    inner = (2.0 if model.ffn_is_gated else 1.0) * width
    products = machine.kernels.experts_s(
        groups, copies / groups, hidden=float(model.hidden_size), width=width, inner=inner
    )
    return np.asarray(products.forward_s, dtype=np.float64)


def _experts_s(machine: ExpertMachine, *, copies: Floats, active: Floats) -> Floats:
    own, model = machine.constants, machine.model
    width = float(machine.moe.expert_ffn_size)
    per_copy = machine.element_bytes * (6.0 * model.hidden_size + 3.0 * width)
    factor = own.moe_memory_factor / own.memory_factor
    moved_s = machine.kernels.memory_bound_s(copies * per_copy * factor)
    return np.asarray(products_s(machine, copies=copies, active=active) + moved_s)


def _exchange_s(
    machine: ExpertMachine, *, most: Floats, total: Floats, reach: Reach | None
) -> Floats:
    group = machine.group
    ranks, inside = float(group.ranks), float(group.inside)
    if ranks <= 1.0:
        return np.zeros_like(most)
    row_bytes = machine.exchange_bytes * machine.model.hidden_size
    if reach is None:
        near, far = most * (inside - 1.0) / ranks, most * (ranks - inside) / ranks
    else:
        domains = ranks / inside
        busiest = most * ranks / np.maximum(total, 1.0)
        tokens = busiest * total / ranks / machine.moe.top_k
        near = tokens * reach.ranks * (inside - 1.0) / inside
        far = tokens * reach.domains * (domains - 1.0) / domains
    once = all_to_all_s(
        near * row_bytes,
        far * row_bytes,
        group,
        machine.hardware,
        machine.constants,
        is_merged=0.0 if reach is None else 1.0,
    )
    return np.asarray(2.0 * once, dtype=np.float64)


def rest_s(machine: ExpertMachine, *, tokens: float, context_tokens: float, decodes: bool) -> float:
    """Seconds of a forward pass without its routed experts, on one of the ranks.

    Args:
        machine: devices and sizes.
        tokens: of the pass, over all ranks.
        context_tokens: that each request's attention looks back on.
        decodes: one query a request, so that its keys and values are read for it alone.
    """
    model, kernels = machine.model, machine.kernels
    rows = max(tokens / machine.ranks, 1.0)
    each = (
        _projections_s(machine, rows=rows)
        + _attention_s(machine, rows=rows, context=context_tokens, decodes=decodes)
        + number(kernels.memory_bound_s(10.0 * machine.element_bytes * rows * model.hidden_size))
    )
    dense = model.layers.count(LayerKind.DENSE)
    shared = 0.0 if model.moe is None else float(model.moe.shared_ffn_size)
    networks = dense * _network_s(machine, rows=rows, width=float(model.dense_ffn_size))
    networks += model.num_moe_layers * _network_s(machine, rows=rows, width=shared)
    sampled = rows if decodes else max(rows / context_tokens, 1.0)
    head = kernels.gemm_s(sampled, float(model.vocab_size), float(model.hidden_size), in_head=True)
    return model.num_layers * each + networks + number(head)


def _projections_s(machine: ExpertMachine, *, rows: float) -> float:
    model, attention = machine.model, machine.model.attention
    hidden, heads = float(model.hidden_size), float(attention.num_heads)
    values = heads * attention.value_head_dim
    shapes = [(hidden, values)]
    if attention.kind == "mla":
        rank = float(attention.q_lora_rank or hidden)
        queries = heads * attention.head_dim
        if attention.q_lora_rank is not None:
            shapes.append((rank, hidden))
        shapes += [
            (queries, rank),
            (float(attention.kv_lora_rank + attention.qk_rope_head_dim), hidden),
            (
                heads * (attention.qk_nope_head_dim + attention.v_head_dim),
                float(attention.kv_lora_rank),
            ),
        ]
    else:
        kv = 2.0 * attention.num_kv_heads * attention.head_dim
        shapes.append((heads * attention.head_dim + kv, hidden))
    return sum(number(machine.kernels.gemm_s(rows, n, k)) for n, k in shapes)


def _attention_s(machine: ExpertMachine, *, rows: float, context: float, decodes: bool) -> float:
    attention, kernels = machine.model.attention, machine.kernels
    if decodes:
        if attention.kind == "mla":
            cached = float(attention.kv_lora_rank + attention.qk_rope_head_dim)
        else:
            cached = 2.0 * attention.num_kv_heads * attention.head_dim
        read_bytes = rows * context * cached * machine.exchange_bytes
        return number(kernels.memory_bound_s(read_bytes))
    sequence = min(context, rows)
    shape = AttentionShape(
        pairs=rows * sequence / 2.0,
        sequences=rows / sequence,
        sequence=sequence,
        heads=float(attention.num_heads),
        kv_heads=float(attention.num_kv_heads),
        key_dim=float(attention.head_dim),
        value_dim=float(attention.value_head_dim),
    )
    return number(kernels.attention_s(shape))


def _network_s(machine: ExpertMachine, *, rows: float, width: float) -> float:
    if width <= 0.0:
        return 0.0
    hidden = float(machine.model.hidden_size)
    inner = (2.0 if machine.model.ffn_is_gated else 1.0) * width
    up = machine.kernels.gemm_s(rows, inner, hidden)
    down = machine.kernels.gemm_s(rows, hidden, width)
    moved = machine.kernels.memory_bound_s(3.0 * machine.element_bytes * rows * width)
    return number(up) + number(down) + number(moved)
