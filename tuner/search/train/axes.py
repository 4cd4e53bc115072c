"""The choices on every axis of an execution option, and what a rule between axes is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from profilers.steps.config import Recompute
from tuner.catalog.manifest import DEFAULT_RANK_ORDER, PIPELINE_INSIDE_ORDER
from tuner.config.knobs import searched

CHUNKS: Final = (1, 2, 4, 8)
LAYER_SHARES: Final = (0.25, 0.5, 0.75, 1.0)
RANK_ORDERS: Final = (DEFAULT_RANK_ORDER, PIPELINE_INSIDE_ORDER)
SHARDINGS: Final = ("everywhere", "domain")
"""Choices of sharding: training state over all ranks that share it, or a copy of it in each
scale-up domain."""

RECOMPUTE_AXES: Final = ("recompute", "chunks")
DISPATCH: Final = tuple(knob for knob in searched() if knob.is_of_dispatch)
DISPATCH_AXES: Final = tuple(knob.field for knob in DISPATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeChoice:
    """Choice on the recomputation axis: level, and modules or layers that are recomputed."""

    level: Recompute
    modules: frozenset[str] = frozenset()
    """Modules that selective recomputation recomputes."""
    share: float = 0.0
    """Share of every stage's layers that full recomputation recomputes."""


Choice = int | float | str | bool | RecomputeChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of the degrees that the option rules read."""

    has_pipeline: bool
    has_virtual: bool
    is_sharded: bool
    """Whether several ranks hold the same dense parameters."""
    has_expert_parallel: bool
    """Whether expert parallelism is above 1."""
    has_tensor: bool = False
    """Whether tensor parallelism is above 1."""
    has_copies: bool = False
    """Whether training state can have a copy in each of several scale-up domains."""
    spans_replicas: bool = False
    """Whether experts are spread over more than one replica's context and tensor ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRule:
    """One reason why an option cannot be launched."""

    text: str
    axes: tuple[str, ...]
    """Axes that the rule reads."""
    is_broken: Callable[..., bool]
    """Function that is called with the facts and one choice per axis."""
    is_limit: bool = False
    """Whether the rule is the user's own limit of one axis."""
