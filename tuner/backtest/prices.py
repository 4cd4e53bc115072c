"""Price all runs at once.

A layer is priced once for all runs that agree in everything it depends on (tables of one framework
repeat a few layers in hundreds of layouts). Then runs are batched by depth, to limit padding, and
assembled from those costs.

Letters: C runs, U runs with distinct layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats
from tuner.backtest.columns import PublishedRun, RunColumns, stack_runs
from tuner.config.knobs import searched
from tuner.config.shapes import taken
from tuner.costs.train.calibration import Regime, kind_of_model
from tuner.costs.train.memory import price_memory
from tuner.costs.train.memory_constants import MemoryConstants, memory_constants
from tuner.costs.train.step import assemble
from tuner.costs.train.units import unit_costs
from tuner.prices.train.constants import Constants

DEPTHS = (1, 2, 4, 16, 100_000)
"""Most stages of a run in each batch."""

BEYOND_LAYERS: Final = (
    "dense_layers",
    "moe_layers",
    "mtp_layers",
    "num_microbatches",
    "pipeline",
    "virtual_pipeline",
    "data",
    "shard_ranks",
    "bucket_parameters",
    "embedding_loss_as_layers",
    *(column for knob in searched() if not knob.is_of_dispatch for column in knob.columns),
)
"""Fields that no layer's cost depends on (tuner/costs/train/units.py)."""

Places = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Peaks:
    """Peak bytes of each run, of the device with the highest peak."""

    allocated_C: Floats
    """Bytes that tensors take."""
    reserved_C: Floats
    """Bytes that the allocator reserves."""
    total_C: Floats
    """Bytes to be compared with the device's memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pricer:
    """Batches of runs, each with the indices of its runs in the given order."""

    parts: tuple[tuple[Places, RunColumns], ...]
    layers: RunColumns
    """Runs with distinct layers."""
    first_U: Places
    """Places of `layers` among all runs."""
    kind_C: Places
    """Index of each run in `layers`."""

    def step_s(self, constants: Constants) -> Floats:
        """Return seconds of one step per run.

        Constants hold one entry per run, the same for all runs of a regime.
        """
        layers = self.layers
        units = unit_costs(
            layers.shape, layers.strategy, layers.hardware, taken(constants, self.first_U)
        )
        found_C = np.empty(len(self.kind_C))
        for columns, batch in self.parts:
            found_C[columns] = assemble(
                batch.shape,
                units.taken(self.kind_C[columns]),
                batch.strategy,
                batch.hardware,
                taken(constants, columns),
                batch.stages,
            ).step_s
        return found_C

    def repeated(self, times: int) -> "Pricer":
        """Return a pricer of the runs, repeated."""
        kinds, runs = len(self.first_U), len(self.kind_C)
        return Pricer(
            parts=tuple(
                (_turns(columns, times, runs), batch.taken(np.tile(np.arange(len(columns)), times)))
                for columns, batch in self.parts
            ),
            layers=self.layers.taken(np.tile(np.arange(kinds), times)),
            first_U=_turns(self.first_U, times, runs),
            kind_C=_turns(self.kind_C, times, kinds),
        )

    def peaks(self, constants: MemoryConstants) -> Peaks:
        """Return peak bytes per run; constants hold one entry per run."""
        found_KC = np.empty((3, len(self.kind_C)))
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


def _turns(places: Places, times: int, size: int) -> Places:
    """Return indices repeated, each copy offset by another `size`."""
    return np.concatenate([places + turn * size for turn in range(times)])


def build_pricer(runs: Sequence[PublishedRun]) -> Pricer:
    """Sort runs into batches."""
    depth_C = np.array([len(run.counts) for run in runs])
    batch_C = np.searchsorted(DEPTHS, depth_C)
    parts = []
    for index in np.unique(batch_C):
        columns = np.flatnonzero(batch_C == index)
        parts.append((columns, stack_runs([runs[int(column)] for column in columns])))
    kinds: dict[tuple[object, ...], int] = {}
    kind_C = np.array([kinds.setdefault(_layer_facts(run), len(kinds)) for run in runs])
    first_U = np.unique(kind_C, return_index=True)[1]
    return Pricer(
        parts=tuple(parts),
        layers=stack_runs([runs[int(place)] for place in first_U]),
        first_U=first_U,
        kind_C=kind_C,
    )


def _layer_facts(run: PublishedRun) -> tuple[object, ...]:
    """Return everything that `unit_costs` and its constants depend on."""
    shape, strategy = (
        tuple(
            float(getattr(part, field.name))
            for field in fields(part)
            if field.name not in BEYOND_LAYERS
        )
        for part in (run.shape, run.strategy)
    )
    return shape, strategy, bool(run.shape.moe_layers), run_regime(run)


def run_memory_constants(runs: Sequence[PublishedRun]) -> MemoryConstants:
    """Return the memory constants of each run's software."""
    return memory_constants(
        [run.software for run in runs], families=[run.memory_family for run in runs]
    )


def run_regime(run: PublishedRun) -> Regime:
    """Return the calibration regime of a run."""
    return Regime(
        device=run.device.name,
        generation=run.device.generation,
        precision=run.precision,
        software=run.software,
        family=run.family,
        model_kind=kind_of_model(has_experts=bool(run.shape.experts)),
        release=run.release,
    )
