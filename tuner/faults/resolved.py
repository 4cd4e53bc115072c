"""Reliability inputs of the formulas, from the spec and the profile."""

import math
from collections.abc import Mapping
from typing import Final, Literal

import numpy as np

from profilers.records import Profile
from tuner.catalog.programs import Programs
from tuner.catalog.saved_bytes import MIXED_PRECISION, SavedBytes
from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import number
from tuner.errors import SpecError
from tuner.faults.measured import (
    host_memory_rates,
    load_bytes_per_s,
    node_bytes_per_s,
    sent_bytes_per_s,
)
from tuner.faults.reliability import FailureModel, HostLevel, Jobs, Storage, checkpoint_bytes
from tuner.spec.cluster import Pool
from tuner.spec.goal import Reliability

USUAL_NODE_BYTES_PER_S: Final = 2e9
"""Write rate of one node where nothing is stated or measured: about that of one client of a
parallel file system; our default, to be replaced by a measurement."""

HOST_MEMORY_BYTES_PER_S: Final[Mapping[str, float]] = {"fresh": 2.3e9, "save": 2.0e9, "load": 0.6e9}
"""Bytes per second of one process, by kind (profilers/host_memory.py); from Megatron-LM's
checkpoints of 6.85 GB on one H200 (examples/profiles/h200-megatron-lm).

    fresh    from a device into memory that was not there before: 2.8 to 3.2 s
    save     into files in memory, what tmpfs takes; with the copy before it 6.4 s, the mean of
             those that training waited for
    load     the same back, with all that the engine does meanwhile: 10.6 and 12.4 s
"""

TMPFS_RATIO: Final = 0.5
"""Share of a node's memory that files in it may take: the default size of a tmpfs
(Documentation/filesystems/tmpfs.rst of Linux). Launch files name a folder below /dev/shm, which is
one; the rest is for processes and for cached files."""


def resolved(
    stated: Reliability,
    *,
    host_bytes_per_s: float,
    profile: Profile | None,
    host: HostLevel | None = None,
    has_background: bool = True,
    has_pinned: bool = False,
    restarts_in_process: bool = True,
    loading_ranks: int = 0,
) -> FailureModel:
    """Fill in what the spec leaves open.

    A stated bandwidth is that of all nodes together, for reading too. Without one each node has the
    rate that the profile measured, or the default; in either case it reads no faster than its
    `loading_ranks` load a checkpoint, where the profile has that: its ranks with an engine of
    PyTorch's distributed format, 0 with others. `has_background`: the engine can write
    checkpoints while training goes on; otherwise it waits, whatever the spec says. `has_pinned`: it
    copies those into pinned memory.
    `restarts_in_process`: it restarts inside its processes after failures that leave them.

    Raises:
        SpecError: the time of a restart is not stated.
    """
    if stated.restart is None:
        raise SpecError("goal.reliability.restart is missing: state it, e.g. 10min")
    checkpoint = stated.checkpoint
    together = math.inf if checkpoint.bandwidth is None else checkpoint.bandwidth
    write, read = math.inf, math.inf
    if checkpoint.bandwidth is None:
        write = _measured(profile, "write") or USUAL_NODE_BYTES_PER_S
        read = _measured(profile, "read") or write
    if profile is not None and loading_ranks:
        read = min(read, load_bytes_per_s(profile, ranks=loading_ranks) or math.inf)
    return FailureModel(
        device_mtbf_s=math.inf if stated.device_mtbf is None else stated.device_mtbf,
        node_mtbf_s=math.inf if stated.node_mtbf_s is None else stated.node_mtbf_s,
        process_mtbf_s=math.inf if stated.process_mtbf is None else stated.process_mtbf,
        restart_s=stated.restart,
        in_process_restart_s=stated.in_process_restart if restarts_in_process else None,
        repair_s=0.0 if stated.repair is None else stated.repair,
        storage=Storage(
            write_bytes_per_s=together,
            read_bytes_per_s=together,
            node_write_bytes_per_s=write,
            node_read_bytes_per_s=read,
            host_bytes_per_s=host_bytes_per_s,
            fresh_bytes_per_s=_memory_rates(profile)["fresh"],
            asynchronous=bool(checkpoint.asynchronous) and has_background,
            has_pinned=has_pinned,
        ),
        interval_s=checkpoint.interval,
        host=host,
    )


