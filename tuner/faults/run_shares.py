"""Wall-clock shares of a run with failures: one checkpoint level (interval.py), two (policies.py).

Shares of the wall clock are exact for exponential failures. With two levels the time that one
failure costs, which only the band of the wall clock needs, is taken as uniform between two
checkpoints of the level that is restored.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from profilers.records import Record, Seconds
from tuner.faults.interval import CheckpointCycle, cycle, interval_steps, step_obstacle
from tuner.faults.levels import Level
from tuner.faults.policies import HostPolicy, PolicyChoice, choose_policy
from tuner.faults.reliability import (
    FailureModel,
    Jobs,
    failure_rate_per_s,
    read_s,
    waiting_ratio,
)
from tuner.faults.two_levels import host_lost_s
from tuner.units import format_s

Ratio = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0)]


class PolicyRatio(Record):
    """Share of the wall clock that trains under other checkpoints, at their best intervals."""

    levels: tuple[Level, ...]
    replicas: Whole = 0
    host_interval_steps: Whole | None = None
    shared_interval_steps: Whole
    effective_time_ratio: Ratio


class CheckpointLevels(Record):
    """The levels of a run's checkpoints, and what they were compared with."""

    levels: tuple[Level, ...]
    """`host`: memory of the nodes; `shared`: shared storage, whose checkpoints are those that the
    other fields of the run describe. Empty: the stated ones are not possible."""
    replicas: Whole = 0
    """Other nodes that hold a copy of a node's."""
    host_interval_s: Seconds | None = None
    """Useful work between checkpoints of either level; this and the next five are absent without
    checkpoints on hosts."""
    host_interval_steps: Whole | None = None
    host_stall_s: Seconds | None = None
    """Time that a checkpoint on hosts stops training."""
    host_write_s: Seconds | None = None
    """Seconds from the start of a checkpoint on hosts until it is durable."""
    host_bytes: Whole | None = None
    """Bytes of one node's memory that checkpoint copies take."""
    host_restore_ratio: Ratio | None = None
    """Share of restarts that continue from copies on hosts."""
    compared: tuple[PolicyRatio, ...]
    """The best of every kind of policy, the chosen one's too, best first."""
    left_out: tuple[str, ...] = ()
    """Policies that are not possible, and why."""
    num_priced: Whole
    """Policies whose share was computed exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Losses in seconds by failures after which one level is restored."""

    share: float
    """Share of all failures."""
    node_share: float
    """Share of the failures that take a node."""
    between_s: float
    """Seconds from one checkpoint of the restored level to the next."""
    background_s: float
    """Mean seconds from the end of a stall until the checkpoint is durable, waits for other writes
    included."""
    restart_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShares:
    """A run with failures, of whichever levels; seconds and shares of the wall clock."""

    training: float
    checkpoints: float
    restarting: float
    waiting: float
    slower: float = 0.0
    """Share lost to longer steps on fewer nodes."""
    switches_per_s: float = 0.0
    """Switches per second to fewer nodes."""
    failures_per_s: float
    work_s: float
    """Seconds of useful work between checkpoints on shared storage."""
    steps: int | None = None
    """Whole optimizer steps between checkpoints on shared storage; None where they are not
    whole."""
    stall_s: float
    background_s: float
    """Seconds that a checkpoint is written after its stall; 0 where training waits for it."""
    restart_s: float
    node_restart_s: float
    """Mean seconds of a restart after a failure that takes a node."""
    losses: tuple["Loss", ...]
    """Losses by the level that is restored, shared storage last."""
    reason: str
    """Reason why the run does not finish, if it does not."""
    levels: CheckpointLevels | None = None

    @property
    def ratios(self) -> dict[str, float]:
        parts = {"training": self.training, "checkpoints": self.checkpoints}
        if self.slower:
            parts["slower"] = self.slower
        rest = 1.0 - sum(parts.values()) - self.restarting - self.waiting
        return parts | {
            "lost": max(0.0, rest),
            "restarting": self.restarting,
            "waiting": self.waiting,
        }


def _on_shared_storage(times: CheckpointCycle, jobs: Jobs, reliability: FailureModel) -> RunShares:
    training, waiting = float(times.effective_ratio), float(times.waiting_ratio)
    rate, restart_s = float(times.failures_per_s), float(times.restart_s)
    return RunShares(
        training=training,
        checkpoints=training * float(times.stall_s) / float(times.work_s),
        restarting=(1.0 - waiting) * -math.expm1(-rate * restart_s),
        waiting=waiting,
        failures_per_s=rate,
        work_s=float(times.work_s),
        stall_s=float(times.stall_s),
        background_s=float(times.background_s),
        restart_s=restart_s,
        node_restart_s=reliability.restart_s + float(read_s(jobs, reliability.storage)),
        losses=(
            Loss(
                share=1.0,
                node_share=1.0,
                between_s=float(times.work_s) + float(times.stall_s),
                background_s=float(times.background_s),
                restart_s=restart_s,
            ),
        ),
        reason=_reason(times),
    )


