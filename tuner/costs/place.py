"""Seconds of the expert layers of one forward pass, from the token copies that each rank gets.

    P passes   L MoE layers   G ranks   C columns
    h hidden size; of latent experts their latent width   f width of an expert
    e bytes of an element

A rank with n token copies on a active experts computes the grouped GEMMs of a experts with n/a rows
each and moves 6 e h bytes a copy to permute and 3 e f to activate (2 e f without a gate). The
grouped GEMMs include reading the weights of active experts, which dominates in decode. A fractional
average a interpolates between the neighbouring whole numbers. A rank's time is divided by its
speed, and the slowest rank sets the time of a layer. Dispatch and combine wait for the rank that
receives the most copies:

    plain       every copy is sent
    merged      a token is sent once to each domain and there once to each rank that it reaches

The rest of a pass is priced roughly, to state a gain as a share of the pass, data parallel over the
ranks: the head, and in each layer an equal part of the operations that tuner/spec/accounting.py
counts for projections, dense networks and shared experts, as one GEMM. Prompts take as long as the
pairs that attention scores. Decode reads what tuner/costs/serve/mixer_ops.py lists for an engine
over a stated context.

Not covered: overlap of all-to-all and GEMMs, launch overhead of the host, tensor parallelism inside
an expert. A rank's experts have equal rows; the additional tiles of an uneven split are a few per
cent at ten rows a tile and less.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.config.columns import Numbers
from tuner.config.shapes import Hardware, number
from tuner.costs.serve.decoder import Formats, decoder_of
from tuner.costs.serve.mixer_ops import MixerOps
from tuner.prices.ops import (
    BF16,
    Op,
    Prices,
    attention,
    gemm,
    memory_bound,
    trained_experts,
)
from tuner.prices.serve.work import work
from tuner.prices.train.collectives import Group, all_to_all_s, sent_s
from tuner.prices.train.constants import Constants
from tuner.spec.accounting import forward_flop_per_token, one_expert_parameters
from tuner.spec.model import ModelSpec, Moe

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

MOST_PRICED = 2**18
"""Ranks priced at a time, which bounds memory."""

AS_PRICED: Final = Formats(attention="", output="", ffn="", experts="", kv="bf16")
"""GEMMs in the format that the machine's prices are of, and a cache in bf16."""


def expert_bytes(model: ModelSpec, *, element_bytes: float) -> float:
    """Return the bytes of one expert of one layer."""
    return one_expert_parameters(model) * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertMachine:
    """Devices, links and sizes that determine the time."""

    model: ModelSpec
    prices: Prices
    hardware: Hardware
    constants: Constants
    ranks: int
    element_bytes: float
    """Bytes of one element of weights and activations in the GEMMs."""
    dispatched_element_bytes: float = 2.0
    """Bytes of one element that is dispatched or combined."""
    ranks_per_node: int | None = None
    """Ranks of a node where these are fewer than its devices; None: as many."""

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
        """Return the bytes of one expert of one layer."""
        return expert_bytes(self.model, element_bytes=self.element_bytes)

    @property
    def moe(self) -> Moe:
        """The experts of the model."""
        if self.model.moe is None:
            raise ValueError(f"{self.model.name} has no experts")
        return self.model.moe

    @property
    def up_matrices(self) -> float:
        """Matrices into the inner width of a network or an expert: two with a gate."""
        return 2.0 if self.model.ffn_is_gated else 1.0

    def grouped_gemms(self, experts: Numbers, rows: Numbers) -> Op:
        """Grouped GEMMs of so many experts of so many rows each."""
        width = float(self.moe.expert_ffn_size)
        hidden, inner = float(self.model.expert_hidden), self.up_matrices * width
        return trained_experts(experts, rows, hidden=hidden, ffn=width, inner=inner).forward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSeconds:
    """One entry per pass and layer."""

    experts_PL: Floats
    """Grouped GEMMs and permutation of the most-loaded rank."""
    all_to_all_PL: Floats
    """Dispatch and combine."""

    @property
    def pass_P(self) -> Floats:
        """Return the seconds of all layers, by pass."""
        return np.asarray((self.experts_PL + self.all_to_all_PL).sum(axis=1))

    @property
    def layer_L(self) -> Floats:
        """Return the seconds of each layer, mean over passes."""
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
        machine, max_copies=copies_PLG.max(axis=2), reach=reach, far_ratio=far_ratio
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
    op = machine.grouped_gemms(experts, copies / experts)
    return np.asarray(machine.prices.seconds(op), dtype=np.float64)


