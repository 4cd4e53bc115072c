"""The output of `moetune backtest --json` for serving runs; shares are ratios, times seconds."""

from typing import Annotated

from pydantic import Field

from profilers.records import Record
from tuner.backtest.records import Errors
from tuner.tables import Rows

SCHEMA_VERSION = 2
# 1: first release. 2: every row counts, whether another repeats its measurement or not.

Count = Annotated[int, Field(ge=0)]


class Order(Record):
    """Pairs of strategies at equal load whose measurements differ by more than 10 %."""

    pairs: Count
    ordered_ratio: float | None
    """Share of the pairs that are predicted in the order that was measured."""
    equal_pairs: Count
    """Pairs of equally many devices, counted in `pairs`."""
    equal_ordered_ratio: float | None


class Metric(Errors):
    """Errors of one latency over all measurements.

    Rank correlation and choice are over parallel strategies at equal load.
    """

    sources: dict[str, Errors]
    """Errors by `system|engine|mode`."""
    harnesses: dict[str, Errors]
    """Aggregated rows by generation|harness; `all` is every harness together."""
    order: dict[str, Order]
    """Order of pairs of strategies, by generation of the device."""


class ServingBacktestRow(Record):
    """One row of the table."""

    id: str
    source: str
    """system|engine|mode; empty where the row cannot be read."""
    reason: str | None
    """Reason why nothing is predicted."""
    predicted_ttft_s: float | None
    ttft_band: tuple[float, float] | None
    """Seconds within which four launches of five are measured."""
    measured_ttft_s: float | None
    predicted_tpot_s: float | None
    tpot_band: tuple[float, float] | None
    measured_tpot_s: float | None
    is_new_pair: bool = False
    """No calibration row shares its model and engine: the bands are those of pairs left out."""
    estimated: tuple[str, ...]
    """Operations without a measured table, priced from the datasheet."""


class ServingBacktest(Record):
    """Predicted and measured latencies."""

    schema_version: int = SCHEMA_VERSION
    tables: dict[str, str]
    """Source of the kernel times, by system."""
    residuals: str
    """`uncalibrated`, or what the residuals were fitted to."""
    table_rows: Count
    ttft: Metric
    tpot: Metric
    ttft_coverage_ratio: float | None
    """Share of predicted rows whose measured latency lies inside its band."""
    tpot_coverage_ratio: float | None
    rows: Rows[ServingBacktestRow]
