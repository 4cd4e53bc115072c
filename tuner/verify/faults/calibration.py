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

The run with faults is predicted from these alone.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tuner.faults.levels import FailureClass, Level, RunSeconds
from tuner.verify.faults.measured import (
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
    """Durations of one policy, before the restarts of all are taken together."""

    step_s: float
    slow_steps_s: tuple[float, ...]
    """Of steps beside a slow link."""
    stall_s: Mapping[Level, float]
    durable_after_s: Mapping[Level, float]
    run: MeasuredRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Durations of one policy as the simulation takes them."""

    seconds: RunSeconds
    slow_factor: float
    """How many times longer a step takes beside a slow link."""
    speed_deviation: float = 0.0
    """Of the logarithm of all seconds, from one run to the next."""

    def at_speed(self, deviations: float) -> "Durations":
        """Return those of a run on a machine that is slower than usual by so many deviations."""
        factor = math.exp(deviations * self.speed_deviation)
        return replace(self, seconds=self.seconds.scaled(factor))


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


def measure_policy(launches: Sequence[LaunchLog]) -> PolicySeconds:
    """Measure the durations of a run."""
    steps, writes = [], []
    slow = slow_windows(launches)
    for launch in launches:
        # The first step of a launch warms up.
        steps += list(steps_of(launch))[1:]
        writes += list(_writes(launch))
    quiet = [
        one.seconds
        for one in steps
        if not any(write.is_beside(one) for write in writes)
        and not any(window.is_beside(one) for window in slow)
    ]
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
        run=measured_run(launches),
    )


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
        restarted=(during,) if during.run.restarts else every,
        slowed=(during,) if during.slow_steps_s else every,
    )


def _durations(
    own: PolicySeconds, *, restarted: Sequence[PolicySeconds], slowed: Sequence[PolicySeconds]
) -> Durations:
    restarts = [restart for one in restarted for restart in one.run.restarts]
    # Those that several launches took are longer by the time between their faults.
    if not restarts:
        raise FaultRunError("no run was restarted, so that the time of a restart is not known")
    single = [one.seconds - one.unnoticed_s for one in restarts if one.launches == 1]
    restart_s = statistics.fmean(single or [one.seconds / one.launches for one in restarts])
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
