"""Round trips over page sizes, degrees, layouts and types are bit for bit the same."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from profilers.kv_transfer import conversion
from profilers.kv_transfer.conversion import cast, convert
from profilers.kv_transfer.pages import (
    BITS,
    PageFormat,
    PageLayout,
    RankCache,
    empty_cache,
    gather,
    pages_needed,
    scatter,
)
from profilers.kv_transfer.shards import CacheDegrees, CacheShape, ShardRank, ranks
from tests.rows import each_row

GROUPED = CacheShape(num_layers=2, num_heads=4, width=3)
UNEVEN = CacheShape(num_layers=3, num_heads=6, width=2)
LATENT = CacheShape(num_layers=2, num_heads=1, width=5, is_latent=True)
DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32)
DEGREES = (1, 2, 4, 8)
PAGES = (16, 32, 64, 128)
NUM_TOKENS = 150


def instance(
    shape: CacheShape,
    degrees: CacheDegrees,
    page_format: PageFormat,
    *,
    num_tokens: int = NUM_TOKENS,
    scale: float = 1.0,
    seed: int = 0,
) -> dict[ShardRank, RankCache]:
    """Empty caches; every rank has its own order of pages, and pages of others between."""
    found = {}
    for number, rank in enumerate(ranks(degrees)):
        needed = pages_needed(num_tokens, page_tokens=page_format.page_tokens)
        order = random.Random(seed + number).sample(range(needed + 2), needed)
        found[rank] = empty_cache(
            shape,
            rank=rank,
            degrees=degrees,
            page_format=page_format,
            page_table_G=torch.tensor(order),
            num_pages=needed + 2,
            scale=scale,
        )
    return found


def random_bits(shape: CacheShape, dtype: torch.dtype, *, num_tokens: int = NUM_TOKENS) -> Tensor:
    """Every bit pattern of the type may occur, NaNs and infinities too; values_LCTHD."""
    sizes = (shape.num_layers, shape.parts, num_tokens, shape.num_heads, shape.width)
    bits = BITS[dtype.itemsize]
    limits = torch.iinfo(bits)
    noise = torch.Generator().manual_seed(1)
    return torch.randint(limits.min, limits.max + 1, sizes, dtype=bits, generator=noise).view(dtype)


def fill(caches: dict[ShardRank, RankCache], values_LCTHD: Tensor) -> None:
    tokens = range(values_LCTHD.shape[2])
    for cache in caches.values():
        for layer in cache.layers:
            piece = values_LCTHD[layer, :, :, cache.heads.start : cache.heads.stop]
            scatter(piece.contiguous(), cache, layer=layer, heads=cache.heads, tokens=tokens)


def assert_holds(caches: dict[ShardRank, RankCache], values_LCTHD: Tensor) -> None:
    tokens = range(values_LCTHD.shape[2])
    bits = BITS[values_LCTHD.element_size()]
    for cache in caches.values():
        for layer in cache.layers:
            piece = gather(cache, layer=layer, heads=cache.heads, tokens=tokens)
            wanted = values_LCTHD[layer, :, :, cache.heads.start : cache.heads.stop].contiguous()
            assert torch.equal(piece.view(bits), wanted.view(bits))


def round_trip(
    shape: CacheShape,
    *,
    sender: CacheDegrees,
    receiver: CacheDegrees,
    mine: PageFormat,
    theirs: PageFormat,
) -> None:
    values = random_bits(shape, mine.dtype)
    senders = instance(shape, sender, mine)
    receivers = instance(shape, receiver, theirs, seed=100)
    again = instance(shape, sender, mine, seed=200)
    fill(senders, values)
    convert(shape, senders=senders, receivers=receivers, num_tokens=NUM_TOKENS)
    assert_holds(receivers, values)
    convert(shape, senders=receivers, receivers=again, num_tokens=NUM_TOKENS)
    assert_holds(again, values)


def round_trip_of_pages(shape: CacheShape, mine: int, theirs: int, page: int, other: int) -> None:
    round_trip(
        shape,
        sender=CacheDegrees(tensor=mine),
        receiver=CacheDegrees(tensor=theirs),
        mine=PageFormat(page_tokens=page, layout=PageLayout.NHD),
        theirs=PageFormat(page_tokens=other, layout=PageLayout.HND),
    )


@each_row("shape", [GROUPED, UNEVEN, LATENT])
@each_row(("mine", "theirs"), itertools.product(range(4), range(4)))
def test_round_trip_over_tensor_degrees_and_page_sizes(
    shape: CacheShape, mine: int, theirs: int
) -> None:
    # Two orthogonal Latin squares: any two of the four axes meet in every pair of their values.
    page, other = PAGES[mine ^ theirs], PAGES[mine ^ (0, 2, 3, 1)[theirs]]
    round_trip_of_pages(shape, DEGREES[mine], DEGREES[theirs], page, other)


@pytest.mark.slow
@each_row("shape", [GROUPED, UNEVEN, LATENT])
@each_row(("mine", "theirs"), itertools.product(DEGREES, DEGREES))
@each_row(("page", "other"), itertools.product(PAGES, PAGES))
def test_round_trip_over_all_tensor_degrees_and_page_sizes(
    shape: CacheShape, mine: int, theirs: int, page: int, other: int
) -> None:
    round_trip_of_pages(shape, mine, theirs, page, other)


@each_row("shape", [GROUPED, LATENT])
@each_row("dtype", DTYPES)
@each_row(("layout", "other"), itertools.product(PageLayout, PageLayout))
def test_round_trip_over_layouts_and_types(
    shape: CacheShape, dtype: torch.dtype, layout: PageLayout, other: PageLayout
) -> None:
    round_trip(
        shape,
        sender=CacheDegrees(tensor=2),
        receiver=CacheDegrees(tensor=4),
        mine=PageFormat(page_tokens=16, layout=layout, dtype=dtype),
        theirs=PageFormat(page_tokens=48, layout=other, dtype=dtype),
    )


@each_row("shape", [UNEVEN, LATENT])
@each_row(("mine", "theirs"), [(1, 3), (3, 1), (2, 3), (3, 3)])
def test_round_trip_over_pipeline_degrees(shape: CacheShape, mine: int, theirs: int) -> None:
    round_trip(
        shape,
        sender=CacheDegrees(tensor=2, pipeline=mine),
        receiver=CacheDegrees(tensor=3, pipeline=theirs),
        mine=PageFormat(page_tokens=16),
        theirs=PageFormat(page_tokens=64, layout=PageLayout.HND),
    )


def test_small_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "MOST_PIECE_BYTES", 1)
    round_trip(
        GROUPED,
        sender=CacheDegrees(tensor=2),
        receiver=CacheDegrees(),
        mine=PageFormat(page_tokens=16),
        theirs=PageFormat(page_tokens=32, layout=PageLayout.HND),
    )


def test_order_and_range_by_hand() -> None:
    # 2 heads of 1 element, pages of 2 tokens, 3 tokens; the request lies in page 1, then page 0.
    (cache,) = (
        empty_cache(
            CacheShape(num_layers=1, num_heads=2, width=1),
            rank=ShardRank(stage=0, tensor=0),
            degrees=CacheDegrees(),
            page_format=PageFormat(page_tokens=2, layout=PageLayout.HND, dtype=torch.float32),
            page_table_G=torch.tensor([1, 0]),
            num_pages=2,
        ),
    )
    # keys: page 0 holds token 2, page 1 holds tokens 0 and 1, head by head
    cache.pages[0, 0, :, :, :, 0] = torch.tensor([[[4.0, 9.0], [5.0, 9.0]], [[0, 2], [1, 3]]])
    piece = gather(cache, layer=0, heads=range(2), tokens=range(3))
    assert piece[0, :, :, 0].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    one = torch.ones(1)
    wide = torch.tensor([1e5, -1e5, 1.5, float("inf"), float("nan")], dtype=torch.bfloat16)
    narrow = cast(
        wide.view(1, 5, 1, 1), dtype=torch.float16, scale_C=one, wanted_scale_C=one
    ).flatten()
    assert narrow[:4].tolist() == [65504.0, -65504.0, 1.5, 65504.0]
    assert narrow[4].isnan()


def test_the_last_page_is_filled_up_with_zeros_and_other_pages_are_left_alone() -> None:
    page_format = PageFormat(page_tokens=16)
    (cache,) = instance(GROUPED, CacheDegrees(), page_format, num_tokens=20).values()
    cache.pages.fill_(7.0)
    values = torch.ones((2, 20, 4, 3), dtype=torch.bfloat16)
    scatter(values, cache, layer=0, heads=range(4), tokens=range(20))
    last = cache.pages[0, :, cache.page_table_G[1]]
    assert torch.all(last[:, :4] == 1.0)
    assert torch.all(last[:, 4:] == 0.0)
    others = sorted(set(range(4)) - set(cache.page_table_G.tolist()))
    assert torch.all(cache.pages[0, :, others] == 7.0)
    assert torch.all(cache.pages[1] == 7.0)


@each_row("between", [torch.bfloat16, torch.float16])
@each_row("scale", [1.0, 0.0371])
def test_fp8_through_a_wider_type_and_back_is_unchanged(between: torch.dtype, scale: float) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = every[~every.to(torch.float32).isnan()].view(1, -1, 1, 1)
    mine, plain = torch.tensor([scale]), torch.ones(1)
    wide = cast(finite, dtype=between, scale_C=mine, wanted_scale_C=plain)
    assert wide.flatten()[1].item() == pytest.approx(scale * 2.0**-9, rel=2.0**-8)
    back = cast(wide, dtype=torch.float8_e4m3fn, scale_C=plain, wanted_scale_C=mine)
    assert torch.equal(back.view(torch.uint8), finite.view(torch.uint8))


def test_fp8_of_another_scale_is_requantised() -> None:
    senders = instance(GROUPED, CacheDegrees(), PageFormat(page_tokens=16), num_tokens=16)
    fp8 = PageFormat(page_tokens=16, dtype=torch.float8_e4m3fn)
    middle = instance(GROUPED, CacheDegrees(), fp8, num_tokens=16, scale=0.5)
    last = instance(GROUPED, CacheDegrees(), fp8, num_tokens=16, scale=0.25)
    fill(senders, torch.full((2, 2, 16, 4, 3), 3.0, dtype=torch.bfloat16))
    convert(GROUPED, senders=senders, receivers=middle, num_tokens=16)
    convert(GROUPED, senders=middle, receivers=last, num_tokens=16)
    # 3 is stored as 6 at scale 1/2 and as 12 at scale 1/4
    assert_holds(middle, torch.full((2, 2, 16, 4, 3), 6.0).to(torch.float8_e4m3fn))
    assert_holds(last, torch.full((2, 2, 16, 4, 3), 12.0).to(torch.float8_e4m3fn))


def test_what_is_no_instance_or_no_page_is_refused() -> None:
    (cache,) = instance(GROUPED, CacheDegrees(), PageFormat(page_tokens=16)).values()
    with pytest.raises(ValueError, match="token 8 does not begin a page of 16"):
        gather(cache, layer=0, heads=range(1), tokens=range(8, 20))
    with pytest.raises(ValueError, match="not all among"):
        gather(cache, layer=0, heads=range(3, 5), tokens=range(16))
    whole = instance(GROUPED, CacheDegrees(tensor=2), PageFormat(page_tokens=16))
    half = {rank: cache for rank, cache in whole.items() if rank.tensor == 1}
    with pytest.raises(ValueError, match="1 ranks are not a whole instance"):
        convert(GROUPED, senders=half, receivers=whole, num_tokens=NUM_TOKENS)
    with pytest.raises(ValueError, match="at least 1"):
        PageFormat(page_tokens=0)
    with pytest.raises(ValueError, match="1, 2 or 4 bytes"):
        PageFormat(page_tokens=16, dtype=torch.float64)
