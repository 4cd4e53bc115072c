"""Settings of `llama-server` that decide memory and time, with the defaults of the build."""

import re
from dataclasses import dataclass, fields
from typing import Final

from tuner.engines.llama_cpp.model import EXPERTS
from tuner.errors import SpecError

BUILD: Final = "b11739"
"""The described build."""
HOST: Final = "CPU"
"""Name of the host among devices."""
CACHE_TYPES: Final = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}
"""Elements and bytes of a block of each type of the KV cache."""
ALL_LAYERS: Final = 9999


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSettings:
    """A launch of the server."""

    context: int = 0
    """Tokens of all slots together; 0: the model's."""
    parallel: int = 4
    """Slots."""
    is_unified: bool = True
    """One cache for all slots."""
    batch: int = 2048
    micro_batch: int = 512
    gpu_layers: int = ALL_LAYERS
    host_expert_layers: int = 0
    """First layers whose routed experts stay on the host."""
    overrides: tuple[tuple[str, str], ...] = ()
    """Expressions on names of tensors, each with a device; the first that matches counts."""
    tensor_split: tuple[float, ...] = ()
    key_type: str = "f16"
    value_type: str = "f16"
    flash_attention: bool = True
    cache_on_device: bool = True
    whole_windows: bool = False
    """Layers with a sliding window keep the whole context."""
    threads: int = 0
    """Threads of decode; 0: the physical cores."""
    batch_threads: int = 0
    is_mapped: bool = True
    """The file is mapped, not copied."""
    is_locked: bool = False
    repacks: bool = True
    offloads_batches: bool = True
    """Host weights are copied to the device for batches of 32 tokens or more."""
    prompt_cache_bytes: int = 8192 * 2**20
    fits_itself: bool = False
    """The engine changes what is not stated (`--fit on`)."""

    def __post_init__(self) -> None:
        for kind in (self.key_type, self.value_type):
            if kind not in CACHE_TYPES:
                raise SpecError(
                    f"KV type {kind!r:.40} is not one of {', '.join(CACHE_TYPES)}; choose one"
                )
        if self.value_type not in ("f32", "f16", "bf16") and not self.flash_attention:
            raise SpecError(
                f"-ctv {self.value_type}: quantized values need flash attention; add -fa on"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not 0 <= value < 2**50:
                raise SpecError(f"{field.name} {value} is no count")
        if not self.parallel or not self.micro_batch or not self.batch:
            raise SpecError("slots, batch and micro-batch are 1 or more")

    def device_of(self, name: str, device: str, layer: int) -> str:
        """Return the device of a tensor whose layer is on `device`."""
        for expression, target in self.overrides:
            if re.search(expression, name):
                return target
        is_expert = layer < self.host_expert_layers and EXPERTS.search(name)
        return HOST if layer >= 0 and is_expert else device
