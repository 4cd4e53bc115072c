"""Bytes of a launch by device: model, KV cache and compute buffers, and what the host holds.

Model and cache: a replay of what the engine allocates, equal to its log within rounding.
Compute:  peak of the tensors that live at once for a micro-batch, closed forms of the engine's
          allocator (ggml-alloc.c): h, w, m, q bytes of a token's hidden state, of the inputs and
          outputs of its experts, and of its queries.
Error:    tests/benchmarks/llama_buffers.py compares all three with the logs of a build.
Valid:    all layers on devices (`-ngl`), experts of any on the host; flash attention. Elsewhere
          compute buffers are approximate.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from tuner.engines.llama_cpp.model import EXPERTS, LlamaModel
from tuner.engines.llama_cpp.settings import CACHE_TYPES, HOST, LlamaSettings
from tuner.errors import SpecError
from tuner.spec.gguf import Tensor

ALIGNMENT: Final = 128
"""Bytes to which the tensors of a CUDA device are rounded up."""
HOST_ALIGNMENT: Final = 32
"""Bytes to which those of a processor are."""
ROW_ELEMENTS: Final = 512
"""Elements to which the last row of a quantized tensor is padded on a device."""
CELLS: Final = 256
"""Cells of which a cache's number is a multiple."""
F32: Final = 4
INPUT_BYTES: Final = 20
"""Bytes a token of positions and of indices into the cache."""
COPY_TOKENS: Final = 32
"""Tokens of a batch from which on host weights are copied to the device."""
REPACKED: Final = frozenset({"q4_0", "q4_k", "iq4_nl", "mxfp4"})
"""Types whose matrices a processor with AVX2 repacks, 8 rows at a time."""


@dataclass(slots=True, kw_only=True)
class Buffers:
    """Bytes on one device."""

    model_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.model_bytes + self.kv_bytes + self.compute_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that a launch allocates."""

    devices: tuple[Buffers, ...]
    """Buffers by device, in the engine's order."""
    host: Buffers
    mapped_bytes: int
    """Bytes of host weights in the mapped file, pages of the cache."""
    repacked_bytes: int
    """Bytes of host weights in another layout, beside the file."""
    pinned_bytes: int
    """Bytes of host weights in pinned memory."""
    on_host: tuple[Tensor, ...] = field(repr=False)
    """Weights that the host reads, the embedding apart."""

    @property
    def host_bytes(self) -> int:
        """Bytes of the host that must not be swapped or dropped."""
        return self.host.total_bytes


def memory_of(
    model: LlamaModel,
    settings: LlamaSettings,
    *,
    shares: Sequence[float],
    is_cuda: bool = True,
) -> Memory:
    """Return the bytes that a launch allocates.

    Args:
        model: of the file.
        settings: of the launch.
        shares: free memory of each device; empty: there is none.
        is_cuda: the devices are CUDA's: they pad rows, and their pinned host buffers come before
            repacking. Else a device is an RPC server of a processor.
    """
    devices = tuple(Buffers() for _ in shares)
    host = Buffers()
    named = {HOST: host} | {f"CUDA{number}": device for number, device in enumerate(devices)}
    layer_device = _layer_devices(model, settings, shares)
    repacked, host_weights, has_embedding = 0, [], False
    moves = settings.repacks and not (is_cuda and shares)
    for _, tensor, device in _placed(model, settings, layer_device, moves=moves):
        if device not in named:
            raise SpecError(f"-ot ...={device:.40}: devices are {', '.join(named)}")
        if device != HOST:
            named[device].model_bytes += _device_bytes(tensor, is_cuda=is_cuda)
            continue
        host.model_bytes += tensor.num_bytes
        is_embedding = tensor.name == "token_embd.weight" and not has_embedding
        has_embedding = has_embedding or is_embedding
        if is_embedding:
            continue
        host_weights.append(tensor)
        repacked += tensor.num_bytes if moves and _repacks(tensor) else 0
    for layer in range(model.num_layers):
        device = layer_device[layer] if settings.cache_on_device else HOST
        named[device].kv_bytes += _layer_cache_bytes(model, settings, layer)
    for device, buffers in named.items():
        buffers.compute_bytes = _compute_bytes(
            model, settings, device, layer_device=layer_device, copies=is_cuda
        )
    stored = host.model_bytes - repacked
    is_pinned = is_cuda and bool(shares) and not settings.is_mapped
    return Memory(
        devices=devices,
        host=host,
        mapped_bytes=stored if settings.is_mapped else 0,
        repacked_bytes=repacked,
        pinned_bytes=stored if is_pinned else 0,
        on_host=tuple(host_weights),
    )


def _layer_devices(
    model: LlamaModel, settings: LlamaSettings, shares: Sequence[float]
) -> tuple[str, ...]:
    """Return the device of each layer, of those that are not loaded and of the output head."""
    count = model.num_layers_all + 1
    weights = settings.tensor_split[: len(shares)] or tuple(shares)
    if not shares or not sum(weights) > 0:
        return (HOST,) * count
    bounds = [end / sum(weights) for end in accumulate(weights)]
    active = min(settings.gpu_layers, count)
    first = count - active
    return tuple(
        HOST if layer < first else f"CUDA{bisect_right(bounds, (layer - first) / active)}"
        for layer in range(count)
    )


