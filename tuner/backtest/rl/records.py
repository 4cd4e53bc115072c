"""The output of `moetune backtest --json` for steps of reinforcement learning; times in seconds."""

from typing import Annotated

from pydantic import Field

from profilers.records import Record
from tuner.backtest.records import Errors
from tuner.tables import Rows

SCHEMA_VERSION = 1
# 1: first release.

Count = Annotated[int, Field(ge=0)]


class RlBacktestRow(Record):
    """One row of the table."""

    id: str
    source: str
    """Framework and release; empty where the row cannot be read."""
    model: str
    placement: str
    """`colocated` or `disaggregated`; empty where the row cannot be read."""
    reason: str | None
    """Reason why nothing is predicted."""
    predicted: float | None
    """Predicted seconds of a step, with the residuals that ship."""
    held_out: float | None
    """Predicted seconds of a step, with residuals fitted to the table's other models alone; absent
    where it has none."""
    band: tuple[float, float] | None
    """Seconds within which four steps of five are measured, around `predicted`."""
    measured: float | None
    phases: dict[str, float]
    """Predicted seconds by phase."""
    assumed: tuple[str, ...]
    """Columns that the row leaves out, which a rule filled."""


class RlOrder(Record):
    """Pairs of steps of one model and batch whose measurements differ by 10 % or more."""

    pairs: Count
    ordered_ratio: float | None
    """Share of the pairs that are predicted in the order that was measured."""


class RlErrors(Record):
    """Errors of one set of predictions."""

    total: Errors
    placements: dict[str, Errors]
    """Errors by placement."""
    releases: dict[str, Errors]
    """Errors by placement and release of the framework."""
    models: dict[str, Errors]
    order: RlOrder
    coverage_ratio: float | None
    """Share of the measurements inside a band around these predictions that was made without their
    model."""


class RlBacktest(Record):
    """Predicted and measured steps."""

    schema_version: int = SCHEMA_VERSION
    shipped: RlErrors
    """Errors with the residuals that ship."""
    held_out: RlErrors | None
    """Errors with residuals fitted to the other models of the table; absent where it has one."""
    fitted: dict[str, float]
    """Residuals fitted to all rows of the table."""
    band_factors: dict[str, float]
    """Factor of the band that ships, up and down, by placement."""
    rows: Rows[RlBacktestRow]
