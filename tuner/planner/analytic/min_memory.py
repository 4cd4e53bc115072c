"""Whether rows can fit in some way: at the leanest of those that are left to choose from.

The highest stage of ZeRO does not always hold the least, since it gathers weights; so rows fit when
they do under one of the stages that are left. What else is left open is chosen as lean as it gets.

Letters: C rows, A axes, Z stages of ZeRO.
"""

import numpy as np

from tuner.planner.analytic.candidates import Candidates
from tuner.planner.analytic.degrees import Table
from tuner.planner.analytic.memory_feasibility import fits_somehow
from tuner.planner.analytic.option_table import OFFLOAD_AXES, WayTable
from tuner.planner.analytic.options import Ways
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.rules import Ints, Mask


def row_fits(question: Question, ways: Ways, table: WayTable, rows: Table) -> Mask:
    """Rows of which some way may fit."""
    count = len(rows["tensor"])
    lean_A = _offloaded(table)
    lean_A[table.axes.index("recompute")] = len(ways.choices["recompute"]) - 1
    lean_CA = np.tile(lean_A, (count, 1))
    return _fits(question, ways, table, rows, lean_CA, _any_stage(table, count), is_idle=True)


def frame_fits_plainly(
    question: Question, ways: Ways, table: WayTable, rows: Table, frame: Ints
) -> Mask:
    """Rows that may fit in a frame with nothing computed again and in one chunk."""
    lean_CA = table.frame_FA[frame] + _offloaded(table)
    return _fits(question, ways, table, rows, lean_CA, _any_stage(table, len(frame)))


def keeping_fits(question: Question, ways: Ways, keepings: Candidates) -> Mask:
    """Keepings of which some way may fit: with every layer computed again."""
    whole = np.full(len(keepings), len(ways.choices["recompute"]) - 1)
    lean = Candidates(rows=keepings.rows, ways={**keepings.ways, "recompute": whole})
    return fits_somehow(question, ways, lean, is_idle=True)


def again_fits(question: Question, ways: Ways, table: WayTable, rows: Table, again: Ints) -> Mask:
    """Rows of which some way of an again may fit."""
    lean_CA, stages_CZ = table.lean_HA[again], table.zero_HZ[again]
    return _fits(question, ways, table, rows, lean_CA, stages_CZ)


def _offloaded(table: WayTable) -> Ints:
    found: Ints = table.lean_HA.max(axis=0, initial=0) * np.isin(table.axes, OFFLOAD_AXES)
    return found


def _any_stage(table: WayTable, count: int) -> Mask:
    return np.tile(table.zero_HZ.any(axis=0), (count, 1))


def _fits(
    question: Question,
    ways: Ways,
    table: WayTable,
    rows: Table,
    lean_CA: Ints,
    stages_CZ: Mask,
    *,
    is_idle: bool = False,
) -> Mask:
    found = np.zeros(len(lean_CA), dtype=np.bool_)
    at = table.axes.index("zero_stage")
    for stage in reversed(range(stages_CZ.shape[1])):
        left = np.flatnonzero(~found & stages_CZ[:, stage])
        if not len(left):
            continue
        ways_CA = lean_CA[left]
        ways_CA[:, at] = stage
        some = Candidates(
            rows={name: column[left] for name, column in rows.items()},
            ways=table.columns(ways_CA),
        )
        found[left] = fits_somehow(question, ways, some, is_idle=is_idle)
    return found
