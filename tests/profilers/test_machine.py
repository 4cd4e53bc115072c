import os
from pathlib import Path

from profilers.machine import fingerprint, processor_name


def test_the_processor_is_named_by_the_kernel(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fake CPU @ 3 GHz: turbo\nflags: x\n")
    assert processor_name(info) == "Fake CPU @ 3 GHz: turbo"


def test_a_processor_without_a_name_still_has_one(tmp_path: Path) -> None:
    assert processor_name(tmp_path / "absent")


def test_ranks_share_the_memory_of_the_host() -> None:
    one = fingerprint(device_kind="cpu", world=1, local_world=1)
    two = fingerprint(device_kind="cpu", world=2, local_world=2)
    assert one.memory_bytes_per_device == one.host_memory_bytes
    assert two.memory_bytes_per_device == one.host_memory_bytes // 2
    assert {"python", "torch"} <= one.libraries.keys()


def test_more_ranks_than_cores_are_flagged() -> None:
    cores = len(os.sched_getaffinity(0))
    assert not fingerprint(device_kind="cpu", world=cores, local_world=cores).oversubscribed
    assert fingerprint(device_kind="cpu", world=cores + 1, local_world=cores + 1).oversubscribed


def test_nodes_are_counted_by_their_ranks() -> None:
    assert fingerprint(device_kind="cpu", world=8, local_world=2).nodes == 4
