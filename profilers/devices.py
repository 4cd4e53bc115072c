"""The accelerator, or the processor when there is none, as the kernels see it.

Covers CUDA devices and processors. One rank drives one accelerator.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil
import torch

from profilers.clock import Clock, HostClock
from profilers.errors import RankError
from profilers.heap import keep_heap
from profilers.records import MEASURED_DTYPES

DTYPES: Final = dict(zip(MEASURED_DTYPES, (torch.bfloat16, torch.float32), strict=True))

CORE_CACHE: Final = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
LAST_CACHE: Final = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
USUAL_CORE_CACHE_BYTES: Final = 2**20
USUAL_LAST_CACHE_BYTES: Final = 32 * 2**20

CYCLES_PER_S: Final = 3e9
"""No slower than the clock of any accelerator, so that it is held long enough."""
QUEUED_RUNS: Final = 32
"""CUDA queues 1,024 launches before the host waits; a run makes up to 30 of them."""


class DeviceClock:
    """Events in the current CUDA stream; read only when all of them have passed."""

    def now_s(self) -> float:
        return HostClock().now_s()

    def mark(self) -> object:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
        event.record()
        return event

    def between_s(self, pairs: Sequence[tuple[object, object]]) -> tuple[float, ...]:
        torch.cuda.synchronize()
        return tuple(
            first.elapsed_time(last) * 1e-3
            for first, last in pairs
            if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event)
        )

    def page_faults(self) -> int:
        return 0

    def hold(self, seconds: float) -> None:
        if seconds > 0.0:
            torch.cuda._sleep(int(seconds * CYCLES_PER_S))  # type: ignore[no-untyped-call]  # torch

    @property
    def most_queued(self) -> int:
        return QUEUED_RUNS


def pick_device(kind: str, *, local_rank: int) -> torch.device:
    """Choose and prepare the device of this rank; `kind` is auto, cpu or cuda.

    Every rank is pinned to one thread: with more, any other load on the machine makes small GEMMs
    on a processor a hundred times slower.

    Raises:
        RankError: there are fewer accelerators than ranks on this node.
    """
    torch.set_num_threads(1)
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        keep_heap()
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise RankError(
            f"local rank {local_rank} has no accelerator of its own ({count} visible); "
            "start at most one rank per accelerator, or measure with device cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    _start_autograd(device)
    return device


def _start_autograd(device: torch.device) -> None:
    """Run one backward: the first GEMM of the thread that runs them warns of a missing context."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.ones(8, 8, device=device, requires_grad=True)
        torch.autograd.grad((x @ x).sum(), x)


def clock_of(device: torch.device) -> Clock:
    """The clock to time kernels of this device with."""
    return DeviceClock() if device.type == "cuda" else HostClock()


def cache_bytes(device: torch.device) -> int:
    """Size of the cache that a step's next operation finds cold: the largest private to a core."""
    if device.type != "cuda":
        # In a step the operands come from other operations, at best from the shared cache.
        return stated_cache_bytes(CORE_CACHE, otherwise=USUAL_CORE_CACHE_BYTES)
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def last_cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache: parameters, used once a micro-batch, are evicted from it."""
    if device.type != "cuda":
        return stated_cache_bytes(LAST_CACHE, otherwise=USUAL_LAST_CACHE_BYTES)
    return cache_bytes(device)


def stated_cache_bytes(size_file: Path, *, otherwise: int) -> int:
    """Read the size of a cache as Linux states it (`1024K`); `otherwise` where it does not."""
    try:
        text = size_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return otherwise
    kibibytes = text.removesuffix("K")
    return int(kibibytes) * 1024 if kibibytes.isdecimal() else otherwise


def free_bytes(device: torch.device, *, local_world: int) -> int:
    """Memory that one rank may use now, besides the other ranks'."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available) // local_world


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the device, or the host's allocator, had no room."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def release_memory(device: torch.device) -> None:
    """Give cached blocks back, so that one large case does not make the next one fail."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def count_accelerators() -> int:
    """Count the accelerators of this node."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
