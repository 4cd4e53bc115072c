"""What keeping the heap does to the process that asks for it, so each test has one of its own."""

import platform
import subprocess
import sys

import pytest

from profilers.heap import keep_heap

COUNT_FAULTS = """
import resource
import sys

import numpy as np

from profilers.heap import keep_heap


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if sys.argv[1] == "keep":
    assert keep_heap()
for turn in range(4):
    before = faults()
    block = np.empty(2**24, dtype=np.uint8)
    block[:] = 1
    del block
print(faults() - before)
"""


def _faults(argument: str) -> int:
    """Page faults of the fourth time that the same 16 MiB are allocated, written and freed."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", COUNT_FAULTS, argument],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's allocator")
def test_freed_memory_is_reused() -> None:
    assert _faults("keep") < 32


def test_an_allocator_without_settings_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _name: object())
    assert not keep_heap()
