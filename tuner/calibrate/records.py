"""What `moetune calibrate --json` prints."""

from profilers.records import Record
from tuner.backtest.records import Errors
from tuner.costs.analytic.calibration import Residuals


class CrossValidation(Record):
    """Errors of predictions by fits that had not seen what they predict."""

    left_out: str
    """What was left out together: group, model, device, cell or hidden."""
    sources: dict[str, Errors]
    moe_only: dict[str, Errors]
    generations: dict[str, Errors]
    total: Errors
    moe_total: Errors


class CalibrationReport(Record):
    """A calibration and how it would have predicted."""

    residuals: Residuals
    cross_validation: dict[str, CrossValidation]
    """By what was left out."""
    skipped: int
    """Rows that could not be predicted or have no time; `moetune backtest` says why."""
