"""Time to convert a request's KV cache into another instance's pages on this device.

One layer of one request, all ranks of both instances on this device, one after the other: what the
path costs without a network. The kind is `<layout>_<layout>` or `latent`, then `/<type>` where the
receiver's type is not the sender's. Every rank of the profile measures at the same time, as ranks
of one node share memory bandwidth.

Grid: 8 heads of 128 as in most grouped-query models, a latent of 576 as in DeepSeek-V3 (512 and 64
rotary); page sizes and degrees vary on plain bf16 lines only, types and layouts on equal pages.

Not covered: copies to and from host memory (table `copy`) and the network (table `collective`).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from profilers.benchmark import Setting, TableBenchmark
from profilers.devices import free_bytes, last_cache_bytes, release_memory
from profilers.kernels.autograd import DRAWN, MAX_SETS, Prepared, fill
from profilers.kernels.suite import measure_kernel
from profilers.kv_transfer.conversion import Caches, convert
from profilers.kv_transfer.pages import (
    BITS,
    PageFormat,
    PageLayout,
    empty_cache,
    pages_needed,
)
from profilers.kv_transfer.shards import CacheDegrees, CacheShape, ranks
from profilers.records import Case, Measurement

DTYPES: Final = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp32": torch.float32,
}
"""Types of a KV cache; fp8 is e4m3."""
LATENT: Final = "latent"
CPU_TOKENS: Final = (256, 1000, 4040)
CUDA_TOKENS: Final = (256, 2040, 16040)
"""The first size fills its pages; hardly any request does, and what fills none is copied again."""
GROUPED: Final = {"heads": 8, "width": 128}
SHARED: Final = {"heads": 1, "width": 576}
PLAIN: Final = {"page_from": 64, "page_to": 64, "tensor_from": 1, "tensor_to": 1}
PAGES: Final = ((16, 64), (64, 16), (16, 16))
DEGREES: Final = ((4, 1), (1, 4), (8, 8))
KINDS: Final = (
    ("nhd_nhd", "bf16"),
    ("nhd_hnd", "bf16"),
    ("hnd_nhd", "bf16"),
    ("hnd_hnd", "bf16"),
    ("hnd_hnd/fp16", "bf16"),
    ("hnd_hnd/fp8", "bf16"),
    ("hnd_hnd/bf16", "fp8"),
    ("hnd_hnd", "fp8"),
    (LATENT, "bf16"),
    (f"{LATENT}/fp8", "bf16"),
    (LATENT, "fp8"),
)
"""Lines of equal pages and degrees: kind and the sender's type."""
VARIED: Final = ("nhd_nhd", "hnd_hnd", LATENT)
"""Kinds whose page sizes and degrees vary, in bf16."""
SCALE_OF_FP8: Final = 0.5
"""A scale that is not one, so that every fp8 cast multiplies; powers of two cost what others do."""


