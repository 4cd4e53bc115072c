"""Prices launches on one machine, and chooses among them.

Every byte of an expert saves the same time on the device, so for a context, a micro-batch and types
of the cache the best placement is the one with the fewest expert layers on the host that leaves the
device its margin: found by bisection, as memory falls with each. What remains is compared whole.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from tuner.devices.datasheet import Datasheet
from tuner.engines.llama_cpp.memory import Memory, memory_of, slot_tokens
from tuner.engines.llama_cpp.model import LlamaModel
from tuner.engines.llama_cpp.rates import (
    DEVICE_SHARE,
    HOST_SHARE,
    MATRIX_SHARE,
    Rates,
    rates,
)
from tuner.engines.llama_cpp.settings import ALL_LAYERS, LlamaSettings
from tuner.prices.host_and_device import HostAndDevice
from tuner.spec.cluster import Pool
from tuner.spec.serving.llama_cpp import LlamaGoal
from tuner.units import format_bytes

MARGIN_BYTES: Final = 2**30
"""Bytes of a device left to its driver's context and pools, as the engine's `--fit-target`."""
MICRO_BATCHES: Final = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaMachine:
    """Memory and rates of the machine."""

    rates: HostAndDevice
    device_bytes: float
    """Bytes of the device that a launch may take; 0: there is none."""
    host_bytes: float
    """Bytes of the host that a launch may take."""
    is_unified: bool
    """Device and host share one memory, of `host_bytes`."""

    def with_more(self, *, device_bytes: float = 0.0, host_bytes: float = 0.0) -> "LlamaMachine":
        """Return the machine with more memory."""
        return replace(
            self,
            device_bytes=self.device_bytes + device_bytes,
            host_bytes=self.host_bytes + host_bytes,
        )


def machine_of(pool: Pool) -> LlamaMachine:
    """Return the machine of a pool that states its host."""
    assert pool.host is not None
    sheet, host = pool.sheet, pool.host
    is_unified = sheet.host_bytes_per_s >= sheet.memory_bytes_per_s
    memory = float(pool.memory_per_device or sheet.memory_bytes)
    usable = min(memory * pool.usable_memory_ratio, memory - MARGIN_BYTES)
    host_bytes = float(host.memory - (host.reserve or 0))
    return LlamaMachine(
        rates=HostAndDevice(
            device_bytes_per_s=sheet.memory_bytes_per_s * DEVICE_SHARE,
            host_bytes_per_s=host.read_rate or (host.bandwidth or 0.0) * HOST_SHARE,
            link_bytes_per_s=sheet.host_bytes_per_s,
            flop_per_s=_flop_per_s(sheet),
            cores=host.cores or 1,
        ),
        device_bytes=min(usable, host_bytes) if is_unified else usable,
        host_bytes=host_bytes,
        is_unified=is_unified,
    )


def _flop_per_s(sheet: Datasheet) -> float:
    return sheet.flop_per_s["bf16"] * MATRIX_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLaunch:
    """A launch with its memory and time."""

    settings: LlamaSettings
    memory: Memory
    rates: Rates
    misfit: str
    """Reason why it does not run, with the missing bytes; empty where it does."""
    request_s: float
    """Seconds of a request: its prompt, then its tokens."""


def price(
    model: LlamaModel, settings: LlamaSettings, machine: LlamaMachine, goal: LlamaGoal
) -> PricedLaunch:
    """Price a launch under the goal's traffic."""
    traffic = goal.traffic
    settings = replace(settings, context=settings.context or model.longest_tokens)
    memory = memory_of(model, settings, shares=(1.0,) if machine.device_bytes else ())
    running = min(traffic.concurrency, settings.parallel)
    priced = rates(
        model,
        settings,
        memory,
        machine.rates,
        running=running,
        depth=traffic.input_tokens + traffic.output_tokens / 2,
    )
    waves = traffic.concurrency / running
    # Prompts of the other requests are read meanwhile, too.
    prompt_s = traffic.input_tokens / priced.prefill_tokens_per_s
    decode_s = traffic.output_tokens * priced.decode_s
    return PricedLaunch(
        settings=settings,
        memory=memory,
        rates=priced,
        misfit=_misfit(model, settings, memory, machine, goal),
        request_s=(prompt_s * running + decode_s) * waves,
    )


