"""Predicts every run from a fit that has seen neither it nor similar runs.

Runs with one key are held out together. The recipe (`group`) is the usual key; holding out whole
models, devices or cells (hidden width, tensor parallelism and micro-batch, which determine the
kernels' shapes) is stricter.

Letters: C runs, A assignments to folds.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats
from tuner.backtest.columns import PublishedRun
from tuner.calibrate.fit import Fit, Problem, refit

MOST_FOLDS: Final = 20
SEED: Final = 20_260_101

KEYS: Final[Mapping[str, Callable[[PublishedRun], str]]] = {
    "group": lambda run: run.row.group,
    "model": lambda run: run.row.text("model"),
    "device": lambda run: run.device.name,
    "cell": lambda run: (
        f"{run.family}|{run.shape.hidden}|{run.strategy.tensor}|{run.strategy.micro_batch}"
    ),
    "hidden": lambda run: f"{run.family}|{run.shape.hidden}",
}
"""Keys of the runs that are left out together, by the name of the split in tables."""


def assign_folds(
    keys: Sequence[str],
    *,
    max_folds: int,
    seed: int = SEED,
    strata: Sequence[str] | None = None,
) -> npt.NDArray[np.intp]:
    """Assign keys to at most `max_folds` folds at random; every run of a key is in its key's fold.

    With strata (each run's; a key has its first run's) every fold gets an even share of each, so
    that no fold loses all of a small table at once.
    """
    distinct, first, key_C = np.unique(np.asarray(keys), return_index=True, return_inverse=True)
    stratum = np.asarray(strata if strata is not None else [""] * len(keys))[first]
    shuffled = np.random.default_rng(seed).permutation(len(distinct))
    order = shuffled[np.argsort(stratum[shuffled], kind="stable")]
    dealt = np.empty(len(distinct), dtype=np.intp)
    dealt[order] = np.arange(len(distinct)) % min(max_folds, len(distinct))
    fold_C: npt.NDArray[np.intp] = dealt[key_C.ravel()]
    return fold_C


def held_out(
    problem: Problem,
    whole: Fit,
    *folds_C: npt.NDArray[np.intp],
    used_C: npt.NDArray[np.bool_] | None = None,
    is_rough: bool = False,
) -> Floats:
    """Return log(predicted / measured) of every run by the fit without its fold.

    With several assignments to folds the fit lacks every run that shares any fold with it. Runs
    outside of `used_C` are in no fit at all; theirs come back as NaN.
    """
    fold_CA = np.stack(folds_C, axis=-1)
    used_C = np.ones(len(fold_CA), dtype=bool) if used_C is None else used_C
    residual_C = np.full(len(fold_CA), np.nan)
    for fold_A in np.unique(fold_CA[used_C], axis=0):
        equal_CA = fold_CA == fold_A
        own_C = equal_CA.all(axis=1) & used_C
        weight_C = np.where(equal_CA.any(axis=1) | ~used_C, 0.0, problem.weight_C)
        residual_C[own_C] = refit(problem, whole, weight_C, is_rough=is_rough)[own_C]
    return residual_C