def _placed(
    model: LlamaModel, settings: LlamaSettings, layer_device: Sequence[str], *, moves: bool
) -> Iterator[tuple[int, Tensor, str]]:
    """Yield the weights with layer and device.

    A tied embedding is there twice where the head is on a device, or `moves` to another layout.
    """
    names = {tensor.name for _, tensor in model.tensors}
    for layer, tensor in model.tensors:
        usual = HOST if tensor.name.startswith("token_embd") else layer_device[layer]
        device = settings.device_of(tensor.name, usual, layer)
        yield layer, tensor, device
        if tensor.name == "token_embd.weight" and "output.weight" not in names:
            head = settings.device_of(tensor.name, layer_device[-1], layer)
            if head != device or (moves and _repacks(tensor)):
                yield layer, tensor, head


def _device_bytes(tensor: Tensor, *, is_cuda: bool) -> int:
    size, tail = tensor.num_bytes, tensor.shape[0] % ROW_ELEMENTS
    if is_cuda and tensor.kind.block > 1 and tail:
        size += tensor.kind.row_bytes(ROW_ELEMENTS - tail)
    alignment = ALIGNMENT if is_cuda else HOST_ALIGNMENT
    return math.ceil(size / alignment) * alignment


def _repacks(tensor: Tensor) -> bool:
    return len(tensor.shape) > 1 and tensor.kind.name in REPACKED and tensor.shape[1] % 8 == 0


def _padded(count: int) -> int:
    return math.ceil(count / CELLS) * CELLS


def cells(model: LlamaModel, settings: LlamaSettings, *, slides: bool) -> int:
    """Return the cells of a layer's cache in one stream."""
    context = _padded(settings.context or model.longest_tokens)
    slots = settings.parallel
    full = context if settings.is_unified else _padded(context // slots)
    if not slides or settings.whole_windows:
        return full
    window = model.window * (slots if settings.is_unified else 1) + settings.micro_batch
    return _padded(min(full, window))


def slot_tokens(model: LlamaModel, settings: LlamaSettings) -> int:
    """Return the most tokens of one request."""
    return cells(model, settings, slides=False)


def _layer_cache_bytes(model: LlamaModel, settings: LlamaSettings, layer: int) -> int:
    count = cells(model, settings, slides=model.slides(layer))
    count *= 1 if settings.is_unified else settings.parallel
    return count * cache_token_bytes(model, settings, layer)


def cache_token_bytes(model: LlamaModel, settings: LlamaSettings, layer: int) -> int:
    """Return the bytes of one token's keys and values in one layer."""
    total = 0
    for kind, elements in (
        (settings.key_type, model.key_elements(layer)),
        (settings.value_type, model.value_elements(layer)),
    ):
        block, block_bytes = CACHE_TYPES[kind]
        if elements % block:
            raise SpecError(f"KV type {kind}: {elements} elements of a layer are no whole blocks")
        total += elements // block * block_bytes
    return total


def _compute_bytes(
    model: LlamaModel,
    settings: LlamaSettings,
    device: str,
    *,
    layer_device: Sequence[str],
    copies: bool,
) -> int:
    """Return the peak of a device's live tensors, bytes."""
    layers = [layer for layer in range(model.num_layers) if device in (HOST, layer_device[layer])]
    if not layers:
        return 0
    tokens = min(settings.micro_batch, _padded(settings.context or model.longest_tokens))
    hidden = F32 * model.hidden
    attends = [layer for layer in layers if layer_device[layer] == device]
    peak = 4 * hidden
    if attends:
        peak = max(peak, _attention_peak(model, attends))
    copied = 0
    for layer in layers:
        weights = {tensor.name: tensor for tensor in model.file.by_layer[layer]}
        for name, tensor in weights.items():
            if not re.search(r"ffn_(gate_)?up(_exps|_chexps)?\.weight$", name):
                continue
            computes = settings.device_of(name, layer_device[layer], layer)
            is_moved = computes == HOST != layer_device[layer]
            offloads = is_moved and copies and settings.offloads_batches
            if offloads and device != HOST:
                copied = max(copied, *(_expert_bytes(tensor) for tensor in weights.values()))
            if computes == device or (offloads and device != HOST):
                base = 2 if is_moved and device == HOST else 4
                peak = max(peak, _ffn_peak(model, tensor, base=base * hidden))
            elif device == layer_device[layer]:
                peak = max(peak, 4 * hidden + hidden * (model.experts_used or 1))
    bytes_of_mask = (2 if settings.flash_attention else F32) * cells(model, settings, slides=False)
    if any(model.slides(layer) for layer in range(model.num_layers)):
        bytes_of_mask += 2 * cells(model, settings, slides=True)
    used = copied if tokens >= COPY_TOKENS else 0
    return tokens * (peak + bytes_of_mask + INPUT_BYTES) + used


def _expert_bytes(tensor: Tensor) -> int:
    return tensor.num_bytes if EXPERTS.search(tensor.name) else 0


def _attention_peak(model: LlamaModel, layers: Sequence[int]) -> int:
    hidden = F32 * model.hidden
    heads = max(model.num_heads(layer) for layer in layers)
    key = F32 * heads * model.head("key", layers[0])
    value = F32 * heads * model.head("value", layers[0])
    return 4 * hidden + key + (2 * value if model.is_latent else key)


def _ffn_peak(model: LlamaModel, up: Tensor, *, base: int) -> int:
    """Return the peak of a feed-forward block: gate, up and their product, then what is summed."""
    is_routed = EXPERTS.search(up.name) is not None
    hidden, used = F32 * model.hidden, model.experts_used if is_routed else 1
    width = F32 * up.shape[1] * used // (2 if "gate_up" in up.name else 1)
    outputs = hidden * used
    if not is_routed:
        return base + max(3 - 2 * hidden // width, 0) * width
    if width <= hidden:
        return base + max(width, outputs)
    return base + 3 * width + (outputs if outputs > 2 * width else 0)
