"""Weights that a training goal trains: all, or low-rank adapters beside frozen ones.

    LoRA    W stays; x W gains (x A) B alpha / rank, and only A and B are trained
            (Hu et al., arXiv:2106.09685)
    QLoRA   the same, with W kept in 4 bits (nf4) and dequantised where it is used
            (Dettmers et al., arXiv:2305.14314)

Targets have the names of PEFT and Transformers. A group stands for the matrices that the model has
of it:

    attention    every projection of attention and of linear attention
    mlp          gate_proj, up_proj and down_proj of dense and shared networks, and all experts
    all-linear   both

A name stands for every matrix of that name: Kimi Linear has a q_proj and an o_proj in softmax
attention and in Kimi delta attention.

Not covered: attention with one key for all heads (DeepSeek-V4), indexers, latent projections of
experts, convolutions, routers, embeddings, DoRA, a rank for each matrix.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Discriminator, Field, Tag

from profilers.records import Record
from profilers.steps.config import LayerKind
from tuner.spec.fields import Count, Number, one_or_many
from tuner.spec.linear_attention import LINEAR_KINDS, LinearName
from tuner.spec.model import ModelSpec

FULL: Final = "full"
EXAMPLE: Final = "{method: lora, rank: 16, targets: [attention]}"

GQA_PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLA_PROJECTIONS: Final = (
    "q_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
)
MAMBA_PROJECTIONS: Final = ("in_proj", "out_proj")
JOINED_INPUTS: Final = ("in_proj_qkvz", "in_proj_ba")
"""Input projections of the gated delta rule in Qwen3-Next."""
SPLIT_INPUTS: Final = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""Input projections of the gated delta rule in Qwen3.5."""
KDA_PROJECTIONS: Final = (
    "q_proj",
    "k_proj",
    "v_proj",
    "b_proj",
    "f_a_proj",
    "f_b_proj",
    "g_a_proj",
    "g_b_proj",
    "o_proj",
)
PER_HEAD: Final = frozenset({"in_proj_ba", "in_proj_b", "in_proj_a", "b_proj"})
"""Matrices to a few numbers a head, which may be narrower than the rank."""
NETWORK: Final = ("gate_proj", "up_proj", "down_proj")
EXPERTS: Final = "experts"
GROUPS: Final = ("attention", "mlp", "all-linear")
QKV: Final = ("q_proj", "k_proj", "v_proj")
GATE_UP: Final = ("gate_proj", "up_proj")
ADAPTER_TARGETS: Final = tuple(
    dict.fromkeys(
        (
            *GQA_PROJECTIONS,
            *MLA_PROJECTIONS,
            *MAMBA_PROJECTIONS,
            *JOINED_INPUTS,
            *SPLIT_INPUTS,
            *KDA_PROJECTIONS,
            *NETWORK,
            EXPERTS,
        )
    )
)


def _known(value: object) -> object:
    if value not in (*ADAPTER_TARGETS, *GROUPS):
        known = ", ".join((*GROUPS, *ADAPTER_TARGETS))
        raise ValueError(
            f"{str(value)[:40]!r} is no module that adapters attach to; known: {known}"
        )
    return value