def _on_both_levels(chosen: HostPolicy, jobs: Jobs, reliability: FailureModel) -> RunShares:
    policy, seconds, shares = chosen.policy, chosen.seconds, chosen.shares
    waiting = float(waiting_ratio(jobs, reliability))
    running, is_async = 1.0 - waiting, policy.asynchronous
    rate = float(failure_rate_per_s(jobs, reliability))
    segment_s = policy.segment_steps * seconds.step_s
    lost_s = host_lost_s(policy, seconds)
    stall_s = {level: seconds.stopped_s(level, asynchronous=is_async) for level in Level}
    written_s = {level: seconds.background_s(level, asynchronous=is_async) for level in Level}
    period_s = (policy.segments - 1) * (segment_s + stall_s[Level.HOST])
    period_s += segment_s + stall_s[Level.SHARED]
    from_host, node_from_host = shares.host_restores, shares.node_host_restores
    return RunShares(
        training=running * shares.training,
        checkpoints=running * shares.checkpoints,
        restarting=running * shares.restarting,
        waiting=waiting,
        failures_per_s=rate,
        work_s=policy.shared_interval_steps * seconds.step_s,
        steps=policy.shared_interval_steps,
        stall_s=stall_s[Level.SHARED],
        background_s=written_s[Level.SHARED],
        restart_s=shares.restart_s,
        node_restart_s=shares.node_restart_s,
        losses=(
            Loss(
                share=from_host,
                node_share=node_from_host,
                between_s=segment_s + stall_s[Level.HOST],
                background_s=lost_s - (segment_s + stall_s[Level.HOST]) / 2.0,
                restart_s=shares.restart_s,
            ),
            Loss(
                share=1.0 - from_host,
                node_share=1.0 - node_from_host,
                between_s=period_s,
                background_s=written_s[Level.SHARED],
                restart_s=shares.restart_s,
            ),
        ),
        reason=(
            f"the job fails every {format_s(1.0 / rate)} and restarting takes"
            f" {format_s(shares.restart_s)}; use fewer devices or a shorter restart"
        ),
    )


def _levels(choice: PolicyChoice, *, step_s: float) -> CheckpointLevels:
    """Return the chosen policy and those it was compared with."""
    compared = [
        PolicyRatio(
            levels=candidate.policy.levels,
            replicas=candidate.policy.replicas,
            host_interval_steps=candidate.policy.host_interval_steps,
            shared_interval_steps=candidate.policy.shared_interval_steps,
            effective_time_ratio=candidate.ratio,
        )
        for candidate in choice.by_replicas
    ]
    only = choice.shared_only
    compared.append(
        PolicyRatio(
            levels=(Level.SHARED,),
            shared_interval_steps=interval_steps(
                float(only.work_s), background_s=float(only.background_s), step_s=step_s
            ),
            effective_time_ratio=float(only.effective_ratio),
        )
    )
    compared.sort(key=lambda candidate: -candidate.effective_time_ratio)
    common: dict[str, Any] = {
        "compared": tuple(compared),
        "left_out": choice.left_out,
        "num_priced": choice.num_priced,
    }
    if choice.chosen is None:
        levels = (Level.SHARED,) if choice.is_shared_enough else ()
        return CheckpointLevels(levels=levels, **common)
    policy, seconds = choice.chosen.policy, choice.chosen.seconds
    stall_s = seconds.stopped_s(Level.HOST, asynchronous=policy.asynchronous)
    return CheckpointLevels(
        levels=policy.levels,
        replicas=policy.replicas,
        host_interval_s=policy.segment_steps * seconds.step_s,
        host_interval_steps=policy.segment_steps,
        host_stall_s=stall_s,
        host_write_s=stall_s + seconds.background_s(Level.HOST, asynchronous=policy.asynchronous),
        host_bytes=math.ceil(choice.chosen.host_bytes),
        host_restore_ratio=choice.chosen.shares.host_restores,
        **common,
    )


def run_shares(jobs: Jobs, reliability: FailureModel, *, step_s: float) -> RunShares:
    """Return the shares of a run with the best, or the stated, checkpoints.

    Where no stated ones are possible nothing trains, and the reason says why.
    """
    short = step_obstacle(reliability, step_s=step_s)
    if reliability.host is None:
        times = cycle(jobs, reliability, step_s=step_s)
        return _without_training(_on_shared_storage(times, jobs, reliability), short)
    choice = choose_policy(jobs, reliability, step_s=step_s)
    if choice.chosen is not None:
        shares = _on_both_levels(choice.chosen, jobs, reliability)
    elif choice.is_shared_enough:
        shares = _on_shared_storage(choice.shared_only, jobs, reliability)
    else:
        shares = _on_shared_storage(choice.shared_only, jobs, reliability)
        short = short or "; ".join(choice.left_out)
    return replace(_without_training(shares, short), levels=_levels(choice, step_s=step_s))


def _without_training(shares: RunShares, reason: str) -> RunShares:
    """Let nothing train where there is a reason; the shares themselves where there is none."""
    return replace(shares, training=0.0, checkpoints=0.0, reason=reason) if reason else shares


def _reason(times: CheckpointCycle) -> str:
    """Explain which interruption dominates, and what would help."""
    between = format_s(1.0 / float(times.failures_per_s))
    parts = {
        "restarting": float(times.restart_s),
        "a checkpoint": float(times.stall_s) + float(times.background_s),
        "the work between two checkpoints": float(times.work_s),
    }
    longest = max(parts, key=lambda name: parts[name])
    if float(times.waiting_ratio) > 0.9:
        return (
            "the job waits for repairs nearly all the time; keep spare nodes or use fewer devices"
        )
    return (
        f"the job fails every {between} and {longest} takes {format_s(parts[longest])};"
        " use fewer devices, faster storage or a shorter restart"
    )
