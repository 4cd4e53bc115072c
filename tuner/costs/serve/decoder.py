"""A model as a serving engine runs it: layers by kind of attention and network, and its formats.

`ModelSpec` describes what planning a training run needs. Serving adds kinds of attention that are
only served so far (sparse compressed keys, gated delta rule) and the storage format of every part
of a quantised checkpoint.

Not covered: encoders and vision towers, which these measurements do not run.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from profilers.steps.config import LayerKind
from tuner.spec.model import Attention, ModelSpec


class AttentionKind(StrEnum):
    """What a layer keeps of the past, and how it looks at it."""

    GROUPED = "grouped"
    """Keys and values of a few heads (GQA)."""
    LATENT = "latent"
    """One compressed vector per token (MLA)."""
    SPARSE_LATENT = "sparse_latent"
    """MLA over the tokens that an indexer picks (DSA)."""
    GATED_DELTA = "gated_delta"
    """A state of fixed size (gated delta rule)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderAttention:
    """One attention block."""

    kind: AttentionKind
    heads: int
    """Query heads; for the gated delta rule value heads."""
    kv_heads: int
    """For the gated delta rule key heads."""
    head_dim: int
    has_gate: bool = False
    """Queries come with an output gate of their own width (Qwen3.5)."""
    query_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    window: int = 0
    """Tokens that are looked back on; 0: all."""
    architecture: str = ""
    """The class that sparse modules are measured under."""

    @property
    def kv_elements(self) -> int:
        """Elements that one token adds to the cache of one layer, on all ranks together."""
        if self.kind is AttentionKind.GATED_DELTA:
            return 0
        if self.kind is AttentionKind.GROUPED:
            return 2 * self.kv_heads * self.head_dim
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Equal layers."""

    count: int
    attention: DecoderAttention
    dense_ffn: int
    """Width of the network; 0 where experts follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What follows attention in layers with experts."""

    num: int
    top_k: int
    ffn: int
    shared_ffn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model that generates text; networks are gated."""

    name: str
    hidden: int
    vocab: int
    layers: tuple[Layers, ...]
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if self.experts is None and any(not group.dense_ffn for group in self.layers):
            raise ValueError(f"{self.name}: layers without a dense network need experts")

    @property
    def num_layers(self) -> int:
        """All of them."""
        return sum(group.count for group in self.layers)

    @property
    def network(self) -> str:
        """The widths that its kernels have, equal for DeepSeek-V3, R1 and V3.1."""
        attention = sorted({f"{g.attention.kind.value}{g.attention.heads}" for g in self.layers})
        own = self.experts
        follows = f"{own.num}e{own.top_k}" if own else f"ffn{self.layers[0].dense_ffn}"
        return f"{self.hidden}x{self.num_layers} {' '.join(attention)} {follows}"


BYTES: Final[Mapping[str, float]] = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "nvfp4": 0.5625,
    "int4_wo": 0.5625,
    "mxfp4": 0.53125,
}
"""Of one weight. nvfp4: half a byte and an fp8 scale per 16 (Pretraining LLMs with NVFP4,
arXiv:2509.25149); int4_wo: half a byte and a bf16 scale per 32 (compressed-tensors);
mxfp4: half a byte and a shared exponent per 32 (OCP Microscaling Formats 1.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Storage formats of a checkpoint's parts, as the tables name them."""

    attention: str
    output: str
    """Of the projection behind attention."""
    ffn: str
    """Of dense and shared networks."""
    experts: str
    kv: str
    """Of cached keys and values: bf16 or fp8."""
    head: str = "bf16"


def decoder_of(model: ModelSpec) -> Decoder:
    """Describe a model that was read from its `config.json`; equal layers are grouped."""
    attention = _attention_of(model.attention)
    counted = Counter(zip(model.layers, model.windowed, strict=True))
    groups = (
        Layers(
            count=count,
            attention=replace(attention, window=model.attention.sliding_window or 0)
            if is_windowed
            else attention,
            dense_ffn=model.dense_ffn_size if kind is LayerKind.DENSE else 0,
        )
        for (kind, is_windowed), count in counted.items()
    )
    experts = None
    if model.moe is not None:
        experts = Experts(
            num=model.moe.num_experts,
            top_k=model.moe.top_k,
            ffn=model.moe.expert_ffn_size,
            shared_ffn=model.moe.shared_ffn_size,
        )
    return Decoder(
        name=model.name,
        hidden=model.hidden_size,
        vocab=model.vocab_size,
        layers=tuple(groups),
        experts=experts,
    )


def _attention_of(source: Attention) -> DecoderAttention:
    if source.kind == "mla":
        return DecoderAttention(
            kind=AttentionKind.LATENT,
            heads=source.num_heads,
            kv_heads=source.num_heads,
            head_dim=source.head_dim,
            query_rank=source.q_lora_rank or 0,
            kv_rank=source.kv_lora_rank,
            rope_dim=source.qk_rope_head_dim,
            value_dim=source.v_head_dim,
        )
    return DecoderAttention(
        kind=AttentionKind.GROUPED,
        heads=source.num_heads,
        kv_heads=source.num_kv_heads,
        head_dim=source.head_dim,
        value_dim=source.head_dim,
    )
