"""Times of checkpoint copies in host memory: new pages, and files that lie in it.

    fresh    a tensor of the device is copied into memory that the process has not touched before,
             as frameworks do that allocate what they save anew: the kernel clears every page first
    save     PyTorch's `torch.save` of a tensor on the host into a file in memory (tmpfs)
    load     `torch.load` of it

All ranks do so at once, each with tensors and files of its own; seconds of one rank. The files lie
in `MEMORY`. Without that folder, or without room for all ranks, saves and loads are recorded as
failures.
Not covered: memory that a process keeps for its saves, which is the table of copies.
"""

import mmap
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from profilers.benchmark import TableBenchmark
from profilers.clock import HostClock
from profilers.records import Case, Measurement
from profilers.storage import cases_of, measured_on_disk
from profilers.timing import measure

KINDS: Final = ("fresh", "save", "load")
SIZES: Final = tuple(2**power for power in (24, 26, 28))
MEMORY: Final = Path("/dev/shm")
REPEATS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryBenchmark(TableBenchmark):
    """The table of host memory."""

    operation: str = "host_memory"

    def cases(self) -> Sequence[Case]:
        return cases_of(self.operation, kinds=KINDS, sizes=SIZES)

    def measure(self, case: Case, *, budget_s: float) -> tuple[Measurement, ...]:
        device = torch.device(self.setting.device)

        def times_s(size: int) -> tuple[float, ...]:
            return _times_s(case.kind, device=device, size=size, budget_s=budget_s)

        setting = self.setting
        if case.kind != "fresh":
            setting = replace(setting, directory=MEMORY)
        return measured_on_disk(case, setting=setting, times_s=times_s)


def _times_s(kind: str, *, device: torch.device, size: int, budget_s: float) -> tuple[float, ...]:
    if kind == "fresh":
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
        return _timed(lambda: _copy_into_new_pages(source), budget_s=budget_s)
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    tensor = torch.randint(0, 255, (size,), dtype=torch.uint8)
    with tempfile.TemporaryFile(dir=MEMORY) as file:
        # PyTorch writes by name; this file has no other one, and goes with its process.
        name = f"/proc/self/fd/{file.fileno()}"
        torch.save(tensor, name)
        if kind == "load":
            return _timed(lambda: _load(name), budget_s=budget_s)
        return _timed(lambda: torch.save(tensor, name), budget_s=budget_s)


def _timed(run: Callable[[], None], *, budget_s: float) -> tuple[float, ...]:
    return measure(run, clock=HostClock(), budget_s=budget_s, min_repeats=REPEATS)


def _copy_into_new_pages(source: torch.Tensor) -> None:
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, source.numel(), flags=private) as pages:
        # Copied on the host's own clock: a copy into pageable memory is done when it returns.
        copy = torch.frombuffer(pages, dtype=torch.uint8)
        copy.copy_(source)
        del copy


def _load(name: str) -> None:
    torch.load(name, weights_only=True)
