"""Token mixers with a state of fixed size: Mamba-2, the gated delta rule, Kimi delta attention.

A head keeps a state of N x P elements (N the width of its key, P of its value) instead of the keys
and values of all tokens. `LINEAR_KINDS` has one entry per kind; whoever counts or prices a layer
takes its matrices and its other parameters from there.

    h hidden size     K key heads (Mamba-2: groups)    H value heads    N key width    P value width
    c kernel of the short convolution                  Q tokens of a chunk

FLOPs of a scan are those of the recurrence, per token and value head: decay and update of the
state, and its read-out. Training and prefill compute chunks of Q tokens as dense GEMMs instead
(tuner/costs/train/linear_attention.py), decoding the recurrence itself.

Sources: Mamba-2, arXiv 2405.21060, section 6 (chunks) and 8 (sizes); Gated DeltaNet, arXiv
2412.06464, sections 3.2 and 3.3; Kimi Linear, arXiv 2510.26692, sections 3 and 4; classes
NemotronHMamba2Mixer, Qwen3NextGatedDeltaNet and KimiLinearDeltaAttention of transformers 5.24.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from profilers.records import Record

Width = Annotated[int, Field(ge=1, le=2**24)]
_Ranks = Any
"""A number or an array of numbers, and what a comparison makes of it."""


class LinearName(StrEnum):
    """Kinds of linear attention."""

    MAMBA2 = "mamba2"
    """State-space duality: a scalar decay per head and token (Nemotron-H, Nemotron-3)."""
    GATED_DELTA = "gated_delta"
    """The delta rule with a scalar decay (Qwen3-Next, Qwen3.5)."""
    KDA = "kda"
    """The delta rule with a decay per channel of the key (Kimi Linear)."""


LINEAR_NAMES: Final = tuple(LinearName)
"""Kinds of linear attention, in the order of their numbers in the columns of the cost model."""


class LinearAttention(Record):
    """One linear-attention block; every layer of a model that has one has the same."""

    kind: LinearName
    num_key_heads: Width
    """Heads of keys; for Mamba-2 groups that share B and C."""
    num_value_heads: Width
    """Heads of values; each has a state."""
    key_head_dim: Width
    """Width of a key head; for Mamba-2 the state size."""
    value_head_dim: Width
    """Width of a value head; for Mamba-2 the width of a head."""
    conv_kernel: Width
    """Tokens that the short convolution sees."""
    chunk_size: Width
    """Tokens that training and prefill compute together."""
    conv_bias: bool = False
    projection_bias: bool = False
    """Biases on the input and output projections."""

    @model_validator(mode="after")
    def _consistent(self) -> "LinearAttention":
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads {self.num_value_heads} % num_key_heads {self.num_key_heads} != 0"
            )
        return self

    @property
    def key_dim(self) -> int:
        """Width of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all values."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: queries, keys and values (Mamba-2: C, B and x)."""
        return 2 * self.key_dim + self.value_dim

    def shard(self, ranks: int) -> "LinearAttention":
        """Return the block of one of so many tensor ranks; each has one key head at least."""
        heads = {
            "num_key_heads": max(self.num_key_heads // ranks, 1),
            "num_value_heads": max(self.num_value_heads // ranks, 1),
        }
        return self.model_copy(update=heads)

    @property
    def state_elements(self) -> int:
        """Elements of the states of one sequence: H N P."""
        return self.num_value_heads * self.key_head_dim * self.value_head_dim

    @property
    def conv_state_elements(self) -> int:
        """Past inputs of the convolution of one sequence: c - 1 tokens."""
        return self.conv_channels * (self.conv_kernel - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    """Widths of a block's matrices."""

    inputs: int
    """Outputs of all projections of the hidden state."""
    low_rank: int = 0
    """Width, counted in `inputs`, that the second projections of a low-rank pair read."""
    low_rank_outputs: int = 0
    """Outputs of all second projections together."""
    scalars: int = 0
    """Outputs, counted in `inputs`, that are one number per head (decay, write strength): engines
    project them apart from the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearKind:
    """Widths and parameters of one kind of linear attention."""

    projections: Callable[[LinearAttention], Projections]
    vectors: Callable[[LinearAttention], int]
    """Parameters outside matrices: convolution, decays, norms."""


def _mamba2_projections(a: LinearAttention) -> Projections:
    # Gate z, the convolution's channels, and one time step per head.
    return Projections(inputs=a.value_dim + a.conv_channels + a.num_value_heads)


def _mamba2_vectors(a: LinearAttention) -> int:
    # Convolution; time-step bias, decay and skip per head; the gated norm.
    return _convolution(a) + 3 * a.num_value_heads + a.value_dim


def _gated_delta_projections(a: LinearAttention) -> Projections:
    # Queries, keys, values and the output gate; write strength and decay per head.
    scalars = 2 * a.num_value_heads
    return Projections(inputs=2 * a.key_dim + 2 * a.value_dim + scalars, scalars=scalars)


def _gated_delta_vectors(a: LinearAttention) -> int:
    return _convolution(a) + 2 * a.num_value_heads + a.value_head_dim


def _kda_projections(a: LinearAttention) -> Projections:
    # Queries, keys, values, write strength; decay and output gate through the rank of one head.
    rank = a.value_head_dim
    return Projections(
        inputs=a.conv_channels + a.num_value_heads + 2 * rank,
        low_rank=rank,
        low_rank_outputs=a.key_dim + a.value_dim,
        scalars=a.num_value_heads,
    )


def _kda_vectors(a: LinearAttention) -> int:
    # Decay per head and its bias per channel; the norm of a head.
    return _convolution(a) + a.num_value_heads + a.key_dim + a.value_head_dim


def _convolution(a: LinearAttention) -> int:
    return a.conv_channels * (a.conv_kernel + a.conv_bias)


LINEAR_KINDS: Final[Mapping[LinearName, LinearKind]] = {
    LinearName.MAMBA2: LinearKind(
        projections=_mamba2_projections,
        vectors=_mamba2_vectors,
    ),
    LinearName.GATED_DELTA: LinearKind(
        projections=_gated_delta_projections,
        vectors=_gated_delta_vectors,
    ),
    LinearName.KDA: LinearKind(
        projections=_kda_projections,
        vectors=_kda_vectors,
    ),
}


def linear_weights(attention: LinearAttention, *, hidden: int) -> int:
    """Count the matrices of one block."""
    projections = LINEAR_KINDS[attention.kind].projections(attention)
    second = projections.low_rank * projections.low_rank_outputs
    return hidden * projections.inputs + second + attention.value_dim * hidden


def linear_parameters(attention: LinearAttention, *, hidden: int) -> int:
    """Count one block: matrices, biases, convolution, decays and norms."""
    projections = LINEAR_KINDS[attention.kind].projections(attention)
    biases = projections.inputs + hidden if attention.projection_bias else 0
    vectors = LINEAR_KINDS[attention.kind].vectors(attention)
    return linear_weights(attention, hidden=hidden) + vectors + biases


def recurrence_flop(attention: LinearAttention) -> float:
    """FLOPs of one token, all heads: 7 per element of the state, in every kind.

    Mamba-2: decay 1, outer product and addition 2 + 1, read-out 2, discretisation 1 (Megatron-LM,
    megatron/training/training.py: mamba_layer_flops). Delta rules: decay 1, read what the key finds
    2, write 2, read with the query 2.
    """
    return 7.0 * attention.state_elements


def splits_heads(attention: LinearAttention, *, tensor: _Ranks, context: _Ranks) -> _Ranks:
    """Say whether tensor and context ranks can share the heads; of numbers or of arrays.

    Context ranks exchange the sequence for heads (Ulysses), so both kinds of ranks divide them.
    Groups of Mamba-2 stay whole on a tensor rank, and may be repeated on context ranks
    (megatron/core/ssm/mamba_context_parallel.py and `TransformerConfig` of core_v0.19.0).
    """
    ranks, keys = tensor * context, attention.num_key_heads
    if attention.kind is not LinearName.MAMBA2:
        return keys % ranks == 0
    groups = (keys % tensor == 0) & ((keys % ranks == 0) | (ranks % keys == 0))
    return groups & (attention.num_value_heads % ranks == 0)
