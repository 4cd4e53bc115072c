"""Predicts published steps of reinforcement learning, fits their residuals, and scores both.

Residuals are two constants of all rows and a factor a release (tuner/costs/rl/residuals.py), fitted
with priors by tuner/calibrate/fit.py. A model's rows are also predicted by residuals of the other
models' rows: what a model errs that was never published. Seconds of a rollout grow in proportion to
the gap between steps, so that two simulations give them for every gap.

Letters: C rows, K constants, P offsets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np

from tuner.arrays import Floats
from tuner.backtest.cells import Cells, MissingError
from tuner.backtest.errors import ScoredRow, summarise_errors
from tuner.backtest.records import Errors
from tuner.backtest.rl.records import RlBacktest, RlBacktestRow, RlErrors, RlOrder
from tuner.backtest.rl.runs import RlRun, parse_run
from tuner.calibrate.fit import Problem, fit, group_blocks
from tuner.costs.rl.residuals import BAND_FACTORS, GENERIC, PLAIN, SHIPPED, RlResiduals
from tuner.simulate.rl.step import Phases

GAP_S: Final = 4e-3
"""Gap between steps of the second simulation."""
SPREADS: Final = (0.7, 0.3, 0.15)
"""Prior deviations of the logarithms of gap, pass factor, and a release's factor."""
STATED: Final = 0.8
"""Share of the steps of unseen models that a band is meant to hold."""
FAMILIAR_ROWS: Final = 6.0
"""Rows that a model weighs as, however many it has."""
CLEAR_RATIO: Final = 1.1
"""Ratio of two measured steps from which on their order counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRun:
    """A run priced without residuals, and with a gap."""

    run: RlRun
    plain: Phases
    gapped: Phases

    def phases(self, residuals: RlResiduals) -> Phases:
        """Return the phases with residuals."""
        factor = residuals.release_factor(self.run.step.release)
        more_s = (self.gapped.rollout_s - self.plain.rollout_s) * residuals.decode_gap_s / GAP_S
        passes = factor * residuals.pass_factor
        return replace(
            self.plain,
            rollout_s=factor * (self.plain.rollout_s + more_s),
            forward_s=passes * self.plain.forward_s,
            train_s=passes * self.plain.train_s,
        )


def backtest_steps(rows: Sequence[Cells]) -> RlBacktest:
    """Predict every row that can be predicted and compute the errors."""
    read = [_read(cells) for cells in rows]
    runs = [_price(run) for run in read if isinstance(run, RlRun)]
    by_id = {id(priced.run): priced for priced in runs}
    held_out = _without_models(runs)
    return RlBacktest(
        shipped=_errors(runs, lambda _: SHIPPED, BAND_FACTORS),
        held_out=None if held_out is None else _errors(runs, lambda run: held_out[run.model], None),
        fitted=_listed(fit_residuals(runs)) if runs else {},
        band_factors=dict(BAND_FACTORS),
        rows=tuple(
            _to_row(cells, by_id[id(run)], held_out)
            if isinstance(run, RlRun)
            else _to_refused(cells, run)
            for cells, run in zip(rows, read, strict=True)
        ),
    )


def _read(cells: Cells) -> RlRun | str:
    try:
        return parse_run(cells)
    except MissingError as error:
        return str(error)


def _price(run: RlRun) -> PricedRun:
    return PricedRun(
        run=run,
        plain=run.step.phases(PLAIN),
        gapped=run.step.phases(replace(PLAIN, decode_gap_s=GAP_S)),
    )


def fit_residuals(runs: Sequence[PricedRun]) -> RlResiduals:
    """Fit the residuals to all rows, held to the generic ones; models weigh equally."""
    releases = sorted({priced.run.step.release for priced in runs})
    release_C = np.array([releases.index(priced.run.step.release) for priced in runs])
    models = [priced.run.model for priced in runs]
    ones_C = np.ones(len(runs))
    holds_PC = np.stack(
        [
            ones_C,
            ones_C,
            *((release_C == place).astype(np.float64) for place in range(len(releases))),
        ]
    )
    generic_K = np.array([GENERIC.decode_gap_s, GENERIC.pass_factor, 1.0])
    gap_s, pass_factor, factor_s = range(3)
    problem = Problem(
        price=lambda values_KC: _seconds(runs, values_KC),
        generic_KC=np.repeat(generic_K[:, None], len(runs), axis=1),
        low_K=np.array([1e-5, 0.5, 0.3]),
        high_K=np.array([0.1, 5.0, 3.0]),
        measured_C=np.array([priced.run.measured_s for priced in runs]),
        weight_C=np.array([FAMILIAR_ROWS / models.count(model) for model in models]),
        constant_P=np.array([gap_s, pass_factor, *([factor_s] * len(releases))]),
        holds_PC=holds_PC,
        spread_P=np.array([*SPREADS[:2], *([SPREADS[2]] * len(releases))]),
        blocks=group_blocks(holds_PC),
    )
    offset_P = fit(problem).offset_P
    factors = np.exp(offset_P)
    return RlResiduals(
        decode_gap_s=float(GENERIC.decode_gap_s * factors[0]),
        pass_factor=float(GENERIC.pass_factor * factors[1]),
        release_factors=dict(zip(releases, map(float, factors[2:]), strict=True)),
    )


def _seconds(runs: Sequence[PricedRun], values_KC: Floats) -> Floats:
    """Return the seconds of each step from its gap, pass factor and release's factor."""
    steps = []
    for priced, (gap_s, passes, factor) in zip(runs, values_KC.T.tolist(), strict=True):
        release = priced.run.step.release
        residuals = RlResiduals(
            decode_gap_s=gap_s, pass_factor=passes, release_factors={release: factor}
        )
        steps.append(priced.phases(residuals).step_s)
    return np.array(steps)


