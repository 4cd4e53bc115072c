"""Backtests and cross-validations of training and serving runs, as tables for people."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from tuner.cli.text import whole_text
from tuner.report.content import Block, Notes, Paragraph, Table, words_table

if TYPE_CHECKING:
    # Each command imports its own.
    from tuner.backtest.records import Backtest, Errors
    from tuner.backtest.rl.records import RlBacktest, RlErrors
    from tuner.backtest.serving.records import Metric, ServingBacktest
    from tuner.calibrate.records import CalibrationReport
    from tuner.calibrate.server_records import Coefficient, ServerCalibration
    from tuner.calibrate.serving_stored import ServingCalibration

HEADER = ("", "rows", "predicted", "median", "mean", "P90", "bias", "rank", "regret", "of best 3")
MOST_REASONS: Final = 24
LONGEST_ID: Final = 80
"""Characters of an id that are shown."""


def backtest_text(backtest: "Backtest") -> str:
    """Return errors per source, for MoE models, by generation, and what is left out."""
    fitted = " (fitted to this very table; 'moetune calibrate' shows errors on runs left out)"
    covered = f"inside the printed band: {percent(backtest.coverage_ratio)} of runs"
    return whole_text(
        Paragraph(text=f"residuals: {backtest.residuals}{fitted * backtest.is_in_sample}"),
        errors_table("all models", {**backtest.sources, "total": backtest.total}),
        errors_table("models with experts", {**backtest.moe_only, "total": backtest.moe_total})
        if backtest.moe_only
        else None,
        errors_table("by generation", backtest.generations) if backtest.generations else None,
        _memory({**backtest.sources, "total": backtest.total}),
        None if backtest.coverage_ratio is None else Paragraph(text=covered),
        left_out((row.id, row.source, row.reason) for row in backtest.rows),
    )


def report_text(report: "CalibrationReport") -> str:
    """Return the cross-validation of a calibration."""
    fitted = report.residuals
    blocks: list[Block] = [
        Paragraph(
            text=f"{fitted.rows} runs of {fitted.groups} recipes fitted, {report.skipped} rows left"
            " out ('moetune backtest' says why)"
        )
    ]
    for name, errors in report.cross_validation.items():
        title, all_errors = f"without runs of the same {name}", {"total": errors.total}
        blocks.append(errors_table(title, {**errors.sources, **all_errors}))
        if errors.moe_only:
            moe = {**errors.moe_only, "total": errors.moe_total}
            blocks.append(errors_table(f"{title}, models with experts", moe))
    if fitted.covered_ratio is not None:
        blocks.append(
            Paragraph(
                text=f"bands: stated {percent(fitted.stated_ratio)}, covered"
                f" {percent(fitted.covered_ratio)} of held-out recipes"
            )
        )
    return whole_text(*blocks)


def serving_text(backtest: "ServingBacktest") -> str:
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


def rl_text(backtest: "RlBacktest") -> str:
    """Return errors with the residuals that ship and with those of other models."""
    bands = ", ".join(f"{name} {factor:.2f}" for name, factor in backtest.band_factors.items())
    fitted = ", ".join(f"{name} {value:.4g}" for name, value in backtest.fitted.items())
    return whole_text(
        *_rl_errors("with the residuals that ship", backtest.shipped),
        *_rl_errors("with residuals of the table's other models", backtest.held_out),
        Paragraph(text=f"fitted to this table: {fitted or 'nothing'}"),
        Paragraph(text=f"band of 80 %, up and down by a factor of: {bands}"),
        left_out((row.id, row.source, row.reason) for row in backtest.rows),
    )


def _rl_errors(title: str, errors: "RlErrors | None") -> Iterator[Block]:
    if errors is None:
        return
    groups = {**errors.placements, **errors.releases, **errors.models}
    yield errors_table(title, groups, has_best=False)
    order = errors.order
    text = f"inside a band made without their model: {percent(errors.coverage_ratio)} of steps"
    ordered = f"; {order.pairs} pairs over 10 % apart, ordered {percent(order.ordered_ratio)}"
    yield Paragraph(text=text + ordered * bool(order.pairs))


def calibration_text(report: "ServingCalibration") -> str:
    """Return the factors, and errors on models that they were not fitted to."""
    rows = (
        (key, factors.models, factors.rows, f"{factors.tpot:.3f}", f"{factors.ttft:.3f}")
        for key, factors in report.residuals.factors.items()
    )
    held_out = {"TPOT": report.held_out_tpot, "TTFT": report.held_out_ttft}
    return whole_text(
        words_table("factors", ("", "models", "rows", "TPOT", "TTFT"), rows),
        *(
            errors_table(f"{name} without runs of the same model", metric.harnesses, has_best=False)
            for name, metric in held_out.items()
        ),
    )


def server_text(made: "ServerCalibration") -> str:
    """Return the corrections of a server's steps, and errors on the last third of its logs."""
    errors, residual = made.errors, made.residual
    rows = (
        (
            coefficient.name.replace("_", " "),
            f"x {coefficient.factor:.3g}" if coefficient.is_identified else "not identified",
            f"{coefficient.low:.3g} to {coefficient.high:.3g}",
            _needed(coefficient),
        )
        for coefficient in made.coefficients
    )
    shown = {
        "prompts, first tokens": (errors.ttft_before, errors.ttft_after),
        "further tokens": (errors.tpot_before, errors.tpot_after),
    }
    return whole_text(
        Paragraph(
            text=f"{made.steps} steps and {made.requests} requests in {made.minutes:.1f} min of"
            f" {residual.engine} {residual.release}, {residual.model} on {made.device}"
            f" ({residual.layout}); prices: {made.kernels}"
        ),
        words_table("factors on predicted seconds", ("", "", "80 % interval", "wanted"), rows),
        words_table(
            "predicted over measured, last third, fitted to the rest",
            ("", "before", "after"),
            (
                (name, *("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios))
                for name, ratios in shown.items()
            ),
        ),
        Paragraph(
            text=f"bands with it: TTFT within a factor of {residual.ttft.spread:.2f} either way,"
            f" TPOT of {residual.tpot.spread:.2f}"
        ),
        Notes(notes=made.notes) if made.notes else None,
    )


def _needed(coefficient: "Coefficient") -> str:
    """Return what would identify a coefficient; empty where it is."""
    minutes, load = coefficient.minutes_needed, coefficient.wanted_load
    return f"{minutes:.0f} min of this load, or {load}" if minutes else load


def _metric(name: str, metric: "Metric") -> Iterator[Table]:
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


def errors_table(title: str, errors: "Mapping[str, Errors]", *, has_best: bool = True) -> Table:
    """Return errors as a table, a row each; with the regret of the best three where it is known."""
    header = HEADER if has_best else HEADER[:-1]
    rows = [
        (
            name,
            summary.rows,
            summary.predicted,
            percent(summary.median_ape),
            percent(summary.mean_ape),
            percent(summary.p90_ape),
            percent(summary.bias, signed=True),
            "-" if summary.rank_correlation is None else f"{summary.rank_correlation:.2f}",
            percent(summary.choice_regret),
            percent(summary.choice_regret_top3),
        )[: len(header)]
        for name, summary in errors.items()
    ]
    return words_table(title, header, rows)


def _memory(errors: "Mapping[str, Errors]") -> Table | None:
    rows = [
        (
            name,
            summary.memory_rows,
            percent(summary.memory_median_ape),
            percent(summary.memory_p90_ape),
            percent(summary.memory_max_ape),
            "-" if summary.false_fits is None else summary.false_fits,
            "-" if summary.false_misfits is None else summary.false_misfits,
        )
        for name, summary in errors.items()
        if summary.memory_rows or summary.false_fits or summary.false_misfits
    ]
    wrong = ("predicted to fit, OOM", "ran, predicted OOM")
    header = ("", "rows", "median", "P90", "max", *wrong)
    return words_table("peak memory", header, rows) if rows else None


def left_out(rows: Iterable[tuple[str, str, str | None]]) -> Notes | None:
    """List each reason why rows were not predicted, with its rows counted and the first one named.

    Args:
        rows: id, source and reason of each; ids, of a stranger's table, are quoted and cut.
    """
    unpredicted = [row for row in rows if row[2]]
    counts = Counter(row[1:] for row in unpredicted)
    first = {row[1:]: row[0][:LONGEST_ID] for row in reversed(unpredicted)}
    notes = [
        f"{count} of {key[0]}: {key[1]} ({'first ' * (count > 1)}{first[key]!r})"
        for key, count in counts.most_common(MOST_REASONS)
    ]
    further = len(counts) - len(notes)
    head = "not predicted, with the first row of each reason; --json has every row:"
    more = (f"... and {further} further reasons",) if further else ()
    return Notes(notes=(head, *notes, *more)) if notes else None


def percent(ratio: float | None, *, signed: bool = False) -> str:
    """Format an error, `-` where there is none."""
    if ratio is None:
        return "-"
    return f"{100.0 * ratio:+.1f} %" if signed else f"{100.0 * ratio:.1f} %"
