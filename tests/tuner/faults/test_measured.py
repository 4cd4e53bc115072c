"""A node's storage as a profile saw it."""

import pytest

from profilers.records import (
    Case,
    Machine,
    Measurement,
    Profile,
    ProfileHeader,
)
from tuner.faults.measured import (
    host_memory_rates,
    node_bytes_per_s,
    sent_bytes_per_s,
)


def _row(
    kind: str, *, size: int, times_s: tuple[float, ...], operation: str = "storage", rank: int = 0
) -> Measurement:
    case = Case(operation=operation, kind=kind, axes={"bytes": size})
    return Measurement(case=case, rank=rank, times_s=times_s)


def _profile(*rows: Measurement) -> Profile:
    machine = Machine(
        hostname="a",
        device="H100",
        device_kind="cuda",
        num_devices=8,
        memory_bytes_per_device=80_000_000_000,
        cores=64,
        host_memory_bytes=10**12,
        nodes=2,
        world=16,
        threads_per_rank=1,
        oversubscribed=False,
        libraries={},
    )
    header = ProfileHeader(moetune_version="0", created="", machine=machine, tables={})
    return Profile(header=header, measurements=rows)


def test_the_ranks_of_a_node_add_up_at_the_largest_size() -> None:
    # 16 ranks on two nodes; the slowest writes 200 MB in 0.5 s: 8 * 0.4 GB/s.
    profile = _profile(
        _row("write", size=1_000_000, times_s=(1.0,)),
        _row("write", size=200_000_000, times_s=(0.1,)),
        _row("write", size=200_000_000, times_s=(0.4, 0.5, 0.6), rank=9),
        _row("read", size=200_000_000, times_s=(0.1,)),
    )
    assert node_bytes_per_s(profile, kind="write") == 3.2e9
    assert node_bytes_per_s(profile, kind="read") == 16e9


def test_ranks_of_a_node_that_send_to_other_nodes_add_up() -> None:
    def sent(stride: int, *, size: int, time_s: float) -> Measurement:
        axes = {"bytes": size, "ranks": 2, "stride": stride, "world": 16}
        return Measurement(
            case=Case(operation="collective", kind="send_recv", axes=axes), times_s=(time_s,)
        )

    # Neighbours are on one node; a stride of 8 leaves it: 8 ranks of 100 MB in 20 ms.
    rows = (
        sent(1, size=10**8, time_s=1e-3),
        sent(8, size=10**6, time_s=1e-3),
        sent(8, size=10**8, time_s=20e-3),
    )
    assert sent_bytes_per_s(_profile(*rows)) == pytest.approx(40e9)
    assert sent_bytes_per_s(_profile(*rows[:1])) is None


def test_storage_that_was_not_measured_has_no_rate() -> None:
    assert node_bytes_per_s(_profile(), kind="write") is None


def test_host_memory_has_the_rates_of_the_slowest_rank_at_the_largest_size() -> None:
    def row(kind: str, size: int, time_s: float, *, rank: int = 0) -> Measurement:
        return _row(kind, size=size, times_s=(time_s,), operation="host_memory", rank=rank)

    rows = (
        row("fresh", 10**9, 0.4),
        row("fresh", 10**9, 0.5, rank=1),
        row("fresh", 10**6, 9.0),
        row("save", 10**9, 1.0),
        row("load", 10**9, 2.0),
    )
    assert host_memory_rates(_profile(*rows)) == {"fresh": 2e9, "save": 1e9, "load": 5e8}
    # What fits into a cache says nothing of a checkpoint.
    small = (*rows[:-1], row("load", 2**24, 0.001))
    assert host_memory_rates(_profile(*small)) == {"fresh": 2e9, "save": 1e9}
