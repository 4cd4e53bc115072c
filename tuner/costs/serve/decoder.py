"""A model as a serving engine runs it: layers by kind of attention and network, and its formats.

`ModelSpec` describes what planning a training run needs; a `Decoder` groups its layers as serving
prices them, and adds the storage format of every part of a quantised checkpoint. A group may lack a
token mixer or a network (Nemotron-H).

Not covered: encoders and vision towers, which these measurements do not run.
"""

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from math import gcd
from typing import Final

from profilers.steps.config import LayerKind
from tuner.prices.serve.work import BYTES
from tuner.spec.linear_attention import LinearAttention
from tuner.spec.model import Attention, Layer, Mixer, ModelSpec, Moe, QkNorm
from tuner.spec.sparse_attention import Compressor, Indexer


class AttentionKind(StrEnum):
    """Kind of token mixer, by what a layer caches of past tokens and how it reads them."""

    GROUPED = "grouped"
    """Keys and values of a few heads (GQA)."""
    LATENT = "latent"
    """One compressed vector per token (MLA)."""
    SPARSE_LATENT = "sparse_latent"
    """MLA over the tokens that an indexer picks (DSA)."""
    COMPRESSED = "compressed"
    """One key, which is the value too, of a window's tokens, and entries that merge older ones
    (DeepSeek-V4)."""
    GATED_DELTA = "gated_delta"
    """A state of fixed size (gated delta rule)."""
    MAMBA2 = "mamba2"
    """A state of fixed size (Mamba-2)."""
    KDA = "kda"
    """A state of fixed size (Kimi delta attention)."""
    NONE = "none"
    """Nothing: the layer is a network alone (Nemotron-H)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderAttention:
    """One token mixer."""

    kind: AttentionKind
    heads: int
    """Query heads; for linear attention value heads."""
    kv_heads: int
    """Heads of keys and values; for linear attention key heads."""
    head_dim: int
    linear: LinearAttention | None = None
    """Widths of linear attention; None: another kind."""
    indexer: Indexer | None = None
    """Indexer of sparse compressed attention, which picks the tokens; None: another kind."""
    shares_index: bool = False
    """Whether the layer has no indexer and attends to what the last one before it picked."""
    compressor: Compressor | None = None
    """Compressor of shared keys, which merges tokens to entries; None: there is the window
    alone."""
    output_groups: int = 0
    """Groups of heads of shared keys, each with an output projection of its own."""
    output_rank: int = 0
    """Rank that the output of each group is projected to."""
    has_gate: bool = False
    """Queries come with an output gate of their own width (Qwen3.5)."""
    query_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    window: int = 0
    """Tokens that are looked back on; 0: all."""
    window_is_chunk: bool = False
    """Tokens look back inside consecutive chunks of `window` tokens (Llama-4)."""
    norms_all_heads: bool = False
    """Queries and keys are normed over all heads at once, so that tensor ranks add their squares
    (OLMoE, MiniMax-M2)."""
    architecture: str = ""
    """The class that sparse modules are measured under."""

    def __post_init__(self) -> None:
        if (self.kind in LINEAR_KINDS) != (self.linear is not None):
            raise ValueError(f"{self.kind} attention: linear attention, and no other, has `linear`")
        if (self.kind is AttentionKind.SPARSE_LATENT) != (self.indexer is not None):
            raise ValueError(f"{self.kind} attention: sparse attention alone has an indexer")

    @property
    def own_indexer(self) -> Indexer | None:
        """Return the indexer that the layer runs; None where it has none or shares another's."""
        return None if self.shares_index else self.indexer

    @property
    def kv_elements(self) -> int:
        """Elements of keys and values that a token adds to one layer's cache, over all ranks.

        Of shared keys those of the window; entries of compressors have as many.
        """
        if self.linear is not None:
            return 0
        if self.kind in (AttentionKind.GROUPED, AttentionKind.NONE):
            return 2 * self.kv_heads * self.head_dim
        if self.kind is AttentionKind.COMPRESSED:
            return self.head_dim
        return self.kv_rank + self.rope_dim

    def is_split_by(self, ranks: int) -> bool:
        """Say whether tensor ranks share the heads evenly.

        Several key heads of linear attention must divide, too (vLLM 0.33.0,
        layers/mamba/mamba_mixer2.py and layers/mamba/gdn); key-value heads divide, or every rank
        has a copy of one (vLLM and SGLang, models/llama.py, LlamaAttention).
        """
        keys = 1 if self.linear is None else self.linear.num_key_heads
        copies = self.kv_heads == 0 or self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0
        return self.heads % ranks == 0 and copies and (keys == 1 or keys % ranks == 0)


