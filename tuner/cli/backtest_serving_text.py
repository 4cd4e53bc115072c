"""Backtests of serving runs as tables for people."""

from collections import Counter

from tuner.backtest.serving.records import Metric, ServingBacktest
from tuner.calibrate.serving_stored import ServingCalibration
from tuner.cli.backtest_text import errors_table, percent
from tuner.cli.left_out import UnpredictedRow, left_out_text
from tuner.cli.text import columns


def serving_text(backtest: ServingBacktest) -> str:
    """Return errors of both latencies per source and harness, choices, and what is left out."""
    tables = ", ".join(f"{system}: {origin}" for system, origin in backtest.tables.items())
    parts = [
        f"{backtest.table_rows} rows; residuals: {backtest.residuals}\nkernels: {tables or 'none'}",
        *_metric("TPOT", backtest.tpot),
        *_metric("TTFT", backtest.ttft),
        f"inside the printed band: {percent(backtest.tpot_coverage_ratio)} of TPOT, "
        f"{percent(backtest.ttft_coverage_ratio)} of TTFT",
        _estimated(backtest),
        _left_out(backtest),
    ]
    return "\n\n".join(part for part in parts if part)


def calibration_text(report: ServingCalibration) -> str:
    """Return the factors, and errors on models that they were not fitted to."""
    rows = [
        (key, one.models, one.rows, f"{one.tpot:.3f}", f"{one.ttft:.3f}")
        for key, one in report.residuals.factors.items()
    ]
    parts = [columns(rows, header=("factors", "models", "rows", "TPOT", "TTFT"))]
    for name, metric in (("TPOT", report.held_out_tpot), ("TTFT", report.held_out_ttft)):
        parts.append(
            errors_table(f"{name} without runs of the same model", metric.harnesses, has_best=False)
        )
    return "\n\n".join(parts)


def _metric(name: str, metric: Metric) -> list[str]:
    by_source = {**metric.sources, "total": metric}
    parts = [errors_table(f"{name} by system|engine|mode", by_source, has_best=False)]
    if metric.harnesses:
        parts.append(errors_table(f"{name} of aggregated rows", metric.harnesses, has_best=False))
    if any(order.pairs for order in metric.order.values()):
        rows = [
            (
                generation,
                order.pairs,
                percent(order.ordered_ratio),
                order.equal_pairs,
                percent(order.equal_ordered_ratio),
            )
            for generation, order in metric.order.items()
        ]
        title = f"{name}, pairs of strategies at equal load, over 10 % apart"
        header = (title, "pairs", "ordered right", "of equal devices", "ordered right")
        parts.append(columns(rows, header=header))
    return parts


def _estimated(backtest: ServingBacktest) -> str:
    counts = Counter(row.source for row in backtest.rows if row.estimated)
    if not counts:
        return ""
    listed = ", ".join(f"{count} of {source}" for source, count in sorted(counts.items()))
    return f"with operations from the datasheet, which no table holds: {listed}"


def _left_out(backtest: ServingBacktest) -> str:
    return left_out_text(
        UnpredictedRow(id=row.id, source=row.source, reason=row.reason)
        for row in backtest.rows
        if row.reason
    )
