"""The whole run of `goal.tokens`: its length, its failures, its share of training, its bill.

Letters as in tuner/faults/interval.py. Shares of the wall clock, exact for exponential failures:

    training     tau / E, less what is spent waiting
    checkpoints  training * c / tau: stalls of checkpoints that were of use
    waiting      for a repair
    restarting   (1 - waiting) (1 - exp(-lambda R)): each failure starts a restart, which takes
                 (1 - exp(-lambda R)) / lambda on average, since it may be cut short
    lost         the rest: work and stalls that had to be repeated

The band of the wall clock is the luck of the failures alone, P10 to P90. The time t lost to each is
taken as independent, so the variance is failures * E[t^2], with a loss uniform over a cycle and an
exponential wait for repair, and the sum as normal. That is good from about twenty failures on; with
fewer its lower end is held at the time without any.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field

from profilers.records import Record, Seconds
from tuner.faults.goodput import LEAST_EFFECTIVE_RATIO
from tuner.faults.interval import Cycle, cycle
from tuner.faults.reliability import Jobs, Reliability, longest_wait_s
from tuner.units import format_s

P90_DEVIATIONS: Final = 1.2815515655446004
"""Standard normal quantile of 0.9."""
SECONDS_PER_HOUR: Final = 3600.0

Ratio = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0)]


class RunForecast(Record):
    """What to expect of a whole training run; goes into the plan as `predicted.run`."""

    finishes: bool
    reason: str = ""
    """Why it never finishes, with numbers; empty when it does."""
    effective_time_ratio: Ratio
    """Share of the wall clock that advances the training."""
    time_ratios: dict[str, Ratio]
    """Shares of the wall clock: training, checkpoints, lost, restarting, waiting."""
    goodput_tokens_per_s: Amount
    """Tokens trained per second of wall clock; 0 when the run never finishes."""
    effective_step_s: Seconds | None = None
    """Wall clock per step, failures included; absent when the run never finishes."""
    checkpoint_bytes: Whole
    failure_interval_s: Seconds | None = None
    """Mean time between failures of the whole job; this and the next five are absent when no
    failures are priced."""
    checkpoint_interval_s: Seconds | None = None
    """Useful work between checkpoints."""
    checkpoint_interval_steps: Whole | None = None
    """The same in whole steps, for a launcher."""
    checkpoint_stall_s: Seconds | None = None
    """What one checkpoint stops training for."""
    checkpoint_write_s: Seconds | None = None
    """From the start of a checkpoint until it is safe."""
    restart_s: Seconds | None = None
    """From a failure (or the repair that it waited for) to the first useful step, reading the
    checkpoint included."""
    steps: Whole | None = None
    """Of the whole run; this and what follows is absent when no number of tokens is asked for."""
    expected_failures: Amount | None = None
    wall_clock_s: Seconds | None = None
    """Expected; the first start is not counted."""
    wall_clock_s_band: tuple[Seconds, Seconds] | None = None
    """P10 and P90 of the failures' luck; how wrong the step time may be is not in it."""
    device_hours: Amount | None = None
    """Of the devices that train and those that stand by."""
    cost: Amount | None = None
    """Device hours times their price, in the user's currency; absent without a price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is to be trained, and what the devices cost."""

    step_s: float
    tokens_per_step: int
    tokens: float | None
    devices_per_node: float
    """Of a spare node, on average over kinds of nodes."""
    price_per_device_hour: float | None = None
    """The same over the devices that train and those that stand by."""

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the whole run."""
        return (
            None if self.tokens is None else max(1, math.ceil(self.tokens / self.tokens_per_step))
        )


def forecast(run: Run, *, jobs: Jobs, reliability: Reliability | None) -> RunForecast:
    """Work out the run of one configuration; `jobs` holds numbers here, not columns."""
    if reliability is None:
        return _with_bill(
            RunForecast(
                finishes=True,
                effective_time_ratio=1.0,
                time_ratios={"training": 1.0},
                goodput_tokens_per_s=run.tokens_per_step / run.step_s,
                effective_step_s=run.step_s,
                checkpoint_bytes=math.ceil(float(jobs.checkpoint_bytes)),
            ),
            run=run,
            jobs=jobs,
            deviation_s=0.0,
        )
    found = cycle(jobs, reliability, step_s=run.step_s)
    ratio = float(found.effective_ratio)
    finishes = ratio >= LEAST_EFFECTIVE_RATIO
    disturbed = RunForecast(
        finishes=finishes,
        reason="" if finishes else _reason(found),
        effective_time_ratio=ratio,
        time_ratios=_time_ratios(found),
        goodput_tokens_per_s=run.tokens_per_step * ratio / run.step_s if finishes else 0.0,
        effective_step_s=run.step_s / ratio if finishes else None,
        checkpoint_bytes=math.ceil(float(jobs.checkpoint_bytes)),
        failure_interval_s=1.0 / float(found.failures_per_s),
        checkpoint_interval_s=float(found.work_s),
        checkpoint_interval_steps=max(1, round(float(found.work_s) / run.step_s)),
        checkpoint_stall_s=float(found.stall_s),
        checkpoint_write_s=float(found.stall_s) + float(found.background_s),
        restart_s=float(found.restart_s),
    )
    if not finishes:
        return disturbed.model_copy(update={"steps": run.steps})
    loss_s = _loss_deviation_s(found, jobs=jobs, reliability=reliability)
    return _with_bill(disturbed, run=run, jobs=jobs, deviation_s=loss_s)


def _with_bill(found: RunForecast, *, run: Run, jobs: Jobs, deviation_s: float) -> RunForecast:
    """Add what depends on the length of the run; `deviation_s`: root of E[t^2] of one failure."""
    if run.steps is None or found.effective_step_s is None:
        return found
    wall_s = run.steps * found.effective_step_s
    failures = 0.0
    if found.failure_interval_s is not None:
        running_s = wall_s * (1.0 - found.time_ratios["waiting"])
        failures = running_s / found.failure_interval_s
    spread_s = P90_DEVIATIONS * math.sqrt(failures) * deviation_s
    undisturbed_s = wall_s * (
        found.time_ratios["training"] + found.time_ratios.get("checkpoints", 0.0)
    )
    held = float(jobs.devices) + float(jobs.spare_nodes) * run.devices_per_node
    hours = held * wall_s / SECONDS_PER_HOUR
    price = run.price_per_device_hour
    return found.model_copy(
        update={
            "steps": run.steps,
            "expected_failures": failures,
            "wall_clock_s": wall_s,
            "wall_clock_s_band": (max(wall_s - spread_s, undisturbed_s), wall_s + spread_s),
            "device_hours": hours,
            "cost": None if price is None else hours * price,
        }
    )


def _time_ratios(found: Cycle) -> dict[str, float]:
    training, waiting = float(found.effective_ratio), float(found.waiting_ratio)
    checkpoints = training * float(found.stall_s) / float(found.work_s)
    cut_short = -math.expm1(-float(found.failures_per_s) * float(found.restart_s))
    restarting = (1.0 - waiting) * cut_short
    return {
        "training": training,
        "checkpoints": checkpoints,
        "lost": max(0.0, 1.0 - training - checkpoints - restarting - waiting),
        "restarting": restarting,
        "waiting": waiting,
    }


def _loss_deviation_s(found: Cycle, *, jobs: Jobs, reliability: Reliability) -> float:
    """Root of the mean square of the seconds that one failure costs."""
    cycle_s = float(found.work_s) + float(found.stall_s)
    rate, waiting = float(found.failures_per_s), float(found.waiting_ratio)
    mean_s = cycle_s / 2.0 + float(found.background_s) + float(found.restart_s)
    square = mean_s**2 + cycle_s**2 / 12.0
    # Some failures wait for the first of S + 1 repairs, exponential of mean one_s.
    one_s = longest_wait_s(jobs, reliability)
    mean_wait_s = waiting / (1.0 - waiting) / rate
    square += 2.0 * mean_wait_s * (mean_s + one_s)
    return math.sqrt(square)


def _reason(found: Cycle) -> str:
    """Say which stop eats the run, and what would help."""
    between = format_s(1.0 / float(found.failures_per_s))
    parts = {
        "restarting": float(found.restart_s),
        "a checkpoint": float(found.stall_s) + float(found.background_s),
        "the work between two checkpoints": float(found.work_s),
    }
    longest = max(parts, key=lambda name: parts[name])
    if float(found.waiting_ratio) > 0.9:
        return (
            "the job waits for repairs nearly all the time; keep spare nodes or use fewer devices"
        )
    return (
        f"the job fails every {between} and {longest} takes {format_s(parts[longest])};"
        " use fewer devices, faster storage or a shorter restart"
    )