class Adapters(Record):
    """Low-rank adapters beside frozen weights."""

    method: Literal["lora", "qlora"]
    """`lora` keeps frozen weights in 16 bits, `qlora` those of linear layers in 4 (nf4)."""
    rank: Count
    """Rank of every adapter."""
    alpha: Number | None = None
    """The adapters' output is scaled by alpha / rank; absent: twice the rank. It changes no
    price."""
    targets: Annotated[
        tuple[Annotated[str, BeforeValidator(_known)], ...],
        Field(min_length=1),
        BeforeValidator(one_or_many),
    ] = ("attention",)
    """Adapted matrices by their names in Transformers, or the groups `attention`, `mlp` and
    `all-linear`."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Type of adapters, their gradients and moments; absent: the engine's default, fp32 with
    PEFT."""

    @property
    def effective_alpha(self) -> float:
        """Alpha, stated or not."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def is_quantised(self) -> bool:
        """Frozen linear layers are kept in 4 bits."""
        return self.method == "qlora"


def _full(value: object) -> object:
    if value != FULL:
        raise ValueError(f"{str(value)[:40]!r} is neither 'full' nor a mapping, e.g. {EXAMPLE}")
    return value


def _kind(value: object) -> str:
    return "<adapters>" if isinstance(value, dict | Adapters) else "<full>"


def adapters_words(tune: Adapters) -> str:
    """Say what is trained, e.g. `LoRA adapters of rank 16 on attention`."""
    name = "QLoRA (frozen weights in nf4)" if tune.is_quantised else "LoRA"
    return f"{name} adapters of rank {tune.rank} on {', '.join(tune.targets)}"


Tune = Annotated[
    Annotated[Literal["full"], BeforeValidator(_full), Tag("<full>")]
    | Annotated[Adapters, Tag("<adapters>")],
    Discriminator(_kind),
]
"""`full`, or adapters."""


class Matrix(NamedTuple):
    """Widths that a weight matrix reads and writes."""

    inputs: int
    outputs: int


def adapted(tune: Adapters, model: ModelSpec) -> tuple[str, ...]:
    """Return the matrices that adapters attach to, by name.

    Raises:
        ValueError: the model lacks one, one is smaller than the rank, or attention beside
            adapters has no price.
    """
    if model.attention.kind == "shared_kv":
        # Compressors and indexers have modules of the same names (kv_proj, gate_proj, q_b_proj).
        raise ValueError(
            f"method: {tune.method} is not priced beside {model.name}'s attention, which has one"
            " key for all heads; train all weights (tune: full)"
        )
    present = matrices(model)
    chosen = dict.fromkeys(name for target in tune.targets for name in _members(target, present))
    for name in chosen:
        if name not in present:
            raise ValueError(f"targets: {model.name} has no {name!r}; it has {', '.join(present)}")
        smallest = min(present[name])
        if tune.rank > smallest and name not in PER_HEAD:
            raise ValueError(
                f"rank: {tune.rank} exceeds the smaller side of {name!r}, {smallest}; an adapter"
                " of that rank is no smaller than the matrix"
            )
    return tuple(chosen)


def members(tune: Adapters) -> frozenset[str]:
    """Return the matrices that the targets name in any model."""
    return frozenset(name for target in tune.targets for name in _members(target, ADAPTER_TARGETS))


def matrices(model: ModelSpec) -> Mapping[str, Matrix]:
    """Return the adaptable matrices of a model.

    Of shared and dense networks it is the larger, of both kinds of attention that of softmax.
    """
    softmax = softmax_matrices(model)
    return {**softmax, **linear_matrices(model), **softmax, **dict(_networks(model))}


def softmax_matrices(model: ModelSpec) -> Mapping[str, Matrix]:
    """Return the projections of softmax attention."""
    return dict(_attention(model))


def linear_matrices(model: ModelSpec) -> dict[str, Matrix]:
    """Return the projections of linear attention, by their names in Transformers.

    Source: models/nemotron_h, qwen3_next, qwen3_5_moe and kimi_linear of transformers 5.24.
    """
    linear, hidden = model.linear, model.hidden_size
    if linear is None:
        return {}
    keys, values, heads = linear.key_dim, linear.value_dim, linear.num_value_heads
    if linear.kind is LinearName.KDA:
        rank = LINEAR_KINDS[linear.kind].projections(linear).low_rank
        widths = (keys, keys, values, heads, rank, keys, rank, values, hidden)
        second = {"f_b_proj": rank, "g_b_proj": rank, "o_proj": values}
        return {
            name: Matrix(second.get(name, hidden), outputs)
            for name, outputs in zip(KDA_PROJECTIONS, widths, strict=True)
        }
    inputs = LINEAR_KINDS[linear.kind].projections(linear).inputs
    if linear.kind is LinearName.MAMBA2:
        into = {"in_proj": inputs}
    elif model.architecture.startswith("Qwen3Next"):
        into = dict(zip(JOINED_INPUTS, (linear.conv_channels + values, 2 * heads), strict=True))
    else:
        into = dict(zip(SPLIT_INPUTS, (linear.conv_channels, values, heads, heads), strict=True))
    read = {name: Matrix(hidden, outputs) for name, outputs in into.items()}
    return read | {"out_proj": Matrix(values, hidden)}


def _members(target: str, present: Collection[str]) -> tuple[str, ...]:
    networks = (*NETWORK, EXPERTS)
    if target == "mlp":
        return tuple(name for name in present if name in networks)
    if target == "attention":
        return tuple(name for name in present if name not in networks)
    return tuple(present) if target == "all-linear" else (target,)


def _attention(model: ModelSpec) -> Iterator[tuple[str, Matrix]]:
    attention, hidden = model.attention, model.hidden_size
    if not model.num_attention_layers:
        return
    queries = attention.num_heads * attention.head_dim
    outputs = attention.num_heads * attention.value_head_dim
    if attention.kind == "gqa":
        kept = attention.num_kv_heads * attention.head_dim
        yield "q_proj", Matrix(hidden, queries * (2 if attention.has_output_gate else 1))
        yield "k_proj", Matrix(hidden, kept)
        yield "v_proj", Matrix(hidden, kept)
    else:
        if attention.q_lora_rank is None:
            yield "q_proj", Matrix(hidden, queries)
        else:
            yield "q_a_proj", Matrix(hidden, attention.q_lora_rank)
            yield "q_b_proj", Matrix(attention.q_lora_rank, queries)
        up = attention.num_heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        yield (
            "kv_a_proj_with_mqa",
            Matrix(hidden, attention.kv_lora_rank + attention.qk_rope_head_dim),
        )
        yield "kv_b_proj", Matrix(attention.kv_lora_rank, up)
    yield "o_proj", Matrix(outputs, hidden)


def _networks(model: ModelSpec) -> Iterator[tuple[str, Matrix]]:
    hidden, moe = model.hidden_size, model.moe
    width = model.dense_ffn_size if LayerKind.DENSE in model.layers else 0
    if moe is not None and model.num_moe_layers:
        width = max(width, moe.shared_ffn_size)
    if width:
        if model.ffn_is_gated:
            yield "gate_proj", Matrix(hidden, width)
        yield "up_proj", Matrix(hidden, width)
        yield "down_proj", Matrix(width, hidden)
    if moe is not None and model.num_moe_layers:
        yield EXPERTS, Matrix(model.expert_hidden, moe.expert_ffn_size)
