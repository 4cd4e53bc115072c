"""Move a request's KV cache from an instance into one of another layout, page size, type or degree.

    pages of the sender -> canonical piece -> cast -> the receiver's heads and layers -> its pages

Piece by piece: no more than `MOST_PIECE_BYTES` of canonical bytes exist at a time, whatever the
request's length; a piece is one layer, the heads that one rank sends to one other, and tokens that
both sides' page sizes divide.

Cast, where the types or scales differ: stored * (sender's scale / receiver's) in fp32, clipped to
the receiver's finite range (448 for e4m3, 65504 for fp16) and rounded to nearest even. Where type
and scale agree, bits are copied. An e4m3 cache that passes through bf16 and back at the same scale
is unchanged: bf16 rounds by 2^-9 relative, half an e4m3 step is 2^-5.

Source: the stages follow arXiv 2509.17542 (alignment of page size, layout, precision and tensor
degree); the number formats are IEEE 754, and e4m3 of Micikevicius et al., arXiv 2209.05433.

Not covered: the network between the two, which the profile's link tables price; hidden states that
travel beside the cache.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from profilers.kv_transfer.pages import RankCache, gather, scatter
from profilers.kv_transfer.shards import CacheDegrees, CacheShape, ShardRank, Transfer, transfers

MOST_PIECE_BYTES: Final = 32 * 2**20
"""Canonical bytes that exist at a time, unless a single granule of tokens is larger."""

Caches = Mapping[ShardRank, RankCache]
"""Cache of the request on every rank of an instance."""


def convert(
    shape: CacheShape,
    *,
    senders: Caches,
    receivers: Caches,
    num_tokens: int,
) -> None:
    """Fill the receivers' pages from the senders'."""
    granule = _granule_tokens(senders, receivers)
    plan = transfers(
        shape,
        sender=_degrees(senders),
        receiver=_degrees(receivers),
        num_tokens=num_tokens,
        granule_tokens=granule,
    )
    for transfer in plan:
        source, target = senders[transfer.sender], receivers[transfer.receiver]
        for layer in transfer.layers:
            for tokens in _chunks(transfer, shape=shape, source=source, granule=granule):
                piece_CTHD = gather(source, layer=layer, heads=transfer.heads, tokens=tokens)
                cast_CTHD = _received(piece_CTHD, source=source, target=target, layer=layer)
                scatter(cast_CTHD, target, layer=layer, heads=transfer.heads, tokens=tokens)


def cast(
    piece_CTHD: Tensor, *, dtype: torch.dtype, scale_C: Tensor, wanted_scale_C: Tensor
) -> Tensor:
    """Return the same values in another type or at another scale."""
    if piece_CTHD.dtype is dtype and torch.equal(scale_C, wanted_scale_C):
        return piece_CTHD
    value_CTHD = piece_CTHD.to(torch.float32)
    for part, ratio in enumerate((scale_C / wanted_scale_C).tolist()):
        value_CTHD[part] *= ratio
    largest = torch.finfo(dtype).max
    return value_CTHD.clamp_(-largest, largest).to(dtype)


def _received(piece_CTHD: Tensor, *, source: RankCache, target: RankCache, layer: int) -> Tensor:
    return cast(
        piece_CTHD,
        dtype=target.format.dtype,
        scale_C=source.scale_LC[layer - source.layers.start],
        wanted_scale_C=target.scale_LC[layer - target.layers.start],
    )


def _chunks(
    transfer: Transfer, *, shape: CacheShape, source: RankCache, granule: int
) -> Iterator[range]:
    token_bytes = shape.parts * len(transfer.heads) * shape.width * source.format.dtype.itemsize
    step = max(1, MOST_PIECE_BYTES // (token_bytes * granule)) * granule
    for first in range(transfer.tokens.start, transfer.tokens.stop, step):
        yield range(first, min(first + step, transfer.tokens.stop))


def _granule_tokens(senders: Caches, receivers: Caches) -> int:
    return math.lcm(
        *(cache.format.page_tokens for cache in (*senders.values(), *receivers.values()))
    )


def _degrees(caches: Caches) -> CacheDegrees:
    degrees = CacheDegrees(
        tensor=1 + max(rank.tensor for rank in caches),
        pipeline=1 + max(rank.stage for rank in caches),
    )
    if len(caches) != degrees.tensor * degrees.pipeline:
        raise ValueError(f"{len(caches)} ranks are not a whole instance of {degrees}")
    return degrees
