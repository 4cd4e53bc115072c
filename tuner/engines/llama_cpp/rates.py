"""Seconds of decode and prefill from the bytes that are read, with experts in host memory.

Model:   decode step of n requests = device bytes / Bd + host bytes / Bh + syncs
         prefill of a micro-batch  = copied bytes / link + 2 * parameters * tokens / F, or
                                     host bytes / Bh + host work where nothing is copied
         Of E experts, n tokens with k each read E * (1 - (1 - k/E)^n), as if they chose evenly.
Source:  tests/benchmarks/llama_rates.py fits the shares of rated bandwidth below to published rows
         and leaves each host out in turn.
Valid:   layers run in turn: the device waits for the host (no expert cache). Threads at most the
         physical cores, whole model in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tuner.engines.llama_cpp.memory import COPY_TOKENS, Memory, cache_token_bytes
from tuner.engines.llama_cpp.model import EXPERTS, LlamaModel
from tuner.engines.llama_cpp.settings import LlamaSettings
from tuner.prices.host_and_device import HostAndDevice
from tuner.spec.gguf import Tensor

HOST_SHARE: Final = 0.48
"""Share of a host's rated bandwidth that reading experts reaches."""
DEVICE_SHARE: Final = 0.40
"""Share of a device's rated bandwidth that decode reaches."""
MATRIX_SHARE: Final = 0.5
"""Share of a device's rated FLOP/s that prefill reaches."""
SYNC_S: Final = 20e-6
"""Seconds for which device and host wait for each other in a layer whose experts are on the host;
assumed, as the published rows fit without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Predicted rates."""

    decode_s: float
    """Seconds of one step, a token of each running request."""
    device_s: float
    """Seconds of that on the device."""
    host_s: float
    """Seconds of that on the host."""
    sync_s: float
    """Seconds of that in which one waits for the other."""
    prefill_tokens_per_s: float
    """Prompt tokens per second."""


def experts_read(experts: int, used: int, tokens: float) -> float:
    """Return how many of a layer's experts a batch reads, as if tokens chose evenly."""
    if not experts:
        return 0.0
    missed: float = (1.0 - min(used / experts, 1.0)) ** tokens
    return experts * (1.0 - missed)


def _read_ratio(model: LlamaModel, tensor: Tensor, tokens: float) -> float:
    """Return the share of a tensor that a batch reads."""
    if not EXPERTS.search(tensor.name):
        return 1.0
    return experts_read(model.num_experts, model.experts_used, tokens) / max(model.num_experts, 1)


def rates(
    model: LlamaModel,
    settings: LlamaSettings,
    memory: Memory,
    machine: HostAndDevice,
    *,
    running: int,
    depth: float,
) -> Rates:
    """Predict the rates of a launch.

    Args:
        model: of the file.
        settings: of the launch.
        memory: what it allocates.
        machine: rates of host and device.
        running: requests that decode together.
        depth: tokens in the cache of each, on average.
    """
    host = _host_layers(memory)
    on_host = {tensor.name for tensor in memory.on_host}
    device_bytes = sum(_device_reads(model, on_host, running))
    host_bytes = sum(
        tensor.num_bytes * _read_ratio(model, tensor, running) for tensor in memory.on_host
    )
    cache_bytes = running * sum(
        min(depth, model.window if model.slides(layer) else depth)
        * cache_token_bytes(model, settings, layer)
        for layer in range(model.num_layers)
    )
    if memory.host.kv_bytes:
        host_bytes += cache_bytes
    else:
        device_bytes += cache_bytes
    threads = settings.threads or machine.cores
    device_s = machine.device_read_s(device_bytes)
    host_s = machine.host_read_s(host_bytes, threads=threads)
    sync_s = SYNC_S * len(host) if memory.devices else 0.0
    return Rates(
        decode_s=device_s + host_s + sync_s,
        device_s=device_s,
        host_s=host_s,
        sync_s=sync_s,
        prefill_tokens_per_s=_prefill(model, settings, memory, machine),
    )


def _host_layers(memory: Memory) -> frozenset[str]:
    return frozenset(tensor.name.rpartition(".ffn_")[0] for tensor in memory.on_host)


def _device_reads(model: LlamaModel, on_host: set[str], tokens: float) -> Iterator[float]:
    names = {tensor.name for _, tensor in model.tensors}
    for layer, tensor in model.tensors:
        is_embedding = tensor.name == "token_embd.weight" and layer < 0
        if tensor.name in on_host or (is_embedding and "output.weight" in names):
            continue
        yield tensor.num_bytes * _read_ratio(model, tensor, tokens)


def active_parameters(model: LlamaModel) -> float:
    """Return the parameters that a token passes, the embedding apart."""
    total = 0.0
    for layer, tensor in model.tensors:
        if len(tensor.shape) < 2 or layer < 0:
            continue
        elements = tensor.num_bytes // tensor.kind.block_bytes * tensor.kind.block
        total += elements * _read_ratio(model, tensor, 1)
    return total


def _prefill(
    model: LlamaModel, settings: LlamaSettings, memory: Memory, machine: HostAndDevice
) -> float:
    tokens = min(settings.micro_batch, settings.batch)
    host_bytes = sum(
        tensor.num_bytes * _read_ratio(model, tensor, tokens) for tensor in memory.on_host
    )
    flop = 2.0 * active_parameters(model) * tokens
    copies = bool(memory.devices) and settings.offloads_batches and tokens >= COPY_TOKENS
    if copies:
        return tokens / (machine.copied_s(host_bytes) + machine.device_work_s(flop))
    reading = settings.threads or machine.cores
    host_flop = flop * _host_ratio(model, memory)
    host_s = max(
        machine.host_read_s(host_bytes, threads=reading),
        machine.host_work_s(host_flop, threads=settings.batch_threads or reading),
    )
    device_s = machine.device_work_s(flop - host_flop) if memory.devices else 0.0
    return tokens / (host_s + device_s)


def _host_ratio(model: LlamaModel, memory: Memory) -> float:
    """Return the share of a token's work that is done with host weights."""
    on_host = {tensor.name for tensor in memory.on_host}
    total = on_host_total = 0.0
    for layer, tensor in model.tensors:
        if layer >= 0 and len(tensor.shape) > 1:
            work = tensor.num_bytes * _read_ratio(model, tensor, 1)
            total += work
            on_host_total += work if tensor.name in on_host else 0.0
    return on_host_total / total if total else 0.0
