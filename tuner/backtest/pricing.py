"""Prices all runs at once, sorted into batches by depth so that few stages are padding.

Letters: C runs, K constants.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.backtest.columns import Batch, Run, batch_of
from tuner.costs.analytic.calibration import Regime, taken_constants
from tuner.costs.analytic.constants import Constants
from tuner.costs.analytic.step import price_step

DEPTHS = (1, 2, 4, 16, 1000)
"""Most stages of a run in each batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pricer:
    """Runs in batches; `columns` are their places in the order given."""

    parts: tuple[tuple[npt.NDArray[np.intp], Batch], ...]
    num_runs: int

    def step_s(self, constants: Constants) -> npt.NDArray[np.float64]:
        """Return seconds of one step per run; constants hold one entry per run."""
        found_C = np.empty(self.num_runs)
        for columns, batch in self.parts:
            found_C[columns] = price_step(
                batch.shape,
                batch.strategy,
                batch.hardware,
                taken_constants(constants, columns),
                batch.stages,
            ).step_s
        return found_C


def pricer_of(runs: Sequence[Run]) -> Pricer:
    """Sort runs into batches."""
    depth_C = np.array([len(run.counts) for run in runs])
    batch_C = np.searchsorted(DEPTHS, depth_C)
    parts = []
    for index in np.unique(batch_C):
        columns = np.flatnonzero(batch_C == index)
        parts.append((columns, batch_of([runs[int(column)] for column in columns])))
    return Pricer(parts=tuple(parts), num_runs=len(runs))


def regime_of(run: Run) -> Regime:
    """Return what a run's kernels and host depend on."""
    return Regime(
        device=run.device.name,
        generation=run.device.generation,
        precision=run.precision,
        software=run.software,
        family=run.family,
        release=run.release,
    )
