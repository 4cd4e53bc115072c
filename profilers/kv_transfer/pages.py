"""A rank's paged KV cache, read into the canonical order and written from it.

Letters: L layers of the rank; C parts (keys and values, or only the latent); P pages; B tokens of
a page; H heads of the rank; D elements of a head; T tokens; G pages of a request.

    nhd        pages_LCPBHD     token by token, every head of a token together
    hnd        pages_LCPHBD     head by head, every token of a page together
    canonical  piece_CTHD       tokens in order, no pages

Token n of a request lies in page `page_table_G[n // B]`, row `n % B`. The last page is filled up
with zeros. Bytes are moved as integers of the element's size, so that every bit pattern, NaNs
included, arrives as it left.

Not covered: layouts that interleave a head's elements (the first paged-attention kernels split it
by 16 bytes) and pages with their own scales.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch
from torch import Tensor

from profilers.kv_transfer.shards import CacheDegrees, CacheShape, ShardRank, heads_of, layers_of

BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer type by bytes of an element."""


class PageLayout(StrEnum):
    """Order of tokens and heads inside a page."""

    NHD = "nhd"
    """Tokens, then heads (vLLM's LBNHC)."""
    HND = "hnd"
    """Heads, then tokens (vLLM's LBHNC)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFormat:
    """Page size, layout and type of an instance's cache."""

    page_tokens: int
    layout: PageLayout = PageLayout.NHD
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise ValueError(f"a page of {self.page_tokens} tokens holds nothing; at least 1")
        if self.dtype.itemsize not in BITS:
            raise ValueError(f"{self.dtype} is no type of a KV cache; 1, 2 or 4 bytes an element")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankCache:
    """KV cache of one request on one rank."""

    format: PageFormat
    layers: range
    """Global numbers of its layers."""
    heads: range
    """Global numbers of its heads."""
    pages: Tensor
    """pages_LCPBHD or pages_LCPHBD."""
    page_table_G: Tensor
    """Page of every `page_tokens` tokens of the request."""
    scale_LC: Tensor
    """Scale of the stored elements, 1 where the type needs none; on the host, so that no launch
    waits for it."""


def pages_needed(num_tokens: int, *, page_tokens: int) -> int:
    """Pages of a request, the last one filled up."""
    return -(-num_tokens // page_tokens)


def empty_cache(
    shape: CacheShape,
    *,
    rank: ShardRank,
    degrees: CacheDegrees,
    page_format: PageFormat,
    page_table_G: Tensor,
    num_pages: int,
    scale: float = 1.0,
) -> RankCache:
    """Allocate a rank's pages, zeroed, on the page table's device."""
    layers = layers_of(shape, stage=rank.stage, pipeline_degree=degrees.pipeline)
    heads = heads_of(shape, tensor_rank=rank.tensor, tensor_degree=degrees.tensor)
    B, H = page_format.page_tokens, len(heads)
    inner = (B, H) if page_format.layout is PageLayout.NHD else (H, B)
    device = page_table_G.device
    return RankCache(
        format=page_format,
        layers=layers,
        heads=heads,
        pages=torch.zeros(
            (len(layers), shape.parts, num_pages, *inner, shape.width),
            dtype=page_format.dtype,
            device=device,
        ),
        page_table_G=page_table_G,
        scale_LC=torch.full((len(layers), shape.parts), scale, dtype=torch.float64),
    )


def gather(cache: RankCache, *, layer: int, heads: range, tokens: range) -> Tensor:
    """Read part of one layer as piece_CTHD of the cache's type; `tokens` starts with a page."""
    pages_G, mine = _pages_of(cache, tokens), _slice(heads, within=cache.heads)
    layer_pages = _bits(cache.pages[layer - cache.layers.start])
    if cache.format.layout is PageLayout.NHD:
        read_CGBHD = layer_pages[:, pages_G, :, mine]
    else:
        read_CGBHD = layer_pages[:, pages_G, mine].transpose(2, 3)
    piece_CTHD = read_CGBHD.flatten(1, 2)[:, : len(tokens)]
    return piece_CTHD.contiguous().view(cache.format.dtype)


def scatter(
    piece_CTHD: Tensor, cache: RankCache, *, layer: int, heads: range, tokens: range
) -> None:
    """Write part of one layer; `tokens` starts with a page and its last page is filled up."""
    pages_G, mine = _pages_of(cache, tokens), _slice(heads, within=cache.heads)
    layer_pages = _bits(cache.pages[layer - cache.layers.start])
    B = cache.format.page_tokens
    missing = len(pages_G) * B - len(tokens)
    bits_CTHD = _bits(piece_CTHD)
    if missing:
        bits_CTHD = torch.nn.functional.pad(bits_CTHD, (0, 0, 0, 0, 0, missing))
    written_CGBHD = bits_CTHD.reshape(len(bits_CTHD), len(pages_G), B, *bits_CTHD.shape[2:])
    if cache.format.layout is PageLayout.NHD:
        layer_pages[:, pages_G, :, mine] = written_CGBHD
    else:
        layer_pages[:, pages_G, mine] = written_CGBHD.transpose(2, 3)


def _pages_of(cache: RankCache, tokens: range) -> Tensor:
    B = cache.format.page_tokens
    if tokens.start % B:
        raise ValueError(f"token {tokens.start} does not begin a page of {B} tokens")
    return cache.page_table_G[tokens.start // B : pages_needed(tokens.stop, page_tokens=B)]


def _slice(heads: range, *, within: range) -> slice:
    if heads.start < within.start or heads.stop > within.stop:
        raise ValueError(f"heads {heads} are not all among {within}")
    return slice(heads.start - within.start, heads.stop - within.start)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.dtype.itemsize])
