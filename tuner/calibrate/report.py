"""Summarises a calibration: errors per source, of models with experts, and by generation."""

from collections.abc import Sequence

import numpy as np

from tuner.arrays import Floats
from tuner.backtest.columns import PublishedRun
from tuner.backtest.errors import ScoredRow, group_errors
from tuner.backtest.prediction import case_key, tokens_per_step
from tuner.calibrate.calibration import Calibration
from tuner.calibrate.cross_validation import KEYS
from tuner.calibrate.records import CalibrationReport, CrossValidation


def build_report(calibration: Calibration, *, num_rows: int) -> CalibrationReport:
    """Return the residuals with the errors of every cross-validation."""
    return CalibrationReport(
        residuals=calibration.residuals,
        cross_validation={
            name: cross_validation(name, calibration.runs, calibration.held_out[name])
            for name in KEYS
        },
        skipped=num_rows - len(calibration.runs),
    )


def cross_validation(
    name: str, runs: Sequence[PublishedRun], residual_C: Floats
) -> CrossValidation:
    """Summarise held-out residuals."""
    scored = [_scored(run, float(residual)) for run, residual in zip(runs, residual_C, strict=True)]
    return CrossValidation(
        left_out=name,
        **group_errors(
            scored,
            sources=[run.row.source for run in runs],
            generations=[str(run.device.generation) for run in runs],
            has_experts=[bool(run.shape.experts) for run in runs],
        ),
    )


def _scored(run: PublishedRun, residual: float) -> ScoredRow:
    measured_s = run.measured_s or 0.0
    return ScoredRow(
        predicted_s=measured_s * float(np.exp(residual)),
        measured_s=measured_s,
        tokens=tokens_per_step(run),
        case=case_key(run.row),
    )
