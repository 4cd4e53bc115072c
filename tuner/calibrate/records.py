"""The output of `moetune calibrate --json`."""

from profilers.records import Record
from tuner.backtest.records import GroupedErrors
from tuner.costs.train.calibration import Residuals


class CrossValidation(GroupedErrors):
    """Errors of held-out predictions."""

    left_out: str
    """Key of the runs that were left out together: group, model, device, cell or hidden."""


class CalibrationReport(Record):
    """A calibration and its cross-validation."""

    residuals: Residuals
    cross_validation: dict[str, CrossValidation]
    """Cross-validation by the key of the runs that were left out together."""
    skipped: int
    """Rows that could not be predicted or have no time; `moetune backtest` says why."""
