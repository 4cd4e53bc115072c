"""Failure rates, storage and spares: how often a job fails and how long it is down.

    lambda   failures of the whole job per second, exponential: devices / MTBF_device
             + nodes / MTBF_node + nodes / MTBF_process
    S        spare nodes, cold: they do not fail while they wait
    a        losses * repair: nodes in repair on average, if the job never waited; losses are the
             failures without those of processes, after which every node goes on

A failed node is replaced by a spare and goes into repair. With all S spares in repair the next
failure leaves the job one node short, and it waits until the first repair is done. Nodes in repair
are then the busy servers of a loss system with S + 1 servers, since no failure can happen while
the job waits: the share of time that it waits is Erlang's B(S + 1, a), which depends on the mean of
the repair time and not on its distribution (Erlang 1917; Sevastyanov 1957 for the latter).

The inputs that MoFa (arXiv 2511.09837) reads from a cluster's failure history are published, its
formulas are not. This package is our own model with the same inputs and outputs. An order of
magnitude for the rates: 419 unexpected stops in 54 days on 16,384 devices (Llama 3, arXiv
2407.21783, section 3.3.4), about 50,000 hours per device with everything included.

Not covered: failures that come in bursts or wear out, slow devices, silent data corruption,
failures of spare devices.
"""

import math
from dataclasses import dataclass

import numpy as np

from tuner.catalog.saved_bytes import SavedBytes
from tuner.config.columns import Numbers

