"""Backtests of serving runs as tables for people."""

from collections import Counter
from collections.abc import Iterator

from tuner.backtest.serving.records import Metric, ServingBacktest
from tuner.calibrate.serving_stored import ServingCalibration
from tuner.cli.backtest_text import errors_table, left_out, percent, words_table
from tuner.cli.text import whole_text
from tuner.report.content import Paragraph, Table


def serving_text(backtest: ServingBacktest) -> str:
    """Return errors of both latencies per source and harness, choices, and what is left out."""
    tables = ", ".join(f"{system}: {origin}" for system, origin in backtest.tables.items())
    counts = Counter(row.source for row in backtest.rows if row.estimated)
    listed = ", ".join(f"{count} of {source}" for source, count in sorted(counts.items()))
    estimated = f"with operations from the datasheet, which no table holds: {listed}"
    return whole_text(
        Paragraph(text=f"{backtest.table_rows} rows; residuals: {backtest.residuals}"),
        Paragraph(text=f"kernels: {tables or 'none'}"),
        *_metric("TPOT", backtest.tpot),
        *_metric("TTFT", backtest.ttft),
        Paragraph(
            text=f"inside the printed band: {percent(backtest.tpot_coverage_ratio)} of TPOT, "
            f"{percent(backtest.ttft_coverage_ratio)} of TTFT"
        ),
        Paragraph(text=estimated) if listed else None,
        left_out((row.id, row.source, row.reason) for row in backtest.rows),
    )


def calibration_text(report: ServingCalibration) -> str:
    """Return the factors, and errors on models that they were not fitted to."""
    rows = (
        (key, one.models, one.rows, f"{one.tpot:.3f}", f"{one.ttft:.3f}")
        for key, one in report.residuals.factors.items()
    )
    held_out = {"TPOT": report.held_out_tpot, "TTFT": report.held_out_ttft}
    return whole_text(
        words_table("factors", ("", "models", "rows", "TPOT", "TTFT"), rows),
        *(
            errors_table(f"{name} without runs of the same model", one.harnesses, has_best=False)
            for name, one in held_out.items()
        ),
    )


def _metric(name: str, metric: Metric) -> Iterator[Table]:
    by_source = {**metric.sources, "total": metric}
    yield errors_table(f"{name} by system|engine|mode", by_source, has_best=False)
    if metric.harnesses:
        yield errors_table(f"{name} of aggregated rows", metric.harnesses, has_best=False)
    if any(order.pairs for order in metric.order.values()):
        yield words_table(
            f"{name}, pairs of strategies at equal load, over 10 % apart",
            ("", "pairs", "ordered right", "of equal devices", "ordered right"),
            (
                (
                    generation,
                    order.pairs,
                    percent(order.ordered_ratio),
                    order.equal_pairs,
                    percent(order.equal_ordered_ratio),
                )
                for generation, order in metric.order.items()
            ),
        )
