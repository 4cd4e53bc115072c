"""A run with failures, event by event: steps, checkpoints, background writes, restarts.

Failures are given or drawn from a seed. The rules are those of tuner/faults/levels.py; the formulas
of two_levels.py and fewer_nodes.py are not used, so that they can be held against it.

    save     a checkpoint is due after the last step of its interval, not after that of the run.
             Copies are written one after the other, of whichever level: one on hosts waits for its
             turn while training goes on, and before one on shared storage training waits until all
             others are durable (levels.py)
    failure  copies that are not durable by then are lost, and those on hosts where the failure
             takes them
    restart  from the newest copy that is left, or the start of the run; a failure during it begins
             it again
    repair   a lost node is replaced by a spare one and repaired; where no spare is left the job
             waits for the first repair. Nothing runs by then, so that failures in this time are
             not counted
    fewer    where the run has a layout of fewer nodes, it goes on in that instead, from shared
             storage: copies on hosts belong to the ranks that wrote them. Every restart takes the
             layout that there are nodes for, and so does the next shared checkpoint after a repair,
             once it is durable. Only where even fewer nodes are left the job waits
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.expect import present
from tuner.faults.levels import (
    CLASSES,
    FailureClass,
    Level,
    RunSeconds,
    SavePolicy,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure."""

    at_s: float
    """Seconds since the run's first step began."""
    kind: FailureClass
    repair_s: float | None = None
    """Until its node can be used again; None: that of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """When a run in one layout saves, and how long that and its steps take."""

    policy: SavePolicy
    seconds: RunSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerNodesLayout:
    """How a run goes on without a spare node, on one node less."""

    layout: Layout
    idle_nodes: int = 0
    """Nodes beside it that are not lost and have nothing to do; they are its spares."""
    return_s: float
    """From a durable checkpoint on shared storage to the first step of all nodes."""
    failures: Iterable[Failure] = ()
    """Those of its nodes, by time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run to simulate."""

    steps: int
    seconds: RunSeconds
    repair_s: float = 0.0
    """Of a node whose failure states none; 0: there is always a replacement."""
    spare_nodes: int = 0
    fewer: FewerNodesLayout | None = None
    """The layout without a spare node; None: the job waits for a repair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """What happened, in seconds; the parts add up to the wall clock."""

    wall_s: float
    training_s: float
    """Steps of the run, each once."""
    lost_s: float
    """Steps, and stalls of checkpoints, that were repeated."""
    saving_s: float
    """Stalls of checkpoints that were kept."""
    recovery_s: float
    """From failures (or repairs that were waited for) until training went on."""
    waiting_s: float
    """For repairs."""
    slower_s: float
    """Of training: what steps with fewer nodes took beyond those with all."""
    restores: tuple[Level, ...]
    """Where each restart found its copy."""
    returns: int
    """To all nodes, at a checkpoint."""


