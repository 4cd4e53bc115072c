"""The choices on every axis of a way to run given degrees, and what a rule between them is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from profilers.steps.config import Recompute

CHUNKS: Final = (1, 2, 4, 8)
LAYER_SHARES: Final = (0.25, 0.5, 0.75, 1.0)
DISPATCHERS: Final = ("alltoall", "deepep", "hybridep")
GRAPHS: Final = ("none", "partial", "full_iteration")
RANK_ORDERS: Final = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
SWITCH: Final = (False, True)
SHARDINGS: Final = ("everywhere", "domain")
"""Training state over all ranks that share it, or a copy of it in each scale-up domain."""

COLUMN_OF_MODULE: Final = {
    "core_attn": "recompute_core_attention",
    "moe_act": "recompute_moe_act",
    "layernorm": "recompute_layernorm",
    "mla_up_proj": "recompute_mla_up_proj",
    "mlp": "recompute_mlp",
    "shared_experts": "recompute_shared_experts",
    "moe": "recompute_moe",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """One choice of what is computed again."""

    level: Recompute
    modules: frozenset[str] = frozenset()
    """Of selective recomputation."""
    share: float = 0.0
    """Of full recomputation: layers of every stage."""


Choice = int | float | str | bool | Recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the ways' rules ask of degrees."""

    has_pipeline: bool
    has_virtual: bool
    is_sharded: bool
    """Several ranks hold the same dense parameters."""
    has_experts_apart: bool
    """Expert parallelism above 1."""
    has_tensor: bool = False
    """Tensor parallelism above 1."""
    has_copies: bool = False
    """Training state can have a copy in each of several scale-up domains."""
    spans_replicas: bool = False
    """Experts are spread over more than one replica's context and tensor ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayRule:
    """One reason why a way cannot be launched."""

    text: str
    axes: tuple[str, ...]
    """What it ties together."""
    is_broken: Callable[..., bool]
    """Called with the facts and one choice per axis."""
