"""Bytes of many candidates in given layouts: unit bytes once, then counted per layout.

Candidates are cut into pieces of one pipeline size, number of virtual stages and layout, since
columns that share their stages share the counts of what is in flight.

Letters: C candidates, P devices of a pipeline, S stages.
"""

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt

from tuner.costs.analytic.memory import assemble_memory
from tuner.costs.analytic.memory_units import MemoryUnits, unit_bytes
from tuner.costs.analytic.shapes import Strategies, taken
from tuner.planner.analytic.candidates import MEMORY_AXES, MEMORY_DEGREES, Candidates
from tuner.planner.analytic.layouts import layers_of_stages, stages_of
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.rules import Ints

Floats = npt.NDArray[np.float64]

PIECE = 4096
"""Candidates that are put together at once; their grids fit a core's cache."""


def unit_memory(
    question: Question, strategies: Strategies, candidates: Candidates
) -> tuple[MemoryUnits, Ints]:
    """Bytes of one layer of each kind, the distinct ones, and which one each candidate has."""
    first, inverse = candidates.same((*MEMORY_DEGREES, *MEMORY_AXES))
    units = unit_bytes(
        question.shape,
        taken(strategies, first),
        question.hardware,
        constants=question.memory_constants,
    )
    return units, inverse


def taken_bytes(units: MemoryUnits, chosen: Ints) -> MemoryUnits:
    """Gather the units of some candidates."""

    def kept(array: Floats) -> Floats:
        return array if array.shape[-1] == 1 else array[..., chosen]

    return MemoryUnits(
        **{field.name: kept(getattr(units, field.name)) for field in fields(MemoryUnits)}
    )


def bytes_of_devices(
    question: Question, strategies: Strategies, candidates: Candidates, layers_PC: Ints
) -> Floats:
    """Bytes of every device, [P, C]; 0 beyond a candidate's pipeline."""
    units, unit_of_C = unit_memory(question, strategies, candidates)
    found_PC = np.zeros(layers_PC.shape)
    for at, pipeline, virtual in pieces_of_layouts(candidates, layers_PC):
        layers_SC = layers_of_stages(layers_PC[:pipeline, at[:1]], virtual=virtual)
        alike = replace(
            taken(strategies, at), pipeline=float(pipeline), virtual_pipeline=float(virtual)
        )
        memory = assemble_memory(
            taken_bytes(units, unit_of_C[at]), alike, stages_of(question.model, layers_SC)
        )
        found_PC[:pipeline, at] = memory.total_PC
    return found_PC


def pieces_of_layouts(candidates: Candidates, layers_PC: Ints) -> Iterator[tuple[Ints, int, int]]:
    """Cut candidates into pieces of one pipeline size, depth and layout."""
    rows = candidates.rows
    for at in pieces_alike(candidates, "pipeline", "virtual_pipeline"):
        pipeline, virtual = (int(rows[name][at[0]]) for name in ("pipeline", "virtual_pipeline"))
        for same in _alike(layers_PC[:pipeline, at]):
            yield at[same], pipeline, virtual


def pieces_alike(candidates: Candidates, *names: str) -> Iterator[Ints]:
    """Cut candidates into pieces that agree in the named columns."""
    _, group = candidates.same(names)
    for of_group in _of_groups(group):
        for start in range(0, len(of_group), PIECE):
            yield of_group[start : start + PIECE]


def _alike(layers_PC: Ints) -> Iterator[Ints]:
    if (layers_PC == layers_PC[:, :1]).all():
        yield np.arange(layers_PC.shape[1])
        return
    rows = np.ascontiguousarray(layers_PC.T.astype(np.int16))
    _, group = np.unique(rows.view(f"V{rows.shape[1] * rows.itemsize}"), return_inverse=True)
    yield from _of_groups(group.ravel())


def _of_groups(group: Ints) -> Iterator[Ints]:
    order = np.argsort(group, kind="stable")
    ends = np.flatnonzero(np.diff(group[order])) + 1
    yield from (one for one in np.split(order, ends) if len(one))
