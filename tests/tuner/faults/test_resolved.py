"""What a spec states, a profile measured and a strategy decides, brought together."""

import math
from dataclasses import replace

import numpy as np
import pytest

from profilers.records import Case, Machine, Measurement, Profile, ProfileHeader
from tests.expect import present
from tuner.catalog.saved_bytes import SavedBytes
from tuner.config.columns import Strategies
from tuner.engines.targets import programs
from tuner.errors import SpecError
from tuner.faults.level_seconds import obstacle
from tuner.faults.reliability import HostLevel, Jobs, read_s, stall_s, write_s
from tuner.faults.resolved import (
    HOST_MEMORY_BYTES_PER_S,
    USUAL_NODE_BYTES_PER_S,
    host_level,
    jobs_on_pool,
    resolved,
)
from tuner.spec.cluster import Pool
from tuner.spec.goal import TWO_LEVELS, Checkpoint, Reliability

STATED = Reliability(device_mtbf=1.8e8, restart=600.0)
POOL = Pool(name="h", device="h100-sxm", nodes=32, devices_per_node=8)


def _strategies(**columns: list[float]) -> Strategies:
    arrays = {name: np.array(values) for name, values in columns.items()}
    return Strategies(sequence=4096.0, micro_batch=1.0, num_microbatches=8.0, **arrays)


def _profile(*rows: Measurement) -> Profile:
    machine = Machine(
        hostname="a",
        device="H100",
        device_kind="cuda",
        num_devices=8,
        memory_bytes_per_device=80_000_000_000,
        cores=64,
        host_memory_bytes=10**12,
        world=8,
        threads_per_rank=1,
        oversubscribed=False,
        libraries={},
    )
    header = ProfileHeader(moetune_version="0", created="", machine=machine, tables={})
    return Profile(header=header, measurements=rows)


def _row(kind: str, time_s: float, *, operation: str = "storage") -> Measurement:
    case = Case(operation=operation, kind=kind, axes={"bytes": 10**9})
    return Measurement(case=case, times_s=(time_s,))


def _level(stated: Reliability, profile: Profile | None) -> HostLevel | None:
    return host_level(
        stated,
        strategies=_strategies(),
        programs=programs(("megatron-lm",)),
        pool=POOL,
        nic_bytes_per_s=5e10,
        profile=profile,
    )


RESOLVED = resolved(STATED, host_bytes_per_s=5e10, profile=None)


def test_nothing_stated_or_measured_takes_the_usual_rate_of_a_machine() -> None:
    assert RESOLVED.storage.node_write_bytes_per_s == USUAL_NODE_BYTES_PER_S
    assert RESOLVED.storage.node_read_bytes_per_s == USUAL_NODE_BYTES_PER_S
    assert (RESOLVED.node_mtbf_s, RESOLVED.repair_s, RESOLVED.interval_s) == (math.inf, 0.0, None)


def test_a_measured_machine_is_taken_and_a_stated_bandwidth_goes_before_it() -> None:
    # Eight ranks write 1 GB in 4 s and read it in 2 s: 2 and 4 GB/s a machine.
    profile = _profile(_row("write", 4.0), _row("read", 2.0))
    measured = resolved(STATED, host_bytes_per_s=5e10, profile=profile)
    assert measured.storage.node_write_bytes_per_s == 2e9
    assert measured.storage.node_read_bytes_per_s == 4e9
    checkpoint = Checkpoint(bandwidth=1e10, asynchronous=True, interval=1800.0)
    stated = STATED.model_copy(update={"checkpoint": checkpoint})
    found = resolved(stated, host_bytes_per_s=5e10, profile=profile)
    assert found.storage.write_bytes_per_s == found.storage.read_bytes_per_s == 1e10
    assert found.storage.node_write_bytes_per_s == math.inf
    assert found.storage.asynchronous
    assert found.interval_s == 1800.0
    # 64 writers of 2 GB each, copied into new memory.
    jobs = Jobs(devices=64.0, nodes=8.0, checkpoint_bytes=128e9, writers=64.0)
    copied_s = 2e9 / HOST_MEMORY_BYTES_PER_S["fresh"]
    assert stall_s(jobs, found.storage) == pytest.approx(copied_s)
    # Pinned memory is there before: 2 GB at 50 GB/s, and what training waits for is not in it.
    pinned = resolved(stated, host_bytes_per_s=5e10, profile=profile, has_pinned=True).storage
    assert stall_s(jobs, pinned) == pytest.approx(0.04)
    assert stall_s(jobs, replace(pinned, asynchronous=False)) == pytest.approx(copied_s + 12.8)


