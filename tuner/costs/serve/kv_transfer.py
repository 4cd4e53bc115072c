"""Cost of a request's KV transfer from a prefill to a decode instance.

Bytes: 2 g d elements a token of a GQA layer, c + p of an MLA layer and the key of its indexer;
tokens outside a window are not sent. Compressors send their entries, with the keys of their
indexers. Layers with linear attention, and compressors, send the state of the request once, split
over the ranks of either side. The rank that sends the most and the one that receives
the most decide (profilers/kv_transfer/shards.py has the transfers).

Time: a path is a chain of stages, each a rate: device to host, conversion, network, host to device;
a path from device to device has the network alone. With t_k the seconds of all bytes in stage k

    whole     alpha + sum_k t_k           nothing overlaps

Source: the stages are those of arXiv 2509.17542; latency and bandwidth of each are Hockney's
(Parallel Computing 20(3), 1994).
Valid: one request at a time on each link; the simulation models queueing for a link. Not covered:
layer-wise transfer during prefill (Splitwise, arXiv 2311.18677), which no described connector does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from profilers.kv_transfer.shards import CacheDegrees, CacheShape, Transfer, transfers
from tuner.prices.ops import Op
from tuner.prices.profile import ProfilePrices
from tuner.prices.serve.work import (
    CONV_STATE_BYTES,
    INDEX_KEY_BYTES,
    STATE_BYTES,
    entry_bytes,
)
from tuner.spec.accounting import state_bytes_per_sequence
from tuner.spec.model import Layer, Mixer, ModelSpec

KV_TRANSFER_LATENCY_S: Final = 0.02
"""Seconds of latency of a KV transfer, besides its bytes: router, page tables, the decode engine's
next scheduler iteration; from published disaggregated runs over NIXL and UCX."""
NIC_RATIO: Final = 0.8
"""Share of a NIC's rate that published disaggregated runs reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPath:
    """Rates of one rank's stages, bytes per second each; None: the path skips the stage."""

    network_bytes_per_s: float
    latency_s: float
    """Seconds before the first byte: rendezvous and posting of the transfer."""
    device_to_host_bytes_per_s: float | None = None
    host_to_device_bytes_per_s: float | None = None
    conversion_bytes_per_s: float | None = None

    rates: tuple[float, ...] = field(init=False)
    """Rates of the stages of the path, in order."""

    def __post_init__(self) -> None:
        stages = (
            self.device_to_host_bytes_per_s,
            self.conversion_bytes_per_s,
            self.network_bytes_per_s,
            self.host_to_device_bytes_per_s,
        )
        object.__setattr__(self, "rates", tuple(rate for rate in stages if rate is not None))
        if any(rate <= 0.0 for rate in self.rates) or self.latency_s < 0.0:
            raise ValueError(f"rates must be positive and the latency not negative: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Bytes of one request on the most-loaded ranks, and in all."""

    sent: float
    received: float
    whole: float
    """Bytes of all ranks together, copies included: what a link between the instances carries."""

    @property
    def peak_rank(self) -> float:
        """Bytes of the most-loaded rank of either side."""
        return max(self.sent, self.received)


def cache_shape(model: ModelSpec) -> CacheShape:
    """Return the KV cache of a token, windows, entries and indexers not considered."""
    attention, layers = model.attention, model.num_attention_layers
    if attention.kind == "shared_kv":
        return CacheShape(num_layers=layers, num_heads=1, width=attention.head_dim, is_latent=True)
    if attention.kind == "mla":
        width = attention.kv_lora_rank + attention.qk_rope_head_dim
        return CacheShape(num_layers=layers, num_heads=1, width=width, is_latent=True)
    return CacheShape(num_layers=layers, num_heads=attention.num_kv_heads, width=attention.head_dim)


def rank_kv_bytes(
    model: ModelSpec,
    *,
    prefill: CacheDegrees,
    decode: CacheDegrees,
    tokens: int,
    bytes_per_element: float,
    state_bytes: float = STATE_BYTES,
) -> RankBytes:
    """Bytes that the most-loaded sender and the most-loaded receiver move for one request."""
    shape = cache_shape(model)
    plan = transfers(shape, sender=prefill, receiver=decode, num_tokens=tokens)
    token_bytes = shape.parts * shape.width * bytes_per_element
    if model.attention.kind == "shared_kv":
        token_bytes = entry_bytes(model.attention.head_dim)
    layer_bytes = [
        _layer_bytes(model, layer, tokens=tokens, token_bytes=token_bytes)
        for layer in model.each_layer
        if layer.mixer is Mixer.ATTENTION
    ]
    state = state_bytes_per_sequence(model, state_bytes=state_bytes, conv_bytes=CONV_STATE_BYTES)

    def moved(transfer: Transfer) -> float:
        share = len(transfer.tokens) / tokens
        whole_bytes = sum(layer_bytes[transfer.layers.start : transfer.layers.stop])
        return len(transfer.heads) * share * whole_bytes

    sizes = [moved(transfer) for transfer in plan]
    return RankBytes(
        sent=_peak_rank_bytes(
            [(transfer.sender, size) for transfer, size in zip(plan, sizes, strict=True)]
        )
        + state / (prefill.tensor * prefill.pipeline),
        received=_peak_rank_bytes(
            [(transfer.receiver, size) for transfer, size in zip(plan, sizes, strict=True)]
        )
        + state / (decode.tensor * decode.pipeline),
        whole=sum(sizes) + state,
    )


def whole_s(rank_bytes: float, *, path: KvPath) -> float:
    """Predict the seconds of a KV transfer that starts when prefill ends."""
    return path.latency_s + sum(rank_bytes / bytes_per_s for bytes_per_s in path.rates)


def conversion_bytes_per_s(
    prices: ProfilePrices,
    model: ModelSpec,
    *,
    tokens: int,
    kind: str,
    dtype: str,
    bytes_per_element: float,
    pages: tuple[int, int],
    tensors: tuple[int, int],
) -> float:
    """Return the measured rate at which one device converts prefill's pages to decode's.

    Args:
        prices: of a profile that holds the table `kv_conversion`.
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
    op = Op(
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
    return holders * layer_bytes / prices.seconds(op)


def _layer_bytes(model: ModelSpec, layer: Layer, *, tokens: int, token_bytes: float) -> float:
    """Bytes of one layer and head, where a token has `token_bytes`."""
    kept = _kept_tokens(model, tokens=tokens) if layer.is_windowed else tokens
    indexer = model.attention.indexer
    if indexer is not None and not layer.shares_index:
        token_bytes += indexer.head_dim * INDEX_KEY_BYTES
    if layer.compressor is None:
        return token_bytes * kept
    index = layer.compressor.indexer
    entry = token_bytes + (0.0 if index is None else index.head_dim * INDEX_KEY_BYTES)
    return token_bytes * kept + entry * (tokens // layer.compressor.ratio)


def _kept_tokens(model: ModelSpec, *, tokens: int) -> int:
    """Tokens of a window, or of the last chunk."""
    window = model.attention.sliding_window or tokens
    if model.attention.window_is_chunk:
        return (tokens - 1) % window + 1
    return min(tokens, window)


def _peak_rank_bytes(moved: Sequence[tuple[object, float]]) -> float:
    totals: dict[object, float] = {}
    for rank, size in moved:
        totals[rank] = totals.get(rank, 0.0) + size
    return max(totals.values(), default=0.0)
