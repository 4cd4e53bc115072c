"""A language model: widths, layers, token mixers, experts.

`ModelSpec` has what determines parameters, FLOPs and bytes, and nothing that only affects numerical
results. tuner/spec/huggingface/ reads it from a `config.json`; tuner/spec/accounting.py counts.

A layer is a token mixer and a network, or one of the two. A model has at most one kind of attention
(GQA, MLA or one shared key), some of whose layers may be limited to a window or have a compressor
beside it (sparse_attention.py), and one kind of linear attention.

Not covered: encoders; of vision towers all but their weights.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from profilers.records import Record
from profilers.steps.config import LayerKind
from tuner.spec.linear_attention import LinearAttention
from tuner.spec.sparse_attention import Compressor, Indexer

LARGEST_SIZE = 2**24
"""Largest width or count; more is refused as a typo."""
MOST_LAYERS = 1_000
"""Most layers, eight times the deepest published models; planning time grows with the square of the
layers."""
MOST_TOP_K = 1_000
MOST_EXPERTS = 10_000
"""Most experts per token, a hundred times those of published models; bounds the pricing time."""
LONGEST_POSITION = 2**31

Count = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
Size = Annotated[int, Field(ge=0, le=LARGEST_SIZE)]


class QkNorm(StrEnum):
    """Query and key norms before the rotary embedding."""

    NONE = "none"
    """No norms."""
    HEAD = "head"
    """A norm of each head: one weight of head_dim for queries, one for keys (Qwen3, GLM-4.5)."""
    FULL = "full"
    """A norm over all heads at once: weights as wide as the projections (OLMoE, MiniMax-M2)."""
    UNWEIGHTED = "unweighted"
    """A norm of each head without weights (Llama-4)."""


class Mixer(StrEnum):
    """Block of a layer in which tokens see each other."""

    ATTENTION = "attention"
    """Softmax attention, `ModelSpec.attention`."""
    LINEAR = "linear"
    """Linear attention, `ModelSpec.linear`."""
    NONE = "none"
    """Nothing: the layer is a network alone (Nemotron-H)."""


class Layer(NamedTuple):
    """Kinds of the parts of one layer of a model; layers with equal ones cost the same."""

    mixer: Mixer
    network: LayerKind
    is_windowed: bool
    compressor: Compressor | None
    shares_index: bool


class Attention(Record):
    """One attention block; every layer of a model has the same, but for its compressor.

    `shared_kv` has one vector per token that is the key and value of all heads, queries through a
    low rank, and an output of `output_groups` groups of heads, each through a rank of its own
    (DeepSeek-V4).
    """

    kind: Literal["gqa", "mla", "shared_kv"]
    num_heads: Count
    num_kv_heads: Count
    """Heads of keys and values; for MLA those after up-projection, equal to num_heads."""
    head_dim: Count
    """Width of one query head; for MLA qk_nope_head_dim + qk_rope_head_dim."""
    qkv_bias: bool = False
    """Biases on the projections of queries, keys and values; for MLA on the two
    down-projections."""
    output_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    has_sinks: bool = False
    """One learned logit per head that takes part in the softmax (gpt-oss)."""
    has_output_gate: bool = False
    """The output is multiplied by a gate that the query projection computes (Qwen3-Next)."""
    indexer: Indexer | None = None
    """MLA: indexer, which picks the tokens that a layer attends to, its own or those of a layer
    before (`ModelSpec.shared_indexers`)."""
    compressors: tuple[Compressor, ...] = ()
    """Shared KV: compressors of the layers that `ModelSpec.compress_ratios` marks, one of each
    ratio."""
    sliding_window: Annotated[int, Field(ge=1, le=LONGEST_POSITION)] | None = None
    """Window size of sliding-window layers, which `ModelSpec.windowed` marks."""
    window_is_chunk: bool = False
    """Windows do not slide: tokens attend inside consecutive chunks of that size (Llama-4)."""
    q_lora_rank: Count | None = None
    """Width of the compressed query; None when queries are projected in one step."""
    kv_lora_rank: Size = 0
    """MLA: width of the compressed keys and values."""
    qk_nope_head_dim: Size = 0
    qk_rope_head_dim: Size = 0
    v_head_dim: Size = 0
    """MLA: width of one value head; otherwise it is head_dim and this is 0."""
    output_groups: Count = 1
    """Shared KV: groups of heads with an output projection of their own."""
    output_rank: Size = 0
    """Shared KV: width that each group is projected to before all are joined."""

    @model_validator(mode="after")
    def _consistent(self) -> "Attention":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} % num_kv_heads {self.num_kv_heads} != 0")
        if self.kind == "mla":
            if not (self.kv_lora_rank and self.v_head_dim and self.qk_rope_head_dim):
                raise ValueError("mla needs kv_lora_rank, qk_rope_head_dim and v_head_dim")
            if self.head_dim != self.qk_nope_head_dim + self.qk_rope_head_dim:
                raise ValueError("mla head_dim must be qk_nope_head_dim + qk_rope_head_dim")
        if self.indexer is not None and not (self.kind == "mla" and self.q_lora_rank):
            raise ValueError("an indexer needs mla with q_lora_rank")
        return self

    @model_validator(mode="after")
    def _shared_kv_is_whole(self) -> "Attention":
        if self.kind != "shared_kv":
            if self.compressors:
                raise ValueError("compressors need shared_kv")
            return self
        if not (self.q_lora_rank and self.output_rank and self.sliding_window):
            raise ValueError("shared_kv needs q_lora_rank, output_rank and sliding_window")
        if self.num_kv_heads != 1:
            raise ValueError(f"shared_kv has 1 key, not num_kv_heads {self.num_kv_heads}")
        if self.num_heads % self.output_groups:
            raise ValueError(
                f"num_heads {self.num_heads} % output_groups {self.output_groups} != 0"
            )
        if len({compressor.ratio for compressor in self.compressors}) < len(self.compressors):
            raise ValueError("compressors must have different ratios")
        return self

    @property
    def value_head_dim(self) -> int:
        """Width of one value head, of either kind."""
        return self.v_head_dim if self.kind == "mla" else self.head_dim

    def compressor(self, ratio: int) -> Compressor | None:
        """Return the compressor of that ratio; None of 0."""
        return next(
            (compressor for compressor in self.compressors if compressor.ratio == ratio), None
        )


class Moe(Record):
    """The MoE block of a layer."""

    num_experts: Annotated[int, Field(ge=1, le=MOST_EXPERTS)]
    """Routed experts with weights."""
    top_k: Annotated[int, Field(ge=1, le=MOST_TOP_K)]
    """Experts that the router chooses for a token, those without weights included."""
    zero_experts: Size = 0
    """Experts without weights that the router also chooses among and that return their input, times
    the router's weight, on the token's own rank (MoE++, arXiv:2410.07348; LongCat-Flash,
    arXiv:2509.01322)."""
    expert_ffn_size: Count
    """Width of one routed expert."""
    latent_size: Size = 0
    """Width of what routed experts read and write, between two projections that all experts of a
    layer share (latent MoE, Nemotron-3 Super); 0: the hidden size."""
    shared_ffn_size: Size = 0
    """Total width of the shared experts; 0 means none."""
    shared_expert_gate: bool = False
    """A learned sigmoid gate on the shared expert's output (Qwen2-MoE)."""
    router_bias: bool = False
    """A learned bias on the router's logits."""
    expert_bias: bool = False
    """Biases on the projections of routed experts."""
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    normalise_top_k: bool = True
    """Scaling of the chosen experts' weights so that they sum to one."""
    score_correction_bias: bool = False
    """A bias on the selection of experts, not on the output; a buffer, not a parameter."""
    num_groups: Count = 1
    """Expert groups of group-limited routing."""
    groups_per_token: Count = 1
    num_hash_layers: Size = 0
    """First layers in which a table chooses the experts by the token alone; the router still weighs
    them (DeepSeek-V4)."""
    is_shortcut: bool = False
    """Shortcut-connected MoE (LongCat-Flash): the output of the experts joins the residual behind
    the next layer, not behind their own; no pipeline stage ends between the two."""

    @property
    def router_outputs(self) -> int:
        """Width of the router: all experts, those without weights included."""
        return self.num_experts + self.zero_experts

    @property
    def computed_top_k(self) -> float:
        """Copies of a token that experts with weights compute, mean: k n / (n + z).

        Uniform routing over n experts with weights and z without. Of LongCat-Flash that is 8 of 12,
        which its bias controller aims at (arXiv:2509.01322, section 2.1: 27B active parameters of
        18.6B with none and 31.3B with all twelve).
        """
        if not self.zero_experts:
            return self.top_k
        return self.top_k * self.num_experts / self.router_outputs

    @model_validator(mode="after")
    def _consistent(self) -> "Moe":
        if self.top_k > self.router_outputs:
            more = f" + zero_experts {self.zero_experts}" if self.zero_experts else ""
            raise ValueError(f"top_k {self.top_k} exceeds num_experts {self.num_experts}{more}")
        if self.zero_experts and self.num_groups > 1:
            raise ValueError(f"zero_experts need num_groups 1, not {self.num_groups}")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups {self.num_groups} does not divide num_experts {self.num_experts}"
            )
        if self.groups_per_token > self.num_groups:
            raise ValueError(
                f"groups_per_token {self.groups_per_token} exceeds num_groups {self.num_groups}"
            )
        return self


