"""Blocks of a cache whose layers keep different things, as vLLM shares them out.

Layers of one kind are parted into groups of equal size, and each group has a table of blocks. All
tables draw from one pool, so that a block has the bytes of the largest group, and a request takes
whole blocks of every group.

    s tokens of a request    f tokens that are scheduled and not yet settled    b tokens of a block
    w window

    all tokens     ceil(s / b)
    window         ceil(min(w - 1 + f, s) / b) + 1
    chunk          ceil(min(w + f, s) / b)
    state          so many states, whatever the length

Groups are as large as the smallest kind, or as the largest where it is less than 1.5 times that.
States of linear attention share their block with as many tokens of keys as they need, a multiple of
16; drafts widen what their convolution keeps (layers/mamba/mamba_utils.py, `num_spec`). DeepSeek-V4
has blocks of 256 tokens for the entries of all its compressors together, of 64 for windows, and of
4 and 8 for the open entries of compressors with and without an indexer, whose pages are padded to
576 bytes; groups are as large as pads least, and not smaller than the kind whose layers have pages
of two sizes.

Source: vLLM 0.32.0, v1/core/kv_cache_utils.py (`get_max_concurrency_for_kv_cache_config`,
`_get_kv_cache_groups_uniform_page_size`, `_get_packed_kv_cache_groups`), v1/kv_cache_interface.py
(`max_admission_blocks_per_request`), models/deepseek_v4/{attention,compressor}.py,
v1/attention/backends/mla/sparse_swa.py. Blocks of earlier releases are up to 5 % larger.

Not covered: keys of different widths beside each other, blocks of other sizes.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tuner.costs.serve.decoder import AttentionKind, DecoderAttention, Layers
from tuner.prices.serve.work import CONV_STATE_BYTES, INDEX_KEY_BYTES, STATE_BYTES, entry_bytes

BLOCK_TOKENS: Final = 16
"""vLLM 0.32.0, config/cache.py, `DEFAULT_BLOCK_SIZE`."""
ENTRY_BLOCK_TOKENS: Final = 256
WINDOW_BLOCK_TOKENS: Final = 64
OPEN_BLOCK_TOKENS: Final = (8, 4)
"""Tokens of a block without and with an indexer."""
ALIGNED_BYTES: Final = 576
WIDE_RATIO: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share a table of blocks."""

    block_tokens: int = BLOCK_TOKENS
    window: int = 0
    """Tokens that are kept; 0: all."""
    is_chunk: bool = False
    states: int = 0
    """Blocks of a request whatever its length; 0: by its tokens."""

    def blocks(self, tokens: float, *, in_flight: float) -> int:
        """Count the blocks of a request."""
        if self.states:
            return self.states
        if not self.window:
            return math.ceil(tokens / self.block_tokens)
        kept = min(self.window - (not self.is_chunk) + in_flight, tokens)
        return math.ceil(kept / self.block_tokens) + (not self.is_chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPool:
    """The blocks of one device."""

    block_bytes: float
    groups: tuple[CacheGroup, ...]

    def request_bytes(self, tokens: float, *, in_flight: float = 0.0) -> float:
        """Bytes of a request of so many tokens, with so many of them in flight."""
        return self.block_bytes * sum(
            group.blocks(tokens, in_flight=in_flight) for group in self.groups
        )

    def sharing(self, context: int, *, block_ratio: float) -> "BlockPool":
        """Return the pool of a rank with a share of each block, and of the positions of requests.

        States are whole on every rank (vLLM 0.33.0, v1/kv_cache_interface.py, `dcp_sharded`).
        """
        groups = (
            group if group.states else replace(group, block_tokens=group.block_tokens * context)
            for group in self.groups
        )
        return BlockPool(block_bytes=self.block_bytes * block_ratio, groups=tuple(groups))

    @property
    def token_bytes(self) -> float:
        """Bytes of a token where every group kept all of them, as releases up to 0.19 log it."""
        return (
            self.block_bytes * len(self.groups) / min(group.block_tokens for group in self.groups)
        )


def block_pool(
    layers: Sequence[Layers],
    *,
    token_bytes: Sequence[float],
    ranks: int,
    state_bytes: float,
    states: int,
    drafts: int = 0,
) -> BlockPool | None:
    """Part layers into groups; None where all keep the same of every token.

    Args:
        layers: of the model and of what drafts.
        token_bytes: of a token in each of them, on one device.
        ranks: tensor ranks.
        state_bytes: of an element of a state of linear attention.
        states: that a request has, those of drafts included.
        drafts: tokens drafted ahead, whose inputs the convolution keeps beside its past ones.
    """
    mixing = [
        (layer, width) for layer, width in zip(layers, token_bytes, strict=True) if layer.has_mixer
    ]
    if any(layer.attention.kind is AttentionKind.COMPRESSED for layer, _ in mixing):
        return _compressed_pool([layer for layer, _ in mixing])
    widths = [width for layer, width in mixing if layer.attention.linear is None]
    state = max(
        (_state_bytes(layer.attention, ranks, state_bytes, drafts) for layer, _ in mixing),
        default=0.0,
    )
    token = max(widths, default=0.0)
    if not state and not any(layer.attention.window for layer, _ in mixing):
        return None
    block = BLOCK_TOKENS * math.ceil(state / (BLOCK_TOKENS * token)) if token and state else 0
    block = block or BLOCK_TOKENS
    page = block * token or state
    counts: Counter[CacheGroup] = Counter()
    for layer, _ in mixing:
        counts[_group(layer.attention, block=block, states=states)] += layer.count
    smallest, largest = min(counts.values()), max(counts.values())
    size = largest if largest < WIDE_RATIO * smallest else smallest
    return BlockPool(block_bytes=size * page, groups=_split_groups(counts, size))


def _split_groups(counts: Mapping[CacheGroup, int], size: int) -> tuple[CacheGroup, ...]:
    return tuple(group for group, count in counts.items() for _ in range(math.ceil(count / size)))


def _group(attention: DecoderAttention, *, block: int, states: int) -> CacheGroup:
    if attention.linear is not None:
        return CacheGroup(block_tokens=block, states=states)
    return CacheGroup(
        block_tokens=block, window=attention.window, is_chunk=attention.window_is_chunk
    )


def _state_bytes(attention: DecoderAttention, ranks: int, element: float, drafts: int) -> float:
    if attention.linear is None:
        return 0.0
    shard = attention.linear.shard(ranks)
    past = shard.conv_state_elements + drafts * shard.conv_channels
    return element * shard.state_elements + CONV_STATE_BYTES * past


def _compressed_pool(layers: Sequence[Layers]) -> BlockPool:
    """Return the blocks of entries, windows and open entries (DeepSeek-V4)."""
    width, window = entry_bytes(layers[0].attention.kv_elements), layers[0].attention.window
    plain = CacheGroup(block_tokens=WINDOW_BLOCK_TOKENS, window=window)
    pages = {plain: _aligned(WINDOW_BLOCK_TOKENS * width)}
    counts, pairs = Counter({plain: sum(layer.count for layer in layers)}), Counter[CacheGroup]()
    entries = 0.0
    for layer in layers:
        merged = layer.attention.compressor
        if merged is None:
            continue
        index, rows = merged.indexer, ENTRY_BLOCK_TOKENS / merged.ratio
        tokens = OPEN_BLOCK_TOKENS[index is not None]
        opened = CacheGroup(block_tokens=tokens, window=merged.series * merged.ratio)
        widths = [layer.attention.head_dim, *([] if index is None else [index.head_dim])]
        pages[opened] = sum(
            _aligned(tokens * merged.outputs(head_dim) * STATE_BYTES) for head_dim in widths
        )
        keys = 0.0 if index is None else _aligned(rows * index.head_dim * INDEX_KEY_BYTES)
        entries += layer.count * (_aligned(rows * width) + keys)
        counts[opened] += layer.count
        pairs[opened] += layer.count * (index is not None)
    size = _least_padding(list(counts.values()), least=max([1, *pairs.values()]))
    blocks = [min(count, size) * pages[group] for group, count in counts.items()]
    whole = (CacheGroup(block_tokens=ENTRY_BLOCK_TOKENS),) if entries else ()
    return BlockPool(block_bytes=max(*blocks, entries), groups=whole + _split_groups(counts, size))


def _aligned(size: float) -> float:
    return float(ALIGNED_BYTES * math.ceil(size / ALIGNED_BYTES))


def _least_padding(counts: Sequence[int], *, least: int) -> int:
    """Return the group size that pads the counts least, the largest of equal ones."""
    sizes = range(least, max(*counts, least) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))
