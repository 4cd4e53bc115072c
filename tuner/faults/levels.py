"""Checkpoint levels: where copies of a run's state are, what destroys them, how long they take.

    host     every rank copies its state to the memory of its node, and with `replicas` of one or
             more to that of as many other nodes; steps in between write it
    shared   every rank writes to shared storage, which survives everything

A failure is classed by what it takes with it. Where both levels are due, only the shared one is
written, as Megatron-LM does (`checkpoint_and_decide_exit`). A copy counts once it is durable, i.e.
complete and seen to be so by all ranks; one that is not at a failure is lost with it. The newest
durable copy that survives is restored.

Each rank has one writer in the background, which writes the copies of both levels one after the
other: a copy on hosts that is made while shared storage is written is durable only after that.
Megatron-LM puts both into the queue of one process (`schedule_async_save`,
`PersistentAsyncCaller.async_loop` of core_v0.19.0). Those on hosts are in memory by then, so that
training goes on; those for shared storage are copied from the device by that process, so that
training waits until it gets to them (`preload_fn`).

The renewal model (two_levels.py) and the tests' simulation of single runs read the same values,
which hold no word of a spec.

Sources: Moody et al., SC10 (levels, classes of failures); Wang et al., Gemini, SOSP 2023 (copies in
the memory of peers).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Kind of memory or storage that keeps a checkpoint."""

    HOST = "host"
    """Memory of the nodes."""
    SHARED = "shared"
    """Shared storage."""


class FailureClass(StrEnum):
    """Class of failures by what it destroys, the mildest first."""

    PROCESS = "process"
    """Processes; every node keeps its memory."""
    NODE = "node"
    """A node with its memory."""
    TOGETHER = "together"
    """A node and all nodes that hold replicas of its copy, e.g. a rack."""


CLASSES = tuple(FailureClass)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """Intervals and copies of a run's checkpoints, by level."""

    shared_interval_steps: int
    """Steps from one shared checkpoint to the next; a multiple of the host's."""
    host_interval_steps: int | None = None
    """Steps from one checkpoint to the next, of either level; None: only the shared one is made."""
    replicas: int = 0
    """Other nodes that hold a copy of a node's."""
    asynchronous: bool = False
    """Training goes on while a copy is not durable; otherwise it waits."""

    def __post_init__(self) -> None:
        host, shared = self.host_interval_steps, self.shared_interval_steps
        if shared < 1 or (host is not None and host < 1):
            raise ValueError(f"intervals of {host} and {shared} steps must be one step or more")
        if host is not None and shared % host:
            raise ValueError(
                f"a shared checkpoint every {shared} steps is no multiple of the host's {host}"
            )
        if self.replicas < 0 or (self.replicas and host is None):
            raise ValueError(f"{self.replicas} replicas need checkpoints on hosts")

    @property
    def segments(self) -> int:
        """Checkpoints from one shared one to the next, itself included."""
        host = self.host_interval_steps
        return 1 if host is None else self.shared_interval_steps // host

    @property
    def segment_steps(self) -> int:
        """Steps from one checkpoint to the next."""
        return self.shared_interval_steps // self.segments

    @property
    def levels(self) -> tuple[Level, ...]:
        """Return the levels that are written."""
        return (Level.SHARED,) if self.segments == 1 else (Level.HOST, Level.SHARED)

    def survives(self, kind: FailureClass) -> bool:
        """Return whether copies on hosts outlive a failure."""
        if kind is FailureClass.NODE:
            return self.replicas > 0
        return kind is FailureClass.PROCESS


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeconds:
    """Durations of one run in seconds."""

    step_s: float
    stall_s: Mapping[Level, float]
    """Seconds that a checkpoint stops training, whether it is written asynchronously or not."""
    durable_after_s: Mapping[Level, float]
    """Seconds from the end of the stall until the copy is durable, if no other one is being
    written."""
    restart_s: Mapping[tuple[Level, FailureClass], float]
    """Seconds from a failure to the first step, by the level that is restored and the worst failure
    since training stopped; for the host level only classes that its copies can outlive."""

    def __post_init__(self) -> None:
        values = [*self.stall_s.values(), *self.durable_after_s.values(), *self.restart_s.values()]
        if not 0.0 < self.step_s < math.inf:
            raise ValueError(f"a step of {self.step_s} s must be above zero")
        if not all(0.0 <= value < math.inf for value in values):
            raise ValueError(f"durations {values} s cannot be below zero")

    def stopped_s(self, level: Level, *, asynchronous: bool) -> float:
        """Seconds that one checkpoint stops training."""
        return self.stall_s[level] + (0.0 if asynchronous else self.durable_after_s[level])

    def background_s(self, level: Level, *, asynchronous: bool) -> float:
        """Seconds of training after it until the copy is durable."""
        return self.durable_after_s[level] if asynchronous else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRates:
    """Failures per second of the whole job, exponential and independent."""

    process_per_s: float = 0.0
    node_per_s: float = 0.0
    """Losses of nodes whose replicas survive."""
    together_per_s: float = 0.0
    """Losses of nodes together with their replicas."""

    def __post_init__(self) -> None:
        rates = (self.process_per_s, self.node_per_s, self.together_per_s)
        if not (min(rates) >= 0.0 and 0.0 < sum(rates) < math.inf):
            raise ValueError(f"rates {rates} cannot be below zero, and something must fail")

    @property
    def per_s(self) -> float:
        """Return the rate of all classes together."""
        return self.process_per_s + self.node_per_s + self.together_per_s

    def of(self, kind: FailureClass) -> float:
        """Return the rate of one class."""
        by_class = {
            FailureClass.PROCESS: self.process_per_s,
            FailureClass.NODE: self.node_per_s,
            FailureClass.TOGETHER: self.together_per_s,
        }
        return by_class[kind]