class ModelSpec(Record):
    """A decoder-only language model."""

    name: str
    """Name in reports: the folder of its config, or its model type."""
    architecture: str
    """The class in transformers, e.g. `MixtralForCausalLM`."""
    hidden_size: Count
    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    """Decoder layers, without multi-token-prediction layers."""
    vocab_size: Count
    tie_word_embeddings: bool
    """The head uses the embedding's weights."""
    norm_epsilon: Annotated[float, Field(gt=0.0, lt=1.0, allow_inf_nan=False)]
    rope_theta: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    max_position: Annotated[int, Field(ge=1, le=LONGEST_POSITION)]
    rope_factor: Annotated[float, Field(ge=1.0, le=LONGEST_POSITION)] = 1.0
    """Factor by which positions are scaled (YaRN)."""
    attention: Attention
    linear: LinearAttention | None = None
    """Linear-attention block of the layers whose mixer is linear attention; None: no layer has
    it."""
    dense_ffn_size: Size
    """Width of the feed-forward network of dense layers; 0 when there are none."""
    ffn_is_gated: bool = True
    """Dense networks have three matrices (SwiGLU) rather than two."""
    ffn_bias: bool = False
    """Biases on the projections of dense and shared feed-forward networks."""
    layers: Annotated[tuple[LayerKind, ...], Field(min_length=1)]
    """Kind of the network behind the mixer, by layer."""
    mixers: tuple[Mixer, ...] = ()
    """Kind of what comes before the network, by layer; empty: attention everywhere."""
    windowed: tuple[bool, ...]
    """Attention is limited to `attention.sliding_window`, by layer."""
    compress_ratios: tuple[Size, ...] = ()
    """Tokens that one entry of the layer's compressor stands for, by layer, which attends to these
    entries beside its window; 0: the layer has no compressor. Empty: no layer has one."""
    shared_indexers: tuple[bool, ...] = ()
    """The layer has no indexer and attends to the tokens that the last one before it picked
    (GLM-5.2), by layer. Empty: all layers pick their own."""
    residual_streams: Count = 1
    """Copies of the residual, from which hyper-connections mix the input of every mixer and
    network and to which they add its output (DeepSeek-V4); 1: a plain residual."""
    moe: Moe | None
    released_cache: Literal["bf16", "fp8"] = "bf16"
    """Type that the checkpoint asks for in the cache of keys and values."""
    vision_elements: Size = 0
    """Weights of the vision tower, always in bf16."""
    released_weights: str = ""
    """Type of the checkpoint's weights, as `goal.quantization` says it; empty: it states none."""
    int4_bytes: Annotated[float, Field(gt=0.0)] = 0.5625
    """Bytes of a weight that is served in int4, with the scale and zero point of its group."""
    unquantized: tuple[Literal["attention", "networks"], ...] = ()
    """Parts that a quantised checkpoint leaves in bf16: attention, dense and shared networks."""
    mtp_num_layers: Size = 0
    """Multi-token-prediction layers after the last: attention and the last layer's network."""

    @model_validator(mode="after")
    def _consistent(self) -> "ModelSpec":
        if not len(self.layers) == len(self.windowed) == self.num_layers:
            raise ValueError(f"layers and windowed must have num_layers {self.num_layers} entries")
        if LayerKind.MOE in self.layers and self.moe is None:
            raise ValueError("moe layers need moe")
        if LayerKind.DENSE in self.layers and not self.dense_ffn_size:
            raise ValueError("dense layers need dense_ffn_size")
        if any(self.windowed) and self.attention.sliding_window is None:
            raise ValueError("windowed layers need attention.sliding_window")
        behind = (*self.layers[1:], LayerKind.MOE)
        if self.has_shortcut and (LayerKind.MOE, LayerKind.MOE) in zip(
            self.layers, behind, strict=True
        ):
            raise ValueError("a shortcut-connected moe layer needs one without experts behind it")
        return self

    @model_validator(mode="after")
    def _compressors_fit(self) -> "ModelSpec":
        if len(self.compress_ratios) not in (0, self.num_layers):
            raise ValueError(
                f"compress_ratios must have num_layers {self.num_layers} entries or none"
            )
        for layer, ratio in enumerate(self.compress_ratios):
            if ratio and self.attention.compressor(ratio) is None:
                raise ValueError(f"layer {layer}: no compressor has ratio {ratio}")
            if ratio and not self.windowed[layer]:
                raise ValueError(f"layer {layer} has a compressor and no window")
        return self

    @model_validator(mode="after")
    def _indexers_fit(self) -> "ModelSpec":
        if len(self.shared_indexers) not in (0, self.num_layers):
            raise ValueError(
                f"shared_indexers must have num_layers {self.num_layers} entries or none"
            )
        if self.shared_indexers and (self.attention.indexer is None or self.shared_indexers[0]):
            raise ValueError("shared_indexers need an indexer, which the first layer has")
        return self

    @model_validator(mode="after")
    def _mixers_fit(self) -> "ModelSpec":
        if len(self.mixers) not in (0, self.num_layers):
            raise ValueError(f"mixers must have num_layers {self.num_layers} entries or none")
        if (Mixer.LINEAR in self.mixers) != (self.linear is not None):
            raise ValueError("linear describes the layers whose mixer is linear, and they need it")
        for position, (mixer, kind) in enumerate(zip(self.mixers, self.layers, strict=False)):
            if mixer is Mixer.NONE and kind is LayerKind.NONE:
                raise ValueError(f"layer {position} has neither a mixer nor a network")
            if self.windowed[position] and mixer is not Mixer.ATTENTION:
                raise ValueError(f"layer {position} is windowed and has no attention")
        if LayerKind.NONE in self.layers and not self.mixers:
            raise ValueError("layers without a network need mixers")
        return self

    @property
    def expert_hidden(self) -> int:
        """Width that routed experts read and write, and that their tokens travel with."""
        latent = 0 if self.moe is None else self.moe.latent_size
        return latent or self.hidden_size

    @property
    def has_shortcut(self) -> bool:
        """Whether the output of MoE layers joins the residual a layer later."""
        return self.moe is not None and self.moe.is_shortcut

    @property
    def most_stages(self) -> int:
        """Stages of the longest pipeline: layers that a shortcut joins stay together."""
        return self.num_layers // 2 if self.has_shortcut else self.num_layers

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers.count(LayerKind.MOE)

    @property
    def mixer_by_layer(self) -> tuple[Mixer, ...]:
        """The mixer of every layer."""
        return self.mixers or (Mixer.ATTENTION,) * self.num_layers

    @property
    def compressor_by_layer(self) -> tuple[Compressor | None, ...]:
        """The compressor of every layer; None: it has none."""
        if not self.compress_ratios:
            return (None,) * self.num_layers
        return tuple(self.attention.compressor(ratio) for ratio in self.compress_ratios)

    @property
    def each_layer(self) -> tuple[Layer, ...]:
        """Kinds of every layer's parts, in model order."""
        shared = self.shared_indexers or (False,) * self.num_layers
        parts = (self.mixer_by_layer, self.layers, self.windowed, self.compressor_by_layer, shared)
        return tuple(map(Layer._make, zip(*parts, strict=True)))

    def part(self, kept: Sequence[int]) -> "ModelSpec":
        """Return a model of some of the layers."""
        by_layer = ("layers", "mixers", "windowed", "compress_ratios", "shared_indexers")
        chosen = {
            name: values and tuple(values[layer] for layer in kept)
            for name in by_layer
            for values in [getattr(self, name)]
        }
        return self.model_copy(update={"num_layers": len(kept), **chosen})

    @property
    def num_attention_layers(self) -> int:
        """Layers with softmax attention, which cache keys and values."""
        return self.mixer_by_layer.count(Mixer.ATTENTION)

    @property
    def num_indexers(self) -> int:
        """Layers with an indexer of their own over tokens."""
        indexers = 0 if self.attention.indexer is None else self.num_attention_layers
        return indexers - sum(self.shared_indexers)

    @property
    def num_linear_layers(self) -> int:
        """Layers with linear attention, which keep a state."""
        return self.mixers.count(Mixer.LINEAR)
