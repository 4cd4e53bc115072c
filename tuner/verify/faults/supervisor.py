"""Runs the reference step to its last step through the faults of a scenario.

Every rank is a process of its own (python -m profilers.steps), connected as profilers/local_ranks
connects them, and launched again in full after each failure. A node is a group of consecutive ranks
with a folder of its own that stands for its memory. The supervisor does what a scheduler does: it
ends a launch whose rank has died, or in which no rank has said anything for `hang` seconds.

Not covered: links that become slow, and engines other than the reference step.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from profilers.local_ranks import end_sessions, has_ended, rank_environment, rendezvous_folder
from profilers.steps.config import Checkpoints, HostCheckpoints, SharedCheckpoints, StepConfig
from tuner.errors import TunerError
from tuner.verify.faults.events import EVENTS_NAME, RankEvents, rank_events, restored_at_s
from tuner.verify.faults.scenario import Fault, FaultKind, StatedPolicy
from tuner.verify.launcher import CONFIG_NAME, LOG_NAME, REPORT_NAME
from tuner.verify.termination import TRIAL_MARK

POLL_S: Final = 0.005
MEMORY: Final = Path("/dev/shm")
"""Where the memory of nodes lies, if it is there."""
NODE_NAME: Final = "node-{node}"
FULL_DISK_BYTES: Final = 2**16
"""The largest file while a disk is full."""
MOST_IN_VAIN: Final = 5
"""Launches in a row that end by themselves before a step is done."""


class FaultRunError(TunerError):
    """A run did not reach its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault that was done to a run."""

    fault: Fault
    time_s: float
    """Since 1970."""


@dataclass(slots=True, kw_only=True)
class LaunchLog:
    """One launch; mutable while it lasts."""

    ranks: list[RankEvents]
    failed_at_s: float | None = None
    """Since 1970, of the fault that ended it; None: it reached the last step."""
    noticed_at_s: float | None = None
    faults: list[Injected] = field(default_factory=list)
    """Done while it was the launch, the one that ended it first among those that end launches."""

    @property
    def restored_at_s(self) -> float | None:
        """When training went on."""
        return restored_at_s(self.ranks)

    @property
    def is_finished(self) -> bool:
        """Whether all ranks have taken the last step."""
        return all(rank.of("finished") for rank in self.ranks)


def checkpointed(
    config: StepConfig, policy: StatedPolicy, *, steps: int, nodes: int, folder: Path, memory: Path
) -> StepConfig:
    """Return the configuration of a run that saves as a policy says."""
    host = None
    if policy.host is not None:
        host = HostCheckpoints(
            folder=str(memory / NODE_NAME),
            interval_steps=policy.host,
            replicas=policy.replicas,
        )
    checkpoints = Checkpoints(
        total_steps=steps,
        shared=SharedCheckpoints(folder=str(folder / "shared"), interval_steps=policy.shared),
        host=host,
        asynchronous=policy.asynchronous,
    )
    ranks_per_node = config.parallelism.world // nodes
    degrees = config.parallelism.model_copy(update={"ranks_per_node": ranks_per_node})
    fields = {"parallelism": degrees, "checkpoints": checkpoints, "memory_limit_bytes": None}
    return StepConfig.model_validate(config.model_copy(update=fields).model_dump())


@contextmanager
def memory_of_nodes() -> Iterator[Path]:
    """Make the folder of all nodes' memories, and remove it in the end."""
    inside = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="moetune-nodes-", dir=inside) as folder:
        yield Path(folder)


def run_through_faults(
    config: StepConfig,
    faults: Sequence[Fault],
    *,
    folder: Path,
    memory: Path,
    hang_s: float,
    disk_full_s: float,
    deadline_s: float,
    groups: Sequence[Path] = (),
) -> list[LaunchLog]:
    """Run until the last step; return its launches.

    Args:
        config: with checkpoints.
        faults: in the order of time.
        folder: of this run alone.
        memory: of the nodes.
        hang_s: without an event after which a launch is ended.
        disk_full_s: how long a disk is full.
        deadline_s: of the whole run.
        groups: a control group for each node, which its ranks join; none: they stay in this one.

    Raises:
        FaultRunError: launches fail by themselves, or the deadline passes.
    """
    folder.mkdir(parents=True)
    (folder / CONFIG_NAME).write_text(config.model_dump_json(indent=1), encoding="utf-8")
    run = _Run(
        config=config,
        folder=folder,
        memory=memory,
        groups=groups,
        hang_s=hang_s,
        disk_full_s=disk_full_s,
        end_s=time.time() + deadline_s,
        coming=list(faults),
    )
    launches: list[LaunchLog] = []
    in_vain = 0
    while True:
        launches.append(run.launch(len(launches)))
        last = launches[-1]
        if last.failed_at_s is None:
            return launches
        has_progress = bool(last.faults) or any(rank.of("step_done") for rank in last.ranks)
        in_vain = 0 if has_progress else in_vain + 1
        if in_vain == MOST_IN_VAIN:
            log = folder / f"launch-{len(launches) - 1}" / LOG_NAME
            raise FaultRunError(f"{in_vain} launches in a row failed by themselves; see {log}")


