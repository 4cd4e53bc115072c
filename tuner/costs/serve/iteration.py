"""One step of a serving engine as a sum of operations, for m tokens and n running sequences.

    T(m, n, s) = sum over layers [ GEMMs(m) + attention + experts(m d) + comm(m) + small(m) ]
                 + head(n) + scheduler

d is the number of attention-data ranks with tokens: they run equal steps and share the experts, so
that a layer's experts see m d tokens. Communication is two all-reduces of m h per layer under
tensor parallelism; under data parallelism an all-gather and a reduce-scatter of m d h around the
experts or an all-to-all of the copies, as configured, or the faster where nothing is stated.

Small kernels: one before a token mixer (its norm with the residual), 2 of a dense network (norm and
activation), 4 of experts (routing and the weighted sum besides), as CUDA graphs of such kernels run
on Hopper; linear attention has another norm behind it. A layer without mixer or without network has
the other's part alone, and one all-reduce. A hyper-connection of s streams, around every mixer and
network, is two kernels which move (4 s + 2) h elements a token and its weights (vLLM 0.33.0,
kernels/mhc: `mhc_fused_post_pre_tilelang`, which reads the streams for the weights and to mix them,
and the block's output, and writes streams and input).

With drafts a running sequence brings k + 1 tokens to a step; callers count them in m. Loads of
experts that were recorded replace those of the tables, as do those of experts without weights
(zero_experts.py). How the parts become a whole step, beside drafting, in two halves or through the
stages of a pipeline, is whole_step.py's business.

Letters: Q query points. h hidden size.

Not covered: dispatch of shortcut-connected experts behind the next layer's dense computation (the
single-batch overlap of the LongCat team's own engine); vLLM 0.33.0 and SGLang 0.5.23 run them one
after the other (models/longcat_flash.py).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from tuner.catalog.serve_rules.manifest import LARGEST_DISPATCH_TOKENS
from tuner.catalog.serve_rules.traits import EngineTraits, ExpertKernels, LayerKernels, MemoryRule
from tuner.costs.serve.all_to_all import ELEMENT_BYTES, ExpertTraffic
from tuner.costs.serve.attention import AttentionLayer
from tuner.costs.serve.decoder import LATENT_KINDS, AttentionKind, Decoder, Formats, Layers
from tuner.costs.serve.engine import A2aBackend, InstanceDegrees
from tuner.costs.serve.expert_loads import ExpertLoads, loaded_experts_s
from tuner.costs.serve.memory import connection_bytes, stage_ratio
from tuner.costs.serve.ops import collective, routed_experts
from tuner.costs.serve.speculative import JOINED_INPUTS, Drafting, draft_decoder
from tuner.costs.serve.zero_experts import computed_copies, computed_loads
from tuner.devices.datasheet import Vendor
from tuner.prices.ops import Op, gemm, memory_bound
from tuner.prices.peer_link import LAUNCH_S
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.machine import (
    BALANCED,
    COMPILED_LAYER_S,
    EAGER_DELTAS,
    EAGER_EXPERTS,
    EAGER_LAYER_S,
    EAGER_MIXERS,
    LOAD,
    PIECES_LAYER_S,
    WHOLE_LAYER_S,
    ServingMachine,
)

SMALL_MIXER: Final = 1
SMALL_LINEAR: Final = 2
SMALL_DENSE: Final = 2
SMALL_MOE: Final = 4
SMALL_ZERO: Final = 2
"""Small kernels of token mixers, of linear ones, of networks, of experts and, on top, of those
without weights: one sums a token's copies, one adds them to the output."""
SMALL_NORMS: Final = 2
SQUARES_BYTES: Final = 8.0
"""Norms of queries and keys over the heads of all ranks: a kernel that sums a token's squares, in
fp32, an all-reduce of both sums, and a kernel that scales (SGLang 0.5.8, models/minimax_m2.py,
`MiniMaxM2RMSNormTP.forward_qk`; vLLM 0.33.0, the class of that name)."""
FUSED_BY: Final = "trtllm"
"""Engine whose all-reduce holds norms (FlashInfer's `trtllm_allreduce_fusion`)."""
TORCH_ROUTING_S: Final = 28e-6
TORCH_ROUTING_TOKEN_S: Final = 17e-9
"""PyTorch's routing beyond that of one kernel: 36 us and 8 of DeepSeek-R1 (sgl-project/sglang, pull
request 5371), and what it takes longer from 1,024 to 40,000 tokens (Kimi-K2, pull request 13374).
"""
SUM_BYTES: Final = 4.0
"""Bytes of a softmax's sum, by which partial outputs are joined."""
CONNECTION_KERNELS: Final = 2
"""Kernels of a hyper-connection: one computes its weights, one mixes."""
SUSTAINED_FACTOR: Final = 1.1
"""Seconds of a saturated device over those of one kernel timed alone: power limits lower the
clocks. Published prompts take 5 to 20 % longer than their kernels."""
FULL_TOKENS: Final = 1024.0
"""Tokens of a step from which on GEMMs keep the whole device busy."""
IDLE_TOKENS: Final = 128.0
"""Tokens of a step up to which memory is the limit and clocks stay up."""


