"""Seconds of the expert layers of one forward pass, from the token copies that each rank gets.

    P passes   L MoE layers   G ranks   C columns
    h hidden size   f width of an expert   e bytes of an element

A rank with n token copies on a active experts computes the grouped GEMMs of a experts with n/a rows
each and moves 6 e h bytes a copy to permute and 3 e f to activate. The grouped GEMMs include
reading the weights of active experts, which dominates in decode. A fractional average a
interpolates between the neighbouring whole numbers. A rank's time is divided by its speed, and the
slowest rank sets the time of a layer. Dispatch and combine wait for the rank that receives the most
copies:

    plain       every copy is sent
    merged      a token is sent once to each domain and there once to each rank that it reaches

The rest of a pass is priced roughly, to state a gain as a share of the pass: projections, attention
over a stated context, shared experts and dense layers, data parallel over the ranks.

Not covered: overlap of all-to-all and GEMMs, launch overhead of the host, tensor parallelism inside
an expert. A rank's experts have equal rows; the additional tiles of an uneven split are a few per
cent at ten rows a tile and less.
"""

from dataclasses import dataclass

import numpy as np

from profilers.steps.config import LayerKind
from tuner.costs.ops import (
    BF16,
    Op,
    Prices,
    attention,
    gemm,
    memory_bound,
    trained_experts,
)
from tuner.costs.train.collectives import Group, all_to_all_s
from tuner.costs.train.constants import Constants
from tuner.costs.train.shapes import Hardware, number
from tuner.spec.linear_attention import LINEAR_KINDS
from tuner.spec.model import ModelSpec, Moe

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

MOST_PRICED = 2**18
"""Ranks priced at a time, which bounds memory."""


