"""A training run lived through event by event, for tests of the closed forms.

Shares no formula with them: it draws failures, loses work, restarts, waits for repairs and writes
checkpoints one at a time.
"""

import heapq
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How the simulated job lives; seconds."""

    failures_per_s: float
    work_s: float
    stall_s: float
    background_s: float = 0.0
    restart_s: float
    repair_s: float = 0.0
    spare_nodes: int = 0
    repair_is_fixed: bool = False
    """Every repair takes the mean; exponential otherwise."""


@dataclass(slots=True, kw_only=True)
class Life:
    """What happened, in seconds of wall clock; mutable while the run lasts."""

    wall_s: float = 0.0
    failures: int = 0
    waiting_s: float = 0.0
    restarting_s: float = 0.0
    checkpoints_s: float = 0.0
    """Stalls of checkpoints that became safe."""
    until_failure_s: float = 0.0
    repairs: list[float] = field(default_factory=list)
    """When each node in repair is back."""


def lived(habits: Habits, *, segments: int, rng: np.random.Generator) -> Life:
    """Run until so many checkpoints are safe."""
    life = Life(until_failure_s=rng.exponential(1.0 / habits.failures_per_s))
    safe = 0
    while safe < segments:
        safe = _until_failure(life, habits, safe=safe, segments=segments)
        if safe < segments:
            _come_back(life, habits, rng=rng)
    return life


def _until_failure(life: Life, habits: Habits, *, safe: int, segments: int) -> int:
    """Work from the last safe checkpoint until the next failure; return how many are safe then."""
    taken = safe
    while True:
        work_s = habits.work_s
        if taken > safe:
            if not _go_on(life, habits.background_s):
                return safe
            safe = taken
            life.checkpoints_s += habits.stall_s
            work_s -= habits.background_s
        if safe == segments or not _go_on(life, work_s) or not _go_on(life, habits.stall_s):
            return safe
        taken += 1


def _come_back(life: Life, habits: Habits, *, rng: np.random.Generator) -> None:
    """Exchange the node, wait where none is left, and restart until a restart succeeds."""
    while True:
        life.failures += 1
        life.until_failure_s = rng.exponential(1.0 / habits.failures_per_s)
        _exchange(life, habits, rng=rng)
        before_s = life.wall_s
        succeeded = _go_on(life, habits.restart_s)
        life.restarting_s += life.wall_s - before_s
        if succeeded:
            return


def _exchange(life: Life, habits: Habits, *, rng: np.random.Generator) -> None:
    if habits.repair_s == 0.0:
        return
    repair_s = habits.repair_s if habits.repair_is_fixed else rng.exponential(habits.repair_s)
    while life.repairs and life.repairs[0] <= life.wall_s:
        heapq.heappop(life.repairs)
    heapq.heappush(life.repairs, life.wall_s + repair_s)
    if len(life.repairs) > habits.spare_nodes:
        back_at = heapq.heappop(life.repairs)
        life.waiting_s += back_at - life.wall_s
        life.wall_s = back_at


def _go_on(life: Life, time_s: float) -> bool:
    """Let time pass until its end or the next failure; False: it failed."""
    if life.until_failure_s <= time_s:
        life.wall_s += life.until_failure_s
        life.until_failure_s = 0.0
        return False
    life.wall_s += time_s
    life.until_failure_s -= time_s
    return True
