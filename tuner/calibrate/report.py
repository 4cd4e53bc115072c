"""Summarises a calibration: errors per source, models with experts apart, by generation."""

from collections.abc import Sequence

import numpy as np

from tuner.backtest.columns import Run
from tuner.backtest.errors import Scored, errors_of
from tuner.backtest.prediction import case_of, tokens_of
from tuner.backtest.records import Errors
from tuner.calibrate.calibration import Calibration
from tuner.calibrate.cross_validation import KEYS
from tuner.calibrate.fit import Floats
from tuner.calibrate.records import CalibrationReport, CrossValidation


def report_of(calibration: Calibration, *, num_rows: int) -> CalibrationReport:
    """Return residuals with the errors of every way to leave runs out."""
    return CalibrationReport(
        residuals=calibration.residuals,
        cross_validation={
            name: cross_validation(name, calibration.runs, calibration.held_out[name])
            for name in KEYS
        },
        skipped=num_rows - len(calibration.runs),
    )


def cross_validation(name: str, runs: Sequence[Run], residual_C: Floats) -> CrossValidation:
    """Measure held-out residuals."""
    scored = [_scored(run, float(residual)) for run, residual in zip(runs, residual_C, strict=True)]
    named = [(run.row.source, one) for run, one in zip(runs, scored, strict=True)]
    by_generation = [
        (str(run.device.generation), one) for run, one in zip(runs, scored, strict=True)
    ]
    moe = [pair for run, pair in zip(runs, named, strict=True) if float(run.shape.experts)]
    return CrossValidation(
        left_out=name,
        sources=_by_name(named),
        moe_only=_by_name(moe),
        generations=_by_name(by_generation),
        total=errors_of(scored),
        moe_total=errors_of([one for _, one in moe]),
    )


def _scored(run: Run, residual: float) -> Scored:
    measured_s = run.measured_s or 0.0
    return Scored(
        predicted_s=measured_s * float(np.exp(residual)),
        measured_s=measured_s,
        tokens=tokens_of(run),
        case=case_of(run.row),
    )


def _by_name(named: Sequence[tuple[str, Scored]]) -> dict[str, Errors]:
    return {
        name: errors_of([one for key, one in named if key == name])
        for name in dict.fromkeys(key for key, _ in named)
    }
