"""Runs the reference step to its last step through the faults of a scenario.

Every rank is a process of its own (python -m profilers.steps), connected as profilers/local_ranks
connects them, and launched again in full after each failure. The supervisor does what a scheduler
does: it ends a launch whose rank has died, in which no rank has said anything for `hang` seconds,
or which does not train after `start_limit` seconds. Where nodes are repaired and too few are left,
it waits for one, or launches the layout of fewer nodes; that is ended by the first checkpoint on
shared storage that is durable and was made with a node for every place again.

Not covered: engines other than the reference step.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from profilers.local_ranks import end_sessions, has_ended, rank_environment, rendezvous_folder
from profilers.steps.config import Checkpoints, HostCheckpoints, SharedCheckpoints, StepConfig
from tuner.errors import TunerError
from tuner.faults.allocation import Allocation
from tuner.faults.levels import Level
from tuner.units import format_s
from tuner.verify.faults.events import EVENTS_NAME, RankEvents, rank_events, restored_at_s
from tuner.verify.faults.nodes import NODE_NAME, Nodes
from tuner.verify.faults.scenario import CLASSES, Fault, FaultKind, Scenario, StatedPolicy
from tuner.verify.launcher import CONFIG_NAME, LOG_NAME, REPORT_NAME
from tuner.verify.termination import TRIAL_MARK

POLL_S: Final = 0.02
MOST_WORDS: Final = 1000
"""Of a launch that are repeated, in bytes."""
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
    lasts_s: float = 0.0
    """0 for those that happen at once."""


@dataclass(slots=True, kw_only=True)
class LaunchLog:
    """One launch; mutable while it lasts."""

    ranks: list[RankEvents]
    is_full: bool = True
    """Whether it had all nodes."""
    failed_at_s: float | None = None
    """Since 1970, of the fault or the return that ended it; None: it reached the last step."""
    is_return: bool = False
    """It was ended to go on with all nodes, from the checkpoint that was made then."""
    noticed_at_s: float | None = None
    """When it was seen to have failed, or that the checkpoint was durable."""
    waited_s: float = 0.0
    """From then on for a repair, before the next launch."""
    is_overdue: bool = False
    """It was ended because it did not train yet."""
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
    config: StepConfig, policy: StatedPolicy, *, steps: int, nodes: Nodes, folder: Path
) -> StepConfig:
    """Return the configuration of a run that saves as a policy says."""
    host = None
    if policy.host is not None:
        host = HostCheckpoints(
            folder=str(nodes.memory / NODE_NAME),
            interval_steps=policy.host,
            replicas=policy.replicas,
        )
    checkpoints = Checkpoints(
        total_steps=steps,
        shared=SharedCheckpoints(folder=str(folder / "shared"), interval_steps=policy.shared),
        host=host,
        asynchronous=policy.asynchronous,
    )
    degrees = config.parallelism.model_copy(update={"ranks_per_node": nodes.ranks_per_node})
    fields = {"parallelism": degrees, "checkpoints": checkpoints, "memory_limit_bytes": None}
    return StepConfig.model_validate(config.model_copy(update=fields).model_dump())


def run_through_faults(
    config: StepConfig,
    faults: Sequence[Fault],
    *,
    folder: Path,
    nodes: Nodes,
    scenario: Scenario,
    deadline_s: float,
    fewer: StepConfig | None = None,
) -> list[LaunchLog]:
    """Run until the last step; return its launches.

    Args:
        config: with checkpoints.
        faults: in the order of time.
        folder: of this run alone.
        nodes: that its ranks run on.
        scenario: how long faults last, and what ends a launch.
        deadline_s: of the whole run.
        fewer: the same run on fewer nodes; None: without a spare node it waits for a repair.

    Raises:
        FaultRunError: launches fail by themselves, or the deadline passes.
    """
    folder.mkdir(parents=True)
    idle_nodes = None
    if fewer is not None:
        idle_nodes = nodes.num - 1 - fewer.parallelism.world // nodes.ranks_per_node
    run = _Run(
        full=config,
        fewer=fewer,
        allocation=Allocation(nodes=nodes.num, spare_nodes=scenario.spares, idle_nodes=idle_nodes),
        folder=folder,
        nodes=nodes,
        scenario=scenario,
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
            how = f"failed by themselves: {_last_line(folder / f'launch-{len(launches) - 1}')}"
            if last.is_overdue:
                how = f"did not train after start_limit, {format_s(scenario.start_limit)}"
            raise FaultRunError(f"{in_vain} launches in a row {how}")
        run.wait_for_nodes(last)


@dataclass(slots=True, kw_only=True)
class _Run:
    """A run and the faults that are still to come."""

    full: StepConfig
    fewer: StepConfig | None
    allocation: Allocation
    folder: Path
    nodes: Nodes
    scenario: Scenario
    end_s: float
    coming: list[Fault]
    first_step_at_s: float | None = None
    full_at_s: float = 0.0
    """When there is a node for every place again, since 1970."""

    @property
    def config(self) -> StepConfig:
        """Of the layout in use."""
        if self.allocation.is_full:
            return self.full
        assert self.fewer is not None
        return self.fewer

    def launch(self, number: int) -> LaunchLog:
        """Start all ranks on the nodes that there are and watch them until they end."""
        now_s = time.time()
        self.full_at_s = self.allocation.full_at_s(now_s)
        is_other = self.allocation.allocate(now_s)
        self.nodes.use(self.allocation.places, keeps_memory=not is_other)
        world = self.config.parallelism.world
        own = self.folder / f"launch-{number}"
        own.mkdir()
        (own / CONFIG_NAME).write_text(self.config.model_dump_json(indent=1), encoding="utf-8")
        log = LaunchLog(ranks=rank_events(own, world=world), is_full=self.allocation.is_full)
        program = (sys.executable, "-P", "-m", "profilers.steps", str(own / CONFIG_NAME))
        written = ("--report", str(own / REPORT_NAME), "--events", str(own / EVENTS_NAME))
        nodes = self.nodes
        with rendezvous_folder() as rendezvous, (own / LOG_NAME).open("wb") as output:
            try:
                for rank in range(world):
                    environment = rank_environment(rank, ranks=world, folder=rendezvous)
                    command = (*nodes.entering(rank), *program, *written)
                    nodes.add(self._started(command, environment, output=output.fileno()))
                self._watch(log)
            finally:
                # A stopped one would not heed SIGTERM; the number of one that was waited for may be
                # another's by now.
                for process in nodes.processes:
                    if process.returncode is None:
                        with suppress(ProcessLookupError):
                            os.killpg(process.pid, signal.SIGKILL)
                end_sessions(nodes.processes)
                nodes.clear()
                for rank_log in log.ranks:
                    rank_log.read()
        return log

    def wait_for_nodes(self, log: LaunchLog) -> None:
        """Wait after a launch until there are nodes for the next; faults by then meet nothing."""
        ready_at_s = self.allocation.ready_at_s(time.time())
        if log.failed_at_s is None or ready_at_s <= time.time():
            return
        log.waited_s = ready_at_s - log.failed_at_s
        while (now_s := time.time()) < ready_at_s:
            self._check_deadline(now_s)
            self.nodes.undo_due(now_s)
            time.sleep(POLL_S)
        if self.first_step_at_s is not None:
            now_s = ready_at_s - self.first_step_at_s
            self.coming = [fault for fault in self.coming if fault.at_s > now_s]

    def _check_deadline(self, now_s: float) -> None:
        if now_s > self.end_s:
            raise FaultRunError(f"{self.folder}: the run did not end before its deadline")

    def _started(
        self, command: Sequence[str], environment: Mapping[str, str], *, output: int
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**environment, **self.nodes.environment, TRIAL_MARK: str(self.folder)},
        )

    def _watch(self, log: LaunchLog) -> None:
        begin_s = heard_s = time.time()
        while True:
            now_s = time.time()
            self._check_deadline(now_s)
            if sum(rank.read() for rank in log.ranks):
                heard_s = now_s
            if self.first_step_at_s is None:
                self.first_step_at_s = log.restored_at_s
            if log.is_finished or self._returns(log, now_s):
                return
            self._inject_due(log, now_s)
            has_failed = self._has_failed()
            log.is_overdue = not has_failed and self._is_overdue(log, begin_s)
            hangs = not has_failed and self._hangs(log, heard_s)
            if hangs and not any(one.fault.kind is FaultKind.FREEZE for one in log.faults):
                raise FaultRunError(
                    f"no rank said anything for {format_s(self.scenario.hang)}, and none was"
                    " stopped: state a longer hang"
                )
            if has_failed or log.is_overdue or hangs:
                log.failed_at_s = _failed_at_s(log, now_s)
                log.noticed_at_s = now_s
                return
            time.sleep(POLL_S)

    def _returns(self, log: LaunchLog, now_s: float) -> bool:
        """Whether a launch on fewer nodes is ended to go on with all, from its last checkpoint."""
        if self.allocation.is_full or now_s < self.full_at_s:
            return False
        if any(one.fault.kind in CLASSES for one in log.faults):
            # It is about to fail.
            return False
        first, total = log.ranks[0], self.full.checkpoints and self.full.checkpoints.total_steps
        durable = {one["step"] for one in first.of("durable") if one["level"] == Level.SHARED}
        made_s = [
            float(one["time_s"])
            for one in first.of("training_resumed")
            if one["level"] == Level.SHARED and one["step"] in durable and one["step"] != total
        ]
        if not made_s or made_s[-1] < self.full_at_s:
            return False
        log.is_return, log.failed_at_s, log.noticed_at_s = True, made_s[-1], now_s
        return True

    def _has_failed(self) -> bool:
        return any(has_ended(one) and one.wait() for one in self.nodes.processes)

    def _is_overdue(self, log: LaunchLog, begin_s: float) -> bool:
        return log.restored_at_s is None and time.time() - begin_s > self.scenario.start_limit

    def _hangs(self, log: LaunchLog, heard_s: float) -> bool:
        return log.restored_at_s is not None and time.time() - heard_s > self.scenario.hang

    def _inject_due(self, log: LaunchLog, now_s: float) -> None:
        self.nodes.undo_due(now_s)
        begin_s = self.first_step_at_s
        while begin_s is not None and self.coming and self.coming[0].at_s <= now_s - begin_s:
            fault = self.coming.pop(0)
            if fault.kind is not FaultKind.FILL_DISK and not self.allocation.uses(fault.node):
                continue
            time_s, repair_s = time.time(), self.scenario.repair
            lost = self._lost(fault)
            lasts_s = self.nodes.inject(fault, scenario=self.scenario, lost=lost, now_s=time_s)
            if repair_s is not None:
                self.allocation.lose(lost, back_at_s=time_s + repair_s)
            log.faults.append(Injected(fault=fault, time_s=time_s, lasts_s=lasts_s))

    def _lost(self, fault: Fault) -> list[int]:
        """Return the nodes that a fault takes."""
        match fault.kind:
            case FaultKind.LOSE_NODE:
                return [fault.node]
            case FaultKind.LOSE_TOGETHER:
                host = self.config.checkpoints and self.config.checkpoints.host
                return self.allocation.neighbours(fault.node, 1 + (host.replicas if host else 0))
        return []


def _last_line(launch: Path) -> str:
    """Return the last words of a launch, whose folder is about to be removed."""
    with (launch / LOG_NAME).open("rb") as log:
        log.seek(-min(MOST_WORDS, log.seek(0, os.SEEK_END)), os.SEEK_END)
        lines = log.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "without a word")


def _failed_at_s(log: LaunchLog, noticed_s: float) -> float:
    """Return when the fault was done that ended a launch; it may have ended by itself."""
    ending = [one.time_s for one in log.faults if one.fault.kind in CLASSES]
    return ending[0] if ending else noticed_s
