"""What `moetune backtest --json` prints; shares are ratios, times seconds, None is "cannot say"."""

from typing import Annotated

from pydantic import Field

from profilers.records import Record

SCHEMA_VERSION = 1
# 1: first release.

Count = Annotated[int, Field(ge=0)]


class Errors(Record):
    """Errors over the rows of one source, generation or kind."""

    rows: Count
    """Of the table."""
    predicted: Count
    """Of them with a predicted time."""
    median_ape: float | None
    """Median of |predicted - measured| / measured."""
    mean_ape: float | None
    p90_ape: float | None
    bias: float | None
    """Median of predicted / measured, less 1."""
    rank_correlation: float | None
    """Median of Spearman's correlation within cases (same model, devices, sequence, precision)."""
    rank_correlation_min: float | None
    """Of the case that is ordered worst."""
    choice_cases: Count
    """Cases with at least two rows."""
    choice_regret: float | None
    """Measured seconds per token of the predicted best over the measured best, less 1; mean."""
    choice_regret_max: float | None
    choice_regret_top3: float | None
    """The same for the best measured of the three that are predicted best."""
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


class ReleaseScatter(Record):
    """Recipes that several releases of their software ran, and how far they moved."""

    recipes: Count
    rows: Count
    """Runs of these recipes."""
    spread_median: float
    """Slowest over fastest release of a recipe, median over recipes."""
    spread_p90: float
    far_ratio: float
    """Share of the recipes whose spread is more than 1.25."""
    one_number_p90_ape: float
    """Error on these runs of each recipe's own geometric mean: scatter between releases alone."""
    p90_ape: float
    """Error of the predictions on these runs."""
    means_p90_ape: float
    """Error of the predictions' geometric means per recipe: what is left without the scatter."""


class Judged(Record):
    """One row of the table, predicted or with the reason why not."""

    id: str
    source: str
    predicted: float | None
    """Seconds of one step."""
    band: tuple[float, float] | None
    """Within which the measured time is expected, with the coverage that `residuals` states."""
    measured: float | None
    """Seconds of one step."""
    reason: str | None
    """Why nothing is predicted."""
    assumed: tuple[str, ...]
    """Columns that were blank and that a rule filled."""
    regime: str
    """Device, precision and software whose residuals were used."""
    predicted_bytes: float | None
    """Of the fullest device."""
    measured_bytes: float | None
    fits: bool | None
    """Whether the prediction stays inside the device's memory."""


class Backtest(Record):
    """Predictions beside measurements."""

    schema_version: int = SCHEMA_VERSION
    residuals: str
    """What the constants come from: `uncalibrated`, or the origin that the residuals state."""
    is_in_sample: bool
    """The residuals were fitted to this very table, so that its errors flatter them."""
    coverage_ratio: float | None
    """Share of the rows whose measured time lies inside the printed band."""
    sources: dict[str, Errors]
    moe_only: dict[str, Errors]
    """By source, rows of models with experts alone."""
    generations: dict[str, Errors]
    """By generation of the device."""
    total: Errors
    moe_total: Errors
    """All rows of models with experts."""
    release_scatter: dict[str, ReleaseScatter] = Field(default_factory=dict)
    """Of models with experts (`moe`) and of the others (`dense`), where recipes were published
    under several releases."""
    rows: tuple[Judged, ...]
