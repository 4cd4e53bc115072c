import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from profilers.affinity import usable_cores
from profilers.devices import cache_bytes, last_cache_bytes, stated_cache_bytes
from profilers.heap import keep_heap
from profilers.machine import fingerprint, processor_name
from profilers.topology import node_topology
from tests.rows import each_row


def test_the_processor_is_named_by_the_kernel(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fake CPU @ 3 GHz: turbo\nflags: x\n")
    assert processor_name(info) == "Fake CPU @ 3 GHz: turbo"
    assert processor_name(tmp_path / "absent")


def test_a_fingerprint_counts_ranks_cores_and_nodes() -> None:
    one = fingerprint(device_kind="cpu", world=1, local_world=1)
    two = fingerprint(device_kind="cpu", world=2, local_world=2)
    assert one.memory_bytes_per_device == one.host_memory_bytes
    assert two.memory_bytes_per_device == one.host_memory_bytes // 2
    assert {"python", "torch"} <= one.libraries.keys()
    cores = len(os.sched_getaffinity(0))
    assert not fingerprint(device_kind="cpu", world=cores, local_world=cores).oversubscribed
    assert fingerprint(device_kind="cpu", world=cores + 1, local_world=cores + 1).oversubscribed
    assert fingerprint(device_kind="cpu", world=8, local_world=2).nodes == 4


# Cores that may be used are those this process is bound to.


def test_a_process_that_is_bound_to_one_core_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() <= frozenset(range(os.cpu_count() or 1))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {3}, raising=False)
    assert usable_cores() == {3}
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == {0}


# The node's parts, read from a made-up sysfs.


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def test_parts_of_a_node_are_listed(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {
            "devices/system/node/node0/cpulist": "0-31\n",
            "devices/system/node/node0/distance": "10 21\n",
            "devices/pci/0000:3b:00.0/numa_node": "0\n",
            "class/net/eth0/speed": "100000\n",
            "class/net/eth0/mtu": "9000\n",
            "class/net/eth0/operstate": "up\n",
            "class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            "class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
            "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        },
    )
    (tmp_path / "class/net/eth0/device").symlink_to(tmp_path / "devices/pci/0000:3b:00.0")
    assert node_topology(accelerators="GPU0 GPU1\nNV18", sysfs=tmp_path).splitlines() == [
        "GPU0 GPU1",
        "NV18",
        "numa node0: cores 0-31, distance 10 21",
        "card eth0: 100000 Mbit/s, mtu 9000, up, 0000:3b:00.0 at numa 0",
        "rdma mlx5_0/1: 400 Gb/sec (4X NDR), InfiniBand, 4: ACTIVE",
    ]
    assert node_topology(sysfs=tmp_path / "absent") == ""


CPU = torch.device("cpu")


@each_row(
    ("text", "expected"),
    [
        ("1024K\n", 2**20),
        ("36608K", 36608 * 1024),
        ("", 7),
        ("K", 7),
        ("many", 7),
        ("-1K", 7),
        ("1.5K", 7),
        ("32M", 7),
    ],
)
def test_a_cache_is_as_large_as_linux_states_and_else_as_usual(
    tmp_path: Path, text: str, expected: int
) -> None:
    size = tmp_path / "size"
    size.write_text(text)
    assert stated_cache_bytes(size, otherwise=7) == expected


def test_a_size_that_is_not_stated_is_the_usual_one(tmp_path: Path) -> None:
    assert stated_cache_bytes(tmp_path / "absent", otherwise=7) == 7
    (tmp_path / "size").write_bytes(b"\xff\xfe")
    assert stated_cache_bytes(tmp_path / "size", otherwise=7) == 7


def test_the_last_cache_of_a_processor_is_read_from_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, last = tmp_path / "core", tmp_path / "last"
    core.write_text("512K\n")
    last.write_text("4096K\n")
    monkeypatch.setattr("profilers.devices.CORE_CACHE", core)
    monkeypatch.setattr("profilers.devices.LAST_CACHE", last)
    assert (cache_bytes(CPU), last_cache_bytes(CPU)) == (512 * 1024, 4096 * 1024)
    last.unlink()
    assert last_cache_bytes(CPU) == 32 * 2**20


# What keeping the heap does to the process that asks for it, so each test has one of its own.

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