def test_a_checkpoint_is_read_no_faster_than_ranks_load_it() -> None:
    # Each of eight ranks of a machine loads 1 GB in 8 s: 1 GB/s together.
    load = _row("distributed", 8.0, operation="checkpoint_load")
    for rows, bandwidth, ranks, rate in (
        ((_row("read", 2.0), load), None, 8, 1e9),
        ((_row("read", 2.0),), None, 8, 4e9),
        # Faster than the storage: the copy of the format is not what limits.
        ((_row("read", 16.0), load), None, 8, 5e8),
        # A stated bandwidth is that of the storage.
        ((load,), 1e10, 8, 1e9),
        ((_row("read", 2.0),), 1e10, 8, math.inf),
        # The pool's machines have other numbers of devices than the one that was measured.
        ((load,), 1e10, 1, 1.25e8),
        ((load,), 1e10, 16, 2e9),
        # An engine with another format.
        ((_row("read", 2.0), load), None, 0, 4e9),
    ):
        stated = STATED.model_copy(update={"checkpoint": Checkpoint(bandwidth=bandwidth)})
        profile = _profile(*rows)
        found = resolved(stated, host_bytes_per_s=5e10, profile=profile, loading_ranks=ranks)
        assert found.storage.node_read_bytes_per_s == rate
        assert found.storage.read_bytes_per_s == (bandwidth or math.inf)
    for targets, ranks in (
        (("megatron-lm", "slurm"), 8),
        (("torchtitan",), 8),
        (("reference",), 8),
        (("deepspeed",), 0),
        (("transformers-peft",), 0),
        # The slower of two.
        (("deepspeed", "torchtitan"), 8),
    ):
        assert programs(targets).loading_ranks(devices_per_node=8) == ranks, targets


def test_a_restart_also_reads_weights_that_no_checkpoint_holds() -> None:
    # Adapters of 1e8 parameters beside 1e10 frozen ones: 1.2 GB and 20 GB. 1.2 GB are written at
    # 2 GB/s a machine by one of them in 0.6 s; 21.2 GB are read in 10.6 s and copied by eight
    # devices at 50 GB/s in 0.053 s.
    jobs = jobs_on_pool(
        _strategies(data=[8.0]),
        parameters=1e10,
        pool=POOL,
        stated=STATED,
        adapters=1e8,
        saved=SavedBytes(trained=12.0, reread=2.0),
    )
    assert (jobs.checkpoint_bytes, jobs.read_bytes) == (1.2e9, 2.12e10)
    assert np.asarray(write_s(jobs, RESOLVED.storage)).tolist() == pytest.approx([0.6])
    assert np.asarray(read_s(jobs, RESOLVED.storage)).tolist() == pytest.approx([10.653])


def test_host_memory_has_the_rates_of_a_profile_where_it_has_them() -> None:
    jobs = Jobs(devices=64.0, nodes=8.0, checkpoint_bytes=128e9, writers=64.0)
    beside = STATED.model_copy(update={"checkpoint": Checkpoint(asynchronous=True)})
    both = STATED.model_copy(update={"checkpoint": Checkpoint(levels=TWO_LEVELS)})
    profile = _profile(
        *(
            _row(kind, time_s, operation="host_memory")
            for kind, time_s in (("fresh", 0.01), ("save", 0.5), ("load", 0.25))
        )
    )
    # New memory is never faster than the link.
    fast = resolved(beside, host_bytes_per_s=5e10, profile=profile)
    assert stall_s(jobs, fast.storage) == pytest.approx(0.04)
    for measured, expected in (
        (profile, (2e9, 4e9)),
        (None, (HOST_MEMORY_BYTES_PER_S["save"], HOST_MEMORY_BYTES_PER_S["load"])),
    ):
        level = _level(both, measured)
        assert level is not None
        assert (level.save_bytes_per_s, level.load_bytes_per_s) == expected
        assert level.node_bytes_per_s == 5e10 * POOL.nics
    # What a node's 8 ranks send to another one, measured: 8 x 1 GB in 0.1 s.
    axes = {"bytes": 10**9, "ranks": 2, "stride": 8, "world": 16}
    case = Case(operation="collective", kind="send_recv", axes=axes)
    sending = _profile(Measurement(case=case, times_s=(0.1,)))
    machine = sending.header.machine.model_copy(update={"nodes": 2, "world": 16})
    header = sending.header.model_copy(update={"machine": machine})
    sending = sending.model_copy(update={"header": header})
    level = _level(both, sending)
    assert present(level).node_bytes_per_s == pytest.approx(8e10)


