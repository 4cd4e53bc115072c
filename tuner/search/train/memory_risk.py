"""Probability that a decision runs out of memory (OOM), and what that is expected to cost.

    at start   the peak was predicted too low (peak_errors.py): the job dies in its first steps
    later      it started, but its peak grows: by GROWTH_RATIO on average, and where no routing was
               recorded by UNEVEN_RATIO of its growth at twice the load of an expert rank

    loss       at start * failed start + later * (CRASHES * crash + failed start)      seconds
    expected   (1 - ever) * step + ever * (expected of what is run next) + loss / steps of the run

A decision that runs out never delivers its own step: the job is planned again, with the safer,
slower decision of least expected time. Predictions of one job's peaks err alike,
so the next decision runs out with probability `ever(next) / ever`. The last one is the fallback,
the fastest safe decision (OOM probability at most SMALL). Without a fallback the
decision is run again as it is, and the value only ranks. A job that dies late is first restarted
CRASHES times. Its progress until then is not credited, since the time of death is unknown; late
crashes therefore cost somewhat too much.

`expected` is in seconds a step; the run has the steps of `goal.tokens`, or as many as the fastest
decision does in USUAL_RUN_S.

The limit is all the memory of a device, not what a plan may use of it (`usable_memory_ratio`, a
limit on the predicted peak). Ranks of one job err alike, so the likeliest to run out decides.

Letters: C candidates, P devices of a pipeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats, Ints
from tuner.config.columns import Strategies
from tuner.config.shapes import Hardware, ModelShape, Stages
from tuner.costs.train.memory import price_memory
from tuner.costs.train.memory_constants import MemoryConstants
from tuner.prices.train.constants import Software
from tuner.search.train.peak_errors import error_kind, published_errors
from tuner.spec.goal import TrainGoal

HOUR_S: Final = 3600.0

FAILED_START_S: Final = 4.0 * HOUR_S
"""Seconds from a start that runs out of memory to the first step of the next: somebody reads the
log, plans again and queues, half a working day. Prior; `goal.failed_start` overrides it."""

CRASHES: Final = 2.0
"""Late crashes until somebody plans again: the first looks like a fault and is restarted. Prior."""

RESTART_S: Final = 0.5 * HOUR_S
"""Seconds from a crash to the next step; `goal.reliability.restart` overrides it. Prior."""

CHECKPOINT_INTERVAL_S: Final = HOUR_S
"""Seconds between checkpoints, half of which is lost in a crash;
`goal.reliability.checkpoint.interval` overrides it. Prior."""

USUAL_RUN_S: Final = 7.0 * 24.0 * HOUR_S
"""Seconds of a run whose spec states no tokens. Prior."""

GROWTH_RATIO: Final = 0.005
"""Growth of a peak over a run, on average: evaluation, checkpoints, blocks that no longer fit.
Prior; no published run states it."""

UNEVEN_RATIO: Final = 0.1
"""Excess of the most-loaded expert rank over balance at its worst, on average, where the routing is
assumed balanced. Prior: recordings of Mixtral and OLMoE on C4 over 8 expert ranks have 1.12 and
1.20 in one pass of a hundred, less where trained with a balancing loss. Where a recording is given
its P99 is in the peak already."""

SMALL: Final = 0.05
"""OOM probability up to which a decision is called safe."""

NUM_PEAK_LIMITS: Final = 2048
"""Number of limits of predicted peaks that are tried, evenly spaced up to a device's memory."""

