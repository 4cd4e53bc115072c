"""Fits residuals to a table of runs, and measures their accuracy by cross-validation.

    rows -> runs -> Problem (terms.py) -> fit -> corrections
                                       -> fits without each fold -> errors, bands

Near-repeats are down-weighted: of n runs that differ only in depth, data parallelism, pipeline or
batch (same width, tensor parallelism, micro-batch, device, software) each weighs n^-0.5, so that
one paper's many near-repeats do not dominate shared constants.

The coverage of the bands is tested by nested cross-validation: bands made without a fold's recipes
have to hold them.

Letters: C runs, P offsets.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats
from tuner.backtest.adapters import trains_adapters
from tuner.backtest.assumptions import with_assumptions
from tuner.backtest.columns import PublishedRun, build_runs
from tuner.backtest.prices import Pricer, build_pricer, run_regime
from tuner.backtest.rows import Row
from tuner.calibrate.bands import STATED, WORST_OF, covered_ratio, error_bands
from tuner.calibrate.cross_validation import KEYS, MOST_FOLDS, assign_folds, held_out
from tuner.calibrate.fit import COARSE, Problem, fit, group_blocks
from tuner.calibrate.ratio_bands import build_pairs, build_ratio_bands, setting_key
from tuner.calibrate.terms import FEWEST_RECIPES, TERMS, Level, Offset, list_offsets, offset_mask
from tuner.costs.train.calibration import (
    Correction,
    Regime,
    Residuals,
    Where,
    as_constants,
    generic_values,
)
from tuner.errors import SpecError
from tuner.prices.train.constants import FITTED, NAMES, version_of

FEWEST_RUNS: Final = 2
OUTER_FOLDS: Final = 4
INNER_FOLDS: Final = 4
COLUMNS_AT_ONCE: Final = 8_000
"""Runs times constants that are priced together; wider batches are no faster."""
SMALLEST_OFFSET: Final = 5e-3
"""Smallest change of a constant's logarithm that the corrections keep."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """A fit with its cross-validation."""

    runs: tuple[PublishedRun, ...]
    regimes: tuple[Regime, ...]
    problem: Problem
    offsets: tuple[Offset, ...]
    held_out: Mapping[str, Floats]
    """log(predicted / measured) of each run, by what was left out: `KEYS`."""
    residuals: Residuals


def calibrate(
    rows: Sequence[Row],
    *,
    origin: str,
    data_sha256: str,
    terms: Mapping[str, Mapping[Level, float]] = TERMS,
) -> Calibration:
    """Fit the rows that can be predicted and have a time.

    Raises:
        SpecError: fewer than two such rows, or no two of different recipes have anything in common.
    """
    runs = tuple(run for run in build_runs(rows)[0] if _is_fitted_to(run))
    if len(runs) < FEWEST_RUNS:
        raise SpecError(
            f"{len(runs)} of {len(rows)} rows can be predicted and have a measured time, which is "
            "too few to fit; 'moetune backtest' says why for each"
        )
    runs = with_assumptions(runs)
    regimes = tuple(run_regime(run) for run in runs)
    problem, offsets = build_problem(runs, regimes, terms)
    whole = fit(problem)
    groups, strata = [run.row.group for run in runs], [run.family for run in runs]
    residual_by = {
        name: held_out(
            problem,
            whole,
            *(assign_folds(keys, max_folds=MOST_FOLDS, strata=strata) for keys in assignments),
        )
        for name, assignments in held_out_keys(runs).items()
    }
    return Calibration(
        runs=runs,
        regimes=regimes,
        problem=problem,
        offsets=offsets,
        held_out=residual_by,
        residuals=Residuals(
            origin=origin,
            data_sha256=data_sha256,
            rows=len(runs),
            groups=len(set(groups)),
            stated_ratio=STATED,
            covered_ratio=nested_coverage(problem, runs, regimes),
            corrections=to_corrections(offsets, whole.offset_P),
            bands=error_bands(regimes, groups, residual_by),
            ratios=build_ratio_bands(build_pairs(runs, residual_by["setting"])),
            releases=releases_by_family(runs),
            recipes=recipes_by_group(regimes, groups),
        ),
    )


def _side_by_side(
    pricer: Pricer, *, num_runs: int, num_values: int
) -> Callable[[Sequence[Floats]], Sequence[Floats]] | None:
    """Return a batched pricer for several sets of constants; None where that saves nothing."""
    max_times = COLUMNS_AT_ONCE // num_runs
    if max_times < 2:
        return None
    times = math.ceil(num_values / math.ceil(num_values / max_times))
    repeated = pricer.repeated(times)

    def prices(values: Sequence[Floats]) -> Sequence[Floats]:
        times_s: list[Floats] = []
        for first in range(0, len(values), times):
            some = list(values[first : first + times])
            filled = some + [some[-1]] * (times - len(some))
            together_s = repeated.step_s(as_constants(np.hstack(filled)))
            times_s += list(together_s.reshape(times, num_runs)[: len(some)])
        return times_s

    return prices


def _is_fitted_to(run: PublishedRun) -> bool:
    """Return whether a run has a time and trains all weights; adapters test fits to other runs."""
    return run.measured_s is not None and not trains_adapters(run.row)


