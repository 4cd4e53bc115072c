"""Bytes of KV cache that an engine allocates on one device, and whether steps fit beside them.

The kinds of rules are in tuner/catalog/serve_rules/traits.py, every engine's in its folder. Where
a launch states no share, SGLang's is that of tuner/engines/sglang/read.py.

CUDA shows less than a device's memory, by 0.3 GiB and 0.7 %: 23.55 of 24 GiB on RTX 4090 (vLLM
issue 13061), 79.2 of 80 on H100 (pull request 10511), 95.0 of 96 on H20, 139.8 of 141 on H200 and
178.4 of 180 on B200 (what PyTorch prints where memory is full).
"""

import math
from dataclasses import dataclass
from typing import Final

from tuner.catalog.serve_rules.traits import MemoryFractionKind, MemoryRule
from tuner.costs.serve.reserve import MIB, Reserve

HIDDEN_BYTES: Final = 0.3 * 1024.0 * MIB
HIDDEN_RATIO: Final = 0.0068
"""Share of a device's memory that CUDA does not show, beside `HIDDEN_BYTES`."""
ROUNDED_RATIO: Final = 0.05
"""Share of the free memory that a plan leaves to allocators, which round up what is counted."""
GIB: Final = 1024.0 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory of one device for KV caches."""

    cache_bytes: float
    """Bytes of the cache that the engine allocates; not above 0 where the weights leave none."""
    left_bytes: float
    """Bytes left beside weights and what steps take, whatever the engine's share."""
    ratio: float
    """Memory share that was applied; with a stated cache, the share of the visible memory that is
    taken in all."""

    @property
    def safe_bytes(self) -> float:
        """Return the bytes of cache that a plan may rely on."""
        return min(self.cache_bytes, self.left_bytes)

    @property
    def lacking_bytes(self) -> float:
        """Return the bytes that a server lacks once its steps are as large as they may be."""
        return max(max(self.cache_bytes, 0.0) - self.left_bytes, 0.0)


def room_of(
    rule: MemoryRule,
    *,
    weights: float,
    reserve: Reserve,
    memory_bytes: float,
    ratio: float | None = None,
    cache_bytes: float | None = None,
    filled_ratio: float = 1.0,
) -> Room:
    """Apply an engine's rule.

    Args:
        rule: of the release.
        weights: bytes of one device, drafts and spare experts included.
        reserve: of the largest steps.
        memory_bytes: of one device.
        ratio: the launch's share; None: the engine's own, and where that is none (SGLang) the one
            that a plan would state: all but what steps take and a twentieth.
        cache_bytes: that the launch states in place of a share.
        filled_ratio: bytes of the cache over those that the engine divides among tokens.
    """
    visible = visible_bytes(memory_bytes)
    free = visible - reserve.context - reserve.communicators
    left = free - weights - reserve.steps
    if cache_bytes is not None:
        taken = (visible - left + cache_bytes) / visible
        return Room(cache_bytes=cache_bytes, left_bytes=left, ratio=taken)
    share = rule.ratio if ratio is None else ratio
    if share is None:
        # As a flag states it, so that the launch has what the plan counts on.
        share = math.floor(1e3 * (1.0 - ROUNDED_RATIO - reserve.steps / free)) / 1e3
    match rule.share:
        case MemoryFractionKind.OF_DEVICE:
            taken = reserve.steps - reserve.graphs * (not rule.counts_graphs)
            taken += reserve.communicators * rule.counts_communicators
            cache = share * visible - weights - taken
        case MemoryFractionKind.OF_FREE:
            cache = share * free - weights
        case MemoryFractionKind.OF_LEFT:
            cache = share * left
    left -= reserve.late
    cache *= filled_ratio if cache > 0.0 else 1.0
    return Room(cache_bytes=cache, left_bytes=left, ratio=share)


def visible_bytes(memory_bytes: float) -> float:
    """Return the bytes of a device's memory that CUDA shows."""
    return (1.0 - HIDDEN_RATIO) * memory_bytes - HIDDEN_BYTES