def host_needed_bytes(model: LlamaModel, settings: LlamaSettings, memory: Memory) -> int:
    """Return the bytes of the host without which pages are read from the disk again and again."""
    weights = model.file.file_bytes if settings.is_mapped else memory.host.model_bytes
    repacked = memory.repacked_bytes if settings.is_mapped else 0
    return weights + repacked + memory.host.kv_bytes + memory.host.compute_bytes


def _misfit(
    model: LlamaModel,
    settings: LlamaSettings,
    memory: Memory,
    machine: LlamaMachine,
    goal: LlamaGoal,
) -> str:
    tokens = slot_tokens(model, settings)
    if tokens < goal.slot_tokens:
        return f"a slot holds {tokens:,} tokens, and requests need {goal.slot_tokens:,}"
    used = sum(device.total_bytes for device in memory.devices)
    if machine.is_unified:
        used += memory.host.total_bytes
    if used > machine.device_bytes and memory.devices:
        short = used - machine.device_bytes
        return f"device memory: {format_bytes(used)} needed, {format_bytes(short)} too much"
    needed = host_needed_bytes(model, settings, memory)
    if needed > machine.host_bytes and not machine.is_unified:
        what = "the mapped file and what is beside it" if settings.is_mapped else "weights"
        short = needed - machine.host_bytes
        return (
            f"host memory: {format_bytes(needed)} needed for {what}, {format_bytes(short)} too much"
        )
    return ""


def placed(
    model: LlamaModel, settings: LlamaSettings, machine: LlamaMachine, goal: LlamaGoal
) -> PricedLaunch:
    """Price the placement with the fewest expert layers on the host that fits the device."""
    counts = (0,) if machine.is_unified else (0, *(layer + 1 for layer in model.expert_layers))
    place = bisect_left(
        counts,
        True,
        key=lambda layers: (
            not _overflows(model, replace(settings, host_expert_layers=layers), machine)
        ),
    )
    layers = counts[min(place, len(counts) - 1)]
    return price(model, replace(settings, host_expert_layers=layers), machine, goal)


def fewest_layers(
    model: LlamaModel, settings: LlamaSettings, machine: LlamaMachine, goal: LlamaGoal
) -> PricedLaunch:
    """Price the most whole layers on the device that fit, as Ollama places them."""
    counts = range(model.num_layers_all + 2)
    place = bisect_left(
        counts,
        True,
        key=lambda layers: _overflows(model, replace(settings, gpu_layers=layers), machine),
    )
    return price(model, replace(settings, gpu_layers=max(place - 1, 0)), machine, goal)


def _overflows(model: LlamaModel, settings: LlamaSettings, machine: LlamaMachine) -> bool:
    """Return whether the device has too little memory for its part; False without a device."""
    memory = memory_of(model, settings, shares=(1.0,) if machine.device_bytes else ())
    return sum(device.total_bytes for device in memory.devices) > machine.device_bytes


def candidates(model: LlamaModel, machine: LlamaMachine, goal: LlamaGoal) -> Iterator[PricedLaunch]:
    """Yield the best placement for each micro-batch and type of the cache."""
    slots = goal.traffic.concurrency
    for kind in goal.kv_cache_types:
        for micro_batch in MICRO_BATCHES:
            settings = LlamaSettings(
                context=goal.slot_tokens * slots,
                parallel=slots,
                is_unified=False,
                batch=max(2048, micro_batch),
                micro_batch=micro_batch,
                gpu_layers=ALL_LAYERS,
                key_type=kind,
                value_type=kind,
                threads=machine.rates.cores,
                batch_threads=machine.rates.cores,
                is_mapped=not machine.device_bytes,
                prompt_cache_bytes=0,
            )
            yield placed(model, settings, machine, goal)


def ranked(model: LlamaModel, machine: LlamaMachine, goal: LlamaGoal) -> list[PricedLaunch]:
    """Return the candidates, those that fit first, the fastest first."""
    return sorted(
        candidates(model, machine, goal),
        key=lambda launch: (bool(launch.misfit), launch.request_s, launch.settings.micro_batch),
    )