def expert_bytes(model: ModelSpec, *, element_bytes: float) -> float:
    """Weights of one expert of one layer."""
    if model.moe is None:
        raise ValueError(f"{model.name} has no experts")
    matrices = 3.0 if model.ffn_is_gated else 2.0
    return matrices * model.hidden_size * model.moe.expert_ffn_size * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertMachine:
    """Devices, links and sizes that determine the time."""

    model: ModelSpec
    prices: Prices
    hardware: Hardware
    constants: Constants
    ranks: int
    element_bytes: float
    """Of weights and activations in the GEMMs."""
    dispatched_element_bytes: float = 2.0
    """Of one element that is dispatched or combined."""
    ranks_per_node: int | None = None
    """Where a node runs fewer ranks than it has devices."""

    @property
    def group(self) -> Group:
        """The expert-parallel ranks on the machine, neighbours inside a domain."""
        inside = number(self.hardware.domain)
        if self.ranks_per_node is not None:
            nodes = max(1.0, inside / number(self.hardware.devices_per_node))
            inside = nodes * min(inside / nodes, float(self.ranks_per_node))
        return Group(ranks=float(self.ranks), inside=min(float(self.ranks), inside))

    @property
    def expert_bytes(self) -> float:
        """Weights of one expert."""
        return expert_bytes(self.model, element_bytes=self.element_bytes)

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
    """Grouped GEMMs and permutation of the most-loaded rank."""
    all_to_all_PL: Floats
    """Dispatch and combine."""

    @property
    def pass_P(self) -> Floats:
        """All layers of each pass."""
        return np.asarray((self.experts_PL + self.all_to_all_PL).sum(axis=1))

    @property
    def layer_L(self) -> Floats:
        """Each layer, mean over passes."""
        return np.asarray((self.experts_PL + self.all_to_all_PL).mean(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Ranks and domains that one token reaches, on average."""

    ranks: float
    domains: float


def layer_seconds(
    machine: ExpertMachine,
    *,
    copies_PLG: Floats,
    active_PLG: Floats,
    speed_G: Floats | None = None,
    reach: Reach | None = None,
    far_ratio: Floats | float = 1.0,
) -> LayerSeconds:
    """Price every layer of every pass.

    Args:
        machine: devices and sizes.
        copies_PLG: token copies of each rank.
        active_PLG: experts of each rank that at least one token reaches.
        speed_G: of each rank's GEMMs, relative to the machine; None: all 1.
        reach: of a merged all-to-all; None: every copy is sent.
        far_ratio: factor on the time between domains for links that differ, by pass and layer or by
            layer.
    """
    passes, layers, ranks = copies_PLG.shape
    speeds_G = np.ones(ranks) if speed_G is None else speed_G
    at_once = max(1, MOST_PRICED // (layers * ranks))
    experts_PL = np.concatenate(
        [
            (
                experts_s(
                    machine,
                    copies=copies_PLG[first : first + at_once].ravel(),
                    active=active_PLG[first : first + at_once].ravel(),
                ).reshape(-1, layers, ranks)
                / speeds_G
            ).max(axis=2)
            for first in range(0, passes, at_once)
        ]
    )
    all_to_all_PL = dispatch_combine_s(
        machine, most=copies_PLG.max(axis=2), reach=reach, far_ratio=far_ratio
    )
    return LayerSeconds(experts_PL=experts_PL, all_to_all_PL=all_to_all_PL)


def grouped_gemms_s(machine: ExpertMachine, *, copies: Floats, active: Floats) -> Floats:
    """Seconds of the grouped GEMMs of ranks with so many token copies and active experts."""
    some = np.maximum(active, 1.0)
    fewer = np.floor(some)
    more_ratio = some - fewer
    fewer_s = _whole_experts_s(machine, copies=copies, experts=fewer)
    more_s = _whole_experts_s(machine, copies=copies, experts=fewer + 1.0)
    return np.asarray((1.0 - more_ratio) * fewer_s + more_ratio * more_s)


def _whole_experts_s(machine: ExpertMachine, *, copies: Floats, experts: Floats) -> Floats:
    model, width = machine.model, float(machine.moe.expert_ffn_size)
    inner = (2.0 if model.ffn_is_gated else 1.0) * width
    network = trained_experts(
        experts, copies / experts, hidden=float(model.hidden_size), ffn=width, inner=inner
    )
    return np.asarray(machine.prices.seconds(network.forward), dtype=np.float64)


def experts_s(machine: ExpertMachine, *, copies: Floats, active: Floats) -> Floats:
    """Seconds of GEMMs and permutation of ranks with so many copies and active experts."""
    own, model = machine.constants, machine.model
    width = float(machine.moe.expert_ffn_size)
    per_copy = machine.element_bytes * (6.0 * model.hidden_size + 3.0 * width)
    factor = own.moe_memory_factor / own.memory_factor
    moved_s = machine.prices.seconds(memory_bound(copies * per_copy * factor))
    return np.asarray(grouped_gemms_s(machine, copies=copies, active=active) + moved_s)


def dispatch_combine_s(
    machine: ExpertMachine, *, most: Floats, reach: Reach | None, far_ratio: Floats | float = 1.0
) -> Floats:
    """Seconds of dispatch and combine where the most-loaded rank receives `most` token copies.

    Merged, tokens have the same imbalance as copies. `far_ratio` is a factor on the time between
    domains, for links that differ.
    """
    group = machine.group
    ranks, inside = float(group.ranks), float(group.inside)
    if ranks <= 1.0:
        return np.zeros_like(most)
    row_bytes = machine.dispatched_element_bytes * machine.model.hidden_size
    if reach is None:
        near, far = most * (inside - 1.0) / ranks, most * (ranks - inside) / ranks
    else:
        domains = ranks / inside
        tokens = most / machine.moe.computed_top_k
        near = tokens * reach.ranks * (inside - 1.0) / inside
        far = tokens * reach.domains * (domains - 1.0) / domains
    far = far * far_ratio
    once = all_to_all_s(
        (near * row_bytes).ravel(),
        (far * row_bytes).ravel(),
        group,
        machine.hardware,
        machine.constants,
        is_merged=0.0 if reach is None else 1.0,
    )
    return np.asarray(2.0 * once, dtype=np.float64).reshape(most.shape)


def weights_s(machine: ExpertMachine, experts: Floats) -> Floats:
    """Seconds to send the weights of so many experts from a rank, or to it, in one pass.

    Targets are uniform over the other ranks: a share over the links inside a node, the rest over
    the network; one after the other, not overlapped with GEMMs or the all-to-all.
    """
    group = machine.group
    ranks, inside = float(group.ranks), float(group.inside)
    if ranks <= 1.0:
        return np.zeros_like(experts)
    near_ratio = (inside - 1.0) / (ranks - 1.0)
    each_s = near_ratio / number(machine.hardware.scale_up_bytes_per_s)
    each_s += (1.0 - near_ratio) / number(machine.hardware.scale_out_bytes_per_s)
    return np.asarray(experts * machine.expert_bytes * each_s)


def rest_s(machine: ExpertMachine, *, tokens: float, context_tokens: float, decodes: bool) -> float:
    """Seconds of a forward pass without its routed experts, on one of the ranks.

    Args:
        machine: devices and sizes.
        tokens: of the pass, over all ranks.
        context_tokens: of each request.
        decodes: one query a request, so its KV cache is read for that query only.
    """
    model = machine.model
    rows = max(tokens / machine.ranks, 1.0)
    each = (
        _projections_s(machine, rows=rows)
        + _attention_s(machine, rows=rows, context=context_tokens, decodes=decodes)
        + _seconds(machine, memory_bound(10.0 * machine.element_bytes * rows * model.hidden_size))
    )
    dense = model.layers.count(LayerKind.DENSE)
    shared = 0.0 if model.moe is None else float(model.moe.shared_ffn_size)
    networks = dense * _network_s(machine, rows=rows, width=float(model.dense_ffn_size))
    networks += model.num_moe_layers * _network_s(machine, rows=rows, width=shared)
    sampled = rows if decodes else max(rows / context_tokens, 1.0)
    head = gemm(sampled, float(model.vocab_size), float(model.hidden_size), dtype=BF16)
    mixers = model.num_attention_layers * each + model.num_linear_layers * _linear_s(machine, rows)
    return mixers + networks + _seconds(machine, head)


def _seconds(machine: ExpertMachine, *ops: Op) -> float:
    return sum(number(machine.prices.seconds(op)) for op in ops)


def _linear_s(machine: ExpertMachine, rows: float) -> float:
    """Linear attention: its matrices, and its state once in and out for every chunk of tokens."""
    model, own = machine.model, machine.model.linear
    if own is None:
        return 0.0
    widths, hidden = LINEAR_KINDS[own.kind].projections(own), float(model.hidden_size)
    gemms = [gemm(rows, float(widths.inputs), hidden), gemm(rows, hidden, float(own.value_dim))]
    if widths.low_rank:
        gemms.append(gemm(rows, float(widths.low_rank_outputs), float(widths.low_rank)))
    states = 8.0 * own.state_elements * max(rows / own.chunk_size, 1.0)
    return _seconds(machine, *gemms, memory_bound(states))


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
    elif attention.kind == "shared_kv":
        # The output projection is one of each group, and one that joins them.
        rank, joined = float(attention.q_lora_rank or 0), float(attention.output_rank)
        groups = float(attention.output_groups)
        shapes = [
            (rank + attention.head_dim, hidden),
            (values, rank),
            (groups * joined, values / groups),
            (hidden, groups * joined),
        ]
    else:
        kv = 2.0 * attention.num_kv_heads * attention.head_dim
        queries = heads * attention.head_dim * (2.0 if attention.has_output_gate else 1.0)
        shapes.append((queries + kv, hidden))
    return _seconds(machine, *(gemm(rows, n, k) for n, k in shapes))


def _attention_s(machine: ExpertMachine, *, rows: float, context: float, decodes: bool) -> float:
    own = machine.model.attention
    if decodes:
        if own.kind == "shared_kv":
            cached, context = float(own.head_dim), _attended(machine.model, context)
        elif own.kind == "mla":
            cached = float(own.kv_lora_rank + own.qk_rope_head_dim)
        else:
            cached = 2.0 * own.num_kv_heads * own.head_dim
        read_bytes = rows * context * cached * machine.dispatched_element_bytes
        return _seconds(machine, memory_bound(read_bytes))
    sequence = min(context, rows)
    pairs = rows * sequence / 2.0
    if own.kind == "shared_kv":
        pairs = min(pairs, rows * _attended(machine.model, sequence))
    prompt = attention(
        pairs=pairs,
        batch=rows / sequence,
        sequence=sequence,
        heads=float(own.num_heads),
        kv_heads=float(own.num_kv_heads),
        head_dim=float(own.head_dim),
        value_dim=float(own.value_head_dim),
    )
    return _seconds(machine, prompt)


def _attended(model: ModelSpec, context: float) -> float:
    """Tokens of a window and entries of a compressor that the last query sees, mean of layers."""
    window = min(context, float(model.attention.sliding_window or context))
    seen = [one.kept(context) for one in model.compressor_by_layer if one is not None]
    return window + float(sum(seen)) / model.num_layers


def _network_s(machine: ExpertMachine, *, rows: float, width: float) -> float:
    if width <= 0.0:
        return 0.0
    hidden = float(machine.model.hidden_size)
    inner = (2.0 if machine.model.ffn_is_gated else 1.0) * width
    activation = memory_bound(3.0 * machine.element_bytes * rows * width)
    return _seconds(machine, gemm(rows, inner, hidden), gemm(rows, hidden, width), activation)