def test_copies_on_hosts_may_by_default_take_half_of_the_measured_memory() -> None:
    # Of 1e12 bytes. 1e12 bytes of checkpoints are 250 GB on each of four machines, thrice (two
    # files and what waits): 750 GB. A profile that was imported does not know the memory.
    jobs = Jobs(devices=32.0, nodes=4.0, checkpoint_bytes=1e12, writers=32.0)
    unknown = _profile()
    machine = unknown.header.machine.model_copy(update={"host_memory_bytes": 0})
    header = unknown.header.model_copy(update={"machine": machine})
    unknown = unknown.model_copy(update={"header": header})
    for stated, profile, memory, reason in (
        (None, _profile(), 5e11, "466 GiB may be taken, half of what was measured"),
        (6 * 10**11, _profile(), 6e11, "559 GiB may be taken (cluster.pools"),
        (8 * 10**11, _profile(), 8e11, ""),
        (None, None, None, ""),
        (None, unknown, None, ""),
    ):
        checkpoint = Checkpoint(levels=TWO_LEVELS, host_memory=stated)
        both = STATED.model_copy(update={"checkpoint": checkpoint})
        host = present(_level(both, profile))
        assert host.memory_bytes == memory
        model = resolved(both, host_bytes_per_s=5e10, profile=profile, host=host)
        left_out = obstacle(jobs, model, replicas=0, step_s=1.0)
        assert reason in left_out
        assert bool(left_out) == bool(reason)


def test_columns_say_who_writes_and_how_many_machines_they_fill() -> None:
    # Three ways to use 128, 128 and 120 devices: sharded; replicated with 4 x 8 expert ranks per
    # stage; sharded on 15 machines.
    strategies = _strategies(
        tensor=[8.0, 4.0, 8.0],
        pipeline=[2.0, 2.0, 1.0],
        data=[8.0, 16.0, 15.0],
        expert=[1.0, 32.0, 1.0],
        zero_stage=[1.0, 0.0, 1.0],
    )
    jobs = jobs_on_pool(strategies, parameters=1e10, pool=POOL, stated=STATED)
    assert np.asarray(jobs.devices).tolist() == [128.0, 128.0, 120.0]
    assert np.asarray(jobs.nodes).tolist() == [16.0, 16.0, 15.0]
    assert np.asarray(jobs.writers).tolist() == [128.0, 64.0, 120.0]
    assert jobs.checkpoint_bytes == 1.4e11
    assert jobs.spare_nodes == 0.0


def test_spares_are_those_that_the_spec_keeps_back_and_no_other_unused_machines() -> None:
    # Of 32 machines, 16 train and one is kept back: a job allocates 17 and pays for them.
    stated = STATED.model_copy(update={"repair": 86400.0, "spare_nodes": 1})
    jobs = jobs_on_pool(_strategies(data=[128.0]), parameters=1e10, pool=POOL, stated=stated)
    assert jobs.spare_nodes == 1.0


def test_the_usual_rate_of_all_machines_writes_and_reads_a_checkpoint() -> None:
    # 140 GB over 16 machines of 2 GB/s: 4.375 s; the copy of 140 GB / 128 at 50 GB/s: 0.021875 s.
    jobs = jobs_on_pool(_strategies(data=[128.0]), parameters=1e10, pool=POOL, stated=STATED)
    assert np.asarray(write_s(jobs, RESOLVED.storage)).tolist() == pytest.approx([4.375])
    assert np.asarray(read_s(jobs, RESOLVED.storage)).tolist() == pytest.approx([4.396875])


def test_a_restart_inside_processes_is_done_where_it_is_shorter() -> None:
    for inside_s, taken_s in ((4.0, 4.0), (STATED.restart, STATED.restart), (1e4, STATED.restart)):
        stated = STATED.model_copy(update={"in_process_restart": inside_s})
        found = resolved(stated, host_bytes_per_s=5e10, profile=None)
        assert (found.process_restart_s, found.restarts_in_process) == (taken_s, inside_s == 4.0)
    unknown = STATED.model_copy(update={"restart": None})
    with pytest.raises(SpecError, match="restart is missing: state it"):
        resolved(unknown, host_bytes_per_s=5e10, profile=None)
