"""The checkpoint interval, and the share of the time that then advances training.

    tau      useful work between checkpoints         lambda  failures per second
    c        seconds that a checkpoint stops training
    w        seconds after that until it is durable (asynchronous writing; 0 when synchronous)
    R        restart and reading the checkpoint; may itself be interrupted

Work is kept once its checkpoint is durable. With exponential failures a segment of tau + c takes on
average

    E = exp(lambda R) / lambda * (exp(lambda (tau + c)) - 1) * exp(lambda w)

For w = 0 this is the complete cost of Daly (Future Generation Computer Systems 22, 2006). With
w > 0 (our extension): a running job needs tau + c without failure until the next checkpoint is
durable, one that has just restarted tau + c + w, which gives the last factor. The share of time
that advances training is tau / E, and its best tau does not depend on R and w:

    1 - lambda tau = exp(-lambda (tau + c)),    to first order sqrt(2 c / lambda) (Young 1974)

A write must be done before the next checkpoint begins, so tau >= w; and a checkpoint follows a
whole step, so tau >= one step. Both only matter where they exceed the best tau: the share falls on
both sides of it. A stated tau that is shorter than a step is refused. Where failures are so
frequent that a write outlasts the best tau, training waits for it as if it were synchronous if that
wastes less.

Not covered: what background writes take from the computation beside them (milliseconds of a write
of 128 MiB on an H200), those that exceed host memory, failing checkpoints.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Numbers
from tuner.faults.recovery import LARGEST_EXPONENT, equal_restart_s
from tuner.faults.reliability import (
    FailureModel,
    Jobs,
    failure_rate_per_s,
    loss_rate_per_s,
    process_rate_per_s,
    read_s,
    stall_s,
    waiting_ratio,
    write_s,
)
from tuner.units import format_s

NEWTON_STEPS = 8
"""Newton steps from Young's interval: the error squares each time; 5 reach the last digit of a
double."""
ROUNDING: Final = 1e-9
"""Share of a step by which a write may exceed a whole number of steps."""
LEAST_EFFECTIVE_RATIO: Final = 0.01
"""A run that needs a hundred times its undisturbed time counts as one that never finishes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointCycle:
    """The cycle between two checkpoints, in seconds, per candidate."""

    failures_per_s: Numbers
    work_s: Numbers
    """tau."""
    stall_s: Numbers
    """c."""
    background_s: Numbers
    """w."""
    restart_s: Numbers
    """R."""
    waiting_ratio: Numbers
    """Share of the wall clock spent waiting for repairs."""

    @property
    def effective_ratio(self) -> Numbers:
        """Share of the wall clock that advances training."""
        rate = np.asarray(self.failures_per_s)
        outside = np.minimum(rate * (self.restart_s + self.background_s), LARGEST_EXPONENT)
        inside = np.minimum(rate * (self.work_s + self.stall_s), LARGEST_EXPONENT)
        ratio = rate * self.work_s / np.expm1(inside) * np.exp(-outside)
        ratio = ratio * (1.0 - self.waiting_ratio)
        return float(ratio) if np.ndim(ratio) == 0 else ratio


def best_work_s(*, failures_per_s: Numbers, stall_s: Numbers) -> Numbers:
    """Return the tau that makes the share of useful time largest, seconds.

    Solves x + exp(-x - s) = 1 for x = lambda tau, s = lambda c, by Newton's method from Young's
    x = sqrt(2 s), which lies above the root of this convex function: every step comes closer.
    """
    stall = np.asarray(failures_per_s * stall_s, dtype=np.float64)
    x = np.minimum(np.sqrt(2.0 * stall), 1.0)
    for _ in range(NEWTON_STEPS):
        slope = -np.expm1(-x - stall)
        x = x - np.where(slope > 0.0, (x + np.expm1(-x - stall)) / _above_zero(slope), 0.0)
    best = x / failures_per_s
    return float(best) if np.ndim(best) == 0 else best


def interval_steps(work_s: float, *, background_s: float, step_s: float) -> int:
    """Return an interval in whole steps, never so few that a write in the background is not done.

    Args:
        work_s: of the interval.
        background_s: of one checkpoint's write, beside training.
        step_s: of a step.
    """
    return max(round(work_s / step_s), math.ceil(background_s / step_s - ROUNDING), 1)


def step_obstacle(reliability: FailureModel, *, step_s: float) -> str:
    """Say why the stated interval is not possible with a step; empty where it is, or none is."""
    stated_s = reliability.interval_s
    if stated_s is None or stated_s >= step_s:
        return ""
    return f"interval {format_s(stated_s)} is shorter than a step of {format_s(step_s)}"


def cycle(jobs: Jobs, reliability: FailureModel, *, step_s: Numbers) -> CheckpointCycle:
    """Return the cycle of every candidate, with the best or the stated checkpoint interval.

    The latter may be shorter than the step of a candidate, which is then not possible.
    """
    storage = reliability.storage
    chosen = _cycle(jobs, reliability, step_s=step_s)
    if not storage.asynchronous:
        return chosen
    # Where no write lengthens the interval, overlapped with training it never costs more.
    is_longer = reliability.interval_s is None and np.any(chosen.work_s <= chosen.background_s)
    if not is_longer:
        return chosen
    waiting = replace(reliability, storage=replace(storage, asynchronous=False))
    return _better(chosen, _cycle(jobs, waiting, step_s=step_s))


def _cycle(jobs: Jobs, reliability: FailureModel, *, step_s: Numbers) -> CheckpointCycle:
    storage = reliability.storage
    rate = failure_rate_per_s(jobs, reliability)
    written_s, stopped_s = write_s(jobs, storage), stall_s(jobs, storage)
    background_s = written_s if storage.asynchronous else written_s * 0.0
    wanted_s: Numbers
    if reliability.interval_s is None:
        wanted_s = np.maximum(best_work_s(failures_per_s=rate, stall_s=stopped_s), step_s)
    else:
        wanted_s = reliability.interval_s
    return CheckpointCycle(
        failures_per_s=rate,
        work_s=np.maximum(wanted_s, background_s),
        stall_s=stopped_s,
        background_s=background_s,
        restart_s=_restart_s(jobs, reliability),
        waiting_ratio=waiting_ratio(jobs, reliability),
    )


def _restart_s(jobs: Jobs, reliability: FailureModel) -> Numbers:
    """Restart and reading the checkpoint, of every class of failure."""
    loaded_s = read_s(jobs, reliability.storage)
    if not reliability.restarts_in_process:
        return reliability.restart_s + loaded_s
    return equal_restart_s(
        process_per_s=process_rate_per_s(jobs, reliability),
        loss_per_s=loss_rate_per_s(jobs, reliability),
        process_restart_s=reliability.process_restart_s + loaded_s,
        restart_s=reliability.restart_s + loaded_s,
    )


def _better(first: CheckpointCycle, second: CheckpointCycle) -> CheckpointCycle:
    """Take each candidate's more effective cycle, the first of equals."""
    is_second = np.asarray(second.effective_ratio) > np.asarray(first.effective_ratio)
    if not np.any(is_second):
        return first
    columns = {
        field.name: np.where(is_second, getattr(second, field.name), getattr(first, field.name))
        for field in fields(CheckpointCycle)
    }
    return CheckpointCycle(**columns)


def _above_zero(value: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(value > 0.0, value, 1.0)