def _without_models(runs: Sequence[PricedRun]) -> dict[str, RlResiduals] | None:
    """Return residuals by the model that they were fitted without; None of a single model."""
    models = sorted({priced.run.model for priced in runs})
    if len(models) < 2:
        return None
    return {
        model: fit_residuals([priced for priced in runs if priced.run.model != model])
        for model in models
    }


def _errors(
    runs: Sequence[PricedRun],
    residuals_of: Callable[[RlRun], RlResiduals],
    factors: Mapping[str, float] | None,
) -> RlErrors:
    """Score predictions; without band factors, a band is made of the other models' errors."""
    predicted_C = np.array([priced.phases(residuals_of(priced.run)).step_s for priced in runs])
    measured_C = np.array([priced.run.measured_s for priced in runs])
    scored = [
        ScoredRow(
            predicted_s=float(predicted_s),
            measured_s=priced.run.measured_s,
            tokens=1.0,
            case=priced.run.case,
        )
        for priced, predicted_s in zip(runs, predicted_C, strict=True)
    ]
    placements = [priced.run.step.placement.value for priced in runs]
    size_C = np.abs(np.log(measured_C / predicted_C))
    inside = [
        size <= np.log(_factor(priced, runs, size_C) if factors is None else factors[placement])
        for priced, placement, size in zip(runs, placements, size_C, strict=True)
    ]
    return RlErrors(
        total=summarise_errors(scored),
        placements=_by_key(placements, scored),
        releases=_by_key(
            [f"{place}, {run.run.source}" for place, run in zip(placements, runs, strict=True)],
            scored,
        ),
        models=_by_key([priced.run.model for priced in runs], scored),
        order=_order(runs, predicted_C),
        coverage_ratio=float(np.mean(inside)) if inside else None,
    )


def _factor(priced: PricedRun, runs: Sequence[PricedRun], size_C: Floats) -> float:
    """Return the band's factor by errors of the other models in the same placement."""
    placement, model = priced.run.step.placement, priced.run.model
    sizes = [
        size
        for size, peer in zip(size_C, runs, strict=True)
        if peer.run.step.placement is placement and peer.run.model != model
    ]
    return band_factor(sizes)


def band_factor(sizes: Sequence[float]) -> float:
    """Return the factor, up and down, that holds the stated share of errors in logarithms."""
    rank = min(int(np.ceil((len(sizes) + 1) * STATED)), len(sizes))
    return float(np.exp(sorted(sizes)[rank - 1])) if sizes else 1.0


def _order(runs: Sequence[PricedRun], predicted_C: Floats) -> RlOrder:
    right = [
        (predicted_C[left] - predicted_C[right]) * np.log(ratio) > 0.0
        for left, right in combinations(range(len(runs)), 2)
        if runs[left].run.case == runs[right].run.case
        and runs[left].run.source == runs[right].run.source
        for ratio in (runs[left].run.measured_s / runs[right].run.measured_s,)
        if max(ratio, 1.0 / ratio) >= CLEAR_RATIO
    ]
    return RlOrder(pairs=len(right), ordered_ratio=float(np.mean(right)) if right else None)


def _by_key(keys: Sequence[str], scored: Sequence[ScoredRow]) -> dict[str, Errors]:
    return {
        key: summarise_errors([row for row, name in zip(scored, keys, strict=True) if name == key])
        for key in sorted(set(keys))
    }


def _listed(residuals: RlResiduals) -> dict[str, float]:
    return {
        "decode_gap_s": residuals.decode_gap_s,
        "pass_factor": residuals.pass_factor,
        **residuals.release_factors,
    }


def _to_row(
    cells: Cells, priced: PricedRun, held_out: Mapping[str, RlResiduals] | None
) -> RlBacktestRow:
    phases, run = priced.phases(SHIPPED), priced.run
    factor = BAND_FACTORS[phases.placement]
    return RlBacktestRow(
        id=run.id,
        source=run.source,
        model=run.model,
        placement=phases.placement,
        reason=None,
        predicted=phases.step_s,
        held_out=None if held_out is None else priced.phases(held_out[run.model]).step_s,
        band=(phases.step_s / factor, phases.step_s * factor),
        measured=run.measured_s,
        phases=phases.seconds(),
        assumed=run.assumed,
    )


def _to_refused(cells: Cells, reason: str) -> RlBacktestRow:
    return RlBacktestRow(
        id=cells.get("id", ""),
        source=cells.get("system", ""),
        model=cells.get("model", ""),
        placement="",
        reason=reason,
        predicted=None,
        held_out=None,
        band=None,
        measured=None,
        phases={},
        assumed=(),
    )
