"""The output of `moetune backtest --json`; shares are ratios, times seconds, None: no data."""

from typing import Annotated

from pydantic import Field

from profilers.records import Record
from tuner.tables import Rows

SCHEMA_VERSION = 2
# 1: first release. 2: without the scatter of recipes between releases.

Count = Annotated[int, Field(ge=0)]


class Errors(Record):
    """Errors over the rows of one source, generation or kind."""

    rows: Count
    """Rows of the table."""
    predicted: Count
    """Rows of the table with a predicted time."""
    median_ape: float | None
    """Median of |predicted - measured| / measured."""
    mean_ape: float | None
    p90_ape: float | None
    bias: float | None
    """Median of predicted / measured, less 1."""
    rank_correlation: float | None
    """Median of Spearman's correlation within cases (same model, devices, sequence, precision)."""
    rank_correlation_min: float | None
    """Lowest of Spearman's correlations within cases."""
    choice_cases: Count
    """Cases with at least two rows."""
    choice_regret: float | None
    """Measured seconds per token of the predicted best over the measured best, less 1; mean."""
    choice_regret_max: float | None
    choice_regret_top3: float | None
    """`choice_regret` of the best measured of the three rows that are predicted best."""
    choice_regret_top3_max: float | None
    false_fits: int | None
    """Rows that ran out of memory though predicted to fit."""
    false_misfits: int | None
    """Rows that ran though predicted not to fit."""
    memory_rows: Count
    """Rows with a measured and a predicted peak."""
    memory_median_ape: float | None
    memory_p90_ape: float | None
    memory_max_ape: float | None


class BacktestRow(Record):
    """One row of the table, predicted or with the reason why not."""

    id: str
    source: str
    predicted: float | None
    """Predicted seconds of one step."""
    band: tuple[float, float] | None
    """Seconds of one step between which the measured time is expected, with the coverage that
    `residuals` states."""
    measured: float | None
    """Measured seconds of one step."""
    reason: str | None
    """Reason why nothing is predicted."""
    assumed: tuple[str, ...]
    """Blank columns that a rule filled."""
    regime: str
    """Device, precision and software whose residuals were used."""
    predicted_bytes: float | None
    """Peak of one device, the highest of the run."""
    measured_bytes: float | None
    fits: bool | None
    """The prediction stays inside the device's memory."""


class GroupedErrors(Record):
    """Errors of a table as a whole, and by what its rows share."""

    sources: dict[str, Errors]
    moe_only: dict[str, Errors]
    """Errors by source, only of rows of models with experts."""
    generations: dict[str, Errors]
    """Errors by generation of the device."""
    total: Errors
    moe_total: Errors
    """All rows of models with experts."""


class Backtest(GroupedErrors):
    """Predictions and measurements."""

    schema_version: int = SCHEMA_VERSION
    residuals: str
    """Source of the constants: `uncalibrated`, or the origin that the residuals state."""
    is_in_sample: bool
    """The residuals were fitted to this table, so its errors are in-sample."""
    coverage_ratio: float | None
    """Share of the rows whose measured time lies inside the printed band."""
    rows: Rows[BacktestRow]
