"""What it costs to hand a request's KV cache from a prefill to a decode instance.

Bytes: 2 g d elements a token of a grouped layer, c + p of a latent one (MLA), tokens behind a
sliding window left out. Of ranks the busiest counts: the one that sends most and the one that
receives most (profilers/kv_transfer/shards.py says who sends what).

Time: a path is a chain of stages, each a rate: device to host, conversion, network, host to device;
a path from device to device has the network alone. With t_k the seconds of all bytes in stage k

    whole     alpha + sum_k t_k           nothing overlaps

Source: the stages are those of arXiv 2509.17542; latency and bandwidth of each are Hockney's
(Parallel Computing 20(3), 1994).
Valid: one request at a time on each link; queueing for a link is the simulation's business. Not
covered: layers that leave one by one while prefill goes on (Splitwise, arXiv 2311.18677), which no
described connector does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from profilers.kv_transfer.shards import CacheShape, Degrees, Transfer, transfers
from profilers.records import Case
from tuner.costs.kernel_table import KernelTable
from tuner.spec.model import ModelSpec

HAND_OVER_S: Final = 0.02
"""Of a hand-over beside its bytes: router, page tables, first look of the decode engine's
scheduler; what published disaggregated runs over NIXL and UCX show."""
CARD_RATIO: Final = 0.8
"""Of a network card's rate that such runs draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPath:
    """Rates of one rank's stages, bytes per second each; absent stages are not passed."""

    network_bytes_per_s: float
    latency_s: float
    """Seconds before the first byte: rendezvous and posting of the transfer."""
    device_to_host_bytes_per_s: float | None = None
    host_to_device_bytes_per_s: float | None = None
    conversion_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if any(rate <= 0.0 for rate in self.rates) or self.latency_s < 0.0:
            raise ValueError(f"rates must be positive and the latency not negative: {self}")

    @property
    def rates(self) -> tuple[float, ...]:
        """Of the stages that are passed, in order."""
        stages = (
            self.device_to_host_bytes_per_s,
            self.conversion_bytes_per_s,
            self.network_bytes_per_s,
            self.host_to_device_bytes_per_s,
        )
        return tuple(rate for rate in stages if rate is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Bytes of one request at the busiest ranks, and in all."""

    sent: float
    received: float
    whole: float
    """Of all ranks together, copies included: what a link between the instances carries."""

    @property
    def busiest(self) -> float:
        """What one end of the slowest pair moves."""
        return max(self.sent, self.received)


def cache_shape(model: ModelSpec) -> CacheShape:
    """Return what the model keeps for a token, windows apart."""
    attention = model.attention
    if attention.kind == "mla":
        width = attention.kv_lora_rank + attention.qk_rope_head_dim
        return CacheShape(num_layers=model.num_layers, num_heads=1, width=width, is_latent=True)
    return CacheShape(
        num_layers=model.num_layers, num_heads=attention.num_kv_heads, width=attention.head_dim
    )


def request_kv_bytes(model: ModelSpec, *, tokens: int, bytes_per_element: float) -> float:
    """Bytes of a request's cache over all layers, each head once."""
    shape = cache_shape(model)
    each = shape.elements_per_token / shape.num_layers * bytes_per_element
    return each * sum(
        _kept_tokens(model, layer, tokens=tokens) for layer in range(model.num_layers)
    )


def rank_kv_bytes(
    model: ModelSpec,
    *,
    prefill: Degrees,
    decode: Degrees,
    tokens: int,
    bytes_per_element: float,
) -> RankBytes:
    """Bytes that the busiest sender and the busiest receiver move for one request."""
    shape = cache_shape(model)
    plan = transfers(shape, sender=prefill, receiver=decode, num_tokens=tokens)
    each = shape.parts * shape.width * bytes_per_element

    def moved(one: Transfer) -> float:
        share = len(one.tokens) / tokens
        kept = sum(_kept_tokens(model, layer, tokens=tokens) for layer in one.layers)
        return each * len(one.heads) * share * kept

    return RankBytes(
        sent=_busiest([(one.sender, moved(one)) for one in plan]),
        received=_busiest([(one.receiver, moved(one)) for one in plan]),
        whole=sum(moved(one) for one in plan),
    )


def whole_s(rank_bytes: float, *, path: KvPath) -> float:
    """Predict the seconds of a hand-over that begins when prefill has ended."""
    return path.latency_s + sum(rank_bytes / rate for rate in path.rates)


def conversion_bytes_per_s(
    table: KernelTable,
    model: ModelSpec,
    *,
    tokens: int,
    kind: str,
    dtype: str,
    bytes_per_element: float,
    pages: tuple[int, int],
    tensors: tuple[int, int],
) -> float:
    """Return the rate at which one device turns prefill's pages into decode's, as measured.

    Args:
        table: prices of a profile that holds the table `kv_conversion`.
        model: whose cache it is.
        tokens: length of the request.
        kind: as profilers/kv_transfer/suite.py names it, e.g. `nhd_hnd` or `latent/fp8`.
        dtype: prefill's type.
        bytes_per_element: of that type.
        pages: tokens of prefill's and of decode's pages.
        tensors: prefill's and decode's tensor degrees.

    Raises:
        OutsideProfileError: no such conversion was measured.
    """
    shape = cache_shape(model)
    case = Case(
        operation="kv_conversion",
        kind=kind,
        dtype=dtype,
        axes={
            "tokens": tokens,
            "heads": shape.num_heads,
            "width": shape.width,
            "page_from": pages[0],
            "page_to": pages[1],
            "tensor_from": tensors[0],
            "tensor_to": tensors[1],
        },
    )
    layer_bytes = shape.elements_per_token / shape.num_layers * tokens * bytes_per_element
    holders = max(1.0, tensors[1] / shape.num_heads)
    return holders * layer_bytes / table.seconds(case)


def _kept_tokens(model: ModelSpec, layer: int, *, tokens: int) -> int:
    window = model.attention.sliding_window
    return min(tokens, window) if model.windowed[layer] and window is not None else tokens


def _busiest(moved: Sequence[tuple[object, float]]) -> float:
    totals: dict[object, float] = {}
    for rank, size in moved:
        totals[rank] = totals.get(rank, 0.0) + size
    return max(totals.values(), default=0.0)