@dataclass(slots=True, kw_only=True)
class _Run:
    """A run and the faults that are still to come."""

    config: StepConfig
    folder: Path
    memory: Path
    groups: Sequence[Path]
    hang_s: float
    disk_full_s: float
    end_s: float
    coming: list[Fault]
    first_step_at_s: float | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    full_until_s: float | None = None

    @property
    def ranks_per_node(self) -> int:
        each = self.config.parallelism.ranks_per_node
        assert each is not None
        return each

    @property
    def nodes(self) -> int:
        return self.config.parallelism.world // self.ranks_per_node

    def launch(self, number: int) -> LaunchLog:
        """Start all ranks and watch them until they end."""
        world = self.config.parallelism.world
        own = self.folder / f"launch-{number}"
        own.mkdir()
        log = LaunchLog(ranks=rank_events(own, world=world))
        program = (sys.executable, "-P", "-m", "profilers.steps", str(self.folder / CONFIG_NAME))
        written = ("--report", str(own / REPORT_NAME), "--events", str(own / EVENTS_NAME))
        with rendezvous_folder() as rendezvous, (own / LOG_NAME).open("wb") as output:
            try:
                for rank in range(world):
                    environment = rank_environment(rank, ranks=world, folder=rendezvous)
                    self._start((*program, *written), environment, output=output.fileno())
                    if self.groups:
                        members = self.groups[rank // self.ranks_per_node] / "cgroup.procs"
                        members.write_text(str(self.processes[-1].pid), encoding="ascii")
                self._watch(log)
            finally:
                for process in self.processes:
                    # A stopped one would not heed SIGTERM.
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                end_sessions(self.processes)
                self.processes.clear()
                self.full_until_s = None
                for rank_log in log.ranks:
                    rank_log.read()
        return log

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str], *, output: int
    ) -> None:
        self.processes.append(
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**environment, TRIAL_MARK: str(self.folder)},
            )
        )

    def _watch(self, log: LaunchLog) -> None:
        heard_s = time.time()
        while True:
            now_s = time.time()
            if now_s > self.end_s:
                raise FaultRunError(f"{self.folder}: the run did not end before its deadline")
            if sum(rank.read() for rank in log.ranks):
                heard_s = now_s
            if self.first_step_at_s is None:
                self.first_step_at_s = log.restored_at_s
            if log.is_finished:
                return
            self._inject_due(log, now_s)
            has_failed = any(has_ended(one) and one.wait() for one in self.processes)
            if has_failed or self._hangs(log, now_s - heard_s):
                log.failed_at_s = _failed_at_s(log, now_s)
                log.noticed_at_s = now_s
                return
            time.sleep(POLL_S)

    def _hangs(self, log: LaunchLog, silent_s: float) -> bool:
        return log.restored_at_s is not None and silent_s > self.hang_s

    def _inject_due(self, log: LaunchLog, now_s: float) -> None:
        if self.full_until_s is not None and now_s >= self.full_until_s:
            self._limit_files(None)
            self.full_until_s = None
        begin_s = self.first_step_at_s
        while begin_s is not None and self.coming and self.coming[0].at_s <= now_s - begin_s:
            fault = self.coming.pop(0)
            log.faults.append(Injected(fault=fault, time_s=time.time()))
            self._inject(fault)

    def _inject(self, fault: Fault) -> None:
        first = fault.node * self.ranks_per_node
        match fault.kind:
            case FaultKind.KILL:
                self._signal([first + fault.place], signal.SIGKILL)
            case FaultKind.FREEZE:
                self._signal([first + fault.place], signal.SIGSTOP)
            case FaultKind.LOSE_NODE:
                self._lose([fault.node])
            case FaultKind.LOSE_TOGETHER:
                host = self.config.checkpoints and self.config.checkpoints.host
                each = 1 + (host.replicas if host else 0)
                self._lose([(fault.node + one) % self.nodes for one in range(each)])
            case FaultKind.FILL_DISK:
                self._limit_files(FULL_DISK_BYTES)
                self.full_until_s = time.time() + self.disk_full_s

    def _lose(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            first = node * self.ranks_per_node
            self._signal(range(first, first + self.ranks_per_node), signal.SIGKILL)
        for node in nodes:
            shutil.rmtree(self.memory / NODE_NAME.format(node=node), ignore_errors=True)

    def _signal(self, ranks: Sequence[int], number: signal.Signals) -> None:
        for rank in ranks:
            process = self.processes[rank]
            # One that has ended is not reaped before this launch is over, so its number is its own.
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


def _failed_at_s(log: LaunchLog, noticed_s: float) -> float:
    """Return when the fault was done that ended a launch; it may have ended by itself."""
    ending = [one.time_s for one in log.faults if one.fault.kind is not FaultKind.FILL_DISK]
    return ending[0] if ending else noticed_s