def simulate(policy: SavePolicy, run: Run, *, failures: Iterable[Failure]) -> SimulatedRun:
    """Simulate a run until its last step; failures come in the order of time."""
    state = _State(full=Layout(policy=policy, seconds=run.seconds), run=run, coming=iter(failures))
    while not _train(state):
        _recover(state)
    return SimulatedRun(
        wall_s=state.clock_s,
        training_s=state.trained_s,
        lost_s=state.lost_s,
        saving_s=state.saving_s,
        recovery_s=state.recovery_s,
        waiting_s=state.waiting_s,
        slower_s=state.slower_s,
        restores=tuple(state.restores),
        returns=state.returns,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    level: Level
    step: int = 0
    trained_s: float = 0.0
    """Seconds of its steps."""
    saving_s: float = 0.0
    """Stalls of all checkpoints that were kept until then, its own included."""
    slower_s: float = 0.0
    """Of its steps: what those with fewer nodes took beyond the others."""
    durable_at_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _State:
    """The run at one moment; mutable while it lasts."""

    full: Layout
    run: Run
    coming: Iterator[Failure]
    layout: Layout = field(init=False)
    """In use."""
    other: Iterator[Failure] = field(init=False)
    """Failures in the other layout."""
    failure: Failure | None = None
    """The next one."""
    clock_s: float = 0.0
    step: int = 0
    """Steps until the last checkpoint or restart."""
    trained_s: float = 0.0
    """What they took."""
    into_s: float = 0.0
    """Work after them."""
    saving_s: float = 0.0
    lost_s: float = 0.0
    recovery_s: float = 0.0
    waiting_s: float = 0.0
    slower_s: float = 0.0
    durable: dict[Level, _Copy] = field(default_factory=dict)
    pending: list[_Copy] = field(default_factory=list)
    """Copies that are not durable, in the order of their writes."""
    repairs: list[float] = field(default_factory=list)
    """When each node in repair is back, a heap."""
    restores: list[Level] = field(default_factory=list)
    returns: int = 0

    def __post_init__(self) -> None:
        self.layout = self.full
        self.durable[Level.SHARED] = _Copy(level=Level.SHARED)
        self.failure = next(self.coming, None)
        self.other = iter(self.run.fewer.failures if self.run.fewer else ())

    @property
    def is_full(self) -> bool:
        return self.layout is self.full

    def missing(self) -> int:
        """Count the nodes in repair beyond the spare ones."""
        while self.repairs and self.repairs[0] <= self.clock_s:
            heapq.heappop(self.repairs)
        return max(0, len(self.repairs) - self.run.spare_nodes)

    def launch(self) -> None:
        """Take the layout that there are nodes for; copies on hosts are useless in another one."""
        fewer = self.run.fewer
        layout = self.full if fewer is None or not self.missing() else fewer.layout
        if layout is self.layout:
            return
        self.layout = layout
        self.durable.pop(Level.HOST, None)
        self.coming, self.other = self.other, self.coming
        if self.failure is not None:
            # Of the other layout, whose next one it stays.
            self.other = itertools.chain((self.failure,), self.other)
        self.failure = next(self.coming, None)
        self.skip_failures()

    def skip_failures(self) -> None:
        """Leave out failures that met nothing."""
        while self.failure is not None and self.failure.at_s < self.clock_s:
            self.failure = next(self.coming, None)

    @property
    def unwritten_s(self) -> float:
        """Seconds until all copies are durable."""
        last_s = self.pending[-1].durable_at_s if self.pending else self.clock_s
        return max(0.0, last_s - self.clock_s)

    def finish_writes(self) -> None:
        """Count the copies as durable that are by now."""
        while self.pending and self.pending[0].durable_at_s <= self.clock_s:
            copy = self.pending.pop(0)
            self.durable[copy.level] = copy

    def spend(self, time_s: float) -> float:
        """Let time pass until it is over or a failure comes; return what passed."""
        if self.failure is not None and self.clock_s + time_s > self.failure.at_s:
            time_s = max(0.0, self.failure.at_s - self.clock_s)
        self.clock_s += time_s
        return time_s


def _train(state: _State) -> bool:
    """Train and save until the next failure; True: until the end."""
    steps = state.run.steps
    while True:
        policy, step_s = state.layout.policy, state.layout.seconds.step_s
        target = min((state.step // policy.segment_steps + 1) * policy.segment_steps, steps)
        work_s = (target - state.step) * step_s
        state.into_s = state.spend(work_s)
        if state.into_s < work_s:
            return False
        state.slower_s += work_s - (target - state.step) * state.full.seconds.step_s
        state.step, state.trained_s, state.into_s = target, state.trained_s + work_s, 0.0
        if target == steps:
            return True
        is_shared = target % policy.shared_interval_steps == 0
        if not _save(state, Level.SHARED if is_shared else Level.HOST):
            return False
        can_return = is_shared and not state.is_full and not state.missing()
        if can_return and not _return(state):
            return False


def _save(state: _State, level: Level) -> bool:
    """Stall for a checkpoint and begin its write; False: it failed before."""
    seconds, is_async = state.layout.seconds, state.layout.policy.asynchronous
    waits_s = state.unwritten_s if level is Level.SHARED else 0.0
    stall_s = waits_s + seconds.stopped_s(level, asynchronous=is_async)
    spent_s = state.spend(stall_s)
    state.saving_s += spent_s
    if spent_s < stall_s:
        return False
    state.finish_writes()
    background_s = seconds.background_s(level, asynchronous=is_async)
    state.pending.append(
        _Copy(
            level=level,
            step=state.step,
            trained_s=state.trained_s,
            saving_s=state.saving_s,
            slower_s=state.slower_s,
            durable_at_s=state.clock_s + state.unwritten_s + background_s,
        )
    )
    return True


def _return(state: _State) -> bool:
    """Go back to all nodes from the checkpoint that was just made; False: it failed before."""
    return_s = state.unwritten_s + present(state.run.fewer).return_s
    spent_s = state.spend(return_s)
    state.recovery_s += spent_s
    if spent_s < return_s:
        return False
    state.finish_writes()
    state.launch()
    state.returns += 1
    return True


def _recover(state: _State) -> None:
    """Restart until a restart succeeds, and go back to the copy that is left."""
    state.finish_writes()
    state.pending.clear()
    position_s = state.trained_s + state.into_s
    worst = FailureClass.PROCESS
    while True:
        failure, state.failure = present(state.failure), next(state.coming, None)
        worst = max(worst, failure.kind, key=CLASSES.index)
        _replace_node(state, failure)
        if not state.layout.policy.survives(worst):
            state.durable.pop(Level.HOST, None)
        state.launch()
        level = max(state.durable, key=lambda one: (state.durable[one].step, one))
        restart_s = state.layout.seconds.restart_s[level, worst]
        spent_s = state.spend(restart_s)
        state.recovery_s += spent_s
        if spent_s == restart_s:
            break
    copy = state.durable[level]
    state.lost_s += position_s - copy.trained_s + state.saving_s - copy.saving_s
    state.step, state.trained_s, state.slower_s = copy.step, copy.trained_s, copy.slower_s
    state.into_s, state.saving_s = 0.0, copy.saving_s
    state.restores.append(level)


def _replace_node(state: _State, failure: Failure) -> None:
    """Put a spare node in the place of a lost one, do without it, or wait for a repair."""
    if state.run.repair_s == 0.0 or failure.kind is FailureClass.PROCESS:
        return
    repair_s = state.run.repair_s if failure.repair_s is None else failure.repair_s
    heapq.heappush(state.repairs, state.clock_s + repair_s)
    fewer = state.run.fewer
    excess = state.missing() - (0 if fewer is None else 1 + fewer.idle_nodes)
    if excess > 0:
        ready_at_s = heapq.nsmallest(excess, state.repairs)[-1]
        state.waiting_s += ready_at_s - state.clock_s
        state.clock_s = ready_at_s
        state.skip_failures()
