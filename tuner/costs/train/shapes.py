"""Inputs of the analytic model, as columns: models, machines, stages.

Strategies are in tuner/config/columns.py.

Every field is a number or an array with one entry per column, combined by numpy's broadcasting: the
planner prices many strategies of one model on one machine, a backtest prices many runs, each of its
own model and machine, with the same formulas. Yes/no fields are 0.0 and 1.0.

Letters: C columns (strategies or runs), S pipeline stages in execution order.
"""

from collections.abc import Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Numbers

Grid = npt.NDArray[np.float64]
"""[S, C], or [S, 1] where all columns agree."""


class _OfNumbers(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Columns = TypeVar("Columns", bound=_OfNumbers)
"""A dataclass all of whose fields are `Numbers`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelShape:
    """A decoder-only transformer in the numbers that cost time and bytes."""

    hidden: Numbers
    heads: Numbers
    kv_heads: Numbers
    head_dim: Numbers
    """Of queries and keys; for MLA qk_nope + qk_rope."""
    value_dim: Numbers
    """Of values."""
    is_mla: Numbers = 0.0
    q_lora_rank: Numbers = 0.0
    """0: queries are projected in one step."""
    kv_lora_rank: Numbers = 0.0
    rope_dim: Numbers = 0.0
    """MLA: width of the rotary part of a key."""
    has_sinks: Numbers = 0.0
    has_qk_norm: Numbers = 0.0
    """Every head's query and key are normalised, as in Qwen3."""
    window: Numbers = 0.0
    """Sliding-window size of a windowed layer; 0: none is windowed."""
    windowed_ratio: Numbers = 0.0
    """Share of the layers that are windowed."""
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
    num_groups: Numbers = 1.0
    """Groups of experts that routing is limited to some of."""
    groups_per_token: Numbers = 1.0
    """Groups that one token's experts may come from."""
    moe_ffn: Numbers = 0.0
    shared_ffn: Numbers = 0.0
    """Total width of the shared experts."""
    mtp_layers: Numbers = 0.0
    """Multi-token-prediction layers, each with a second head."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hardware:
    """One device and its links; bandwidths per device and direction."""

    matmul_flop_per_s: Numbers
    """Peak of the linear layers' precision, dense."""
    attention_flop_per_s: Numbers
    """Peak of attention's precision, bf16 everywhere so far."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """What every stage holds; columns with fewer stages are padded with empty ones."""

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
    """Keep the chosen columns; fields that are numbers stay numbers."""
    kind = type(columns)
    return kind(
        **{
            field.name: value[chosen]
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
