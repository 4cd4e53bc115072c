"""Times to write a checkpoint to a directory and to read it back.

A write ends when the file is on the disk (fsync). Before a read the file is dropped from the
page cache; if the system cannot do that, the table's note says so. All ranks write and read files
of their own at the same time. A disk without room for all ranks is recorded as a
failure instead of being filled. The file has no name, so it goes with its process.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from profilers.benchmark import Setting, TableBenchmark
from profilers.clock import HostClock
from profilers.records import Case, Measurement, MeasurementStatus
from profilers.timing import measure

SIZES = tuple(2**power for power in (20, 23, 25, 27))
BLOCK_BYTES = 2**23
SPARE_RATIO = 1.1
"""Room that must be left beyond what is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageBenchmark(TableBenchmark):
    """The table of writes and reads."""

    operation: str = "storage"

    def note(self) -> str:
        return "" if can_drop_cache() else "reads may come from the page cache"

    def cases(self) -> Sequence[Case]:
        return cases_of(self.operation, kinds=("write", "read"), sizes=SIZES)

    def measure(self, case: Case, *, budget_s: float) -> tuple[Measurement, ...]:
        directory = self.setting.directory
        return measured_on_disk(
            case,
            setting=self.setting,
            times_s=lambda size: _times_s(
                case.kind, directory=directory, size=size, budget_s=budget_s
            ),
        )


def cases_of(operation: str, *, kinds: Sequence[str], sizes: Sequence[int]) -> tuple[Case, ...]:
    """Return the cases of a table over bytes: every kind at every size."""
    return tuple(
        Case(operation=operation, kind=kind, axes={"bytes": size})
        for size in sizes
        for kind in kinds
    )


def measured_on_disk(
    case: Case, *, setting: Setting, times_s: Callable[[int], tuple[float, ...]]
) -> tuple[Measurement, ...]:
    """Time so many bytes on every rank at once; what the disk refuses is a row, too."""
    team, size = setting.team, case.axes["bytes"]
    team.barrier()
    try:
        _require_room(setting.directory, size=size * team.local_world)
        times = times_s(size)
    except (OSError, ValueError) as error:
        line = (error.strerror if isinstance(error, OSError) else "") or str(error)
        return (
            Measurement(
                case=case, status=MeasurementStatus.FAILED, error=line[:200], rank=team.rank
            ),
        )
    finally:
        team.barrier()
    return (Measurement(case=case, rank=team.rank, times_s=times),)


def can_drop_cache() -> bool:
    """Return whether the system can drop a file from the page cache."""
    return hasattr(os, "posix_fadvise")


def drop_cache(file: Path) -> None:
    """Write a file to the disk, and drop it from the page cache where the system can."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
        if can_drop_cache():
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _require_room(directory: Path, *, size: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < SPARE_RATIO * size:
        raise OSError(errno.ENOSPC, f"{size} bytes do not fit into {free} free")


def _times_s(kind: str, *, directory: Path, size: int, budget_s: float) -> tuple[float, ...]:
    if kind not in ("write", "read"):
        raise ValueError(f"kind {kind!r} is not one of write, read")
    block = os.urandom(min(size, BLOCK_BYTES))
    with tempfile.TemporaryFile(dir=directory) as file:
        handle = file.fileno()
        if kind == "write":
            return measure(
                lambda: _write(handle, block, size=size),
                clock=HostClock(),
                budget_s=budget_s,
                min_repeats=3,
            )
        _write(handle, block, size=size)
        return measure(
            lambda: _read(handle, size=size), clock=HostClock(), budget_s=budget_s, min_repeats=3
        )


def _write(handle: int, block: bytes, *, size: int) -> None:
    os.lseek(handle, 0, os.SEEK_SET)
    os.ftruncate(handle, 0)
    left = size
    while left:
        left -= os.write(handle, block[: min(left, len(block))])
    os.fsync(handle)


def _read(handle: int, *, size: int) -> None:
    if can_drop_cache():
        os.posix_fadvise(handle, 0, size, os.POSIX_FADV_DONTNEED)
    os.lseek(handle, 0, os.SEEK_SET)
    left = size
    while left:
        got = len(os.read(handle, min(left, BLOCK_BYTES)))
        if not got:
            raise OSError(errno.EIO, "the file ended early")
        left -= got
