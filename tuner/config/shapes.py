"""Inputs of the analytic model, as columns: models, machines, stages.

Strategies are in tuner/config/columns.py.

Every field is a number or an array with one entry per column, combined by numpy's broadcasting: the
planner prices many strategies of one model on one machine, a backtest prices many runs, each of its
own model and machine, with the same formulas. Yes/no fields are 0.0 and 1.0.

Letters: C columns (strategies or runs), S pipeline stages in execution order.
"""

from collections.abc import Sequence
from dataclasses import Field, dataclass, fields, replace
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Numbers

Grid = npt.NDArray[np.float64]
"""[S, C], or [S, 1] where all columns agree."""


class _OfNumbers(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Columns = TypeVar("Columns", bound=_OfNumbers)
"""A dataclass of `Numbers`, or of arrays whose last axis is that of the columns."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelShape:
    """A decoder-only language model in the numbers that cost time and bytes.

    Layers are of two kinds, without and with experts. Where layers of a kind differ (hybrids), each
    is priced as their average: hybrids repeat a pattern that is shorter than a pipeline stage.
    """

    hidden: Numbers
    heads: Numbers
    kv_heads: Numbers
    head_dim: Numbers
    """Width of queries and keys; for MLA qk_nope + qk_rope."""
    value_dim: Numbers
    """Width of values."""
    is_mla: Numbers = 0.0
    q_lora_rank: Numbers = 0.0
    """Rank of the queries' projection; 0: queries are projected in one step."""
    kv_lora_rank: Numbers = 0.0
    rope_dim: Numbers = 0.0
    """MLA: width of the rotary part of a key."""
    has_sinks: Numbers = 0.0
    has_qk_norm: Numbers = 0.0
    """Every head's query and key are normalised, as in Qwen3."""
    has_output_gate: Numbers = 0.0
    """Queries come with a gate of the output."""
    index_heads: Numbers = 0.0
    """Heads of an indexer, which picks the tokens that queries attend to, or the entries where
    there is a `csa_ratio`; 0: there is none."""
    index_dim: Numbers = 0.0
    index_share: Numbers = 1.0
    """Share of the attention layers of MLA that have an indexer."""
    index_top_k: Numbers = 0.0
    """Tokens or entries that the indexer picks for a query."""
    output_groups: Numbers = 0.0
    """Groups of heads with an output projection of their own, and one key that is the value of all
    heads (DeepSeek-V4); 0: no such attention."""
    output_rank: Numbers = 0.0
    """Rank that the output of each group is projected to."""
    csa_ratio: Numbers = 0.0
    """Tokens of an entry of compressed sparse attention, whose entries an indexer picks."""
    csa_share: Numbers = 0.0
    """Share of the attention layers that have compressed sparse attention, beside their window."""
    csa_outputs: Numbers = 0.0
    """Outputs of the projections to the entries of compressed sparse attention and to the keys of
    its indexer."""
    hca_ratio: Numbers = 0.0
    """Tokens of an entry of heavily compressed attention, which has no indexer."""
    hca_share: Numbers = 0.0
    hca_outputs: Numbers = 0.0
    streams: Numbers = 1.0
    """Copies of the residual, with hyper-connections around mixers and networks; 1: plain."""
    window: Numbers = 0.0
    """Sliding-window size of a windowed layer; 0: none is windowed."""
    window_is_chunk: Numbers = 0.0
    """Tokens attend inside consecutive chunks of the window's size."""
    windowed_ratio: Numbers = 0.0
    """Share of the attention layers that are windowed."""
    dense_attention: Numbers = 1.0
    """Share of the layers without experts that have attention."""
    dense_linear: Numbers = 0.0
    """Share of the layers without experts that have linear attention."""
    dense_network: Numbers = 1.0
    """Share of the layers without experts that have a feed-forward network."""
    moe_attention: Numbers = 1.0
    """Share of the layers with experts that have attention."""
    moe_linear: Numbers = 0.0
    """Share of the layers with experts that have linear attention."""
    linear_inputs: Numbers = 0.0
    """Linear attention: outputs of the projections of the hidden state."""
    linear_rank: Numbers = 0.0
    """Width of what is projected once more (KDA's decay and gate); 0: nothing."""
    linear_rank_outputs: Numbers = 0.0
    """Outputs of these second projections together."""
    linear_heads: Numbers = 0.0
    """Heads, each with a state."""
    linear_key_heads: Numbers = 0.0
    linear_key_dim: Numbers = 0.0
    linear_value_dim: Numbers = 0.0
    linear_chunk: Numbers = 0.0
    """Tokens that its kernels compute together."""
    linear_kind: Numbers = 0.0
    """Place in `LINEAR_NAMES` (tuner/spec/linear_attention.py): 0 is Mamba-2, above it are delta
    rules."""
    dense_ffn: Numbers = 0.0
    is_gated: Numbers = 1.0
    """Three matrices per network rather than two."""
    vocab: Numbers
    is_tied: Numbers = 0.0
    """The head uses the embedding's weights."""
    dense_layers: Numbers
    """Layers without experts; those with experts follow them."""
    moe_layers: Numbers = 0.0
    experts: Numbers = 0.0
    top_k: Numbers = 0.0
    """Copies of a token that experts compute, mean: the router's k but for `zero_experts`."""
    zero_experts: Numbers = 0.0
    """Experts without weights, which the router chooses among and nothing computes."""
    num_groups: Numbers = 1.0
    """Groups of experts that routing is limited to some of."""
    groups_per_token: Numbers = 1.0
    """Groups that one token's experts may come from."""
    moe_ffn: Numbers = 0.0
    moe_latent: Numbers = 0.0
    """Width of what routed experts read and write, where it is not the hidden size; 0: it is."""
    shared_ffn: Numbers = 0.0
    """Total width of the shared experts."""
    mtp_layers: Numbers = 0.0
    """Multi-token-prediction layers, each with attention and a second head."""
    mtp_is_repeated: Numbers = 0.0
    """1 where all multi-token-prediction layers are one layer's weights, applied several times."""
    mtp_is_dense: Numbers = 0.0
    """1 where the network of multi-token-prediction layers is dense although the model has layers
    with experts (LongCat-Flash)."""

    @property
    def is_shared_kv(self) -> Numbers:
        """Return whether one key is the value of all heads."""
        return np.minimum(self.output_groups, 1.0)

    @property
    def has_streams(self) -> Numbers:
        """Return whether the residual has several streams."""
        return np.where(np.greater(self.streams, 1.0), 1.0, 0.0)

    @property
    def without_compressors(self) -> "ModelShape":
        """Return the model without compressors, as its multi-token-prediction layers are."""
        return replace(self, csa_share=0.0, hca_share=0.0)

    @property
    def residual_width(self) -> Numbers:
        """Width of what passes between layers: all streams."""
        return self.streams * self.hidden

    @property
    def expert_hidden(self) -> Numbers:
        """Width of what routed experts read and write."""
        return np.where(np.greater(self.moe_latent, 0.0), self.moe_latent, self.hidden)

    @property
    def router_outputs(self) -> Numbers:
        """Experts that the router chooses among, those without weights included."""
        return self.experts + self.zero_experts

    @property
    def mtp_has_experts(self) -> Numbers:
        """Return whether multi-token-prediction layers have experts: as the last layer has."""
        has_experts = np.greater(self.moe_layers, 0.0) & np.less_equal(self.mtp_is_dense, 0.0)
        return np.where(has_experts, 1.0, 0.0)

    @property
    def mtp_weight_ratio(self) -> Numbers:
        """Layers of weights for each multi-token-prediction layer."""
        once = 1.0 / np.maximum(self.mtp_layers, 1.0)
        return np.where(np.greater(self.mtp_is_repeated, 0.0), once, 1.0)

    @property
    def has_linear(self) -> bool:
        """Return whether any column has linear attention."""
        return bool(np.any(np.greater(self.linear_heads, 0.0)))

    @property
    def linear_is_delta(self) -> Numbers:
        """Linear attention by a delta rule rather than Mamba-2."""
        return np.minimum(self.linear_kind, 1.0)

    @property
    def linear_decays_channels(self) -> Numbers:
        """A delta rule with a decay for every channel of a key (KDA)."""
        return np.greater(self.linear_kind, 1.0) * 1.0

    @property
    def linear_values(self) -> Numbers:
        """Width of all values of linear attention."""
        return self.linear_heads * self.linear_value_dim

    @property
    def linear_conv(self) -> Numbers:
        """Channels of its short convolution: queries, keys and values."""
        return 2.0 * self.linear_key_heads * self.linear_key_dim + self.linear_values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hardware:
    """One device and its links; bandwidths per device and direction."""

    matmul_flop_per_s: Numbers
    """Peak of the linear layers' precision, dense."""
    attention_flop_per_s: Numbers
    """Peak of attention's precision, bf16 everywhere so far."""
    gemm_share: Numbers = 1.0
    """Share of `matmul_flop_per_s` that the largest GEMMs reach alone."""
    bf16_share: Numbers = 1.0
    """Share of `attention_flop_per_s` that the largest GEMMs reach alone."""
    exponential_ratio: Numbers = 1.0
    """Exponentials of a unit and clock over those of its generation's other devices."""
    matrix_ratio: Numbers = 1.0
    """Dense matmuls of a unit and clock over those of its generation's other devices."""
    compute_units: Numbers
    memory_bytes: Numbers
    memory_bytes_per_s: Numbers
    scale_up_bytes_per_s: Numbers
    domain: Numbers
    """Devices of one scale-up domain."""
    devices_per_node: Numbers
    scale_out_bytes_per_s: Numbers
    """Network bandwidth of one device: NICs of a node over its devices and the
    oversubscription."""
    host_bytes_per_s: Numbers = 50e9
    is_processor: Numbers = 0.0
    """1 where the device is a CPU, which launches its kernels itself: no launch hides behind
    one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """Content of every stage; columns with fewer stages are padded with empty ones."""

    dense_SC: Grid
    """Layers without experts."""
    moe_SC: Grid
    """Layers with experts."""
    embedding_SC: Grid
    """1 where the token embedding lies."""
    head_SC: Grid
    """1 where final norm, logits and loss lie."""
    mtp_SC: Grid
    """Multi-token-prediction layers."""
    load_SC: Grid | None = None
    """Sum of the imbalances of the stage's MoE layers; None: `expert_imbalance` for each."""


def stacked(parts: Sequence[Columns]) -> Columns:
    """Join single columns (fields that are numbers) to one value with arrays [C]."""
    kind = type(parts[0])
    return kind(
        **{
            field.name: np.array([float(getattr(part, field.name)) for part in parts])
            for field in fields(kind)
        }
    )


def taken(columns: Columns, chosen: npt.NDArray[np.intp]) -> Columns:
    """Keep or repeat the chosen columns, an array's last axis; what is no array stays."""
    kind = type(columns)
    return kind(
        **{
            field.name: value[..., chosen]
            if isinstance(value := getattr(columns, field.name), np.ndarray)
            else value
            for field in fields(kind)
        }
    )


def single(columns: Columns) -> Columns:
    """Turn a value of one column into one of numbers."""
    kind = type(columns)
    return kind(**{field.name: number(getattr(columns, field.name)) for field in fields(kind)})


def number(value: Numbers) -> float:
    """Return a number, or that of the only column."""
    return float(np.asarray(value, dtype=np.float64).ravel()[0])
