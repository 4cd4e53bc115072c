"""Load times of a checkpoint in PyTorch's distributed format.

Every rank saves tensors of `TENSOR_BYTES` to a folder of its own and loads them into host memory
that it has used before, all at the same time. Before a load the files are dropped from the page
cache, as for the reads of profilers/storage.py; what is slower than those is the format: its index,
and a copy of every tensor by one thread.

Not covered: the plan that ranks agree on for a checkpoint of another layout, smaller tensors (each
takes about a millisecond), the copy to a device, and engines that load by a way of their own.
"""

import errno
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from profilers.benchmark import Benchmark, Setting, TableBenchmark
from profilers.clock import HostClock
from profilers.host_memory import HostMemoryBenchmark
from profilers.records import Case, Measurement
from profilers.storage import (
    StorageBenchmark,
    can_drop_cache,
    cases_of,
    drop_cache,
    measured_on_disk,
)

TENSOR_BYTES: Final = 2**24
SIZES: Final = tuple(2**power for power in (24, 26, 28))
REPEATS: Final = 3


def benchmarks(setting: Setting) -> tuple[Benchmark, ...]:
    """Return the suite of storage: files, host memory, and loads of a checkpoint."""
    return (
        StorageBenchmark(setting=setting),
        HostMemoryBenchmark(setting=setting),
        CheckpointLoadBenchmark(setting=setting),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLoadBenchmark(TableBenchmark):
    """The table of loads."""

    operation: str = "checkpoint_load"

    def note(self) -> str:
        return "" if can_drop_cache() else "files may come from the page cache"

    def cases(self) -> Sequence[Case]:
        return cases_of(self.operation, kinds=("distributed",), sizes=SIZES)

    def measure(self, case: Case, *, budget_s: float) -> tuple[Measurement, ...]:
        del budget_s  # The repeats are few; sizes that would outlast it are not begun (AS_A_WHOLE).
        directory = self.setting.directory
        return measured_on_disk(
            case, setting=self.setting, times_s=lambda size: _times_s(directory, size=size)
        )


def _times_s(directory: Path, *, size: int) -> tuple[float, ...]:
    """Return the seconds of loads of so many bytes after a warm-up.

    Raises:
        OSError: the disk refuses the files, e.g. because it is full.
    """
    try:
        return _loads_s(directory, size=size)
    except CheckpointException as error:
        # It is no Exception, and an unfinished file hides what the disk said.
        (failure, _trace), *_ = error.failures.values()
        cause: BaseException | None = failure
        while not isinstance(cause, OSError):
            if cause is None:
                raise OSError(errno.EIO, str(failure)) from error
            cause = cause.__cause__ or cause.__context__
        raise OSError(cause.errno, cause.strerror) from error


def _loads_s(directory: Path, *, size: int) -> tuple[float, ...]:
    clock, times_s = HostClock(), []
    tensors = {
        f"tensor.{number}": torch.rand(TENSOR_BYTES // 4) for number in range(size // TENSOR_BYTES)
    }
    with tempfile.TemporaryDirectory(dir=directory) as folder, warnings.catch_warnings():
        # PyTorch warns that no other rank takes part, which is intended.
        warnings.simplefilter("ignore", UserWarning)
        # The loads below read what this save wrote: nobody else writes to this folder.
        save(dict(tensors), checkpoint_id=folder, no_dist=True)
        for _ in range(1 + REPEATS):
            for file in Path(folder).iterdir():
                drop_cache(file)
            begin_s = clock.now_s()
            load(dict(tensors), checkpoint_id=folder, no_dist=True)
            times_s.append(clock.now_s() - begin_s)
    return tuple(times_s[1:])
