"""The checkpoints of a run: levels, replicas, and steps between them.

Shared storage alone is priced by interval.py, with the best or the stated interval. Every number of
replicas on hosts is priced by two_levels.py, in whole steps: n steps to a host checkpoint, k of
these to a shared one. Both are optimised where they are not stated: the best of a grid of powers of
two, from the shortest intervals that writes allow to four times the best ones of one level, then
from there and from the one-level estimates to ever nearer neighbours, until none is better.

The shared interval is a whole number of host ones. With it alone stated, host intervals are
compared of which a multiple lies within `NEAR` of it, or within a step where it has `FEW_STEPS` or
more; if none of these can be used, the one with the nearest multiple is taken. With both stated,
the shared one is the nearest multiple of the host's.

What is exact: the share of every policy that is compared. That the optimum is one of all whole
numbers is tested by enumeration, not proven; none of its neighbours is better.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from tuner.faults.interval import CheckpointCycle, best_work_s, cycle
from tuner.faults.level_seconds import (
    failure_rates,
    host_bytes,
    memory_words,
    obstacle,
    run_seconds,
)
from tuner.faults.levels import FailureRates, Level, RunSeconds, SavePolicy
from tuner.faults.reliability import FailureModel, Jobs, waiting_ratio
from tuner.faults.two_levels import LevelShares, level_shares, queued_copies, unfinished
from tuner.units import format_bytes, format_s

FARTHEST: Final = 4.0
"""Longest interval of the grid, as a multiple of the best interval of one level."""
APPROACH: Final = (1.5, 1.2, 1.05, 1.0)
"""Factors between neighbours, the last one for a difference of one."""
NEAR: Final = 0.02
"""Share of a stated shared interval by which the planned one may differ."""
FEW_STEPS: Final = 20
"""Steps of a stated shared interval from which a deviation of one step (5 % at most) is allowed."""
MOST_TRIES: Final = 2000
"""Intervals of one number of replicas; a hundred are usual."""

Intervals = tuple[int, int]
"""Steps to a host checkpoint, and of these checkpoints to a shared one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPolicy:
    """A policy with copies on hosts, and what it makes of a run."""

    policy: SavePolicy
    seconds: RunSeconds
    shares: LevelShares
    """Shares of the time, without waiting for repairs."""
    ratio: float
    """Share of the wall clock that advances training."""
    host_bytes: float
    """Bytes of one node's memory that checkpoint copies take."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyChoice:
    """The best policy, and what it was compared with."""

    chosen: HostPolicy | None
    """Best policy with copies on hosts; None: shared storage alone, or nothing."""
    shared_only: CheckpointCycle
    """Shared storage alone."""
    is_shared_enough: bool
    by_replicas: tuple[HostPolicy, ...]
    """The best of each number of replicas, best first."""
    left_out: tuple[str, ...]
    """Reasons why other numbers of replicas are not possible."""
    num_priced: int
    """Policies whose share was computed."""

    @property
    def ratio(self) -> float:
        """Share of the wall clock that advances training; 0 where no stated policy is possible."""
        if self.chosen is not None:
            return self.chosen.ratio
        return float(self.shared_only.effective_ratio) if self.is_shared_enough else 0.0


def choose_policy(jobs: Jobs, reliability: FailureModel, *, step_s: float) -> PolicyChoice:
    """Choose the policy with the largest share; of equals the one with fewer copies.

    Args:
        jobs: numbers, not arrays, on nodes of one kind.
        reliability: with a level on hosts.
        step_s: of the configuration.
    """
    host = reliability.host
    if host is None:
        raise ValueError("the failure model has no level on hosts")
    shared_only = cycle(jobs, reliability, step_s=step_s)
    best: list[HostPolicy] = []
    left_out: dict[str, None] = {}
    num_priced = 1
    for replicas in sorted(set(host.replicas)):
        reason = obstacle(jobs, reliability, replicas=replicas, step_s=step_s)
        if reason:
            left_out[reason] = None
            continue
        price = _Price.of(jobs, reliability, replicas=replicas, step_s=step_s)
        policy = price.best(shared_only)
        num_priced += len(price.shares)
        if policy is None:
            left_out[_impossible(reliability, price)] = None
        else:
            best.append(policy)
    best.sort(key=lambda candidate: -candidate.ratio)
    chosen = best[0] if best else None
    if (
        chosen is not None
        and host.is_optional
        and chosen.ratio <= float(shared_only.effective_ratio)
    ):
        chosen = None
    return PolicyChoice(
        chosen=chosen,
        shared_only=shared_only,
        is_shared_enough=host.is_optional,
        by_replicas=tuple(best),
        left_out=tuple(left_out),
        num_priced=num_priced,
    )


def _impossible(reliability: FailureModel, price: "_Price") -> str:
    """Say which stated intervals leave no room for a host checkpoint and its write, or memory."""
    host, seconds = reliability.host, price.seconds
    assert host is not None
    written_s = seconds.durable_after_s[Level.HOST]
    if price.least_bytes < math.inf:
        return (
            f"checkpoints on hosts that wait for a write to shared storage of"
            f" {format_s(seconds.durable_after_s[Level.SHARED])} take"
            f" {format_bytes(price.least_bytes)} of a node's memory, and {memory_words(host)};"
            " state a longer host_interval, or more memory of the host"
        )
    if host.interval_s is not None and reliability.interval_s is None:
        return (
            f"host_interval {format_s(host.interval_s)} is shorter than the write of a copy on"
            f" hosts, {format_s(written_s)}"
        )
    if reliability.interval_s is not None:
        return (
            f"interval {format_s(reliability.interval_s)} has no room for a host checkpoint, whose"
            f" interval is {format_s(max(host.interval_s or 0.0, written_s, seconds.step_s))} or"
            f" more, and for a write to shared storage of"
            f" {format_s(seconds.durable_after_s[Level.SHARED])}"
        )
    return "no intervals are long enough for the writes of both levels"


@dataclass(slots=True, kw_only=True)
class _Price:
    """Shares of policies with one number of replicas; mutable, as it remembers them."""

    jobs: Jobs
    reliability: FailureModel
    replicas: int
    seconds: RunSeconds
    rates: FailureRates
    waiting: float
    shares: dict[Intervals, LevelShares | None]
    """Shares by pair of intervals; None: a write outlasts its interval, or copies take more memory
    than there is."""
    least_bytes: float = math.inf
    """Fewest bytes of a node's memory among the policies that exceed what there is."""

    @classmethod
    def of(cls, jobs: Jobs, reliability: FailureModel, *, replicas: int, step_s: float) -> "_Price":
        return cls(
            jobs=jobs,
            reliability=reliability,
            replicas=replicas,
            seconds=run_seconds(jobs, reliability, replicas=replicas, step_s=step_s),
            rates=failure_rates(jobs, reliability),
            waiting=float(waiting_ratio(jobs, reliability)),
            shares={},
        )

    def policy(self, intervals: Intervals) -> SavePolicy:
        steps, segments = intervals
        return SavePolicy(
            host_interval_steps=steps,
            shared_interval_steps=steps * segments,
            replicas=self.replicas,
            asynchronous=self.reliability.storage.asynchronous,
        )

    def training(self, intervals: Intervals) -> float:
        """Share that trains; below zero where the policy is not possible."""
        if intervals not in self.shares:
            policy = self.policy(intervals)
            is_possible = unfinished(policy, self.seconds) is None and self._fits(policy)
            self.shares[intervals] = (
                level_shares(policy, self.seconds, self.rates) if is_possible else None
            )
        shares = self.shares[intervals]
        return -1.0 if shares is None else shares.training

    def _fits(self, policy: SavePolicy) -> bool:
        """Return whether the copies on hosts have room."""
        host = self.reliability.host
        assert host is not None
        needed = self.host_bytes(policy)
        if host.memory_bytes is None or needed <= host.memory_bytes:
            return True
        self.least_bytes = min(self.least_bytes, needed)
        return False

    def host_bytes(self, policy: SavePolicy) -> float:
        """Bytes that copies take of a node's memory."""
        queued = queued_copies(policy, self.seconds)
        return host_bytes(self.jobs, replicas=self.replicas, queued=queued)

    def best(self, shared_only: CheckpointCycle) -> HostPolicy | None:
        """Return the policy with the best intervals; None where none is possible."""
        allowed = _Allowed.of(self.reliability, self.seconds)
        stated = allowed.shared_steps
        if stated is None:
            starts = list(allowed.grid(self.rates, shared_only))
        else:
            starts = allowed.near(stated)
        if not starts:
            return None
        intervals = max(starts, key=self.training)
        if stated is None:
            intervals = _climb(intervals, self.training, allowed)
        shares = self.shares[intervals]
        if shares is None:
            return None
        policy = self.policy(intervals)
        return HostPolicy(
            policy=policy,
            seconds=self.seconds,
            shares=shares,
            ratio=shares.training * (1.0 - self.waiting),
            host_bytes=self.host_bytes(policy),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allowed:
    """The intervals that a spec leaves open."""

    step_s: float
    least_steps: int
    """Fewest steps of a host interval, so that its write ends in time."""
    fixed_steps: int | None
    """Stated host interval in steps; None if left open."""
    shared_steps: float | None
    """Stated shared interval in steps; None if left open."""
    stall_s: float
    """Seconds that one host checkpoint stops training."""
    background_s: float
    """Seconds of training after that stall until the host copy is durable; 0 if synchronous."""
    shared_stall_s: float
    shared_background_s: float

    @classmethod
    def of(cls, reliability: FailureModel, seconds: RunSeconds) -> "_Allowed":
        host, is_async = reliability.host, reliability.storage.asynchronous
        assert host is not None
        step_s, stated_s = seconds.step_s, reliability.interval_s
        written_s = seconds.background_s(Level.HOST, asynchronous=is_async)
        return cls(
            step_s=step_s,
            least_steps=max(1, math.ceil(written_s / step_s)),
            fixed_steps=None
            if host.interval_s is None
            else max(1, round(host.interval_s / step_s)),
            shared_steps=None if stated_s is None else stated_s / step_s,
            stall_s=seconds.stopped_s(Level.HOST, asynchronous=is_async),
            background_s=written_s,
            shared_stall_s=seconds.stopped_s(Level.SHARED, asynchronous=is_async),
            shared_background_s=seconds.background_s(Level.SHARED, asynchronous=is_async),
        )

    def least_segments(self, steps: int) -> int:
        """Return the host checkpoints a shared interval needs for all its writes; two at least."""
        needed_s = self.shared_background_s - self.background_s + self.stall_s
        # Time of each segment that the write of its own copy leaves free.
        free_s = steps * self.step_s + self.stall_s - self.background_s
        return max(2, math.ceil(needed_s / free_s)) if free_s > 0.0 else 2

    def usable(self, steps: int, segments: float) -> Intervals | None:
        """Return the nearest intervals that may be used; None where there are none."""
        if self.fixed_steps is not None:
            steps = self.fixed_steps
        if steps < self.least_steps:
            return None
        return steps, max(self.least_segments(steps), round(segments))

    def near(self, stated: float) -> list[Intervals]:
        """Return the intervals that keep a stated shared one; none where there is no room."""
        usable = [
            (steps, segments)
            for steps, segments in _multiples(stated, steps=self.fixed_steps)
            if steps >= self.least_steps and segments >= self.least_segments(steps)
        ]
        distances = [abs(steps * segments - stated) for steps, segments in usable]
        a_step = 1.0 if stated >= FEW_STEPS else 0.0
        allowed = max(a_step, NEAR * stated, min(distances, default=0.0))
        return [
            intervals for intervals, far in zip(usable, distances, strict=True) if far <= allowed
        ]

    def grid(self, rates: FailureRates, shared_only: CheckpointCycle) -> Iterator[Intervals]:
        """Yield powers of two, and the best intervals of either level by itself."""
        rate = rates.per_s
        rarest = rates.together_per_s or rates.node_per_s
        shared_s = float(best_work_s(failures_per_s=rarest, stall_s=self.shared_stall_s))
        host_s = float(best_work_s(failures_per_s=rate, stall_s=self.stall_s))
        farthest = max(host_s, float(shared_only.work_s)) * FARTHEST / self.step_s
        steps_N = [max(1, round(host_s / self.step_s)), *_powers(self.least_steps, farthest)]
        for steps in dict.fromkeys(max(self.least_steps, candidate) for candidate in steps_N):
            near = shared_s / (steps * self.step_s)
            least = self.least_segments(steps)
            for segments in (near, *_powers(least, FARTHEST * near)):
                intervals = self.usable(steps, segments)
                if intervals is not None:
                    yield intervals


def _multiples(stated: float, *, steps: int | None) -> Iterator[Intervals]:
    """Yield host intervals and a multiple near a stated number of steps.

    For a stated host interval the nearest one; otherwise, for every number of segments up to the
    root of the stated steps, and every host interval up to it, the ones just below and above.
    """
    if steps is not None:
        yield steps, round(stated / steps)
        return
    few = math.isqrt(math.ceil(stated)) + 1
    near = {
        (interval, segments)
        for interval in range(1, few + 1)
        for segments in _around(stated / interval)
    }
    near |= {
        (interval, segments)
        for segments in range(2, few + 1)
        for interval in _around(stated / segments)
    }
    yield from sorted(near)


def _around(value: float) -> tuple[int, int]:
    return math.floor(value), math.ceil(value)


def _climb(
    start: Intervals, training: Callable[[Intervals], float], allowed: _Allowed
) -> Intervals:
    """Go to better neighbours until there is none."""
    best = start
    tries = 0
    for factor in APPROACH:
        while tries < MOST_TRIES:
            around = [
                near
                for steps, segments in _neighbours(best, factor)
                if (near := allowed.usable(steps, segments)) is not None
            ]
            tries += len(around)
            nearest = max(around, key=training, default=best)
            if not training(nearest) > training(best):
                break
            best = nearest
    return best


def _neighbours(intervals: Intervals, factor: float) -> Iterator[tuple[int, float]]:
    """Yield nearby intervals of hosts, and with each the same shared interval or a nearby one."""
    steps, segments = intervals
    for near in (steps, max(steps + 1, round(steps * factor)), _less(steps, factor)):
        same = segments * steps / near
        yield near, segments
        yield near, same
        yield near, max(round(same) + 1, same * factor)
        yield near, min(round(same) - 1, same / factor)


def _powers(first: int, last: float) -> Iterator[int]:
    """Yield a number and its doubles until they exceed another."""
    while True:
        yield first
        if first > last:
            return
        first *= 2


def _less(steps: int, factor: float) -> int:
    return max(1, min(steps - 1, round(steps / factor)))