def build_problem(
    runs: Sequence[PublishedRun],
    regimes: Sequence[Regime],
    terms: Mapping[str, Mapping[Level, float]],
) -> tuple[Problem, tuple[Offset, ...]]:
    """Build the fitting problem."""
    groups = [run.row.group for run in runs]
    offsets = list_offsets(regimes, groups, terms)
    if not offsets:
        raise SpecError(
            f"{len(runs)} rows of {len(set(groups))} recipes share no constant; one is fitted to "
            f"{FEWEST_RECIPES} recipes (column group) on the same devices or software"
        )
    pricer, holds_PC = build_pricer(runs), offset_mask(offsets, regimes)
    bounds_K = [FITTED.get(name) for name in NAMES]
    problem = Problem(
        price=lambda values_KC: pricer.step_s(as_constants(values_KC)),
        price_side_by_side=_side_by_side(
            pricer, num_runs=len(runs), num_values=1 + len({offset.constant for offset in offsets})
        ),
        generic_KC=generic_values(regimes),
        low_K=np.array([-np.inf if prior is None else prior.low for prior in bounds_K]),
        high_K=np.array([np.inf if prior is None else prior.high for prior in bounds_K]),
        measured_C=np.array([run.measured_s for run in runs], dtype=np.float64),
        weight_C=run_weights(runs),
        constant_P=np.array([NAMES.index(offset.constant) for offset in offsets], dtype=np.intp),
        holds_PC=holds_PC,
        spread_P=np.array([offset.spread for offset in offsets]),
        blocks=group_blocks(holds_PC),
    )
    return problem, offsets


def run_weights(runs: Sequence[PublishedRun]) -> Floats:
    """Return n^-0.5 for n runs whose layers have the same kernels on the same software."""
    kinds = [
        (
            run.family,
            run.release,
            run.device.name,
            run.precision,
            run.shape.hidden,
            run.shape.experts,
            run.strategy.tensor,
            run.strategy.expert,
            run.strategy.micro_batch,
            run.strategy.sequence,
        )
        for run in runs
    ]
    count = Counter(kinds)
    return np.array([count[kind] ** -0.5 for kind in kinds])


def held_out_keys(runs: Sequence[PublishedRun]) -> dict[str, tuple[list[str], ...]]:
    """Return the cross-validation keys of the runs: for tables, and for bands.

    Of several keys any that two runs share is left out for both.
    """
    families = [run.family for run in runs]
    generations = [str(run.device.generation) for run in runs]
    return {
        **{name: ([key(run) for run in runs],) for name, key in KEYS.items()},
        "release": ([f"{run.family}|{run.release}" for run in runs],),
        "generation": (list(map("|".join, zip(families, generations, strict=True))),),
        "family": (families,),
        "both": (families, generations),
        "setting": ([setting_key(run) for run in runs],),
    }


def recipes_by_group(regimes: Sequence[Regime], groups: Sequence[str]) -> dict[str, int]:
    """Count the recipes of each family, generation and kind of model."""
    return dict(
        sorted(
            Counter(
                key
                for key, _ in set(zip((regime.group for regime in regimes), groups, strict=True))
            ).items()
        )
    )


def releases_by_family(runs: Sequence[PublishedRun]) -> dict[str, tuple[str, ...]]:
    """Return the releases of each family, oldest first."""
    return {
        family: tuple(sorted(known, key=version_of))
        for family in sorted({run.family for run in runs})
        if (known := {run.release for run in runs if run.family == family and run.release})
    }


def to_corrections(offsets: Sequence[Offset], offset_P: Floats) -> tuple[Correction, ...]:
    """Group factors by the regime they apply to."""
    by_where: dict[Where, dict[str, float]] = {}
    for offset, value in zip(offsets, offset_P, strict=True):
        if abs(value) >= SMALLEST_OFFSET:
            factors = by_where.setdefault(offset.where, {})
            factors[offset.constant] = float(f"{np.exp(value):.5g}")
    return tuple(
        Correction(where=where, factors=dict(sorted(factors.items())))
        for where, factors in sorted(by_where.items(), key=lambda pair: str(pair[0]))
    )


def nested_coverage(
    problem: Problem, runs: Sequence[PublishedRun], regimes: Sequence[Regime]
) -> float | None:
    """Return the share of recipes inside bands that were made without them."""
    groups = [run.row.group for run in runs]
    keys = held_out_keys(runs)
    outer_C = assign_folds(groups, max_folds=OUTER_FOLDS, seed=1)
    shares: dict[str, float] = {}
    for fold in np.unique(outer_C):
        used_C = outer_C != fold
        if not used_C.any():
            return None
        inner = fit(problem, weight_C=np.where(used_C, problem.weight_C, 0.0), tolerance=COARSE)
        residual_by = {
            name: held_out(
                problem, inner, *map(_inner_folds, keys[name]), used_C=used_C, is_rough=True
            )
            for name in WORST_OF
        }
        bands = error_bands(regimes, groups, residual_by)
        shares |= covered_ratio(regimes, groups, np.where(used_C, np.nan, inner.residual_C), bands)
    return float(np.mean(list(shares.values()))) if shares else None


def _inner_folds(keys: Sequence[str]) -> npt.NDArray[np.intp]:
    return assign_folds(keys, max_folds=INNER_FOLDS, seed=2)
