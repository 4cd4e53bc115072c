"""What saving in the background takes, and what it costs the computation beside it.

A rank copies a tensor of its device into pinned host memory and writes it to a file (fsync), block
after block, in a thread and, on an accelerator, a stream of its own; its own GEMMs go on meanwhile.

    save        seconds until the file is on the disk
    delay       seconds that the GEMMs lose meanwhile: what they take beyond as many of them alone,
                timed just before

On a processor the thread shares the rank's cores with the GEMMs, so most of a save is a delay; on
an accelerator they share its memory and its link to the host.

All ranks save at the same time. As with other storage, a disk without room is recorded as a
failure instead of being filled.
Not covered: the copy that training waits for (profilers/host_memory.py), and collectives beside a
save.
"""

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from profilers.benchmark import Benchmark, Setting
from profilers.clock import HostClock
from profilers.host_memory import HostMemoryBenchmark
from profilers.records import Case, Measurement
from profilers.storage import BLOCK_BYTES, StorageBenchmark, cases_of, measured_on_disk

KINDS: Final = ("save", "delay")
SIZES: Final = tuple(2**power for power in (23, 25, 27))
REPEATS: Final = 3
GEMM_SIZES: Final = {"cpu": 384, "cuda": 4096}
"""Of square GEMMs: about a millisecond, so that their number measures time well."""


def benchmarks(setting: Setting) -> tuple[Benchmark, ...]:
    """The suite of storage: alone, beside computation, and in host memory."""
    return (
        StorageBenchmark(setting=setting),
        BackgroundSaveBenchmark(setting=setting),
        HostMemoryBenchmark(setting=setting),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundSaveBenchmark:
    """The table of saves beside GEMMs."""

    setting: Setting
    operation: str = "background_save"
    weight: float = 1.0
    refined_axes: tuple[str, ...] = ()

    def note(self) -> str:
        return ""

    def cases(self) -> Sequence[Case]:
        return cases_of(self.operation, kinds=KINDS, sizes=SIZES)

    def measure(self, case: Case, *, budget_s: float) -> tuple[Measurement, ...]:
        def times_s(size: int) -> tuple[float, ...]:
            if case.kind not in KINDS:
                raise ValueError(f"kind {case.kind!r} is not one of {', '.join(KINDS)}")
            device = torch.device(self.setting.device)
            runs = _runs(device, directory=self.setting.directory, size=size, budget_s=budget_s)
            return tuple(one if case.kind == "save" else other for one, other in runs)

        return measured_on_disk(case, setting=self.setting, times_s=times_s)


def _runs(
    device: torch.device, *, directory: Path, size: int, budget_s: float
) -> list[tuple[float, float]]:
    """Return seconds of a save and of its delay, of every repeat after a warm-up."""
    gemms, clock = Gemms(device), HostClock()
    end_s = clock.now_s() + budget_s
    runs: list[tuple[float, float]] = []
    with tempfile.TemporaryFile(dir=directory) as file:
        save = Save(device, file.fileno(), size=size)
        with ThreadPoolExecutor(max_workers=1) as thread:
            while len(runs) < REPEATS + 1 or (clock.now_s() < end_s and len(runs) < 4 * REPEATS):
                undisturbed_s = gemms.seconds_of_one()
                runs.append(_beside(thread.submit(save.run), gemms, undisturbed_s=undisturbed_s))
    return runs[1:]


def _beside(
    saving: "Future[float]", gemms: "Gemms", *, undisturbed_s: float
) -> tuple[float, float]:
    clock = HostClock()
    count, begin_s = 0, clock.now_s()
    while not saving.done():
        gemms.run()
        count += 1
    busy_s = clock.now_s() - begin_s
    return saving.result(), max(0.0, busy_s - count * undisturbed_s)


class Gemms:
    """One GEMM after the other, each waited for."""

    def __init__(self, device: torch.device) -> None:
        size = GEMM_SIZES[device.type]
        self._device = device
        self._left = torch.randn(size, size, device=device).bfloat16()
        self._right = torch.randn(size, size, device=device).bfloat16()
        self._out = torch.empty_like(self._left)

    def run(self) -> None:
        """Multiply once."""
        torch.mm(self._left, self._right, out=self._out)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def seconds_of_one(self, *, seconds: float = 0.05) -> float:
        """Return the mean of as many as that long."""
        clock, count = HostClock(), 0
        self.run()
        begin_s = clock.now_s()
        while (passed_s := clock.now_s() - begin_s) < seconds:
            self.run()
            count += 1
        return passed_s / count


class Save:
    """Copies a tensor to the host and writes it, block after block."""

    def __init__(self, device: torch.device, handle: int, *, size: int) -> None:
        self._handle = handle
        self._source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
        is_cuda = device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda)
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]  # torch

    def run(self) -> float:
        """Save once; return its seconds."""
        clock = HostClock()
        begin_s = clock.now_s()
        os.lseek(self._handle, 0, os.SEEK_SET)
        os.ftruncate(self._handle, 0)
        with self._own_stream():
            self._host.copy_(self._source, non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()
        view = self._host.numpy().data
        while view:
            view = view[os.write(self._handle, view[:BLOCK_BYTES]) :]
        os.fsync(self._handle)
        return clock.now_s() - begin_s

    def _own_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
