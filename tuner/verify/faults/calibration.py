"""The durations of a run, measured before it is made to suffer faults.

One short run of each policy, with its checkpoints closer together, loses a rank early on; where
links become slow, one does at its beginning. It goes on for the mean time between two faults, 14
steps at least and `LONGEST_S` at most, since checkpoints take less and less time in a process that
has run for a while: on a processor with its folder in memory 0.53 s at first, 0.30 s after 40 s. Of
it and of the run without faults count

    step         median of the steps beside which nothing is written and no link is slow; mean over
                 all runs, whose policies do not change it
    speed        deviation of those medians over their mean: the machine is so much faster or slower
                 from one run to the next
    slow step    median of those that are wholly beside a slow link, over all policies
    stall        mean of what a checkpoint of a level stops training for, less its wait for an
                 earlier write; where it is written in the background, also what the steps beside
                 the write take beyond the median; those beside a slow link are left out
    durable      median from the end of the stall until the checkpoint is durable
    restart      mean from the fault to the next step, over all policies: a restart is mostly the
                 start of processes

Where a run goes on with fewer nodes, one more short run of its policy loses a node about its middle
and gets it back after the repair time, `LONGEST_S` at most. It has the same durations of the layout
of fewer nodes, whose step counts as a multiple of that with all nodes in the same run, and

    return       mean from the durable checkpoint to the next step with all nodes

The run with faults is predicted from these alone.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tuner.faults.levels import FailureClass, Level, RunSeconds
from tuner.faults.simulation import FewerNodesLayout, Layout
from tuner.verify.faults.measured import (
    MeasuredRestart,
    MeasuredRun,
    Stall,
    Step,
    durable_of,
    measured_run,
    slow_windows,
    stalls_of,
    steps_of,
)
from tuner.verify.faults.scenario import Fault, FaultKind, Scenario, StatedPolicy
from tuner.verify.faults.supervisor import FaultRunError, LaunchLog

HOST_STEPS: Final = 4
SHARED_STEPS: Final = 8
STEPS: Final = 28
"""Of a short run, at least; half of them before the fault."""
LONGEST_S: Final = 60.0
"""After the fault, however rare faults are."""
WARM_STEPS: Final = 2
"""Before a link becomes slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySeconds:
    """Durations of one policy in one layout, before the restarts of all are taken together."""

    step_s: float
    slow_steps_s: tuple[float, ...]
    """Of steps beside a slow link."""
    stall_s: Mapping[Level, float]
    durable_after_s: Mapping[Level, float]
    run: MeasuredRun
    """With the launches in the other layout."""
    is_full: bool = True
    """Whether the layout is that of all nodes."""

    @property
    def restarts(self) -> list[MeasuredRestart]:
        """After faults, into the layout."""
        return [
            one for one in self.run.restarts if one.is_full is self.is_full and not one.is_return
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerSeconds:
    """Durations of one policy with fewer nodes, from a run that changes to them."""

    own: PolicySeconds
    step_ratio: float
    """Its step over that with all nodes."""

    @property
    def returns_s(self) -> list[float]:
        """From durable checkpoints to the first step with all nodes again."""
        return [
            one.seconds - one.unnoticed_s
            for one in self.own.run.restarts
            if one.is_return and one.launches == 1
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Durations of one policy as the simulation takes them."""

    seconds: RunSeconds
    slow_factor: float
    """How many times longer a step takes beside a slow link."""
    speed_deviation: float = 0.0
    """Of the logarithm of all seconds, from one run to the next."""
    fewer: FewerNodesLayout | None = None
    """Without a spare node; None: the run waits for a repair."""

    def at_speed(self, deviations: float) -> "Durations":
        """Return those of a run on a machine that is slower than usual by so many deviations."""
        factor = math.exp(deviations * self.speed_deviation)
        fewer = self.fewer
        if fewer is not None:
            layout = replace(fewer.layout, seconds=fewer.layout.seconds.scaled(factor))
            fewer = replace(fewer, layout=layout, return_s=fewer.return_s * factor)
        return replace(self, seconds=self.seconds.scaled(factor), fewer=fewer)


def short(policy: StatedPolicy) -> StatedPolicy:
    """Return a policy with its checkpoints closer together."""
    host = None if policy.host is None else HOST_STEPS
    return policy.model_copy(update={"shared": SHARED_STEPS, "host": host})


def short_faults(scenario: Scenario, *, mean_step_s: float) -> tuple[Fault, ...]:
    """Return the faults of a short run: a rank is killed about its middle, after a slow link."""
    middle_s = STEPS / 2 * mean_step_s
    kill = Fault(at_s=middle_s, kind=FaultKind.KILL, node=0, place=0)
    if FaultKind.SLOW_LINK not in scenario.faults:
        return (kill,)
    slow = Fault(at_s=WARM_STEPS * mean_step_s, kind=FaultKind.SLOW_LINK, node=0, place=0)
    return slow, replace(kill, at_s=middle_s + scenario.link_slow)


def short_steps(scenario: Scenario, *, mean_step_s: float) -> int:
    """Return the steps of a short run, enough for its faults."""
    *_, kill = short_faults(scenario, mean_step_s=mean_step_s)
    after_s = max(STEPS / 2 * mean_step_s, min(scenario.mean_interval, LONGEST_S))
    return math.ceil((kill.at_s + after_s) / mean_step_s)


def short_repair(
    scenario: Scenario, *, mean_step_s: float, restart_s: float
) -> tuple[Scenario, tuple[Fault, ...], int]:
    """Return scenario, fault and steps of a short run that loses a node and gets it back.

    Its steps are those of the repair time and of a short run, so that some are left for all nodes.
    """
    stay_s = max(SHARED_STEPS * mean_step_s, min(scenario.repair or 0.0, LONGEST_S))
    lost = Fault(
        at_s=STEPS / 2 * mean_step_s, kind=FaultKind.LOSE_NODE, node=scenario.nodes - 1, place=0
    )
    steps = STEPS + SHARED_STEPS + math.ceil(stay_s / mean_step_s)
    fields = {"repair": restart_s + stay_s, "spares": 0}
    return scenario.model_copy(update=fields), (lost,), steps


def measure_policy(launches: Sequence[LaunchLog], *, is_full: bool = True) -> PolicySeconds:
    """Measure the durations of a run in one of its layouts.

    Raises:
        FaultRunError: it took one step at a time in it, or none.
    """
    steps, writes = [], []
    run, slow = measured_run(launches), slow_windows(launches)
    for launch in launches:
        if launch.is_full is not is_full:
            continue
        # The first step of a launch warms up.
        steps += list(steps_of(launch))[1:]
        writes += list(_writes(launch))
    quiet = [
        one.seconds
        for one in steps
        if not any(write.is_beside(one) for write in writes)
        and not any(window.is_beside(one) for window in slow)
    ]
    if not steps:
        raise FaultRunError("no launch took two steps, so that the length of a step is not known")
    step_s = statistics.median(quiet or [one.seconds for one in steps])
    stalls: dict[Level, list[float]] = {}
    slowed: dict[Level, list[float]] = {}
    for write in writes:
        if any(window.is_beside(write.stall) for window in slow):
            continue
        beside = [
            one.seconds
            for one in steps
            if write.is_beside(one) and not any(window.is_beside(one) for window in slow)
        ]
        stalls.setdefault(write.level, []).append(write.stopped_s)
        slowed.setdefault(write.level, []).append(sum(beside) - len(beside) * step_s)
    return PolicySeconds(
        step_s=step_s,
        slow_steps_s=tuple(one.seconds for one in steps if any(window.has(one) for window in slow)),
        stall_s={
            level: statistics.fmean(values) + max(0.0, statistics.fmean(slowed[level]))
            for level, values in stalls.items()
        },
        durable_after_s={
            level: statistics.median(one.background_s for one in writes if one.level is level)
            for level in {one.level for one in writes}
        },
        run=run,
        is_full=is_full,
    )


def measure_fewer(launches: Sequence[LaunchLog]) -> FewerSeconds | None:
    """Measure the durations of a run with fewer nodes; None where it took no two steps there."""
    if not any(len(list(steps_of(one))) > 1 for one in launches if not one.is_full):
        return None
    own = measure_policy(launches, is_full=False)
    return FewerSeconds(own=own, step_ratio=own.step_s / measure_policy(launches).step_s)


def durations(own: PolicySeconds, *others: PolicySeconds) -> Durations:
    """Return the durations of a policy; restarts and slow steps are those of all that are given.

    Raises:
        FaultRunError: none of them was restarted.
    """
    every = (own, *others)
    return _durations(own, restarted=every, slowed=every)


def replay_durations(
    during: PolicySeconds, before: PolicySeconds, *others: PolicySeconds
) -> Durations:
    """Return the durations of a run; what it lacks is filled from the short runs.

    Args:
        during: of the run.
        before: of its policy's short run, whose stalls count for a level whose own are all beside
            a slow link.
        others: of the short runs of other policies. Restarts and slow steps are those of all short
            runs if the run had none.

    Raises:
        FaultRunError: none of the runs was restarted.
    """
    every = (during, before, *others)
    return _durations(
        replace(during, stall_s={**before.stall_s, **during.stall_s}),
        restarted=(during,) if during.restarts else every,
        slowed=(during,) if during.slow_steps_s else every,
    )


def _durations(
    own: PolicySeconds, *, restarted: Sequence[PolicySeconds], slowed: Sequence[PolicySeconds]
) -> Durations:
    restarts = [restart for one in restarted for restart in one.restarts]
    # Those that several launches took are longer by the time between their faults.
    if not restarts:
        raise FaultRunError("no run was restarted, so that the time of a restart is not known")
    single = [one.recovery_s - one.unnoticed_s for one in restarts if one.launches == 1]
    restart_s = statistics.fmean(single or [one.recovery_s / one.launches for one in restarts])
    both = (Level.HOST, Level.SHARED)
    factors = [slow_s / one.step_s for one in slowed for slow_s in one.slow_steps_s]
    return Durations(
        seconds=RunSeconds(
            step_s=own.step_s,
            stall_s={level: own.stall_s.get(level, 0.0) for level in both},
            durable_after_s={level: own.durable_after_s.get(level, 0.0) for level in both},
            restart_s={(level, kind): restart_s for level in both for kind in FailureClass},
        ),
        slow_factor=max(1.0, statistics.median(factors or [1.0])),
    )


def expected_durations(
    own: PolicySeconds, others: Sequence[PolicySeconds], *, unbroken: PolicySeconds
) -> Durations:
    """Return the durations of a policy on a machine whose speed changes as it did between the runs.

    Raises:
        FaultRunError: none of the short runs was restarted.
    """
    of_own = durations(own, *others)
    steps_s = [one.step_s for one in (own, *others, unbroken)]
    step_s = statistics.fmean(steps_s)
    return replace(
        of_own,
        seconds=replace(of_own.seconds, step_s=step_s),
        speed_deviation=statistics.stdev(steps_s) / step_s,
    )


def with_expected_fewer(
    full: Durations, policy: StatedPolicy, own: FewerSeconds, *others: FewerSeconds, idle_nodes: int
) -> Durations:
    """Return expected durations with those of fewer nodes.

    Args:
        full: with all nodes.
        policy: with fewer.
        own: of the policy's short run.
        others: of the short runs of other policies.
        idle_nodes: that the layout leaves.
    """
    every = (own, *others)
    ratio = statistics.fmean(one.step_ratio for one in every)
    seconds = durations(own.own, *(one.own for one in others)).seconds
    seconds = replace(seconds, step_s=full.seconds.step_s * ratio)
    return _with_fewer(full, policy, seconds, _returns_s(every), idle_nodes=idle_nodes)


def with_replayed_fewer(
    full: Durations,
    policy: StatedPolicy,
    during: FewerSeconds | None,
    before: FewerSeconds,
    *others: FewerSeconds,
    idle_nodes: int,
) -> Durations:
    """Return the durations of a run with those of fewer nodes; what it lacks is the short runs'."""
    own = during or before
    seconds = replay_durations(own.own, before.own, *(one.own for one in others)).seconds
    if during is None:
        seconds = replace(seconds, step_s=full.seconds.step_s * before.step_ratio)
    returns_s = own.returns_s or _returns_s((before, *others))
    return _with_fewer(full, policy, seconds, returns_s, idle_nodes=idle_nodes)


def _returns_s(every: Sequence[FewerSeconds]) -> list[float]:
    return [return_s for one in every for return_s in one.returns_s]


def _with_fewer(
    full: Durations,
    policy: StatedPolicy,
    seconds: RunSeconds,
    returns_s: Sequence[float],
    *,
    idle_nodes: int,
) -> Durations:
    # No short run has returned: a return is a restart from shared storage that nothing delays.
    usual_s = full.seconds.restart_s[Level.SHARED, FailureClass.PROCESS]
    fewer = FewerNodesLayout(
        layout=Layout(policy=policy.policy(), seconds=seconds),
        idle_nodes=idle_nodes,
        return_s=statistics.fmean(returns_s or [usual_s]),
    )
    return replace(full, fewer=fewer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """A finished checkpoint."""

    stall: Stall
    waited_s: float
    """Of the stall, for an earlier write."""
    durable_s: float
    """When it was durable, since 1970; not before the end of the stall."""

    @property
    def level(self) -> Level:
        """That was written."""
        return self.stall.level

    @property
    def stopped_s(self) -> float:
        """Of the stall, without waiting."""
        return self.stall.seconds - self.waited_s

    @property
    def background_s(self) -> float:
        """From the end of the stall until it was durable."""
        return self.durable_s - self.stall.end_s

    def is_beside(self, step: Step) -> bool:
        """Whether a step was taken while it was written."""
        return self.stall.end_s < step.end_s and self.durable_s > step.begin_s


def _writes(launch: LaunchLog) -> Iterator[_Write]:
    durable, earlier_s = durable_of(launch), -math.inf
    for stall in stalls_of(launch):
        durable_s = durable.get((stall.level, stall.step))
        waited_s = min(stall.seconds, max(0.0, earlier_s - stall.begin_s))
        if durable_s is not None:
            earlier_s = max(earlier_s, durable_s)
            yield _Write(stall=stall, waited_s=waited_s, durable_s=max(stall.end_s, durable_s))
