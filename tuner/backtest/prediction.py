"""Predicts every row of a table and compares it with the measurement.

    rows -> runs (columns.py) -> recomputation where unknown (assumptions.py) -> seconds, bytes

A row that cannot be predicted stays, with its reason. Without residuals the generic constants hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tuner.arrays import Floats
from tuner.backtest.assumptions import with_assumptions
from tuner.backtest.columns import PublishedRun, build_runs
from tuner.backtest.errors import ScoredRow, group_errors
from tuner.backtest.prices import Peaks, build_pricer, run_memory_constants, run_regime
from tuner.backtest.records import Backtest, BacktestRow
from tuner.backtest.rows import Row
from tuner.costs.train.calibration import Regime, Residuals, band_of, constants_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PredictedRun:
    """One run with its prediction."""

    run: PublishedRun
    regime: Regime
    step_s: float
    band: tuple[float, float]
    """Lowest and highest measured over predicted seconds that are expected."""
    peak_bytes: float
    """Peak memory of one device as the run's software reports it, bytes."""
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualSet:
    """Residuals by device."""

    default: Residuals | None = None
    """Residuals for all devices that `by_device` does not name; None: the generic constants."""
    by_device: Mapping[str, Residuals] = field(default_factory=dict)
    """Residuals by name of the datasheet."""

    def for_device(self, device: str) -> Residuals | None:
        """Return the residuals of a device."""
        return self.by_device.get(device, self.default)

    @property
    def table_digests(self) -> set[str]:
        """Return the digests of the tables that the residuals were fitted to."""
        digests = {residuals.data_sha256 for residuals in self.by_device.values()}
        return digests | ({self.default.data_sha256} if self.default else set())

    @property
    def origin(self) -> str:
        """Return the origin of the residuals."""
        named = [
            f"{name}: {residuals.origin}" for name, residuals in sorted(self.by_device.items())
        ]
        return "; ".join((self.default.origin if self.default else "uncalibrated", *named))


def backtest(
    rows: Sequence[Row], *, residual_set: ResidualSet, data_sha256: str | None = None
) -> Backtest:
    """Predict every row that can be predicted and compute the errors; the digest is the table's."""
    runs, reasons = build_runs(rows)
    predicted = {
        prediction.run.row.number: prediction
        for prediction in predictions(runs, residual_set=residual_set)
    }
    result_rows = tuple(
        _to_row(row, predicted.get(row.number), reasons.get(row.number)) for row in rows
    )
    scored = [_to_scored_row(row, predicted.get(row.number)) for row in rows]
    of_experts = {run.row.number for run in runs if run.shape.experts}
    with_experts = [
        bool(row.architecture.get("experts")) or row.number in of_experts for row in rows
    ]
    inside = [_is_inside(row) for row in result_rows if row.predicted and row.measured]
    return Backtest(
        residuals=residual_set.origin,
        is_in_sample=data_sha256 is not None and data_sha256 in residual_set.table_digests,
        coverage_ratio=float(np.mean(inside)) if inside else None,
        rows=result_rows,
        **group_errors(
            scored,
            sources=[row.source for row in rows],
            generations=[
                str(predicted[row.number].regime.generation) if row.number in predicted else ""
                for row in rows
            ],
            has_experts=with_experts,
        ),
    )


def predictions(
    runs: Sequence[PublishedRun], *, residual_set: ResidualSet
) -> tuple[PredictedRun, ...]:
    """Predict runs; unknown recomputation is chosen first."""
    if not runs:
        return ()
    chosen = with_assumptions(runs)
    regimes = [run_regime(run) for run in chosen]
    pricer = build_pricer(chosen)
    step_s_C = pricer.step_s(constants_of(regimes, residual_set.default))
    for device, residuals in residual_set.by_device.items():
        here_C = np.array([regime.device == device for regime in regimes])
        found_C = pricer.step_s(constants_of(regimes, residuals))
        step_s_C = np.where(here_C, found_C, step_s_C)
    peaks = pricer.peaks(run_memory_constants(chosen))
    reported_C = reported_peaks(chosen, peaks)
    return tuple(
        PredictedRun(
            run=run,
            regime=regime,
            step_s=float(step_s_C[place]),
            band=band_of(regime, residual_set.for_device(regime.device)).edges,
            peak_bytes=float(reported_C[place]),
            fits=bool(peaks.total_C[place] <= float(run.hardware.memory_bytes)),
        )
        for place, (run, regime) in enumerate(zip(chosen, regimes, strict=True))
    )


def reported_peaks(runs: Sequence[PublishedRun], peaks: Peaks) -> Floats:
    """Return the peak that each run's software prints: allocated, or reserved by the allocator."""
    is_reserved_C = np.array([run.reports_reserved for run in runs])
    chosen: Floats = np.where(is_reserved_C, peaks.reserved_C, peaks.allocated_C)
    return chosen


def _to_row(row: Row, predicted: PredictedRun | None, reason: str | None) -> BacktestRow:
    if predicted is None:
        return BacktestRow(
            id=row.id,
            source=row.source,
            predicted=None,
            band=None,
            measured=row.numbers.get("step_time_s"),
            reason=reason or "not predicted",
            assumed=(),
            regime="",
            predicted_bytes=None,
            measured_bytes=None,
            fits=None,
        )
    low, high = predicted.band
    run = predicted.run
    return BacktestRow(
        id=row.id,
        source=row.source,
        predicted=predicted.step_s,
        band=(low * predicted.step_s, high * predicted.step_s),
        measured=run.measured_s,
        reason=None,
        assumed=run.assumed,
        regime=str(predicted.regime),
        predicted_bytes=predicted.peak_bytes,
        measured_bytes=run.peak_bytes,
        fits=predicted.fits,
    )


def _is_inside(row: BacktestRow) -> bool:
    return (
        row.band is not None
        and row.measured is not None
        and row.band[0] <= row.measured <= row.band[1]
    )


def case_key(row: Row) -> tuple[str, ...]:
    """Return the key of a case: rows with equal keys are alternatives."""
    texts = (row.text(name) for name in ("model", "gpu", "precision"))
    numbers = (f"{row.number_or(name, 0.0):g}" for name in ("num_gpus", "seq"))
    return (row.source, *texts, *numbers)


def tokens_per_step(run: PublishedRun) -> float:
    """Return the tokens of one step."""
    s = run.strategy
    return float(s.micro_batch * s.num_microbatches * s.data * s.sequence)


def _to_scored_row(row: Row, predicted: PredictedRun | None) -> ScoredRow:
    if predicted is None:
        return ScoredRow(predicted_s=None, measured_s=None, tokens=1.0, case=case_key(row))
    return ScoredRow(
        predicted_s=predicted.step_s,
        measured_s=predicted.run.measured_s,
        tokens=tokens_per_step(predicted.run),
        case=case_key(row),
        predicted_bytes=predicted.peak_bytes,
        measured_bytes=predicted.run.peak_bytes,
        fits=predicted.fits,
        has_run_out_of_memory=row.has_run_out_of_memory,
    )
