"""Memory of many candidates in given layouts: unit bytes once, then counted per layout.

Candidates are cut into pieces of one pipeline size, number of virtual stages and layout, since
candidates with the same stages share the counts of micro-batches in flight.

Letters: C candidates, P devices of a pipeline, S stages.
"""

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Strategies
from tuner.costs.train.memory import assemble_memory
from tuner.costs.train.memory_units import MemoryUnits, unit_bytes
from tuner.costs.train.shapes import taken
from tuner.search.train.candidates import MEMORY_AXES, MEMORY_DEGREES, Candidates
from tuner.search.train.layouts import layers_of_stages, to_stages
from tuner.search.train.problem import TrainProblem
from tuner.search.train.rules import Ints

Floats = npt.NDArray[np.float64]

PIECE = 4096
"""Candidates that are assembled at once; their arrays fit a core's cache."""


def unit_memory(
    problem: TrainProblem, strategies: Strategies, candidates: Candidates
) -> tuple[MemoryUnits, Ints]:
    """Bytes of one layer of each kind for the distinct candidates, and the inverse index."""
    first, inverse = candidates.same((*MEMORY_DEGREES, *MEMORY_AXES))
    units = unit_bytes(
        problem.shape,
        taken(strategies, first),
        problem.hardware,
        constants=problem.memory_constants,
    )
    return units, inverse


def take_units(units: MemoryUnits, chosen: Ints) -> MemoryUnits:
    """Gather the unit bytes of some candidates."""

    def kept(array: Floats) -> Floats:
        return array if array.shape[-1] == 1 else array[..., chosen]

    return MemoryUnits(
        **{field.name: kept(getattr(units, field.name)) for field in fields(MemoryUnits)}
    )


def bytes_of_devices(
    problem: TrainProblem, strategies: Strategies, candidates: Candidates, layers_PC: Ints
) -> Floats:
    """Bytes of every device, [P, C]; 0 beyond a candidate's pipeline."""
    units, unit_of_C = unit_memory(problem, strategies, candidates)
    bytes_PC = np.zeros(layers_PC.shape)
    for at, pipeline, virtual in pieces_of_layouts(candidates, layers_PC):
        layers_SC = layers_of_stages(layers_PC[:pipeline, at[:1]], virtual=virtual)
        uniform = replace(
            taken(strategies, at), pipeline=float(pipeline), virtual_pipeline=float(virtual)
        )
        memory = assemble_memory(
            take_units(units, unit_of_C[at]), uniform, to_stages(problem.model, layers_SC)
        )
        bytes_PC[:pipeline, at] = memory.total_PC
    return bytes_PC


def pieces_of_layouts(candidates: Candidates, layers_PC: Ints) -> Iterator[tuple[Ints, int, int]]:
    """Cut candidates into pieces of one pipeline size, depth and layout."""
    rows = candidates.rows
    for at in uniform_pieces(candidates, "pipeline", "virtual_pipeline"):
        pipeline, virtual = (int(rows[name][at[0]]) for name in ("pipeline", "virtual_pipeline"))
        for same in _uniform_layouts(layers_PC[:pipeline, at]):
            yield at[same], pipeline, virtual


def uniform_pieces(candidates: Candidates, *names: str) -> Iterator[Ints]:
    """Cut candidates into pieces that agree in the named columns."""
    _, group = candidates.same(names)
    for of_group in _of_groups(group):
        for start in range(0, len(of_group), PIECE):
            yield of_group[start : start + PIECE]


def _uniform_layouts(layers_PC: Ints) -> Iterator[Ints]:
    if (layers_PC == layers_PC[:, :1]).all():
        yield np.arange(layers_PC.shape[1])
        return
    rows = np.ascontiguousarray(layers_PC.T.astype(np.int16))
    _, group = np.unique(rows.view(f"V{rows.shape[1] * rows.itemsize}"), return_inverse=True)
    yield from _of_groups(group.ravel())


def _of_groups(group: Ints) -> Iterator[Ints]:
    order = np.argsort(group, kind="stable")
    boundaries = np.flatnonzero(np.diff(group[order])) + 1
    yield from (one for one in np.split(order, boundaries) if len(one))