def host_level(
    stated: Reliability,
    *,
    strategies: Strategies,
    programs: Programs,
    pool: Pool,
    nic_bytes_per_s: float,
    profile: Profile | None,
) -> HostLevel | None:
    """Return the level on hosts that a spec asks for; None where it asks for shared storage alone.

    Args:
        stated: in the spec.
        strategies: the decision, as a column.
        programs: that keep the copies.
        pool: whose nodes hold the copies.
        nic_bytes_per_s: of one NIC, where no profile has what a node sends to others.
        profile: of the pool, which knows the memory of a node.
    """
    checkpoint = stated.checkpoint
    if not checkpoint.keeps_host_copies:
        return None
    sent = None if profile is None else sent_bytes_per_s(profile)
    return HostLevel(
        node_bytes_per_s=sent or nic_bytes_per_s * pool.nics / pool.oversubscription,
        save_bytes_per_s=_memory_rates(profile)["save"],
        load_bytes_per_s=_memory_rates(profile)["load"],
        memory_bytes=_host_memory_bytes(stated, pool, profile),
        memory_is_assumed=checkpoint.host_memory is None and pool.host is None,
        replicas=(0, 1, 2) if checkpoint.replicas == "auto" else (checkpoint.replicas,),
        together_ratio=stated.lost_together,
        is_optional=checkpoint.levels == "auto",
        interval_s=checkpoint.host_interval,
        obstacle=programs.host_checkpoint_obstacle(
            zero_stage=round(number(strategies.zero_stage)),
            offloads_optimizer=number(strategies.optimizer_offload) > 0.0,
        ),
    )


def jobs_on_pool(
    strategies: Strategies,
    *,
    parameters: Numbers,
    pool: Pool,
    stated: Reliability,
    adapters: float = 0.0,
    saved: SavedBytes = MIXED_PRECISION,
) -> Jobs:
    """Return the quantities of each strategy that decide its failures, on one pool.

    With the optimizer state sharded (ZeRO 1 and above) every device writes; otherwise one replica
    of each part. Spares are those that the spec keeps back, which a job allocates and pays for;
    other unused nodes of the pool come through the queue, after a time that nobody knows.

    Args:
        strategies: on the pool.
        parameters: of the model.
        pool: whose nodes run it.
        stated: in the spec.
        adapters: parameters of adapters, beside which those of the model are frozen; 0: none.
        saved: of a parameter by the engine.
    """
    world = strategies.world
    nodes = np.ceil(world / pool.devices_per_node)
    parts = strategies.pipeline * np.maximum(
        strategies.tensor, strategies.expert * strategies.expert_tensor
    )
    writers = np.where(np.greater(strategies.zero_stage, 0.0), world, np.minimum(world, parts))
    trained: Numbers = parameters
    frozen: Numbers = 0.0
    if adapters:
        trained, frozen = adapters, parameters
    return Jobs(
        devices=world,
        nodes=nodes,
        checkpoint_bytes=checkpoint_bytes(saved, trained=trained, frozen=frozen),
        reread_bytes=frozen * saved.reread,
        writers=writers,
        spare_nodes=float(stated.num_spare_nodes),
    )


def _host_memory_bytes(stated: Reliability, pool: Pool, profile: Profile | None) -> float | None:
    """Bytes of a node that copies may take; None where neither the spec nor the profile knows."""
    if stated.checkpoint.host_memory is not None:
        return float(stated.checkpoint.host_memory)
    known = pool.host_limit_bytes(profile)
    return known if known is None or pool.host is not None else TMPFS_RATIO * known


def _memory_rates(profile: Profile | None) -> Mapping[str, float]:
    measured = {} if profile is None else host_memory_rates(profile)
    return {**HOST_MEMORY_BYTES_PER_S, **measured}


def _measured(profile: Profile | None, kind: Literal["write", "read"]) -> float | None:
    return None if profile is None else node_bytes_per_s(profile, kind=kind)