NEGLIGIBLE_RATIO = 1e-15
"""Share of time below which a number is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Bandwidths of checkpoint storage in bytes per second, and how checkpoints are written."""

    write_bytes_per_s: float
    """Write bandwidth of the storage for all nodes together."""
    read_bytes_per_s: float
    """Read bandwidth of the storage for all nodes together."""
    node_write_bytes_per_s: float = math.inf
    """The most that one node sends to storage."""
    node_read_bytes_per_s: float = math.inf
    host_bytes_per_s: float
    """Bandwidth between one device and its host's memory."""
    fresh_bytes_per_s: float = math.inf
    """Bandwidth from one device into newly allocated memory of its host, as frameworks save."""
    asynchronous: bool = False
    """Training stops for the copy to host memory only; the write is in the background."""
    has_pinned: bool = False
    """Whether that copy goes into pinned memory, allocated once for all checkpoints."""

    def __post_init__(self) -> None:
        rates = (
            self.write_bytes_per_s,
            self.read_bytes_per_s,
            self.node_write_bytes_per_s,
            self.node_read_bytes_per_s,
            self.host_bytes_per_s,
            self.fresh_bytes_per_s,
        )
        if not min(rates) > 0.0:
            raise ValueError(f"bandwidths {rates} must be above zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLevel:
    """Checkpoints in the memory of nodes, between those on shared storage."""

    node_bytes_per_s: float
    """Bandwidth from one node to another, all NICs of a node together."""
    save_bytes_per_s: float = math.inf
    """Bandwidth of one writer from its memory into files in memory."""
    load_bytes_per_s: float = math.inf
    """Bandwidth of one writer reading such files back."""
    memory_bytes: float | None = None
    """Bytes of a node's memory that copies may take; None: not known."""
    memory_is_assumed: bool = False
    """Whether `memory_bytes` is a default share of the measured memory."""
    replicas: tuple[int, ...]
    """Numbers of other nodes that may hold a node's copy, to choose from."""
    together_ratio: float
    """Share of lost nodes whose replicas are lost with them."""
    is_optional: bool
    """Shared storage alone may be chosen, too."""
    interval_s: float | None = None
    """Useful work between checkpoints; None: the best there is."""
    obstacle: str = ""
    """Reason why the engine cannot keep copies of a configuration on hosts; empty: it can."""

    def __post_init__(self) -> None:
        rates = (self.node_bytes_per_s, self.save_bytes_per_s, self.load_bytes_per_s)
        if not (min(rates) > 0.0 and 0.0 < self.together_ratio <= 1.0):
            raise ValueError(
                f"bandwidths {rates} and share {self.together_ratio} of losses that take replicas"
                " must be above zero, and a share is one at most"
            )
        if not self.replicas or min(self.replicas) < 0:
            raise ValueError(f"replicas {self.replicas} cannot be below zero, and none is named")
        if self.interval_s is not None and not 0.0 < self.interval_s < math.inf:
            raise ValueError(f"interval {self.interval_s} s on hosts must be above zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureModel:
    """Rates of failures, and the restarts and spares that follow them."""

    device_mtbf_s: float
    """Mean time between failures of one device that stop the job; infinite where only whole nodes
    are said to fail."""
    node_mtbf_s: float = math.inf
    """Mean time between failures of the rest of a node: host, NICs, cables, and software unless
    stated."""
    process_mtbf_s: float = math.inf
    """Mean time between failures of a node's processes; the node keeps its memory and goes on."""
    restart_s: float
    """Seconds from a failure to the first useful step, without reading the checkpoint: detection,
    replacing the node, starting the processes, warm-up."""
    in_process_restart_s: float | None = None
    """Seconds from a failure of processes alone to the first useful step, if the others are not
    ended; None: the engine starts all of them again."""
    repair_s: float = 0.0
    """Mean time until a failed node can be used again; 0: there is always a replacement."""
    storage: Storage
    interval_s: float | None = None
    """Useful work between checkpoints on shared storage; None: the best there is."""
    host: HostLevel | None = None
    """A second level; None: there is shared storage alone."""

    def __post_init__(self) -> None:
        rarest = (self.device_mtbf_s, self.node_mtbf_s, self.process_mtbf_s)
        if not (min(rarest) > 0.0 and min(rarest) < math.inf):
            raise ValueError(
                f"mean times between failures {', '.join(map(str, rarest))} s"
                " must be above zero, one of them finite"
            )
        inside_s = self.in_process_restart_s
        if inside_s is not None and not 0.0 <= inside_s < math.inf:
            raise ValueError(f"restart {inside_s} s cannot be below zero")
        if not (0.0 <= self.restart_s < math.inf and 0.0 <= self.repair_s < math.inf):
            raise ValueError(
                f"restart {self.restart_s} and repair {self.repair_s} s cannot be below zero"
            )
        if self.interval_s is not None and not 0.0 < self.interval_s < math.inf:
            raise ValueError(f"checkpoint interval {self.interval_s} s must be above zero")

    @property
    def restarts_in_process(self) -> bool:
        """Return whether processes restart inside themselves, since that is shorter."""
        return self.in_process_restart_s is not None and self.in_process_restart_s < self.restart_s

    @property
    def process_restart_s(self) -> float:
        """Seconds of the shorter restart after a failure of processes alone."""
        inside_s = self.in_process_restart_s
        return self.restart_s if inside_s is None else min(inside_s, self.restart_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Jobs:
    """The quantities of a training configuration that decide its failures; numbers or arrays."""

    devices: Numbers
    nodes: Numbers
    """Nodes that the devices fill, in whole nodes."""
    checkpoint_bytes: Numbers
    """Bytes of one checkpoint, every byte counted once."""
    reread_bytes: Numbers = 0.0
    """Frozen weights that a checkpoint does not hold: a restart reads them, too."""
    writers: Numbers
    """Devices that each write their own part: all of them where the optimizer state is sharded and
    saved in parallel, TP * PP (one replica) otherwise."""
    spare_nodes: Numbers = 0.0
    """Idle nodes that are paid for."""
    kinds: tuple["Jobs", ...] = ()
    """The parts of a job on nodes of several kinds (kinds.py), whose sums the above are; empty
    where all nodes are identical."""

    @property
    def read_bytes(self) -> Numbers:
        """Return the bytes that a restart reads from shared storage."""
        return self.checkpoint_bytes + self.reread_bytes


def checkpoint_bytes(saved: SavedBytes, *, trained: Numbers, frozen: Numbers = 0.0) -> Numbers:
    """Bytes of one checkpoint from which training continues exactly.

    Args:
        saved: by the engine.
        trained: parameters that the optimizer updates.
        frozen: the others.
    """
    return trained * saved.trained + frozen * saved.frozen


def loss_rate_per_s(jobs: Jobs, reliability: FailureModel) -> Numbers:
    """Failures per second that take a node out of the job, with its memory."""
    return jobs.devices / reliability.device_mtbf_s + jobs.nodes / reliability.node_mtbf_s


def process_rate_per_s(jobs: Jobs, reliability: FailureModel) -> Numbers:
    """Failures per second of processes alone."""
    return jobs.nodes / reliability.process_mtbf_s


def failure_rate_per_s(jobs: Jobs, reliability: FailureModel) -> Numbers:
    """Failures per second that stop the job, lambda."""
    return loss_rate_per_s(jobs, reliability) + process_rate_per_s(jobs, reliability)


def copy_s(jobs: Jobs, storage: Storage) -> Numbers:
    """Seconds to copy the largest writer's part between device and host memory."""
    return jobs.checkpoint_bytes / jobs.writers / storage.host_bytes_per_s


def fresh_copy_s(jobs: Jobs, storage: Storage) -> Numbers:
    """Seconds to copy it from the device into memory that was not there before."""
    rate = min(storage.host_bytes_per_s, storage.fresh_bytes_per_s)
    return jobs.checkpoint_bytes / jobs.writers / rate


def stall_s(jobs: Jobs, storage: Storage) -> Numbers:
    """Seconds of training that one checkpoint on storage costs.

    Where it is written in the background, the copy to host memory alone.
    """
    if not storage.asynchronous:
        return fresh_copy_s(jobs, storage) + write_s(jobs, storage)
    return copy_s(jobs, storage) if storage.has_pinned else fresh_copy_s(jobs, storage)


def write_s(jobs: Jobs, storage: Storage) -> Numbers:
    """Seconds from host memory to storage, limited by the storage or by the writing nodes."""
    nodes = np.minimum(jobs.nodes, jobs.writers)
    rate = np.minimum(storage.write_bytes_per_s, storage.node_write_bytes_per_s * nodes)
    return _plain(jobs.checkpoint_bytes / rate)


def read_s(jobs: Jobs, storage: Storage) -> Numbers:
    """Seconds to load a checkpoint and what it leaves out: every byte is read once, then copied.

    The broadcast between replicas is left out: that network is faster than storage.
    """
    return _plain(_load_s(jobs.read_bytes, jobs, storage))


def reread_s(jobs: Jobs, storage: Storage) -> Numbers:
    """Seconds of that for the frozen weights that a checkpoint leaves out."""
    return _plain(_load_s(jobs.reread_bytes, jobs, storage))


def _load_s(size_bytes: Numbers, jobs: Jobs, storage: Storage) -> Numbers:
    rate = np.minimum(storage.read_bytes_per_s, storage.node_read_bytes_per_s * jobs.nodes)
    return size_bytes / rate + size_bytes / jobs.writers / storage.host_bytes_per_s


def waiting_ratio(jobs: Jobs, reliability: FailureModel) -> Numbers:
    """Share of the wall clock that the job waits for a repair: B(S + 1, a), see the module.

    By the recursion B(0) = 1, B(k) = a B(k-1) / (k + a B(k-1)); for several kinds of nodes as
    kinds.py says.
    """
    if jobs.kinds:
        shares = [float(waiting_ratio(kind, reliability)) for kind in jobs.kinds]
        odds = sum(share / (1.0 - share) for share in shares)
        return odds / (1.0 + odds)
    load = loss_rate_per_s(jobs, reliability) * reliability.repair_s
    servers = np.floor(np.asarray(jobs.spare_nodes, dtype=np.float64)) + 1.0
    blocked = np.ones(np.broadcast(load, servers).shape)
    for k in range(1, int(np.max(servers, initial=0.0)) + 1):
        blocked = np.where(k <= servers, load * blocked / (k + load * blocked), blocked)
        if np.all((k >= servers) | (blocked < NEGLIGIBLE_RATIO)):
            break
    return _plain(blocked)


def longest_wait_s(jobs: Jobs, reliability: FailureModel) -> float:
    """Mean seconds until the first of S + 1 nodes in repair is back, of the kind with fewest S."""
    fewest = min(float(kind.spare_nodes) for kind in jobs.kinds or (jobs,))
    return reliability.repair_s / (math.floor(fewest) + 1.0)


def _plain(value: Numbers) -> Numbers:
    """Return a number for numbers, an array for arrays."""
    return float(value) if np.ndim(value) == 0 else value
