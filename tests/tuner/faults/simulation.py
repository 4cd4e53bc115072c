"""A run with failures, event by event: steps, checkpoints, background writes, restarts.

Failures are given or drawn from a seed. The rules
are those of tuner/faults/levels.py; the formulas of two_levels.py are not used, so that each can be
held against the other.

    save     a checkpoint is due after the last step of its interval, not after that of the run.
             Copies are written one after the other, of whichever level: one on hosts waits for its
             turn while training goes on, and before one on shared storage training waits until all
             others are durable (levels.py)
    failure  copies that are not durable by then are lost, and those on hosts where the failure
             takes them. If all nodes that hold a node's copy are lost before it is back, that
             counts as one failure of them together. Nodes exchange copies in groups of neighbours,
             0 with 1, 2 with 3 where there is one replica (as with a replication jump of one node
             in NVIDIA's resiliency extension), and copies are back when training goes on; or each
             sends its own to the next ones around, and a node that was
             lost has none until the next checkpoint on hosts is durable
    restart  from the newest copy that is left, or the start of the run; a failure during it begins
             it again
    repair   a lost node is replaced by a spare one and repaired; where no spare is left the job
             waits for the first repair. Nothing runs by then, so that failures in this time are
             not counted
    fewer    where the run has a layout of fewer nodes, it goes on in that instead, from shared
             storage: copies on hosts belong to the ranks that wrote them. Every restart takes the
             layout that there are nodes for, and so does the next shared checkpoint after a repair,
             once it is durable. Only where even fewer nodes are left the job waits. Failures of
             named nodes that are not in use meet nothing
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.tuner.faults.allocation import Allocation
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
    node: int | None = None
    """The node that failed, counted from 0; None: any, which takes no other's replica along. With
    a run of `ring_nodes`, one that fails together with its replicas takes their nodes along."""
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
    failures: Iterable["Failure"] | None = None
    """Those of its nodes, by time; None: those of all."""

    def __post_init__(self) -> None:
        if self.idle_nodes < 0 or not 0.0 <= self.return_s < math.inf:
            raise ValueError(
                f"{self.idle_nodes} idle nodes, return {self.return_s} s: nothing is below zero"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run to simulate."""

    steps: int
    seconds: RunSeconds
    repair_s: float = 0.0
    """Of a node whose failure states none; 0: there is always a replacement."""
    spare_nodes: int = 0
    ring_nodes: int | None = None
    """Nodes that each send their copy to the next ones around; None: groups exchange copies."""
    fewer: FewerNodesLayout | None = None
    """The layout without a spare node; None: the job waits for a repair."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.spare_nodes < 0 or not 0.0 <= self.repair_s < math.inf:
            raise ValueError(
                f"{self.steps} steps, {self.spare_nodes} spare nodes, repairs of {self.repair_s} s:"
                " a run has one step or more, and nothing is below zero"
            )
        if self.fewer is not None and not self.repair_s > 0.0:
            raise ValueError("a layout of fewer nodes needs a repair time: without, none is short")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """One successful restart."""

    at_s: float
    """When training went on."""
    step: int
    """Steps that the restored copy holds."""
    level: Level
    kind: FailureClass
    """The worst failure since the run stood still."""


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
    failures: int
    """That met a run that was there."""
    restores: tuple[Restore, ...]
    fewer_s: float = 0.0
    """In the layout of fewer nodes, from the first step to the failure or return that ends it."""
    returns: int = 0
    """To all nodes, at a checkpoint."""


def simulate(
    policy: SavePolicy,
    run: Run,
    *,
    failures: Iterable[Failure],
) -> SimulatedRun:
    """Simulate a run until its last step.

    Args:
        policy: when it saves.
        run: its length and durations.
        failures: in the order of time; those after its end are not used. In the layout of fewer
            nodes its own count instead, if it has some.

    Raises:
        ValueError: a failure comes before the one above it.
    """
    everything = Layout(policy=policy, seconds=run.seconds)
    state = _State(full=everything, run=run, coming=_in_order(failures))
    while not _train(state):
        _recover(state)
    state.leave_layout()
    return SimulatedRun(
        wall_s=state.clock_s,
        training_s=state.trained_s,
        lost_s=state.lost_s,
        saving_s=state.saving_s,
        recovery_s=state.recovery_s,
        waiting_s=state.waiting_s,
        slower_s=state.slower_s,
        failures=state.failures,
        restores=tuple(state.restores),
        fewer_s=state.fewer_s,
        returns=state.returns,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    level: Level
    step: int
    trained_s: float
    """Seconds of its steps."""
    saving_s: float
    """Stalls of all checkpoints that were kept until then, its own included."""
    slower_s: float
    """Of its steps: what those with fewer nodes took beyond the others."""
    durable_at_s: float


@dataclass(slots=True, kw_only=True)
class _State:
    """The run at one moment; mutable while it lasts."""

    full: Layout
    run: Run
    coming: Iterator[Failure]
    layout: Layout = field(init=False)
    """In use."""
    began_s: float = 0.0
    """When the first step in it began."""
    other: Iterator[Failure] | None = None
    """Failures in the other layout; None: the same."""
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
    failures: int = 0
    durable: dict[Level, _Copy] = field(default_factory=dict)
    pending: list[_Copy] = field(default_factory=list)
    """Copies that are not durable, in the order of their writes."""
    allocation: Allocation = field(init=False)
    """Nodes in use and in repair."""
    empty_places: set[int] = field(default_factory=set)
    """Of nodes that were lost and have no copies."""
    restores: list[Restore] = field(default_factory=list)
    fewer_s: float = 0.0
    returns: int = 0

    def __post_init__(self) -> None:
        self.layout = self.full
        self.durable[Level.SHARED] = _Copy(
            level=Level.SHARED,
            step=0,
            trained_s=0.0,
            saving_s=0.0,
            slower_s=0.0,
            durable_at_s=0.0,
        )
        self.failure = next(self.coming, None)
        fewer = self.run.fewer
        self.allocation = Allocation(
            nodes=self.run.ring_nodes,
            spare_nodes=self.run.spare_nodes,
            idle_nodes=None if fewer is None else fewer.idle_nodes,
        )
        if fewer is not None and fewer.failures is not None:
            self.other = _in_order(fewer.failures)

    @property
    def policy(self) -> SavePolicy:
        return self.layout.policy

    @property
    def seconds(self) -> RunSeconds:
        return self.layout.seconds

    @property
    def is_full(self) -> bool:
        return self.layout is self.full

    def launch(self) -> None:
        """Take the layout that there are nodes for; copies on hosts are useless in another one."""
        fewer = self.run.fewer
        if not self.allocation.allocate(self.clock_s):
            return
        self.layout = self.full
        if not self.allocation.is_full:
            assert fewer is not None
            self.layout = fewer.layout
        self.durable.pop(Level.HOST, None)
        self.empty_places.clear()
        if self.other is None:
            return
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

    def leave_layout(self) -> None:
        """Count the time in it."""
        if not self.is_full:
            self.fewer_s += max(0.0, self.clock_s - self.began_s)

    @property
    def unwritten_s(self) -> float:
        """Seconds until all copies are durable."""
        last_s = self.pending[-1].durable_at_s if self.pending else self.clock_s
        return last_s - self.clock_s if last_s > self.clock_s else 0.0

    def finish_writes(self) -> None:
        """Count the copies as durable that are by now; one on hosts is on all of them."""
        while self.pending and self.pending[0].durable_at_s <= self.clock_s:
            copy = self.pending.pop(0)
            self.durable[copy.level] = copy
            if copy.level is Level.HOST:
                self.empty_places.clear()

    def spend(self, time_s: float) -> float | None:
        """Let time pass; return what passed of it before a failure, None where all did."""
        while (failure := self.failure) is not None and self.clock_s + time_s > failure.at_s:
            if self.allocation.uses(failure.node):
                spent_s = max(0.0, failure.at_s - self.clock_s)
                self.clock_s += spent_s
                return spent_s
            self.failure = next(self.coming, None)
        self.clock_s += time_s
        return None


def _train(state: _State) -> bool:
    """Train and save until the next failure; True: until the end."""
    steps = state.run.steps
    while True:
        policy, step_s, each = state.policy, state.seconds.step_s, state.policy.segment_steps
        target = min((state.step // each + 1) * each, steps)
        work_s = (target - state.step) * step_s
        spent_s = state.spend(work_s)
        if spent_s is not None:
            state.into_s = spent_s
            return False
        state.slower_s += work_s - (target - state.step) * state.full.seconds.step_s
        state.step, state.trained_s = target, state.trained_s + work_s
        if target == steps:
            return True
        is_shared = target % policy.shared_interval_steps == 0
        if not _save(state, Level.SHARED if is_shared else Level.HOST):
            return False
        can_return = is_shared and not state.is_full and not state.allocation.short(state.clock_s)
        if can_return and not _return(state):
            return False


def _save(state: _State, level: Level) -> bool:
    """Stall for a checkpoint and begin its write; False: it failed before."""
    seconds, is_async = state.seconds, state.policy.asynchronous
    begin_s, stall_s = state.clock_s, seconds.stopped_s(level, asynchronous=is_async)
    is_done = level is not Level.SHARED or state.spend(state.unwritten_s) is None
    is_done = is_done and state.spend(stall_s) is None
    state.saving_s += state.clock_s - begin_s
    if not is_done:
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
    fewer = state.run.fewer
    assert fewer is not None
    state.leave_layout()
    for part_s in (state.unwritten_s, fewer.return_s):
        spent_s = state.spend(part_s)
        state.recovery_s += part_s if spent_s is None else spent_s
        if spent_s is not None:
            state.began_s = state.clock_s
            return False
    state.finish_writes()
    state.launch()
    state.returns += 1
    return True


def _recover(state: _State) -> None:
    """Restart until a restart succeeds, and go back to the copy that is left."""
    state.finish_writes()
    state.pending.clear()
    state.leave_layout()
    position_s = state.trained_s + state.into_s
    worst = FailureClass.PROCESS
    while True:
        assert state.failure is not None
        worst = _worse(worst, _kind_of(state.failure, state))
        failure, state.failure = state.failure, next(state.coming, None)
        state.failures += 1
        _replace_nodes(state, failure)
        if not state.policy.survives(worst):
            state.durable.pop(Level.HOST, None)
        state.launch()
        level = max(state.durable, key=lambda one: (state.durable[one].step, one))
        restart_s = state.seconds.restart_s[level, worst]
        spent_s = state.spend(restart_s)
        state.recovery_s += restart_s if spent_s is None else spent_s
        if spent_s is None:
            break
    if state.run.ring_nodes is None:
        state.empty_places.clear()
    copy = state.durable[level]
    state.lost_s += position_s - copy.trained_s
    state.lost_s += state.saving_s - copy.saving_s
    state.step, state.trained_s, state.slower_s = copy.step, copy.trained_s, copy.slower_s
    state.into_s, state.began_s = 0.0, state.clock_s
    state.saving_s = copy.saving_s
    state.restores.append(Restore(at_s=state.clock_s, step=copy.step, level=level, kind=worst))


def _kind_of(failure: Failure, state: _State) -> FailureClass:
    """Return what a failure takes, after those before it; note the place that it empties."""
    if failure.node is None or failure.kind is FailureClass.PROCESS:
        return failure.kind
    ring = state.allocation.places
    place = ring.index(failure.node) if ring else failure.node
    state.empty_places.add(place)
    replicas = state.policy.replicas
    if not replicas:
        return failure.kind
    firsts: Iterable[int] = (place // (replicas + 1) * (replicas + 1),)
    if ring:
        firsts = range(place - replicas, place + 1)
    for first in firsts:
        holders = range(first, first + replicas + 1)
        if state.empty_places >= {node % len(ring) if ring else node for node in holders}:
            return FailureClass.TOGETHER
    return failure.kind


def _replace_nodes(state: _State, failure: Failure) -> None:
    """Put spare nodes in the place of lost ones, do without them, or wait for a repair."""
    if state.run.repair_s == 0.0 or failure.kind is FailureClass.PROCESS:
        return
    allocation = state.allocation
    lost: Sequence[int | None] = (failure.node,)
    if failure.node is not None and allocation.places:
        is_together = failure.kind is FailureClass.TOGETHER
        lost = allocation.neighbours(failure.node, 1 + is_together * state.policy.replicas)
    repair_s = state.run.repair_s if failure.repair_s is None else failure.repair_s
    allocation.lose(lost, back_at_s=state.clock_s + repair_s)
    ready_at_s = allocation.ready_at_s(state.clock_s)
    if ready_at_s > state.clock_s:
        state.waiting_s += ready_at_s - state.clock_s
        state.clock_s = ready_at_s
        state.skip_failures()


def _worse(one: FailureClass, other: FailureClass) -> FailureClass:
    return max(one, other, key=CLASSES.index)


def _in_order(failures: Iterable[Failure]) -> Iterator[Failure]:
    before_s = 0.0
    for failure in failures:
        if not failure.at_s >= before_s:
            raise ValueError(
                f"a failure at {failure.at_s} s comes after one at {before_s} s; sort them by time"
            )
        before_s = failure.at_s
        yield failure
