"""Predicts every row of a table and sets what was measured beside it.

    rows -> runs (columns.py) -> recomputation where unknown (assumptions.py) -> seconds, bytes

A row that cannot be predicted stays, with its reason. Without residuals the generic constants hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tuner.backtest.assumptions import with_assumptions
from tuner.backtest.columns import Run, runs_of
from tuner.backtest.errors import Scored, errors_of
from tuner.backtest.prices import (
    Floats,
    Peaks,
    memory_constants_of,
    pricer_of,
    regime_of,
)
from tuner.backtest.records import Backtest, Errors, Judged, ReleaseScatter
from tuner.backtest.releases import release_scatter
from tuner.backtest.rows import Row
from tuner.costs.analytic.calibration import Regime, Residuals, band_of, constants_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """One run with its prediction."""

    run: Run
    regime: Regime
    step_s: float
    band: tuple[float, float]
    """Of measured over predicted seconds."""
    peak_bytes: float
    """As its software reports it."""
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """Which residuals hold for which device."""

    usual: Residuals | None = None
    """Where nothing else is given; None: the generic constants."""
    of_device: Mapping[str, Residuals] = field(default_factory=dict)
    """By name of the datasheet."""

    def of(self, device: str) -> Residuals | None:
        """Return what holds for a device."""
        return self.of_device.get(device, self.usual)

    @property
    def digests(self) -> set[str]:
        """Return the digests of the tables that the residuals were fitted to."""
        own = {one.data_sha256 for one in self.of_device.values()}
        return own | ({self.usual.data_sha256} if self.usual else set())

    @property
    def origin(self) -> str:
        """Say where it comes from."""
        named = [f"{name}: {one.origin}" for name, one in sorted(self.of_device.items())]
        return "; ".join((self.usual.origin if self.usual else "uncalibrated", *named))


def backtest(
    rows: Sequence[Row], *, knowledge: Knowledge, data_sha256: str | None = None
) -> Backtest:
    """Predict what can be predicted and measure the errors; the digest is that of the table."""
    runs, reasons = runs_of(rows)
    predicted = {found.run.row.number: found for found in predictions(runs, knowledge=knowledge)}
    judged = tuple(_judged(row, predicted.get(row.number), reasons.get(row.number)) for row in rows)
    scored = [_scored(row, predicted.get(row.number)) for row in rows]
    with_experts = [bool(row.architecture.get("experts")) for row in rows]
    moe = [(row, one) for row, one, has in zip(rows, scored, with_experts, strict=True) if has]
    inside = [_is_inside(row) for row in judged if row.predicted and row.measured]
    return Backtest(
        residuals=knowledge.origin,
        is_in_sample=data_sha256 is not None and data_sha256 in knowledge.digests,
        coverage_ratio=float(np.mean(inside)) if inside else None,
        sources=_by_name([(row.source, one) for row, one in zip(rows, scored, strict=True)]),
        moe_only=_by_name([(row.source, one) for row, one in moe]),
        generations=_by_name(
            [
                (str(predicted[row.number].regime.generation), one)
                for row, one in zip(rows, scored, strict=True)
                if row.number in predicted
            ]
        ),
        total=errors_of(scored),
        moe_total=errors_of([one for _, one in moe]),
        release_scatter=_release_scatter(tuple(predicted.values())),
        rows=judged,
    )


def _release_scatter(predicted: Sequence[Predicted]) -> dict[str, ReleaseScatter]:
    by_kind = {
        name: [one for one in predicted if bool(one.run.shape.experts) == has_experts]
        for name, has_experts in (("moe", True), ("dense", False))
    }
    found = {
        name: release_scatter([one.run for one in some], np.array([one.step_s for one in some]))
        for name, some in by_kind.items()
    }
    return {name: one for name, one in found.items() if one is not None}


def predictions(runs: Sequence[Run], *, knowledge: Knowledge) -> tuple[Predicted, ...]:
    """Predict runs; unknown recomputation is chosen first."""
    if not runs:
        return ()
    chosen = with_assumptions(runs)
    regimes = [regime_of(run) for run in chosen]
    pricer = pricer_of(chosen)
    step_s_C = pricer.step_s(constants_of(regimes, knowledge.usual))
    for device, residuals in knowledge.of_device.items():
        here_C = np.array([regime.device == device for regime in regimes])
        found_C = pricer.step_s(constants_of(regimes, residuals))
        step_s_C = np.where(here_C, found_C, step_s_C)
    peaks = pricer.peaks(memory_constants_of(chosen))
    reported_C = reported_peaks(chosen, peaks)
    return tuple(
        Predicted(
            run=run,
            regime=regime,
            step_s=float(step_s_C[place]),
            band=band_of(regime, knowledge.of(regime.device)),
            peak_bytes=float(reported_C[place]),
            fits=bool(peaks.total_C[place] <= float(run.hardware.memory_bytes)),
        )
        for place, (run, regime) in enumerate(zip(chosen, regimes, strict=True))
    )


def reported_peaks(runs: Sequence[Run], peaks: Peaks) -> Floats:
    """Return the peak that each run's software prints: allocated, or reserved by the allocator."""
    is_reserved_C = np.array([run.reports_reserved for run in runs])
    chosen: Floats = np.where(is_reserved_C, peaks.reserved_C, peaks.allocated_C)
    return chosen


def _judged(row: Row, predicted: Predicted | None, reason: str | None) -> Judged:
    if predicted is None:
        return Judged(
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
    return Judged(
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


def _is_inside(row: Judged) -> bool:
    return (
        row.band is not None
        and row.measured is not None
        and row.band[0] <= row.measured <= row.band[1]
    )


def case_of(row: Row) -> tuple[str, ...]:
    """Return what makes two rows alternatives of each other."""
    texts = (row.text(name) for name in ("model", "gpu", "precision"))
    numbers = (f"{row.number_or(name, 0.0):g}" for name in ("num_gpus", "seq"))
    return (row.source, *texts, *numbers)


def tokens_of(run: Run) -> float:
    """Return the tokens of one step."""
    s = run.strategy
    return float(s.micro_batch * s.num_microbatches * s.data * s.sequence)


def _scored(row: Row, predicted: Predicted | None) -> Scored:
    if predicted is None:
        return Scored(predicted_s=None, measured_s=None, tokens=1.0, case=case_of(row))
    return Scored(
        predicted_s=predicted.step_s,
        measured_s=predicted.run.measured_s,
        tokens=tokens_of(predicted.run),
        case=case_of(row),
        predicted_bytes=predicted.peak_bytes,
        measured_bytes=predicted.run.peak_bytes,
        fits=predicted.fits,
        has_run_out_of_memory=row.has_run_out_of_memory,
    )


def _by_name(named: Sequence[tuple[str, Scored]]) -> dict[str, Errors]:
    names = dict.fromkeys(name for name, _ in named)
    return {name: errors_of([one for key, one in named if key == name]) for name in names}