def benchmarks(setting: Setting) -> tuple["ConversionBenchmark", ...]:
    """The one table of conversions."""
    return (ConversionBenchmark(setting=setting),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionBenchmark(TableBenchmark):
    """The table of conversions."""

    operation: str = "kv_conversion"
    weight: float = 1.5
    refined_axes: tuple[str, ...] = ("tokens",)

    def cases(self) -> Sequence[Case]:
        on_cuda = self.setting.device.startswith("cuda")
        varied = [
            *({"page_from": sender, "page_to": receiver} for sender, receiver in PAGES),
            *({"tensor_from": sender, "tensor_to": receiver} for sender, receiver in DEGREES),
        ]
        lines: list[tuple[str, str, dict[str, int]]] = [
            *((kind, dtype, {}) for kind, dtype in KINDS),
            *((kind, "bf16", change) for kind in VARIED for change in varied),
        ]
        return tuple(
            Case(
                operation=self.operation,
                kind=kind,
                dtype=dtype,
                axes={"tokens": tokens, **_widths(kind), **PLAIN, **change},
            )
            for kind, dtype, change in lines
            for tokens in (CUDA_TOKENS if on_cuda else CPU_TOKENS)
        )

    def measure(self, case: Case, *, budget_s: float) -> tuple[Measurement, ...]:
        device, team = torch.device(self.setting.device), self.setting.team
        team.barrier()
        rows = measure_kernel(
            case,
            prepare=lambda: prepare(case, device),
            clock=self.setting.clock,
            budget_s=budget_s,
            free_bytes=free_bytes(device, local_world=team.local_world),
            rank=team.rank,
            pace=replace(self.setting.pace, repeat_s=0.0),
        )
        release_memory(device)
        return rows


def prepare(case: Case, device: torch.device) -> Prepared:
    """Allocate requests of random bits until they fill the last cache twice; they take turns."""
    layouts, _, wanted = case.kind.partition("/")
    is_latent = layouts == LATENT
    sender_layout, _, receiver_layout = ("nhd", "_", "nhd") if is_latent else layouts.partition("_")
    axes = case.axes
    shape = CacheShape(
        num_layers=1, num_heads=axes["heads"], width=axes["width"], is_latent=is_latent
    )

    def instance(side: str, layout: str, dtype: str, *, is_filled: bool = True) -> Caches:
        page_format = PageFormat(
            page_tokens=axes[f"page_{side}"], layout=PageLayout(layout), dtype=DTYPES[dtype]
        )
        degrees = CacheDegrees(tensor=axes[f"tensor_{side}"])
        return _random_instance(
            shape,
            degrees=degrees,
            page_format=page_format,
            tokens=axes["tokens"],
            device=device,
            is_filled=is_filled,
        )

    def request() -> Callable[[], None]:
        senders = instance("from", sender_layout, case.dtype)
        receivers = instance("to", receiver_layout, wanted or case.dtype, is_filled=False)
        return lambda: convert(
            shape, senders=senders, receivers=receivers, num_tokens=axes["tokens"]
        )

    turns = _turns(request, request_bytes=_stored_bytes(shape, axes=axes), device=device)
    return Prepared(forward=lambda: next(turns)(), backward=None)


def _turns(
    request: Callable[[], Callable[[], None]], *, request_bytes: int, device: torch.device
) -> Iterator[Callable[[], None]]:
    # A request is read and as much is written.
    wanted = 1 + last_cache_bytes(device) // request_bytes
    return itertools.cycle([request() for _ in range(min(MAX_SETS, wanted))])


def _random_instance(
    shape: CacheShape,
    *,
    degrees: CacheDegrees,
    page_format: PageFormat,
    tokens: int,
    device: torch.device,
    is_filled: bool,
) -> Caches:
    """Every rank's pages in an order of its own, as an allocator leaves them after a while.

    Filled with random bits, or touched with zeros where they will be written.
    """
    count = pages_needed(tokens, page_tokens=page_format.page_tokens)
    bits = BITS[page_format.dtype.itemsize]
    limits = torch.iinfo(bits)
    scale = SCALE_OF_FP8 if page_format.dtype is torch.float8_e4m3fn else 1.0
    caches = {}
    for rank in ranks(degrees):
        cache = empty_cache(
            shape,
            rank=rank,
            degrees=degrees,
            page_format=page_format,
            page_table_G=torch.randperm(count, device=device),
            num_pages=count,
            scale=scale,
        )
        if is_filled:
            pages = cache.pages.view(bits).flatten()
            part = torch.randint(
                limits.min, limits.max, (min(len(pages), DRAWN),), dtype=bits, device=device
            )
            fill(pages, part)
        else:
            cache.pages.view(bits).zero_()
        caches[rank] = cache
    return caches


def _widths(kind: str) -> dict[str, int]:
    return SHARED if kind.startswith(LATENT) else GROUPED


def _stored_bytes(shape: CacheShape, *, axes: dict[str, int]) -> int:
    return 2 * shape.elements_per_token * axes["tokens"]
