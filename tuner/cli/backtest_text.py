"""Backtests and cross-validations as tables for people."""

from collections.abc import Mapping

from tuner.backtest.records import Backtest, Errors
from tuner.calibrate.records import CalibrationReport
from tuner.cli.left_out import UnpredictedRow, left_out_text
from tuner.cli.text import columns

HEADER = ("", "rows", "predicted", "median", "mean", "P90", "bias", "rank", "regret", "of best 3")


def backtest_text(backtest: Backtest) -> str:
    """Return errors per source, for MoE models, by generation, and what is left out."""
    parts = [
        f"residuals: {backtest.residuals}"
        + (
            "\n(fitted to this very table; 'moetune calibrate' shows errors on runs left out)"
            if backtest.is_in_sample
            else ""
        ),
        errors_table("all models", {**backtest.sources, "total": backtest.total}),
    ]
    if backtest.moe_only:
        parts.append(
            errors_table("models with experts", {**backtest.moe_only, "total": backtest.moe_total})
        )
    if backtest.generations:
        parts.append(errors_table("by generation", backtest.generations))
    parts.append(_memory(backtest))
    if backtest.coverage_ratio is not None:
        parts.append(f"inside the printed band: {percent(backtest.coverage_ratio)} of runs")
    parts.append(_left_out(backtest))
    return "\n\n".join(part for part in parts if part)


def report_text(report: CalibrationReport) -> str:
    """Return the cross-validation of a calibration."""
    fitted = report.residuals
    parts = [
        f"{fitted.rows} runs of {fitted.groups} recipes fitted, {report.skipped} rows left out"
        " ('moetune backtest' says why)",
    ]
    for name, errors in report.cross_validation.items():
        parts.append(
            errors_table(
                f"without runs of the same {name}", {**errors.sources, "total": errors.total}
            )
        )
        if errors.moe_only:
            parts.append(
                errors_table(
                    "  models with experts", {**errors.moe_only, "total": errors.moe_total}
                )
            )
    if fitted.covered_ratio is not None:
        parts.append(
            f"bands: stated {percent(fitted.stated_ratio)}, covered"
            f" {percent(fitted.covered_ratio)} of held-out recipes"
        )
    return "\n\n".join(parts)


def errors_table(title: str, errors: Mapping[str, Errors], *, has_best: bool = True) -> str:
    """Return errors as a table, a row each; with the regret of the best three where it is known."""
    header = (title, *HEADER[1 : len(HEADER) if has_best else -1])
    rows = [
        (
            name,
            one.rows,
            one.predicted,
            percent(one.median_ape),
            percent(one.mean_ape),
            percent(one.p90_ape),
            percent(one.bias, signed=True),
            "-" if one.rank_correlation is None else f"{one.rank_correlation:.2f}",
            percent(one.choice_regret),
            percent(one.choice_regret_top3),
        )[: len(header)]
        for name, one in errors.items()
    ]
    return columns(rows, header=header)


def _memory(backtest: Backtest) -> str:
    rows = [
        (
            name,
            one.memory_rows,
            percent(one.memory_median_ape),
            percent(one.memory_p90_ape),
            percent(one.memory_max_ape),
            "-" if one.false_fits is None else one.false_fits,
            "-" if one.false_misfits is None else one.false_misfits,
        )
        for name, one in {**backtest.sources, "total": backtest.total}.items()
        if one.memory_rows or one.false_fits or one.false_misfits
    ]
    header = (
        "peak memory",
        "rows",
        "median",
        "P90",
        "max",
        "predicted to fit, OOM",
        "ran, predicted OOM",
    )
    return columns(rows, header=header) if rows else ""


def _left_out(backtest: Backtest) -> str:
    return left_out_text(
        UnpredictedRow(id=row.id, source=row.source, reason=row.reason)
        for row in backtest.rows
        if row.reason
    )


def percent(ratio: float | None, *, signed: bool = False) -> str:
    """Format an error, `-` where there is none."""
    if ratio is None:
        return "-"
    return f"{100.0 * ratio:+.1f} %" if signed else f"{100.0 * ratio:.1f} %"
