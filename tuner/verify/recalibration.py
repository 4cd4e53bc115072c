"""Recalibrates the model with measured trials; its error is that on held-out trials.

Two factors, on computation and on communication, common to all configurations:

    minimise over a, b   sum_i ((a comp_i + b comm_i) / measured_i - 1)^2
                         + w ((a - s)^2 + (b - s)^2),   s = median of measured_i / predicted_i

The second line is a ridge towards one common factor, for trials that cannot separate the two;
w = (0.05 / 0.3)^2: steps repeat within about 5 %, and factors differ by about 30 % (our priors).
A trial is recalibrated from the others only (leave-one-out).
"""

import statistics
from collections.abc import Sequence

import numpy as np

from tuner.costs.residuals import Residual
from tuner.verify.evidence import measured_s
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
    ran = [other for other in others if other.status == "ok" and other.number != trial.number]
    if len(ran) < MIN_TRIALS:
        return None
    return corrected_step_s(trial, factors(ran))


def corrected_step_s(trial: TrialRecord, fitted: tuple[float, float]) -> float:
    """Predict a trial with factors of (computation, communication)."""
    computation, communication = fitted
    inside = trial.predicted_step_s - trial.predicted_communication_s
    return computation * inside + communication * trial.predicted_communication_s


def fitted_residual(trials: Sequence[TrialRecord], *, prior: Residual) -> Residual | None:
    """Fit a residual to all trials, with a leave-one-out error band.

    None if there are too few, or if no factor brings predictions near them.
    """
    ran = [trial for trial in trials if trial.status == "ok"]
    if len(ran) <= MIN_TRIALS:
        return None
    computation, communication = factors(ran)
    left_out = [
        abs(recalibrated_s - measured_s(trial)) / measured_s(trial)
        for trial in ran
        if (recalibrated_s := recalibrated_step_s(trial, ran)) is not None
    ]
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
