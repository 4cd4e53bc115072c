"""Backtests of serving runs as tables for people."""

from collections import Counter
from collections.abc import Mapping

from tuner.backtest.records import Errors
from tuner.backtest.serving.records import Metric, ServingBacktest
from tuner.calibrate.serving_stored import ServingCalibration
from tuner.cli.left_out import UnpredictedRow, left_out_text
from tuner.cli.text import columns

HEADER = ("", "rows", "predicted", "median", "mean", "P90", "bias", "rank", "regret")


def serving_text(backtest: ServingBacktest) -> str:
    """Return errors of both latencies per source and harness, choices, and what is left out."""
    distinct = backtest.table_rows - backtest.copies
    tables = ", ".join(f"{system}: {origin}" for system, origin in backtest.tables.items())
    parts = [
        f"{backtest.table_rows} rows hold {distinct} distinct measurements; residuals: "
        f"{backtest.residuals}\nkernels: {tables or 'none'}",
        *_metric("TPOT", backtest.tpot),
        *_metric("TTFT", backtest.ttft),
        f"inside the printed band: {_percent(backtest.tpot_coverage_ratio)} of TPOT, "
        f"{_percent(backtest.ttft_coverage_ratio)} of TTFT",
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
        parts.append(_table(f"{name} without runs of the same model", metric.harnesses))
    return "\n\n".join(parts)


def _metric(name: str, metric: Metric) -> list[str]:
    by_source = {**metric.sources, "total": metric}
    parts = [_table(f"{name} by system|engine|mode", by_source)]
    if metric.harnesses:
        parts.append(_table(f"{name} of aggregated rows", metric.harnesses))
    if any(order.pairs for order in metric.order.values()):
        rows = [
            (
                generation,
                order.pairs,
                _percent(order.ordered_ratio),
                order.equal_pairs,
                _percent(order.equal_ordered_ratio),
            )
            for generation, order in metric.order.items()
        ]
        title = f"{name}, pairs of strategies at equal load, over 10 % apart"
        header = (title, "pairs", "ordered right", "of equal devices", "ordered right")
        parts.append(columns(rows, header=header))
    return parts


def _table(title: str, errors: Mapping[str, Errors]) -> str:
    rows = [
        (
            name,
            one.rows,
            one.predicted,
            _percent(one.median_ape),
            _percent(one.mean_ape),
            _percent(one.p90_ape),
            _percent(one.bias, signed=True),
            "-" if one.rank_correlation is None else f"{one.rank_correlation:.2f}",
            _percent(one.choice_regret),
        )
        for name, one in errors.items()
    ]
    return columns(rows, header=(title, *HEADER[1:]))


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
        if row.reason and row.copy_of is None
    )


def _percent(ratio: float | None, *, signed: bool = False) -> str:
    if ratio is None:
        return "-"
    return f"{100.0 * ratio:+.1f} %" if signed else f"{100.0 * ratio:.1f} %"