LINEAR_KINDS: Final = frozenset(
    {AttentionKind.GATED_DELTA, AttentionKind.MAMBA2, AttentionKind.KDA}
)
"""Kinds that keep a state of fixed size."""
LATENT_KINDS: Final = frozenset({AttentionKind.LATENT, AttentionKind.SPARSE_LATENT})
"""Kinds whose cache holds one compressed vector a token."""
NO_MIXER: Final = DecoderAttention(kind=AttentionKind.NONE, heads=0, kv_heads=0, head_dim=0)


def linear_mixer(linear: LinearAttention) -> DecoderAttention:
    """Describe a block of linear attention."""
    return DecoderAttention(
        kind=AttentionKind(linear.kind.value),
        heads=linear.num_value_heads,
        kv_heads=linear.num_key_heads,
        head_dim=linear.key_head_dim,
        value_dim=linear.value_head_dim,
        linear=linear,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Equal layers."""

    count: int
    attention: DecoderAttention
    dense_ffn: int
    """Width of the network; 0 where experts follow, or nothing."""
    has_network: bool = True

    @property
    def has_mixer(self) -> bool:
        """Return whether the layers mix tokens."""
        return self.attention.kind is not AttentionKind.NONE

    @property
    def has_experts(self) -> bool:
        """Return whether the layers have experts."""
        return self.has_network and not self.dense_ffn


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed and shared experts of the layers that have them."""

    num: int
    top_k: int
    """Experts that the router chooses for a token, those without weights included."""
    ffn: int
    shared_ffn: int = 0
    latent: int = 0
    """Width that routed experts read and write, between two projections that every rank holds
    (Nemotron-3 Super); 0: the hidden size."""
    zero: int = 0
    """Experts without weights, beside `num` (LongCat-Flash)."""

    @property
    def router_outputs(self) -> int:
        """Width of the router."""
        return self.num + self.zero

    @property
    def computed_top_k(self) -> float:
        """Copies of a token for experts with weights, mean (`Moe.computed_top_k`)."""
        return self.top_k * self.num / self.router_outputs if self.zero else self.top_k


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model that generates text."""

    name: str
    hidden: int
    vocab: int
    layers: tuple[Layers, ...]
    experts: Experts | None = None
    ffn_is_gated: bool = True
    """Whether networks and experts have three matrices, else two."""
    is_tied: bool = False
    """The head is the embedding."""
    streams: int = 1
    """Copies of the residual, with hyper-connections around mixers and networks; 1: plain."""
    stage_unit: int = 1
    """Consecutive layers that a pipeline does not part: two with shortcut-connected experts."""
    positions: int = 0
    """The longest sequence of the model; 0: not one of a config."""
    rope_factor: float = 1.0
    """Factor by which positions are scaled."""
    vision_elements: int = 0
    """Weights of a vision tower, in bf16."""
    architecture: str = ""
    """The class in transformers, which decides the type of states; empty: not one of a config."""

    def __post_init__(self) -> None:
        if self.experts is None and any(group.has_experts for group in self.layers):
            raise ValueError(f"{self.name}: layers without a dense network need experts")

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return sum(group.count for group in self.layers if group.has_experts)

    @property
    def network_layers(self) -> int:
        """Layers with a network."""
        return sum(group.count for group in self.layers if group.has_network)

    @property
    def matrices(self) -> int:
        """Count the weight matrices of a network or an expert."""
        return 3 if self.ffn_is_gated else 2

    @property
    def expert_hidden(self) -> int:
        """Width that routed experts read and write, and that their tokens travel with."""
        latent = 0 if self.experts is None else self.experts.latent
        return latent or self.hidden

    def is_split_by(self, ranks: int) -> bool:
        """Say whether tensor ranks share the heads of every layer evenly."""
        return all(group.attention.is_split_by(ranks) for group in self.layers)

    def cache_copies(self, ranks: int) -> int:
        """Return how many tensor ranks keep equal keys in every layer, so that they can share them.

        Windows, their chunks and what is merged beside them stay whole on every rank (vLLM 0.33.0,
        v1/core/kv_cache_coordinator.py; SGLang 0.5.23, mem_cache/kv_cache_configurator.py).
        """
        copies = ranks
        for attention in (group.attention for group in self.layers if group.has_mixer):
            if attention.window or attention.kind is AttentionKind.COMPRESSED:
                return 1
            if attention.kind is AttentionKind.GROUPED:
                copies = gcd(copies, ranks // attention.kv_heads or 1)
        return copies

    @property
    def num_layers(self) -> int:
        """All of them."""
        return sum(group.count for group in self.layers)

    @property
    def most_stages(self) -> int:
        """Stages of the longest pipeline."""
        return self.num_layers // self.stage_unit

    @property
    def network(self) -> str:
        """The widths that its kernels have, equal for DeepSeek-V3, R1 and V3.1."""
        mixers = [group.attention for group in self.layers if group.has_mixer]
        attention = sorted({f"{mixer.kind.value}{mixer.heads}" for mixer in mixers})
        experts = self.experts
        follows = f"{experts.num}e{experts.top_k}" if experts else f"ffn{self.layers[0].dense_ffn}"
        return f"{self.hidden}x{self.num_layers} {' '.join(attention)} {follows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Storage formats of a checkpoint's parts, as the tables name them."""

    attention: str
    output: str
    """Format of the output projection of attention."""
    ffn: str
    """Format of dense networks and shared experts."""
    experts: str
    kv: str
    """Format of cached keys and values: bf16 or fp8."""
    head: str = "bf16"
    linear: str = ""
    """Format of the projections of linear attention; empty: those of other attention."""
    latent: str = ""
    """Format of the projections around the experts' latent width; empty: that of networks."""
    packs_sparse: bool = True
    """An fp8 cache of sparse attention keeps scales and bf16 positions beside each token."""
    int4_bytes: float = BYTES["int4_wo"]
    """Bytes of an int4 weight in memory, by the groups of the checkpoint."""

    def stored_bytes(self, dtype: str) -> float:
        """Return the bytes of one stored weight of a format."""
        return self.int4_bytes if dtype == "int4_wo" else BYTES[dtype]

    @property
    def linear_projections(self) -> tuple[str, str]:
        """Formats of the projections before linear attention, and of the one behind it."""
        return self.linear or self.attention, self.linear or self.output

    @property
    def latent_projections(self) -> str:
        """Format of the projections around the experts' latent width."""
        return self.latent or self.ffn


def decoder_of(model: ModelSpec) -> Decoder:
    """Describe a model that was read from its `config.json`; equal layers are grouped."""
    groups = (
        Layers(
            count=count,
            attention=_mixer_of(model, layer),
            dense_ffn=model.dense_ffn_size if layer.network is LayerKind.DENSE else 0,
            has_network=layer.network is not LayerKind.NONE,
        )
        for layer, count in Counter(model.each_layer).items()
    )
    return Decoder(
        name=model.name,
        hidden=model.hidden_size,
        vocab=model.vocab_size,
        layers=tuple(groups),
        experts=None if model.moe is None else _experts_of(model.moe),
        ffn_is_gated=model.ffn_is_gated,
        is_tied=model.tie_word_embeddings,
        streams=model.residual_streams,
        stage_unit=model.num_layers // model.most_stages,
        positions=model.max_position,
        rope_factor=model.rope_factor,
        vision_elements=model.vision_elements,
        architecture=model.architecture,
    )


def _experts_of(moe: Moe) -> Experts:
    return Experts(
        num=moe.num_experts,
        top_k=moe.top_k,
        ffn=moe.expert_ffn_size,
        shared_ffn=moe.shared_ffn_size,
        latent=moe.latent_size,
        zero=moe.zero_experts,
    )


def _mixer_of(model: ModelSpec, layer: Layer) -> DecoderAttention:
    if layer.mixer is Mixer.NONE:
        return NO_MIXER
    if layer.mixer is Mixer.LINEAR:
        assert model.linear is not None  # ModelSpec refuses linear mixers without it
        return linear_mixer(model.linear)
    plain = _attention_of(model.attention, architecture=model.architecture)
    if not layer.is_windowed:
        return replace(plain, shares_index=layer.shares_index)
    return replace(
        plain,
        window=model.attention.sliding_window or 0,
        window_is_chunk=model.attention.window_is_chunk,
        compressor=layer.compressor,
    )


def _attention_of(source: Attention, *, architecture: str) -> DecoderAttention:
    if source.kind == "mla":
        is_sparse = source.indexer is not None
        return DecoderAttention(
            kind=AttentionKind.SPARSE_LATENT if is_sparse else AttentionKind.LATENT,
            heads=source.num_heads,
            kv_heads=source.num_heads,
            head_dim=source.head_dim,
            indexer=source.indexer,
            query_rank=source.q_lora_rank or 0,
            kv_rank=source.kv_lora_rank,
            rope_dim=source.qk_rope_head_dim,
            value_dim=source.v_head_dim,
            architecture=architecture if is_sparse else "",
        )
    if source.kind == "shared_kv":
        return DecoderAttention(
            kind=AttentionKind.COMPRESSED,
            heads=source.num_heads,
            kv_heads=1,
            head_dim=source.head_dim,
            query_rank=source.q_lora_rank or 0,
            rope_dim=source.qk_rope_head_dim,
            value_dim=source.head_dim,
            output_groups=source.output_groups,
            output_rank=source.output_rank,
        )
    return DecoderAttention(
        kind=AttentionKind.GROUPED,
        heads=source.num_heads,
        kv_heads=source.num_kv_heads,
        head_dim=source.head_dim,
        value_dim=source.head_dim,
        has_gate=source.has_output_gate,
        norms_all_heads=source.qk_norm is QkNorm.FULL,
    )