LIKELY: Final = 0.5
"""OOM probability above which a decision counts as not fitting: the median of its peak exceeds the
device. It is planned only where no other decision is less likely to run out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chances:
    """Probabilities of running out of memory."""

    at_start_C: Floats
    ever_C: Floats
    """Probability of running out of memory at the start or later."""

    @property
    def later_C(self) -> Floats:
        """Return the probability of running out after the start."""
        return self.ever_C - self.at_start_C

    def of_likeliest_rank(self) -> tuple["Chances", Ints]:
        """Return the probabilities of the device most likely to run out, and its index.

        Both arrays have the shape [P, C] here: the devices of every decision's pipeline.
        """
        rank_C = self.ever_C.argmax(axis=0)
        at = rank_C[None]
        worst = Chances(
            at_start_C=np.take_along_axis(self.at_start_C, at, axis=0)[0],
            ever_C=np.take_along_axis(self.ever_C, at, axis=0)[0],
        )
        return worst, rank_C


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPrices:
    """Seconds lost when a run runs out of memory, and the length of the run."""

    failed_start_s: float = FAILED_START_S
    crash_s: float = RESTART_S + CHECKPOINT_INTERVAL_S / 2.0
    run_steps: float | None = None
    """Steps of the whole run; None: it takes USUAL_RUN_S, or a step where that is longer."""

    def loss_s(self, chances: Chances) -> Floats:
        """Return the seconds that failed starts and restarts are expected to take of the run."""
        late_s = CRASHES * self.crash_s + self.failed_start_s
        total_s: Floats = chances.at_start_C * self.failed_start_s + chances.later_C * late_s
        return total_s

    def run_s(self, step_s: float) -> float:
        """Return the seconds of the run, which has at least one step."""
        return max(USUAL_RUN_S, step_s) if self.run_steps is None else self.run_steps * step_s

    def assumed_run_s(self, step_s: float) -> float | None:
        """Return the seconds of the run where its length is assumed; None where it is stated."""
        return self.run_s(step_s) if self.run_steps is None else None

    def expected_s(self, step_s_C: Floats, chances: Chances) -> Floats:
        """Return the seconds a step, with the expected cost of running out of memory.

        A safe decision, and one with no safer and slower decision to fall back on, is run again as
        it is.

        Args:
            step_s_C: seconds a step of the decisions.
            chances: probabilities that the decisions run out.
        """
        if not len(step_s_C):
            return step_s_C
        ever_C = chances.ever_C
        fastest_s = float(step_s_C.min())
        lost_s_C = self.loss_s(chances) * fastest_s / self.run_s(fastest_s)
        later_s_C = np.full(len(step_s_C), np.inf)
        step_j_s = np.inf
        # A decision no faster than a safer one is never a useful fallback.
        for j in np.lexsort((step_s_C, np.maximum(ever_C, SMALL))):
            if step_s_C[j] >= step_j_s:
                continue
            step_j_s = step_s_C[j]
            later_s = ever_C[j] * step_j_s if np.isinf(later_s_C[j]) else later_s_C[j]
            from_j_s_C = (ever_C - ever_C[j]) * step_j_s + lost_s_C[j] + later_s
            may_precede_C = (ever_C > max(SMALL, ever_C[j])) & (step_s_C <= step_j_s)
            later_s_C = np.where(may_precede_C, np.minimum(later_s_C, from_j_s_C), later_s_C)
        later_s_C = np.where(np.isinf(later_s_C), ever_C * step_s_C, later_s_C)
        expected: Floats = (1.0 - ever_C) * step_s_C + later_s_C + lost_s_C
        return expected


def whole_loss_s(loss_s: float, *, chance: float, slower_s: float) -> float:
    """Return the seconds of the run that running out costs, the fallback's longer step included.

    That is what `LossPrices.expected_s` adds to the steps of the run, where nothing in between is
    tried before the fallback.

    Args:
        loss_s: seconds of failed starts and restarts.
        chance: probability of running out.
        slower_s: seconds of the run that the fallback takes longer.
    """
    return loss_s + chance * slower_s


def loss_prices(goal: TrainGoal) -> LossPrices:
    """Read the cost of running out from a goal."""
    stated = goal.reliability
    interval_s = None if stated is None else stated.checkpoint.interval
    restart_s = RESTART_S if stated is None or stated.restart is None else stated.restart
    return LossPrices(
        failed_start_s=FAILED_START_S if goal.failed_start is None else goal.failed_start,
        crash_s=restart_s + (interval_s or CHECKPOINT_INTERVAL_S) / 2.0,
        run_steps=None if goal.tokens is None else goal.tokens / goal.tokens_per_step,
    )


def chances(
    peak_bytes_C: Floats,
    *,
    capacity_bytes: Floats | float,
    software: Software,
    pipeline_C: npt.ArrayLike,
    uneven_bytes_C: Floats | float = 0.0,
) -> Chances:
    """Return the probabilities that peaks exceed the memory of a device.

    Peaks may also be [P, C]; a peak of 0 means no device.

    Args:
        peak_bytes_C: predicted peaks.
        capacity_bytes: all that a device has.
        software: training framework.
        pipeline_C: ranks of the pipeline, or one number for all.
        uneven_bytes_C: growth of a peak when the load of the most-loaded expert rank doubles; 0
            where a recording says how uneven the load is, or there are no experts.
    """
    peak_bytes_C = np.maximum(peak_bytes_C, 1.0)
    room_C = capacity_bytes / peak_bytes_C
    growth_C = GROWTH_RATIO + UNEVEN_RATIO * uneven_bytes_C / peak_bytes_C
    growth_C = np.broadcast_to(growth_C, room_C.shape)
    is_piped_C = np.broadcast_to(np.asarray(pipeline_C) > 1, room_C.shape)
    at_start_C, ever_C = np.empty(room_C.shape), np.empty(room_C.shape)
    for has_pipeline in (False, True):
        of_kind = is_piped_C == has_pipeline
        errors = published_errors(error_kind(software, has_pipeline=has_pipeline))
        at_start_C[of_kind] = errors.at_start(room_C[of_kind])
        ever_C[of_kind] = errors.ever(room_C[of_kind], growth_C=growth_C[of_kind])
    return Chances(at_start_C=at_start_C, ever_C=ever_C)


def largest_peak_bytes(
    capacity_bytes: float,
    *,
    chance: float,
    software: Software,
    has_pipeline: bool,
    uneven_ratio: float,
) -> float:
    """Return the largest predicted peak with at most this OOM probability; 0: there is none.

    Args:
        capacity_bytes: all that a device has.
        chance: probability of running out.
        software: training framework.
        has_pipeline: whether the run has a pipeline.
        uneven_ratio: growth of the peak, as a share, when the load of the most-loaded expert rank
            doubles.
    """
    peaks = capacity_bytes * np.arange(1, NUM_PEAK_LIMITS + 1) / NUM_PEAK_LIMITS
    ever = chances(
        peaks,
        capacity_bytes=capacity_bytes,
        software=software,
        pipeline_C=2 if has_pipeline else 1,
        uneven_bytes_C=peaks * uneven_ratio,
    ).ever_C
    return float(peaks[ever <= chance].max(initial=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """Memory risk of one decision."""

    out_of_memory_probability: float
    """Probability of running out of memory at any time of the run."""
    out_of_memory_at_start_probability: float
    out_of_memory_loss_s: float
    """Seconds of the run that failed starts and restarts are expected to take."""


def fallback_forecast(chance: float) -> MemoryForecast:
    """Return the forecast of a fallback, whose failed starts do not count."""
    return MemoryForecast(
        out_of_memory_probability=chance,
        out_of_memory_at_start_probability=0.0,
        out_of_memory_loss_s=0.0,
    )


def tried_in_turn_s(
    prices: LossPrices, step_s: Sequence[float], risks: Sequence[MemoryForecast]
) -> float:
    """Return the expected seconds a step if the first decision is tried, then safer ones.

    Args:
        prices: what running out of memory costs.
        step_s: seconds a step, each longer and less likely to run out than the one before.
        risks: forecasts of the decisions.
    """
    every = Chances(
        at_start_C=np.array([risk.out_of_memory_at_start_probability for risk in risks]),
        ever_C=np.array([risk.out_of_memory_probability for risk in risks]),
    )
    return float(prices.expected_s(np.array(step_s), every)[0])


def forecast_memory(
    peak_bytes_P: Floats,
    uneven_bytes_P: Floats | float,
    *,
    capacity_bytes: Floats | float,
    software: Software,
    prices: LossPrices,
) -> MemoryForecast:
    """Forecast the memory risk of one decision, by the device most likely to run out.

    Args:
        peak_bytes_P: predicted peaks.
        uneven_bytes_P: growth of the peaks when the load of the most-loaded expert rank doubles.
        capacity_bytes: all that each device has.
        software: training framework.
        prices: what running out costs.
    """
    every = chances(
        peak_bytes_P,
        capacity_bytes=capacity_bytes,
        software=software,
        pipeline_C=len(peak_bytes_P),
        uneven_bytes_C=uneven_bytes_P,
    )
    by_rank = Chances(at_start_C=every.at_start_C[:, None], ever_C=every.ever_C[:, None])
    worst, _ = by_rank.of_likeliest_rank()
    return MemoryForecast(
        out_of_memory_probability=min(1.0, float(worst.ever_C[0])),
        out_of_memory_at_start_probability=min(1.0, float(worst.at_start_C[0])),
        out_of_memory_loss_s=float(prices.loss_s(worst)[0]),
    )


def uneven_bytes(
    shape: ModelShape,
    strategies: Strategies,
    hardware: Hardware,
    stages: Stages,
    *,
    constants: MemoryConstants,
) -> Floats:
    """Return each device's growth of the peak when the most-loaded rank's load doubles, [P]."""
    once, twice = (
        price_memory(
            shape,
            replace(strategies, expert_imbalance_p99=ratio),
            hardware,
            stages,
            constants=constants,
        ).total_PC[:, 0]
        for ratio in (1.0, 2.0)
    )
    grown: Floats = np.maximum(twice - once, 0.0)
    return grown
