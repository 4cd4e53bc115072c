"""The durations of a run, measured before it is made to suffer faults.

One short run of each policy, with its checkpoints closer together, loses a rank at the middle of
its steps. Of it count

    step         median of the steps beside which nothing is written
    stall        median of what a checkpoint of a level stops training for; where it is written in
                 the background, also what the steps beside the write take beyond the median
    durable      median from the end of the stall until the checkpoint is durable
    restart      mean from the fault to the next step, over all policies: a restart is mostly the
                 start of processes

The run with faults is predicted from these alone.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tuner.faults.levels import FailureClass, Level, RunSeconds
from tuner.verify.faults.measured import (
    MeasuredRestart,
    MeasuredRun,
    Step,
    durable_of,
    measured_run,
    stalls_of,
    steps_of,
)
from tuner.verify.faults.scenario import Fault, FaultKind, StatedPolicy
from tuner.verify.faults.supervisor import LaunchLog

HOST_STEPS: Final = 4
SHARED_STEPS: Final = 8
STEPS: Final = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySeconds:
    """Durations of one policy, before the restarts of all are taken together."""

    step_s: float
    stall_s: Mapping[Level, float]
    durable_after_s: Mapping[Level, float]
    run: MeasuredRun


def short(policy: StatedPolicy) -> StatedPolicy:
    """Return a policy with its checkpoints closer together."""
    host = None if policy.host is None else HOST_STEPS
    return policy.model_copy(update={"shared": SHARED_STEPS, "host": host})


def short_faults(*, mean_step_s: float) -> tuple[Fault, ...]:
    """Return the one fault of a short run, a rank that is killed about its middle."""
    return (Fault(at_s=STEPS / 2 * mean_step_s, kind=FaultKind.KILL, node=0, place=0),)


def measure_policy(launches: Sequence[LaunchLog]) -> PolicySeconds:
    """Measure the durations of a run."""
    steps, writes = [], []
    for launch in launches:
        # The first step of a launch warms up.
        steps += list(steps_of(launch))[1:]
        writes += list(_writes(launch))
    quiet = [one.seconds for one in steps if not any(write.is_beside(one) for write in writes)]
    step_s = statistics.median(quiet or [one.seconds for one in steps])
    stalls: dict[Level, list[float]] = {}
    for write in writes:
        beside = [one.seconds for one in steps if write.is_beside(one)]
        slowed_s = max(0.0, sum(beside) - len(beside) * step_s)
        stalls.setdefault(write.level, []).append(write.stall_s + slowed_s)
    return PolicySeconds(
        step_s=step_s,
        stall_s={level: statistics.median(values) for level, values in stalls.items()},
        durable_after_s={
            level: statistics.median(one.background_s for one in writes if one.level is level)
            for level in stalls
        },
        run=measured_run(launches),
    )


def run_seconds(own: PolicySeconds, restarts: Sequence[MeasuredRestart]) -> RunSeconds:
    """Return the durations of a policy as the models take them, with the mean of some restarts."""
    # Those that several launches took are longer by the time between their faults.
    single = [one.seconds - one.unnoticed_s for one in restarts if one.launches == 1]
    restart_s = statistics.fmean(single or [one.seconds / one.launches for one in restarts])
    both = (Level.HOST, Level.SHARED)
    return RunSeconds(
        step_s=own.step_s,
        stall_s={level: own.stall_s.get(level, 0.0) for level in both},
        durable_after_s={level: own.durable_after_s.get(level, 0.0) for level in both},
        restart_s={(level, kind): restart_s for level in both for kind in FailureClass},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """A finished checkpoint."""

    level: Level
    stall_s: float
    begin_s: float
    """The end of its stall, since 1970."""
    end_s: float
    """When it was durable; not before that."""

    @property
    def background_s(self) -> float:
        """From the end of the stall until it was durable."""
        return self.end_s - self.begin_s

    def is_beside(self, step: Step) -> bool:
        """Whether a step was taken while it was written."""
        return self.begin_s < step.end_s and self.end_s > step.end_s - step.seconds


def _writes(launch: LaunchLog) -> Iterator[_Write]:
    durable = durable_of(launch)
    for stall in stalls_of(launch):
        durable_s = durable.get((stall.level, stall.step))
        if durable_s is not None:
            yield _Write(
                level=stall.level,
                stall_s=stall.seconds,
                begin_s=stall.end_s,
                end_s=max(stall.end_s, durable_s),
            )
