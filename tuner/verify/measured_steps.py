"""Statistics of measured steps: noise, ties, early termination of trials, and recalibration.

    e(x) = 1.2533 * IQR(x) / 1.349 / sqrt(n)      standard error of the median of n steps x

1.2533 = sqrt(pi / 2) is the median's asymptotic standard error over that of the mean, and 1.349 the
interquartile range over the standard deviation, both of the normal distribution. Two trials tie
when their medians differ by at most 2 (e_1 + e_2).

A trial is hopeless if its median so far minus twice its error exceeds the best median plus twice
its error by a margin: launches of one decision differ by more than the steps within a launch.

The model is recalibrated with measured trials by two factors, on computation and on communication,
common to all configurations; its error is that on held-out trials:

    minimise over a, b   sum_i ((a comp_i + b comm_i) / measured_i - 1)^2
                         + w ((a - s)^2 + (b - s)^2),   s = median of measured_i / predicted_i

The second line is a ridge towards one common factor, for trials that cannot separate the two;
w = (0.05 / 0.3)^2: steps repeat within about 5 %, and factors differ by about 30 % (our priors).
A trial is recalibrated from the others only (leave-one-out).

Not covered: drift within a launch, which the interquartile range does not separate from noise.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from tuner.costs.residuals import Residual
from tuner.units import format_ratio
from tuner.verify.records import TrialRecord

MIN_TRIALS = 2
"""Minimum for predicting a held-out trial."""

PULL = (0.05 / 0.3) ** 2
SMALLEST_FACTOR = 1e-3
MOST_BAND = 10.0
"""Predictions further off than this factor are of something else."""


def factors(trials: Sequence[TrialRecord]) -> tuple[float, float]:
    """Fit (computation, communication) to trials that ran.

    Raises:
        ValueError: there is no trial.
    """
    if not trials:
        raise ValueError("no trial to fit to")
    measured = np.array([measured_s(trial) for trial in trials])
    parts = np.array(
        [
            (
                trial.predicted_step_s - trial.predicted_communication_s,
                trial.predicted_communication_s,
            )
            for trial in trials
        ]
    )
    common = statistics.median(measured_s(trial) / trial.predicted_step_s for trial in trials)
    rows = np.vstack([parts / measured[:, None], np.sqrt(PULL) * np.eye(2)])
    wanted = np.concatenate([np.ones(len(trials)), np.sqrt(PULL) * np.full(2, common)])
    solution, *_ = np.linalg.lstsq(rows, wanted, rcond=None)
    computation, communication = np.maximum(solution, SMALLEST_FACTOR)
    return float(computation), float(communication)


def recalibrated_step_s(trial: TrialRecord, others: Sequence[TrialRecord]) -> float | None:
    """Predict a trial with factors fitted to other trials; None if there are too few."""
    ran = [record for record in others if record.status == "ok" and record.number != trial.number]
    if len(ran) < MIN_TRIALS:
        return None
    return corrected_step_s(trial, factors(ran))


def corrected_step_s(trial: TrialRecord, fitted: tuple[float, float]) -> float:
    """Predict a trial with factors of (computation, communication)."""
    return corrected_s(trial.predicted_step_s, trial.predicted_communication_s, by=fitted)


def corrected_s(step_s: float, communication_s: float, *, by: tuple[float, float]) -> float:
    """Correct a predicted step, with its communication, by factors of both parts."""
    computation, communication = by
    return computation * (step_s - communication_s) + communication * communication_s


def fitted_residual(trials: Sequence[TrialRecord], *, prior: Residual) -> Residual | None:
    """Fit a residual to all trials, with a leave-one-out error band.

    None if there are too few, or if no factor brings predictions near them.
    """
    ran = [trial for trial in trials if trial.status == "ok"]
    if len(ran) <= MIN_TRIALS:
        return None
    computation, communication = factors(ran)
    left_out = ape((recalibrated_step_s(trial, ran), measured_s(trial)) for trial in ran)
    band_ratio = max(0.02, float(np.quantile(left_out, 0.9)))
    if band_ratio > MOST_BAND:
        return None
    # Only the reference step reports its device.
    device = f" on {ran[0].device}" if ran[0].device else ""
    return Residual(
        engine=ran[0].engine,
        release=ran[0].release,
        device_kind=prior.device_kind,
        computation=prior.computation * computation,
        communication=prior.communication * communication,
        band_ratio=band_ratio,
        origin=f"{len(ran)} trials{device}, each predicted from the others",
        num_runs=len(ran),
    )


def ape(pairs: Iterable[tuple[float | None, float | None]]) -> list[float]:
    """Return |predicted - measured| / measured of each pair that has both."""
    return [abs(p - m) / m for p, m in pairs if p is not None and m]


def median_if_all(values: Iterable[float | None]) -> float | None:
    """Return the median of values; None if there is none, or one is unknown."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return statistics.median(known) if known and len(known) == len(listed) else None


HOPELESS_MARGIN_RATIO: Final = 0.10
"""Twice the 5 % by which steps of one decision vary between launches
(tuner/verify/measured_steps.py)."""

HOPELESS_STEPS: Final = 3
"""Minimum for an interquartile range."""


def median_error_s(steps_s: Sequence[float]) -> float:
    """Return the standard error of the median, in seconds; 0 for fewer than two steps."""
    if len(steps_s) < 2:
        return 0.0
    low_s, _, high_s = statistics.quantiles(steps_s, n=4)
    return 1.2533 * (high_s - low_s) / 1.349 / math.sqrt(len(steps_s))


def is_tie(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether two medians differ by at most twice the sum of their standard errors."""
    noise = median_error_s(first) + median_error_s(second)
    return abs(statistics.median(first) - statistics.median(second)) <= 2.0 * noise


def slower_than(records: Sequence[TrialRecord]) -> Callable[[Sequence[float]], str]:
    """Return the test that ends a trial which can no longer become the fastest."""
    ran = [record for record in records if record.status == "ok"]
    best = min(ran, key=measured_s, default=None)

    def hopeless(steps_s: Sequence[float]) -> str:
        if best is None or len(steps_s) < HOPELESS_STEPS:
            return ""
        so_far_s = statistics.median(steps_s)
        least_s = so_far_s - 2.0 * median_error_s(steps_s)
        most_s = measured_s(best) + 2.0 * median_error_s(best.measured_steps_s)
        if least_s <= most_s * (1.0 + HOPELESS_MARGIN_RATIO):
            return ""
        slower = format_ratio(so_far_s / measured_s(best) - 1.0)
        return f"ended after {len(steps_s)} steps, {slower} slower than the best so far"

    return hopeless


def measured_ratio(record: TrialRecord) -> float:
    """Return the measured step of a trial that ran over the predicted one."""
    return measured_s(record) / record.predicted_step_s


def measured_s(record: TrialRecord) -> float:
    """Return the measured step time of a trial that ran."""
    if record.measured_step_s is None:
        raise ValueError(f"trial {record.number} was not measured")
    return record.measured_step_s
