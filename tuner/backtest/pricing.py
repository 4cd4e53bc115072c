"""Prices all runs at once, sorted into batches by depth so that few stages are padding.

Letters: C runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.backtest.columns import Batch, Run, batch_of
from tuner.costs.analytic.calibration import Regime
from tuner.costs.analytic.constants import Constants
from tuner.costs.analytic.memory import price_memory
from tuner.costs.analytic.memory_constants import MemoryConstants, memory_constants
from tuner.costs.analytic.shapes import taken
from tuner.costs.analytic.step import price_step

DEPTHS = (1, 2, 4, 16, 100_000)
"""Most stages of a run in each batch."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Peaks:
    """Bytes on the fullest device of each run."""

    allocated_C: Floats
    """By tensors."""
    reserved_C: Floats
    """By the allocator."""
    total_C: Floats
    """To be compared with the device's memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pricer:
    """Runs in batches; the places of a batch's runs in the order given come with it."""

    parts: tuple[tuple[npt.NDArray[np.intp], Batch], ...]
    num_runs: int

    def step_s(self, constants: Constants) -> Floats:
        """Return seconds of one step per run; constants hold one entry per run."""
        found_C = np.empty(self.num_runs)
        for columns, batch in self.parts:
            found_C[columns] = price_step(
                batch.shape,
                batch.strategy,
                batch.hardware,
                taken(constants, columns),
                batch.stages,
            ).step_s
        return found_C

    def peaks(self, constants: MemoryConstants) -> Peaks:
        """Return bytes of the fullest device per run; constants hold one entry per run."""
        found_KC = np.empty((3, self.num_runs))
        for columns, batch in self.parts:
            price = price_memory(
                batch.shape,
                batch.strategy,
                batch.hardware,
                batch.stages,
                constants=taken(constants, columns),
            )
            for row, grid in enumerate((price.allocated_PC, price.reserved_PC, price.total_PC)):
                found_KC[row, columns] = grid.max(axis=0)
        return Peaks(allocated_C=found_KC[0], reserved_C=found_KC[1], total_C=found_KC[2])


def pricer_of(runs: Sequence[Run]) -> Pricer:
    """Sort runs into batches."""
    depth_C = np.array([len(run.counts) for run in runs])
    batch_C = np.searchsorted(DEPTHS, depth_C)
    parts = []
    for index in np.unique(batch_C):
        columns = np.flatnonzero(batch_C == index)
        parts.append((columns, batch_of([runs[int(column)] for column in columns])))
    return Pricer(parts=tuple(parts), num_runs=len(runs))


def memory_constants_of(runs: Sequence[Run]) -> MemoryConstants:
    """Return the constants of memory of each run's software."""
    return memory_constants(
        [run.software for run in runs], families=[run.memory_family for run in runs]
    )


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
