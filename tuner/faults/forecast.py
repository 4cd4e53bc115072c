"""The whole run of `goal.tokens`: its length, its failures, its share of training, its cost.

Letters as in tuner/faults/interval.py. Shares of the wall clock (run_shares.py), here for shared
storage alone:

    training     tau / E, less the time spent waiting
    checkpoints  training * c / tau: stalls of checkpoints that were kept
    waiting      for a repair
    slower       lost to longer steps where the job goes on with fewer nodes (fewer_nodes.py)
    restarting   (1 - waiting) (1 - exp(-lambda R)): each failure starts a restart, which takes
                 (1 - exp(-lambda R)) / lambda on average, since it may be interrupted
    lost         the rest: work and stalls that had to be repeated

The band of the wall clock covers only the randomness of failures, P10 to P90. The times t lost to
failures are assumed independent, so the variance is failures * E[t^2], with a loss uniform over a
cycle and an exponential wait for repair, and a normal sum. That holds from about twenty failures
on; with fewer the lower end is clipped at the time without failures.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from profilers.records import Record, Seconds
from tuner.faults.interval import LEAST_EFFECTIVE_RATIO, interval_steps
from tuner.faults.level_seconds import copied_bytes
from tuner.faults.reliability import FailureModel, Jobs, longest_wait_s
from tuner.faults.run_shares import CheckpointLevels, Ratio, RunShares, Whole, run_shares
from tuner.faults.spare_choice import SpareChoice
from tuner.faults.without_spare import WithoutSpare
from tuner.spec.goal import Reliability

P90_DEVIATIONS: Final = 1.2815515655446004
"""Standard normal quantile of 0.9."""
SECONDS_PER_HOUR: Final = 3600.0

Amount = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class ProcessRestart(Record):
    """The restart after failures of processes alone; seconds without reading the checkpoint."""

    decision: Literal["in_process", "full"]
    """The shorter one, with which more of the time trains."""
    in_process_s: Seconds
    full_s: Seconds
    effective_time_ratio: Ratio
    """Share of the wall clock that advances training, of a job that waits for repairs."""
    full_effective_time_ratio: Ratio
    """Share of the wall clock that advances training if all processes were restarted."""


class RunForecast(Record):
    """Forecast of a whole training run; `predicted.run` of the plan."""

    finishes: bool
    reason: str = ""
    """Reason why the run never finishes, with numbers; empty when it does."""
    effective_time_ratio: Ratio
    """Share of the wall clock that advances training."""
    time_ratios: dict[str, Ratio]
    """Shares of the wall clock: training, checkpoints, lost, restarting, waiting; slower where the
    job goes on with fewer nodes."""
    goodput_tokens_per_s: Amount
    """Tokens trained per second of wall clock; 0 when the run never finishes."""
    effective_step_s: Seconds | None = None
    """Wall clock per step, failures included; absent when the run never finishes."""
    checkpoint_bytes: Whole
    failure_interval_s: Seconds | None = None
    """Mean time between failures of the whole job; this and the next six are absent when no
    failures are priced."""
    checkpoint_interval_s: Seconds | None = None
    """Useful work between checkpoints."""
    checkpoint_interval_steps: Whole | None = None
    """Checkpoint interval in whole steps, for a launcher."""
    checkpoint_stall_s: Seconds | None = None
    """Time that one checkpoint stops training."""
    checkpoint_write_s: Seconds | None = None
    """Seconds from the start of a checkpoint until it is durable."""
    checkpoint_in_background: bool | None = None
    """Training goes on while one is written; absent from plans of before it was decided, which do
    as `goal.reliability.checkpoint` says."""
    process_restart: ProcessRestart | None = None
    """Restart after failures of processes alone; absent where the spec or the engine has one
    kind."""
    restart_s: Seconds | None = None
    """Seconds from a failure (or the repair that it waited for) to the first useful step, reading
    the checkpoint included."""
    steps: Whole | None = None
    """Optimizer steps of the whole run; this and the following fields are absent when the spec
    gives no number of tokens."""
    expected_failures: Amount | None = None
    wall_clock_s: Seconds | None = None
    """Expected wall clock of the run; the first start is not counted."""
    wall_clock_s_band: tuple[Seconds, Seconds] | None = None
    """P10 and P90 over random failures; errors of the step time are not included."""
    device_hours: Amount | None = None
    """Hours of training and spare devices, summed over devices."""
    cost: Amount | None = None
    """Device hours times their price, in the user's currency; absent without a price."""
    checkpoint_levels: CheckpointLevels | None = None
    """Levels of the checkpoints; absent where the spec asks for shared storage alone."""
    spares: SpareChoice | None = None
    """Number of training and of spare nodes; absent where the spec states it."""
    without_spare: WithoutSpare | None = None
    """Decision to wait or continue without a spare node; absent where the spec says that the job
    waits."""

    @model_serializer(mode="wrap")
    def _without_levels(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what the spec does not ask for."""
        values: dict[str, Any] = serialize(self)
        for name in ("checkpoint_levels", "without_spare", "process_restart", "spares"):
            if getattr(self, name) is None:
                values.pop(name, None)
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """The training run, and the price of its devices."""

    step_s: float
    tokens_per_step: int
    tokens: float | None
    devices_per_node: float
    """Devices of one spare node, averaged over kinds of nodes."""
    price_per_device_hour: float | None = None
    """Price of one device for an hour, averaged over training and spare devices."""

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the whole run."""
        return (
            None if self.tokens is None else max(1, math.ceil(self.tokens / self.tokens_per_step))
        )


def forecast(run: TrainingRun, *, jobs: Jobs, reliability: FailureModel | None) -> RunForecast:
    """Forecast the run of one configuration; `jobs` holds numbers here, not arrays."""
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
    shares = run_shares(jobs, reliability, step_s=run.step_s)
    made = forecast_shares(shares, run, jobs=jobs, reliability=reliability)
    restart = _process_restart(shares, run, jobs=jobs, reliability=reliability)
    return made.model_copy(update={"process_restart": restart})


def _process_restart(
    shares: RunShares, run: TrainingRun, *, jobs: Jobs, reliability: FailureModel
) -> ProcessRestart | None:
    """Compare both kinds of restart; None where there is one kind."""
    inside_s = reliability.in_process_restart_s
    if inside_s is None:
        return None
    without = replace(reliability, in_process_restart_s=None)
    return ProcessRestart(
        decision="in_process" if reliability.restarts_in_process else "full",
        in_process_s=inside_s,
        full_s=reliability.restart_s,
        effective_time_ratio=shares.training,
        full_effective_time_ratio=run_shares(jobs, without, step_s=run.step_s).training,
    )


def copies_on_hosts(run: RunForecast | None, jobs: Jobs) -> float:
    """Bytes of a node's memory that copies of checkpoints take at most."""
    if run is None:
        return 0.0
    levels = run.checkpoint_levels
    on_hosts = 0 if levels is None else levels.host_bytes or 0
    return float(on_hosts) or (copied_bytes(jobs) if run.checkpoint_in_background else 0.0)


def writes_in_background(run: RunForecast, stated: Reliability) -> bool:
    """Return whether checkpoints are written in the background; for older plans, as in the spec."""
    if run.checkpoint_in_background is None:
        return bool(stated.checkpoint.asynchronous)
    return run.checkpoint_in_background


def forecast_shares(
    shares: RunShares, run: TrainingRun, *, jobs: Jobs, reliability: FailureModel
) -> RunForecast:
    """Forecast the run whose shares of the wall clock are known."""
    ratio = shares.training
    finishes = ratio >= LEAST_EFFECTIVE_RATIO
    disturbed = RunForecast(
        finishes=finishes,
        reason="" if finishes else shares.reason,
        effective_time_ratio=ratio,
        time_ratios=shares.ratios,
        goodput_tokens_per_s=run.tokens_per_step * ratio / run.step_s if finishes else 0.0,
        effective_step_s=run.step_s / ratio if finishes else None,
        checkpoint_bytes=math.ceil(float(jobs.checkpoint_bytes)),
        failure_interval_s=1.0 / shares.failures_per_s,
        checkpoint_interval_s=shares.work_s,
        checkpoint_interval_steps=shares.steps
        or interval_steps(shares.work_s, background_s=shares.background_s, step_s=run.step_s),
        checkpoint_stall_s=shares.stall_s,
        checkpoint_write_s=shares.stall_s + shares.background_s,
        checkpoint_in_background=shares.background_s > 0.0,
        restart_s=shares.restart_s,
        checkpoint_levels=shares.levels,
    )
    if not finishes:
        return disturbed.model_copy(update={"steps": run.steps})
    deviation_s = _loss_deviation_s(shares, jobs=jobs, reliability=reliability)
    return _with_bill(disturbed, run=run, jobs=jobs, deviation_s=deviation_s)


def _with_bill(
    run_forecast: RunForecast, *, run: TrainingRun, jobs: Jobs, deviation_s: float
) -> RunForecast:
    """Add what depends on the length of the run; `deviation_s`: root of E[t^2] of one failure."""
    if run.steps is None or run_forecast.effective_step_s is None:
        return run_forecast
    wall_s = run.steps * run_forecast.effective_step_s
    failures = 0.0
    if run_forecast.failure_interval_s is not None:
        running_s = wall_s * (1.0 - run_forecast.time_ratios["waiting"])
        failures = running_s / run_forecast.failure_interval_s
    spread_s = P90_DEVIATIONS * math.sqrt(failures) * deviation_s
    undisturbed_s = wall_s * (
        run_forecast.time_ratios["training"] + run_forecast.time_ratios.get("checkpoints", 0.0)
    )
    billed_devices = float(jobs.devices) + float(jobs.spare_nodes) * run.devices_per_node
    hours = billed_devices * wall_s / SECONDS_PER_HOUR
    price = run.price_per_device_hour
    return run_forecast.model_copy(
        update={
            "steps": run.steps,
            "expected_failures": failures,
            "wall_clock_s": wall_s,
            "wall_clock_s_band": (max(wall_s - spread_s, undisturbed_s), wall_s + spread_s),
            "device_hours": hours,
            "cost": None if price is None else hours * price,
        }
    )


def _loss_deviation_s(shares: RunShares, *, jobs: Jobs, reliability: FailureModel) -> float:
    """Root mean square of the seconds that one failure costs."""
    mean_s, square = 0.0, 0.0
    for loss in shares.losses:
        one_mean_s = loss.between_s / 2.0 + loss.background_s + loss.restart_s
        mean_s += loss.share * one_mean_s
        square += loss.share * (one_mean_s**2 + loss.between_s**2 / 12.0)
    # Some failures wait for the first of S + 1 repairs, exponential of mean one_s.
    one_s = longest_wait_s(jobs, reliability)
    mean_wait_s = shares.waiting / (1.0 - shares.waiting) / shares.failures_per_s
    square += 2.0 * mean_wait_s * (mean_s + one_s)
    if shares.slower and shares.switches_per_s:
        # Some switch to fewer nodes, for an exponential time of longer steps.
        mean_slower_s = shares.slower / (1.0 - shares.waiting) / shares.failures_per_s
        square += 2.0 * mean_slower_s * (mean_s + shares.slower / shares.switches_per_s)
    return math.sqrt(square)