def experts_s(machine: ExpertMachine, *, copies: Floats, active: Floats) -> Floats:
    """Seconds of GEMMs and permutation of ranks with so many copies and active experts."""
    constants = machine.constants
    activated = (1.0 + machine.up_matrices) * machine.moe.expert_ffn_size
    per_copy = machine.element_bytes * (6.0 * machine.model.expert_hidden + activated)
    factor = constants.moe_memory_factor / constants.memory_factor
    moved_s = machine.prices.seconds(memory_bound(copies * per_copy * factor))
    return np.asarray(grouped_gemms_s(machine, copies=copies, active=active) + moved_s)


def dispatch_combine_s(
    machine: ExpertMachine,
    *,
    max_copies: Floats,
    reach: Reach | None,
    far_ratio: Floats | float = 1.0,
) -> Floats:
    """Seconds of dispatch and combine if the most-loaded rank receives `max_copies` token copies.

    Merged, tokens have the same imbalance as copies. `far_ratio` is a factor on the time between
    domains, for links that differ.
    """
    group = machine.group
    ranks, inside = float(group.ranks), float(group.inside)
    if ranks <= 1.0:
        return np.zeros_like(max_copies)
    row_bytes = machine.dispatched_element_bytes * machine.model.expert_hidden
    if reach is None:
        near, far = max_copies * (inside - 1.0) / ranks, max_copies * (ranks - inside) / ranks
    else:
        domains = ranks / inside
        tokens = max_copies / machine.moe.computed_top_k
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
    return np.asarray(2.0 * once, dtype=np.float64).reshape(max_copies.shape)


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
    moved_bytes = experts * machine.expert_bytes
    return np.asarray(sent_s(moved_bytes, inside_ratio=near_ratio, hardware=machine.hardware))


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
    sequence = context_tokens if decodes else min(context_tokens, rows)
    sampled = rows if decodes else max(rows / context_tokens, 1.0)
    hidden, decoder = float(model.hidden_size), decoder_of(model)
    flop = forward_flop_per_token(model, sequence_length=max(1, round(sequence)))
    dense = flop.attention_projections + flop.dense_ffn + flop.shared_experts
    dense += 4.0 * hidden * machine.moe.latent_size * model.num_moe_layers
    layers = float(model.num_layers)
    # Norm before each mixer or network, residual addition behind it.
    parts = sum(group.count * (group.has_mixer + group.has_network) for group in decoder.layers)
    total_s = _seconds(
        machine,
        gemm(sampled, float(model.vocab_size), hidden, dtype=BF16),
        memory_bound(5.0 * parts * machine.element_bytes * rows * hidden),
    )
    total_s += layers * _seconds(machine, gemm(rows, dense / (2.0 * hidden * layers), hidden))
    if not decodes:
        spec = model.attention
        width = float(spec.num_heads * (spec.head_dim + spec.value_head_dim))
        scored = rows * (flop.attention_core + flop.linear_scan) / (2.0 * width * layers)
        prompts = attention(
            pairs=scored,
            batch=rows / sequence,
            sequence=sequence,
            heads=float(spec.num_heads),
            kv_heads=float(spec.num_kv_heads),
            head_dim=float(spec.head_dim),
            value_dim=float(spec.value_head_dim),
        )
        return total_s + layers * _seconds(machine, prompts)
    for group in decoder.layers:
        mixer = MixerOps(attention=group.attention, hidden=model.hidden_size, formats=AS_PRICED)
        ops = mixer.decode_ops(np.array([rows]), np.array([context_tokens]))
        read = [memory_bound(work(op)[1]) for op in ops]
        total_s += group.count * _seconds(machine, *read)
    return total_s


def _seconds(machine: ExpertMachine, *ops: Op) -> float:
    return sum(number(machine.prices.seconds(op)) for op in ops)
