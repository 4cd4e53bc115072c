"""Accuracy of the ratio of two configurations' step times, beside that of a single time.

    python tests/benchmarks/ratio_bands.py RUNS.csv

Reads a published table (published_training.py). Every run is predicted by a fit without its whole
setting (one model, device, precision and release of one source), and every band of ratios is tested
on the pairs of a setting that it was made without. Prints, by generation of device, experts or none
and same kernels or not, the band, the number of settings and its coverage; the same for pairs of
equal device count and sequence length; and the width beside the 80 % band of single times, with
recipes held out. Figures that miss their aim are marked. Exit code 1: a figure misses.
"""

import math
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.benchmarks.bars import is_missed, say
from tests.benchmarks.published_training import read_published
from tuner.arrays import Floats
from tuner.backtest.assumptions import with_assumptions
from tuner.backtest.columns import PublishedRun, build_runs
from tuner.backtest.prices import run_regime
from tuner.calibrate.calibration import build_problem, held_out_keys
from tuner.calibrate.cross_validation import MOST_FOLDS, assign_folds, held_out
from tuner.calibrate.fit import fit
from tuner.calibrate.ratio_bands import (
    PairClass,
    Pairs,
    band_width,
    build_pairs,
    is_covered,
    pair_weights,
    setting_key,
)
from tuner.calibrate.terms import TERMS
from tuner.costs.train.ratio_bands import STATED_RATIO

LEAST_COVERED = 0.78
MOST_WIDE = 0.5
"""Width of a band of ratios over that of single times, on Hopper with experts."""


def main(path: str) -> int:
    """Print every figure and return 1 if any misses its aim."""
    rows = read_published(Path(path))
    runs = with_assumptions([one for one in build_runs(rows)[0] if one.measured_s])
    problem, _ = build_problem(runs, tuple(run_regime(run) for run in runs), TERMS)
    whole, keys = fit(problem), held_out_keys(runs)
    strata = [run.family for run in runs]
    by_setting, by_group = (
        held_out(problem, whole, assign_folds(keys[name][0], max_folds=MOST_FOLDS, strata=strata))
        for name in ("setting", "group")
    )
    pairs = build_pairs(runs, by_setting)
    inside = is_covered(pairs)
    missed = [
        *_coverage("all pairs", pairs, inside),
        *_coverage("the same devices and sequence", *_strict(runs, by_setting, pairs, inside)),
    ]
    _by_kind(pairs, inside)
    missed += _widths(runs, by_group, pairs)
    _with_experts(runs, by_group)
    return int(any(missed))


def _coverage(name: str, pairs: Pairs, inside: npt.NDArray[np.bool_]) -> list[bool]:
    """Print the coverage of the bands, under three weightings of dependent pairs."""
    if not len(inside):
        say(f"{name}: none")
        return []
    by_root = pair_weights(pairs)
    recipes = 1.0 / np.bincount(pairs.recipes_P)[pairs.recipes_P]
    settings = by_root / np.bincount(pairs.setting_P, weights=by_root)[pairs.setting_P]
    covered = {
        "settings weigh the root of their recipe pairs": by_root,
        "pairs of recipes weigh alike": recipes,
        "settings weigh alike": settings,
    }
    counted = f"{len(inside)} pairs, {len(np.unique(pairs.setting_P))} settings"
    return [
        is_missed(
            f"{name} ({counted}) held, {weighing}",
            float(np.average(inside, weights=weight)),
            LEAST_COVERED,
            is_most=False,
        )
        for weighing, weight in covered.items()
    ]


def _strict(
    runs: Sequence[PublishedRun], residual_C: Floats, pairs: Pairs, inside: npt.NDArray[np.bool_]
) -> tuple[Pairs, npt.NDArray[np.bool_]]:
    """Keep the pairs of equal device count and sequence length."""
    places: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        places.setdefault(setting_key(run), []).append(place)
    sizes: dict[tuple[int, float], set[bool]] = {}
    number_of = {name: number for number, name in enumerate(pairs.settings)}
    for name, own in places.items():
        for one, other in combinations(own, 2):
            error = abs(float(residual_C[one] - residual_C[other]))
            is_alike = all(
                runs[one].row.number_or(column, 0.0) == runs[other].row.number_or(column, 0.0)
                for column in ("num_gpus", "seq")
            )
            sizes.setdefault((number_of[name], error), set()).add(is_alike)
    with_kernels = np.array(
        [
            True in sizes[int(setting), float(error)]
            for setting, error in zip(pairs.setting_P, pairs.error_P, strict=True)
        ],
        dtype=bool,
    )
    return pairs.taken(with_kernels), inside[with_kernels]


def _by_kind(pairs: Pairs, inside: npt.NDArray[np.bool_]) -> None:
    for number, kind in sorted(enumerate(pairs.kinds), key=lambda item: item[1]):
        own_P = pairs.kind_P == number
        own, size = pairs.taken(own_P), band_width(pairs, kind)
        if size is None:
            continue
        covered = float(np.average(inside[own_P], weights=pair_weights(own)))
        say(
            f"  {_name(kind):44s} {math.exp(-size):.3f} to {math.exp(size):.3f}"
            f"  {len(own.error_P):6d} pairs of {len(np.unique(own.setting_P)):3d} settings,"
            f" held {100 * covered:.0f} %"
        )


def _name(kind: PairClass) -> str:
    experts = "experts" if kind.has_experts else "dense"
    return f"{kind.generation}, {experts}, {'same' if kind.same_kernels else 'other'} kernels"


def _widths(runs: Sequence[PublishedRun], residual_C: Floats, pairs: Pairs) -> list[bool]:
    """Print the width of both bands on Hopper with experts."""
    sizes: dict[str, list[float]] = {}
    for run, residual in zip(runs, residual_C, strict=True):
        if run.device.generation == "hopper" and bool(run.shape.experts):
            sizes.setdefault(run.row.group, []).append(abs(float(residual)))
    result = {
        same: band_width(pairs, PairClass("hopper", has_experts=True, same_kernels=same))
        for same in (True, False)
    }
    if not sizes or None in result.values():
        say("single times on Hopper with experts: nothing to measure")
        return []
    single = _quantile(list(sizes.values()), STATED_RATIO)
    say(
        f"single times on Hopper with experts: {math.exp(-single):.3f} to {math.exp(single):.3f}, "
        f"{len(sizes)} recipes held out"
    )
    return [
        is_missed(
            f"width of the ratio's band beside it, {'same' if same else 'other'} kernels",
            math.sinh(size or 0.0) / math.sinh(single),
            MOST_WIDE,
        )
        for same, size in result.items()
    ]


def _quantile(sizes_by_group: Sequence[Sequence[float]], share: float) -> float:
    """Return the conformal quantile, with equal weight for every group."""
    weighted = sorted((size, 1.0 / len(own)) for own in sizes_by_group for size in own)
    needed = min(float(len(sizes_by_group)), share * (len(sizes_by_group) + 1))
    seen = np.cumsum([weight for _, weight in weighted])
    return weighted[min(int(np.searchsorted(seen, needed - 1e-9)), len(weighted) - 1)][0]


def _with_experts(runs: Sequence[PublishedRun], residual_C: Floats) -> None:
    """Print the errors of rows with experts."""
    with_experts = np.array([bool(run.shape.experts) for run in runs])
    if with_experts.any():
        result = 100 * np.quantile(np.abs(np.expm1(residual_C[with_experts])), [0.5, 0.9])
        say(
            f"all rows with experts: {with_experts.sum()}, median {result[0]:.1f} %,"
            f" P90 {result[1]:.1f} %"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
