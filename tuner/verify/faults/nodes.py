"""Emulated nodes of a run, and what is done to them.

A node is a group of consecutive ranks with a folder that stands for its memory, and where it is
asked for with a control group and a link. What lasts a while, a full disk or a slow link, is undone
by `undo_due`, a full disk also with the processes that write.
"""

import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from tuner.verify.faults.links import NodeLinks, node_links
from tuner.verify.faults.scenario import Fault, FaultKind, Scenario

MEMORY: Final = Path("/dev/shm")
"""Where the memory of nodes lies, if it is there."""
PREFIX: Final = "moetune-nodes-"
NODE_NAME: Final = "node-{node}"
FULL_DISK_BYTES: Final = 2**16
"""The largest file while a disk is full."""


@dataclass(slots=True, kw_only=True)
class Nodes:
    """The nodes of a run; mutable, as faults change them."""

    num: int
    ranks_per_node: int
    memory: Path
    """Has a folder for each place of a node."""
    places: Sequence[int]
    """Nodes in use, in the order of ranks (tuner/faults/allocation.py)."""
    groups: Sequence[Path]
    """A control group for each, which its ranks join; none: they stay in this one."""
    links: NodeLinks | None
    """None: ranks talk over loopback."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Of the ranks, in their order."""
    full_until_s: float | None = None
    slow_until_s: dict[int, float] = field(default_factory=dict)
    """By node."""

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return self.places[rank // self.ranks_per_node]

    def entering(self, rank: int) -> tuple[str, ...]:
        """Return the prefix of a command that is to run on the node of a rank."""
        return () if self.links is None else self.links.entering(self.node_of(rank))

    @property
    def environment(self) -> dict[str, str]:
        """Return what ranks on nodes need beyond their other variables."""
        return {} if self.links is None else self.links.environment

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """Take the process of the next rank."""
        self.processes.append(process)
        if self.groups:
            members = self.groups[self.node_of(len(self.processes) - 1)] / "cgroup.procs"
            members.write_text(str(process.pid), encoding="ascii")

    def clear(self) -> None:
        """Forget processes that have ended."""
        self.processes.clear()
        self.full_until_s = None

    def use(self, places: Sequence[int], *, keeps_memory: bool) -> None:
        """Run the next launch on some nodes."""
        self.places = tuple(places)
        if not keeps_memory:
            self._empty(range(self.num))

    def inject(
        self, fault: Fault, *, scenario: Scenario, lost: Sequence[int], now_s: float
    ) -> float:
        """Do a fault to nodes in use; return how long it lasts, 0 for those that happen at once.

        Args:
            fault: what, and where.
            scenario: how long it lasts.
            lost: nodes that it takes, if it takes some.
            now_s: since 1970.
        """
        match fault.kind:
            case FaultKind.KILL:
                self._signal([self._first_rank(fault.node) + fault.place], signal.SIGKILL)
            case FaultKind.FREEZE:
                self._signal([self._first_rank(fault.node) + fault.place], signal.SIGSTOP)
            case FaultKind.LOSE_NODE | FaultKind.LOSE_TOGETHER:
                self._lose(lost)
            case FaultKind.FILL_DISK:
                self._limit_files(FULL_DISK_BYTES)
                self.full_until_s = now_s + scenario.disk_full
                return scenario.disk_full
            case FaultKind.SLOW_LINK:
                assert self.links is not None
                self.links.set_rate(fault.node, ratio=scenario.link_slow_ratio)
                self.slow_until_s[fault.node] = now_s + scenario.link_slow
                return scenario.link_slow
        return 0.0

    def undo_due(self, now_s: float) -> None:
        """End what has lasted long enough."""
        if self.full_until_s is not None and now_s >= self.full_until_s:
            self._limit_files(None)
            self.full_until_s = None
        for node, until_s in list(self.slow_until_s.items()):
            if now_s >= until_s and self.links is not None:
                self.links.set_rate(node)
                del self.slow_until_s[node]

    def _lose(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            first = self._first_rank(node)
            self._signal(range(first, first + self.ranks_per_node), signal.SIGKILL)
        self._empty([self.places.index(node) for node in nodes])

    def _first_rank(self, node: int) -> int:
        return self.places.index(node) * self.ranks_per_node

    def _empty(self, places: Sequence[int]) -> None:
        for place in places:
            shutil.rmtree(self.memory / NODE_NAME.format(node=place), ignore_errors=True)

    def _signal(self, ranks: Sequence[int], number: signal.Signals) -> None:
        for rank in ranks:
            process = self.processes[rank]
            # The number of one that was waited for may be another's by now.
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
            if number is signal.SIGKILL:
                process.wait()

    def _limit_files(self, largest_bytes: int | None) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
                soft = hard if largest_bytes is None else largest_bytes
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def emulated_nodes(
    num: int,
    *,
    ranks: int,
    link_bytes_per_s: float | None = None,
    groups: Sequence[Path] = (),
) -> Iterator[Nodes]:
    """Make nodes without anything in their memory, and remove them in the end.

    Args:
        num: of nodes.
        ranks: of the run, a multiple of it.
        link_bytes_per_s: that each node sends at most; None: ranks talk over loopback.
        groups: a control group for each node.

    Raises:
        EnvironmentMissingError: links cannot be made here.
    """
    inside = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None
    _remove_left(inside or Path(tempfile.gettempdir()))
    shaped = link_bytes_per_s and node_links(num, bytes_per_s=link_bytes_per_s)
    with (
        tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", dir=inside) as folder,
        shaped or nullcontext() as links,
    ):
        yield Nodes(
            num=num,
            ranks_per_node=ranks // num,
            memory=Path(folder),
            places=tuple(range(num)),
            groups=groups,
            links=links,
        )


def _remove_left(inside: Path) -> None:
    """Remove the memory of runs whose process was killed outright."""
    for folder in inside.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