def sustained_factor(m_Q: Floats) -> Floats:
    """The factor on a step of m tokens."""
    place_Q = np.log(np.maximum(m_Q, 1.0) / IDLE_TOKENS) / np.log(FULL_TOKENS / IDLE_TOKENS)
    return np.asarray(1.0 + (SUSTAINED_FACTOR - 1.0) * np.clip(place_Q, 0.0, 1.0))


def _eager_mixer(kind: AttentionKind) -> float:
    """Host seconds of a token mixer without a graph, over those of a network."""
    if kind in (AttentionKind.GATED_DELTA, AttentionKind.KDA):
        return EAGER_DELTAS
    return {AttentionKind.NONE: 0.0, AttentionKind.GROUPED: 1.0}.get(kind, EAGER_MIXERS)


def _eager_network(group: Layers) -> float:
    """Host seconds of a network without a graph, over those of a dense one."""
    return EAGER_EXPERTS if group.has_experts else float(group.has_network)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSeconds:
    """Seconds of everything that depends on the tokens of a step alone, by what may overlap."""

    dense_Q: Floats
    """Seconds of layers without experts."""
    compute_Q: Floats
    """Seconds of layers with experts, without the all-to-all."""
    all_to_all_Q: Floats
    """Seconds of the all-to-all of layers with experts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Iteration:
    """One engine running one model on one system."""

    decoder: Decoder
    formats: Formats
    degrees: InstanceDegrees
    traits: EngineTraits
    machine: ServingMachine
    sequence_s: float = 0.0
    """Seconds of host work per running sequence and step, unless the machine's host was
    measured."""
    busy_ratio: float = 1.0
    """Share of the attention-data ranks that have tokens; the others only run their experts."""
    experts_table: str = ""
    """Software whose measured experts count, as `software@version`; empty: the engine's newest."""
    drafting: Drafting | None = None
    two_batch_overlap: bool = False
    """Whether steps run as two halves, one's all-to-all behind the other's GEMMs."""
    a2a_backend: A2aBackend = A2aBackend.LEAST
    loads: ExpertLoads | None = None
    """Recorded loads of experts; None: those of the kernel tables."""
    is_eager: bool = False
    """Whether no graph holds the steps: the host launches their kernels one by one."""
    graph_sequences: float = math.inf
    """Running sequences of the largest step that a graph holds; larger ones wait for the host."""
    stream_s: float = 0.0
    """Seconds of the server's process to stream one token of a rank's running sequence."""
    has_whole_graphs: bool = False
    """Whether one graph holds a decode step also where the engine makes them in pieces by
    default."""
    release: str = ""
    """Release of the engine; empty: the newest."""
    exchanges_outputs: bool = False
    """Whether context ranks pass outputs and their sums in one all-to-all; else sums are gathered
    first."""
    aligns_prompts: bool | None = None
    """Whether attention-data ranks wait until all of them have prompts; None: the engine's trait
    says."""
    redundant_experts: int = 0
    """Second copies of experts in every layer; where loads were recorded, those of their slots."""

    @property
    def num_slots(self) -> int:
        """Copies of experts of a layer, over all ranks that share them."""
        num_experts = 0 if self.decoder.experts is None else self.decoder.experts.num
        recorded = 0 if self.loads is None else self.loads.num_slots
        return max(num_experts + self.redundant_experts, recorded)

    @property
    def spare_experts(self) -> int:
        """Copies of experts of a layer beyond one of each."""
        return 0 if self.decoder.experts is None else self.num_slots - self.decoder.experts.num

    @property
    def computed_copies(self) -> float:
        """Copies of a token that are dispatched and computed, mean; 0 without experts."""
        experts = self.decoder.experts
        if experts is None or not experts.zero:
            return 0 if experts is None else experts.top_k
        return computed_copies(experts, self.traits)

    @cached_property
    def computed_loads(self) -> ExpertLoads | None:
        """Loads of these copies; None: those of the kernel tables."""
        experts = self.decoder.experts
        if experts is None or not experts.zero:
            return self.loads
        return computed_loads(experts, self.traits, self.loads, ranks=self.degrees.expert)

    @property
    def checked_tokens(self) -> int:
        """Tokens that a running sequence brings to a step, drafts included."""
        return 1 if self.drafting is None else self.drafting.checked_tokens

    @property
    def tokens_per_step(self) -> float:
        """Return the tokens that a running sequence gets from a step on average."""
        return 1.0 if self.drafting is None else self.drafting.tokens_per_step

    @cached_property
    def drafter(self) -> "Iteration | None":
        """One pass of the drafter; its whole layer is on every rank of the last stage."""
        if self.drafting is None:
            return None
        return replace(
            self,
            decoder=draft_decoder(self.decoder, self.drafting.method),
            degrees=replace(self.degrees, pipeline=1, context=self.degrees.side_context),
            sequence_s=0.0,
            drafting=None,
            two_batch_overlap=False,
        )

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.decoder.moe_layers

    @property
    def slot_ratio(self) -> float:
        """Share of all layers that the longest stage of the pipeline holds."""
        return stage_ratio(self.decoder, self.degrees)

    @cached_property
    def cache_formats(self) -> Formats:
        """Formats with the fp8 cache of sparse attention that the release keeps on this device."""
        packs = self.traits.packs_sparse(self.machine.sheet.generation, self.release)
        return replace(self.formats, packs_sparse=packs)

    @cached_property
    def attention_layers(self) -> tuple[tuple[int, AttentionLayer], ...]:
        """Counts and one layer of each kind."""
        states = self.memory_rule.states
        return tuple(
            (
                group.count,
                AttentionLayer(
                    attention=group.attention,
                    hidden=self.decoder.hidden,
                    formats=self.formats,
                    tensor=self.degrees.attention_tensor,
                    machine=self.machine,
                    software=self.traits.name,
                    state_bytes=states.element_bytes(self.decoder.architecture),
                    context=self.degrees.context,
                    side_context=self.degrees.side_context,
                    indexer_launches=self.traits.indexer_launches(self.release),
                ),
            )
            for group in self.decoder.layers
        )

    @cached_property
    def kernels(self) -> LayerKernels:
        """Return the kernels that the engine's release runs."""
        return self.traits.kernels(self.release)

    @cached_property
    def fuses_norms(self) -> bool:
        """Whether each all-reduce holds the norm behind it."""
        degrees, sheet = self.degrees, self.machine.sheet
        devices = self.kernels.fused_norms.get(self.decoder.architecture, ())
        is_dispatched = self.a2a_backend in (A2aBackend.NORMAL, A2aBackend.LOW_LATENCY)
        is_plain = degrees.attention_tensor > degrees.attention_data == 1 and not is_dispatched
        return is_plain and sheet.generation in devices and degrees.devices <= sheet.scale_up_domain

    @property
    def waits_for_ranks(self) -> bool:
        """Return whether a rank's step waits for prompts of other ranks with the same experts."""
        has_ranks = self.degrees.attention_data > 1 and self.moe_layers > 0
        aligns = self.traits.aligns_prompts if self.aligns_prompts is None else self.aligns_prompts
        return has_ranks and not aligns

    @property
    def busy_ranks(self) -> float:
        """Attention-data ranks that have tokens."""
        return max(self.degrees.attention_data * self.busy_ratio, 1.0)

    def linear_parts(self, m_Q: Floats) -> dict[str, Floats]:
        """Seconds of everything that depends on the tokens of the step alone, by part."""
        parts = {
            name: np.zeros_like(m_Q)
            for name in ("projections", "dense", "experts", "shared", "router", "exchange", "small")
        }
        for group, (count, layer) in zip(self.decoder.layers, self.attention_layers, strict=True):
            projections_Q = self.machine.corrections.linear * layer.projections_s(m_Q)
            parts["projections"] = parts["projections"] + count * projections_Q
            for name, seconds_Q in self._layer(m_Q, group).items():
                parts[name] = parts[name] + count * seconds_Q
        return parts

    def linear_s(self, m_Q: Floats) -> Floats:
        """Return the seconds of `linear_parts` together, at the clocks that a device keeps."""
        seconds_Q = self._linear_by_tokens.get(m_Q.tobytes())
        if seconds_Q is None:
            total_Q = np.sum(list(self.linear_parts(m_Q).values()), axis=0)
            seconds_Q = total_Q * self._sustained(m_Q) + self._idle_s
            seconds_Q.setflags(write=False)
            self._linear_by_tokens[m_Q.tobytes()] = seconds_Q
        return seconds_Q

    @cached_property
    def _linear_by_tokens(self) -> dict[bytes, Floats]:
        """Filled on use: seconds by tokens of steps."""
        return {}

    @cached_property
    def layers_launch_s(self) -> float:
        """Seconds in which the host launches all layers; 0 where it was measured."""
        vendor = self.machine.sheet.generation.vendor
        if self.machine.host is not None:
            return 0.0
        if self.traits.compiles_layers and not self.is_eager and vendor in COMPILED_LAYER_S:
            return self.decoder.num_layers * COMPILED_LAYER_S[vendor]
        halves = sum(
            group.count * (_eager_network(group) + _eager_mixer(group.attention.kind))
            for group in self.decoder.layers
        )
        return 0.5 * halves * EAGER_LAYER_S.get(vendor, 0.0)

    @property
    def _idle_s(self) -> float:
        """Seconds of a step that its graphs leave a device idle; 0 where its host was measured."""
        in_pieces = self.machine.sheet.generation.vendor in self.traits.graphs_in_pieces
        if self.machine.host is not None or not self.has_graphs or not in_pieces:
            return 0.0
        layer_s = WHOLE_LAYER_S if self.has_whole_graphs else PIECES_LAYER_S
        return self.decoder.num_layers * layer_s

    @property
    def has_graphs(self) -> bool:
        """Return whether graphs hold any steps.

        DeepEP's normal kernels wait for counts on the host.

        Engines switch graphs off beside them: vLLM in `config/compilation.py`, SGLang in
        `_handle_a2a_moe` of its server's arguments; files for TensorRT-LLM state none.
        """
        waits = self.a2a_backend is A2aBackend.NORMAL and self.degrees.attention_data > 1
        return not (self.is_eager or waits)

    @property
    def largest_graph(self) -> float:
        """Sequences of the largest step without prompts that a graph holds."""
        return self.graph_sequences if self.has_graphs else 0.0

    @property
    def largest_prompt_graph(self) -> float:
        """Tokens of the largest step with prompts that a graph holds, or that waits for no host."""
        if not self.traits.waits_for_host:
            return math.inf
        if not self.has_graphs:
            return 0.0
        graphs = self.traits.graphs_of_prompts(self.release)
        if graphs is None or not self.captures_prompts:
            return self.traits.graph_tokens
        has_latent = any(group.attention.kind in LATENT_KINDS for group in self.decoder.layers)
        return graphs.latent_tokens if has_latent else math.inf

    @property
    def captures_prompts(self) -> bool:
        """Whether the engine's release has graphs of steps with prompts for such a launch."""
        graphs, degrees = self.traits.graphs_of_prompts(self.release), self.degrees
        if graphs is None or self.two_batch_overlap or max(degrees.pipeline, degrees.context) > 1:
            return False
        return graphs.hold(
            self.decoder.architecture,
            {group.attention.kind for group in self.decoder.layers},
            device=self.machine.sheet.generation,
            data_ranks=degrees.attention_data,
            dispatches=self.a2a_backend in (A2aBackend.NORMAL, A2aBackend.LOW_LATENCY),
            drafts=self.drafting is not None,
        )

    def prompt_launch_s(self, m_Q: Floats) -> Floats:
        """Least seconds of the layers of a step of m tokens with prompts, without a graph."""
        return np.where(m_Q > self.largest_prompt_graph, self.layers_launch_s, 0.0)

    def decode_launch_s(self, n_Q: Floats) -> Floats:
        """Least seconds of the layers of a step of n sequences without prompts."""
        return np.where(n_Q > self.largest_graph, self.layers_launch_s, 0.0)

    def _sustained(self, m_Q: Floats) -> Floats:
        """The factor on a step of m tokens; 1 where whole steps were measured."""
        return sustained_factor(m_Q) if self.machine.host is None else np.ones_like(m_Q)

    def linear_split(self, m_Q: Floats) -> TokenSeconds:
        """Return the seconds of `linear_s` by what two halves of a step may hide of each other."""
        if m_Q.tobytes() not in self._split_by_tokens:
            self._split_by_tokens[m_Q.tobytes()] = self._split(m_Q)
        return self._split_by_tokens[m_Q.tobytes()]

    @cached_property
    def _split_by_tokens(self) -> dict[bytes, TokenSeconds]:
        """Filled on use: seconds by tokens of steps."""
        return {}

    def _split(self, m_Q: Floats) -> TokenSeconds:
        dense_Q, compute_Q, all_to_all_Q = (np.zeros_like(m_Q) for _ in range(3))
        for group, (count, layer) in zip(self.decoder.layers, self.attention_layers, strict=True):
            parts = self._layer(m_Q, group)
            passed_Q = count * parts.pop("exchange")
            compute_part_Q = count * (
                self.machine.corrections.linear * layer.projections_s(m_Q)
                + np.sum(list(parts.values()), axis=0)
            )
            if group.has_experts:
                compute_Q, all_to_all_Q = compute_Q + compute_part_Q, all_to_all_Q + passed_Q
            else:
                dense_Q = dense_Q + compute_part_Q + passed_Q
        factor_Q = self._sustained(m_Q)
        return TokenSeconds(
            dense_Q=dense_Q * factor_Q,
            compute_Q=compute_Q * factor_Q,
            all_to_all_Q=all_to_all_Q * factor_Q,
        )

    def _layer(self, m_Q: Floats, group: Layers) -> dict[str, Floats]:
        """A layer beside its mixer's kernels, as corrected."""
        links, linear = self.machine.corrections.links, self.machine.corrections.linear
        return {
            name: seconds_Q * (links if name == "exchange" else linear)
            for name, seconds_Q in self._layer_parts(m_Q, group).items()
        }

    def _layer_parts(self, m_Q: Floats, group: Layers) -> dict[str, Floats]:
        """A layer beside its mixer's kernels: its network, and the communication of both."""
        nothing_Q = np.zeros_like(m_Q)
        parts = self._network(m_Q, group) if group.has_network else {}
        if self.decoder.streams > 1:
            connections = group.has_mixer + group.has_network
            parts["small"] = parts.get("small", nothing_Q) + connections * self._connection_s(m_Q)
        if not group.has_mixer:
            return {"exchange": nothing_Q, "small": nothing_Q} | parts
        small = SMALL_MIXER if group.attention.linear is None else SMALL_LINEAR
        more_s = 0.0
        if group.attention.kind is AttentionKind.LATENT:
            small += self.kernels.latent_kernels
        if group.attention.kind is AttentionKind.GATED_DELTA:
            more_s = LAUNCH_S * self.kernels.delta_kernels.get(self.decoder.architecture, 0)
        if self.fuses_norms:
            more_s -= (1 + group.has_network) * self.machine.small_s
        all_to_all_Q = self._reduced_s(m_Q) + parts.get("exchange", nothing_Q)
        if group.attention.norms_all_heads:
            small += SMALL_NORMS
            squares_Q = self._passed_s(
                "all_reduce", SQUARES_BYTES * m_Q, self.degrees.attention_tensor
            )
            all_to_all_Q = all_to_all_Q + squares_Q
        small_Q = self._small_s(m_Q, small) + more_s + parts.get("small", nothing_Q)
        return parts | {"exchange": all_to_all_Q, "small": small_Q}

    def _network(self, m_Q: Floats, group: Layers) -> dict[str, Floats]:
        """Price the network or the experts of one layer by part, communication included."""
        ranks = self.degrees.attention_tensor
        if group.dense_ffn:
            # With data-parallel attention every rank holds the whole dense network.
            return {
                "dense": self._dense_s(m_Q, width=group.dense_ffn / ranks),
                "exchange": self._reduced_s(m_Q),
                "small": self._small_s(m_Q, SMALL_DENSE),
            }
        experts = self.decoder.experts
        assert experts is not None  # Decoder refuses layers without either
        name, device = self.decoder.architecture, self.machine.sheet.generation
        kernels = self.kernels.expert_kernels(name, self.formats.experts, device)
        routed = routed_experts(
            self.decoder,
            self.formats,
            m_Q * self.busy_ranks,
            tensor=self.degrees.moe_tensor,
            expert=self.degrees.expert,
            software=self.experts_table or self.traits.name,
            # Second copies are placed where loads are uneven, to level them.
            load=BALANCED if self.redundant_experts else LOAD,
            copies=self.computed_copies,
            kernels=kernels,
        )
        router_Q = self._gemm_s(m_Q, n=experts.router_outputs, k=self.decoder.hidden, dtype="bf16")
        is_generated, is_cuda = kernels is ExpertKernels.GENERATED, device.vendor is Vendor.NVIDIA
        if is_cuda and not is_generated and (name, experts.num) in self.kernels.torch_routing:
            router_Q = router_Q + TORCH_ROUTING_S + TORCH_ROUTING_TOKEN_S * m_Q
        seconds_by_part = {
            "experts": self._experts_s(m_Q, routed),
            "router": router_Q,
            "exchange": self._moe_all_to_all_s(m_Q),
            "small": self._small_s(
                m_Q, SMALL_MOE - is_generated + (SMALL_ZERO if experts.zero else 0)
            ),
        }
        shared_Q = np.zeros_like(m_Q)
        if experts.shared_ffn:
            shared_Q = shared_Q + self._dense_s(m_Q, width=experts.shared_ffn / ranks)
        if experts.latent:
            shared_Q = shared_Q + self._latent_s(m_Q, latent=experts.latent)
        if experts.shared_ffn or experts.latent:
            seconds_by_part["shared"] = shared_Q
        return seconds_by_part

    def _latent_s(self, m_Q: Floats, *, latent: int) -> Floats:
        """The projections around the experts' latent width, whole on every rank."""
        hidden, dtype = self.decoder.hidden, self.formats.latent_projections
        down_Q = self._gemm_s(m_Q, n=latent, k=hidden, dtype=dtype)
        return down_Q + self._gemm_s(m_Q, n=hidden, k=latent, dtype=dtype)

    def _experts_s(self, m_Q: Floats, routed: Op) -> Floats:
        """Routed experts by the kernels that fit how tokens reach them."""
        if self.degrees.attention_data == 1 or self.a2a_backend in (
            A2aBackend.LEAST,
            A2aBackend.ALLGATHER,
        ):
            if self.degrees.attention_data > 1 and self.a2a_backend is A2aBackend.LEAST:
                # The fastest exchange may hand a rank the copies for its experts alone.
                routed = replace(routed, axes={**routed.axes, "handled": m_Q})
            return self._kernel_s(routed)
        many_Q = self._kernel_s(replace(routed, kind=f"context/{routed.kind}"))
        if self.a2a_backend is A2aBackend.NORMAL:
            return many_Q
        few_Q = self._kernel_s(replace(routed, kind=f"generation/{routed.kind}"))
        return np.where(m_Q <= LARGEST_DISPATCH_TOKENS, few_Q, many_Q)

    def _kernel_s(self, routed: Op) -> Floats:
        if self.computed_loads is None:
            return self.machine.seconds(routed)
        return loaded_experts_s(self.machine, routed, loads=self.computed_loads)

    def _dense_s(self, m_Q: Floats, *, width: float) -> Floats:
        hidden, dtype = self.decoder.hidden, self.formats.ffn
        inner = (self.decoder.matrices - 1.0) * width
        up_Q = self._gemm_s(m_Q, n=inner, k=hidden, dtype=dtype)
        return up_Q + self._gemm_s(m_Q, n=hidden, k=width, dtype=dtype)

    def _gemm_s(self, m_Q: Floats, *, n: float, k: float, dtype: str) -> Floats:
        return self.machine.seconds(
            replace(gemm(m_Q, n, k, dtype=dtype), software=self.traits.name)
        )

    def _small_s(self, m_Q: Floats, count: int) -> Floats:
        moved_Q = 2.0 * ELEMENT_BYTES * m_Q * self.decoder.hidden
        return count * self.machine.seconds(memory_bound(moved_Q))

    def _connection_s(self, m_Q: Floats) -> Floats:
        """A hyper-connection: one kernel for its weights, one that mixes."""
        vectors = 4.0 * self.decoder.streams + 2.0
        moved_Q = vectors * ELEMENT_BYTES * m_Q * self.decoder.hidden
        moved_Q = moved_Q + connection_bytes(self.decoder)
        return CONNECTION_KERNELS * self.machine.seconds(memory_bound(moved_Q / CONNECTION_KERNELS))

    def _reduced_s(self, m_Q: Floats) -> Floats:
        """One all-reduce of the step's hidden states."""
        return self._collective_s("all_reduce", m_Q, self.degrees.attention_tensor)

    def _moe_all_to_all_s(self, m_Q: Floats) -> Floats:
        if self.degrees.attention_data == 1:
            return self._reduced_s(m_Q)
        traffic = ExpertTraffic(
            machine=self.machine,
            hidden=self.decoder.expert_hidden,
            top_k=self.computed_copies,
            ranks=self.degrees.attention_tensor * self.degrees.attention_data,
            a2a_backend=self.a2a_backend,
            software=self.traits.name,
        )
        return traffic.seconds(m_Q, together_Q=m_Q * self.busy_ranks)

    def _collective_s(self, kind: str, m_Q: Floats, ranks: int) -> Floats:
        return self._passed_s(kind, ELEMENT_BYTES * m_Q * self.decoder.hidden, ranks)

    def _passed_s(self, kind: str, moved_Q: Floats, ranks: int) -> Floats:
        software = FUSED_BY if self.fuses_norms else self.kernels.all_reduce or self.traits.name
        return self.machine.seconds(collective(kind, moved_Q, ranks=ranks, software=software))

    def head_s(self, n_Q: Floats) -> Floats:
        """The head for n sequences, the gathering of its logits, and the host's work on them."""
        ranks = self.degrees.attention_tensor
        rows_Q = n_Q * self.checked_tokens
        gemm_Q = self._gemm_s(
            rows_Q, n=self.decoder.vocab / ranks, k=self.decoder.hidden, dtype=self.formats.head
        )
        logits_Q = ELEMENT_BYTES * rows_Q * self.decoder.vocab
        host, corrections = self.machine.host, self.machine.corrections
        sequence_s = self.sequence_s if host is None else host.sequence_s
        host_Q = corrections.step * sequence_s * n_Q
        gathered_Q = corrections.links * self._passed_s("all_gather", logits_Q, ranks)
        return host_Q + corrections.linear * gemm_Q + gathered_Q

    def decode_s(self, n_Q: Floats, past_Q: Floats) -> Floats:
        """Attention of all layers for one step of n sequences, drafts included."""
        total_Q = np.zeros_like(n_Q)
        for count, layer in self.attention_layers:
            total_Q = total_Q + count * layer.decode_s(n_Q, past_Q, checked=self.checked_tokens)
        passed_Q = self.context_s(n_Q * self.checked_tokens)
        return self.machine.corrections.attention * total_Q + passed_Q

    def context_s(self, m_Q: Floats) -> Floats:
        """Return seconds of what all layers pass among context ranks for m tokens.

        Model:   an all-gather of m queries of all heads; an all-gather of their sums from every
                 rank and a reduce-scatter of m outputs, or one all-to-all of both, which moves what
                 a reduce-scatter does and is priced as one
        Source:  vLLM 0.33.0, v1/attention/ops/dcp.py, `ag_rs` and `a2a`
        """
        ranks, total_Q = self.degrees.context, np.zeros_like(m_Q)
        if ranks == 1:
            return total_Q
        for count, layer in self.attention_layers:
            queries, outputs = layer.context_elements
            sums_Q = SUM_BYTES * m_Q * layer.heads * ranks * (queries > 0.0)
            passed_Q = self._passed_s("all_gather", ELEMENT_BYTES * m_Q * queries, ranks)
            outputs_Q = ELEMENT_BYTES * m_Q * outputs
            if self.exchanges_outputs:
                passed_Q = passed_Q + self._passed_s("reduce_scatter", outputs_Q + sums_Q, ranks)
            else:
                passed_Q = passed_Q + self._passed_s("all_gather", sums_Q * ranks, ranks)
                passed_Q = passed_Q + self._passed_s("reduce_scatter", outputs_Q, ranks)
            total_Q = total_Q + (count if queries else 0) * passed_Q
        return total_Q

    def context_prompt_s(self, m_Q: Floats, before_Q: Floats) -> Floats:
        """Return seconds of what context ranks pass for m tokens of a prompt behind those before.

        Compressed keys of what was read before are gathered; else queries and outputs are passed.
        Not covered: simulations, whose prompts take no such time (simulate/serving/steps.py).
        """
        ranks, keys_Q = self.degrees.context, np.zeros_like(m_Q)
        if ranks == 1:
            return keys_Q
        if any(group.attention.kind is not AttentionKind.LATENT for group in self.decoder.layers):
            return np.where(before_Q > 0.0, self.context_s(m_Q), keys_Q)
        for count, layer in self.attention_layers:
            gathered_Q = ELEMENT_BYTES * before_Q * layer.attention.kv_elements
            keys_Q = keys_Q + count * self._passed_s("all_gather", gathered_Q, ranks)
        return np.where(before_Q > 0.0, keys_Q, 0.0)

    def draft_attention_s(self, n_Q: Floats, past_Q: Floats) -> Floats:
        """Attention of the drafter's first pass, over all tokens that a step has checked."""
        total_Q = np.zeros_like(n_Q)
        if self.drafter is not None:
            for count, layer in self.drafter.attention_layers:
                total_Q = total_Q + count * layer.decode_s(n_Q, past_Q, checked=self.checked_tokens)
            passed_Q = self.drafter.context_s(n_Q * self.checked_tokens)
            total_Q = self.machine.corrections.attention * total_Q + passed_Q
        return total_Q

    def prompt_s(self, s_Q: Floats) -> Floats:
        """Attention of all layers for one prompt of s tokens."""
        total_Q = np.zeros_like(s_Q)
        for count, layer in self.attention_layers:
            total_Q = total_Q + count * layer.prompt_s(s_Q)
        factor = self.machine.corrections.prompt_attention
        return total_Q * factor * (SUSTAINED_FACTOR if self.machine.host is None else 1.0)

    def joined_s(self, m_Q: Floats) -> Floats:
        """The GEMM that joins hidden states and embeddings before a drafting layer."""
        hidden, dtype = self.decoder.hidden, self.formats.attention
        joined_Q = self._gemm_s(m_Q, n=hidden, k=JOINED_INPUTS * hidden, dtype=dtype)
        return self.machine.corrections.linear * joined_Q

    def passed_s(self, m_Q: Floats) -> Floats:
        """Sends of hidden states from stage to stage in a step, all of them together.

        Each tensor rank sends its part (vLLM, `send_tensor_dict` with an all-gather behind it).
        """
        hops = self.degrees.pipeline - 1
        if hops == 0:
            return np.zeros_like(m_Q)
        fits = self.degrees.devices <= self.machine.sheet.scale_up_domain
        is_inside = fits and self.degrees.stage_machines == 1
        width = self.decoder.streams * self.decoder.hidden
        moved_Q = ELEMENT_BYTES * m_Q * width / self.degrees.attention_tensor
        factor = self.machine.corrections.links
        return factor * hops * self.machine.message_s(moved_Q, is_inside=is_inside)

    @cached_property
    def memory_rule(self) -> MemoryRule:
        """Return the rule by which the engine's release divides a device's memory."""
        return self.traits.memory_rule(self.release)

    @property
    def scheduler_s(self) -> float:
        """Return the seconds between two steps without prompts."""
        host, factor = self.machine.host, self.machine.corrections.step
        if host is None:
            gap_s = 0.0 if self.drafting is None else self.traits.draft_gap_s(self.release)
            return factor * (self.traits.scheduler_s + gap_s + self._exposed_host_s)
        tensor_s = host.tensor_step_s if self.degrees.attention_tensor > 1 else 0.0
        return factor * (host.step_s + tensor_s)

    @property
    def prompt_scheduler_s(self) -> float:
        """Return the seconds between two steps that hold prompts."""
        host = self.machine.host
        if host is not None:
            return self.scheduler_s
        own_s = self.traits.scheduler_s * self.traits.prompt_scheduler_ratio
        return self.machine.corrections.step * (own_s + self._exposed_host_s)

    @property
    def nccl_ranks(self) -> int:
        """Ranks of the largest group that meets by NCCL inside a step."""
        is_gathered = self.a2a_backend is A2aBackend.ALLGATHER
        return self.degrees.attention_tensor * (self.degrees.attention_data if is_gathered else 1)

    @property
    def _exposed_host_s(self) -> float:
        """Return the exposed seconds of host work where the step's collectives use the network."""
        is_inside = self.nccl_ranks <= self.machine.sheet.scale_up_domain
        return 0.0 if is_inside else self.traits.exposed_host_s
