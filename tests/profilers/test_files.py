"""Files that a user named are opened without waiting and read within a bound."""

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from profilers.files import NotRegularError, TooLargeError, open_regular, read_bounded


def test_what_is_read_is_what_the_file_holds(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"12345")
    assert read_bounded(file, most_bytes=5) == b"12345"
    with pytest.raises(TooLargeError, match="larger than the 4 bytes"):
        read_bounded(file, most_bytes=4)
    with open_regular(file) as opened:
        assert opened.read() == b"12345"


def test_a_device_a_pipe_and_a_folder_are_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (Path("/dev/zero"), Path("/dev/full"), pipe):
        with pytest.raises(NotRegularError, match="not a regular file"):
            read_bounded(path, most_bytes=10)
    with pytest.raises(IsADirectoryError):
        read_bounded(tmp_path, most_bytes=10)
    with pytest.raises(OSError, match="null"):
        read_bounded(Path("a\0b"), most_bytes=10)


def test_a_file_that_does_not_know_its_size_is_bounded_by_what_is_read() -> None:
    status = Path("/proc/self/status")
    assert status.stat().st_size == 0
    assert read_bounded(status, most_bytes=100_000).startswith(b"Name:")
    with pytest.raises(TooLargeError):
        read_bounded(status, most_bytes=10)


def test_a_file_with_a_hole_takes_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "hole"
    with file.open("wb") as stream:
        stream.truncate(2**40)
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError):
            read_bounded(file, most_bytes=2**28)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**20


def test_a_file_of_unknown_size_takes_no_more_memory_than_its_bound(tmp_path: Path) -> None:
    most_bytes = 2**22
    file = tmp_path / "hole"
    with file.open("wb") as stream:
        stream.truncate(2**40)
    tracemalloc.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            # As a file below /proc says of itself.
            patch.setattr("os.fstat", _of_no_size)
            with pytest.raises(TooLargeError):
                read_bounded(file, most_bytes=most_bytes)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * most_bytes


def _of_no_size(descriptor: int, stat: Callable[[int], os.stat_result] = os.fstat) -> Any:
    return SimpleNamespace(st_mode=stat(descriptor).st_mode, st_size=0)
