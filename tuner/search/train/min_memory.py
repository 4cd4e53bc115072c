"""Whether rows fit with some option: checked at the option of least memory that is left.

The highest ZeRO stage does not always hold the least, since it gathers weights. Rows therefore fit
if they do under one of the stages that are left. Every other open knob takes its choice of least
memory.

Letters: C rows, A axes, Z stages of ZeRO.
"""

import numpy as np

from tuner.search.train.candidates import Candidates
from tuner.search.train.degrees import Table
from tuner.search.train.memory_feasibility import may_fit
from tuner.search.train.option_table import OFFLOAD_AXES, OptionTable
from tuner.search.train.options import OptionSpace
from tuner.search.train.problem import TrainProblem
from tuner.search.train.rules import Ints, Mask


def row_fits(problem: TrainProblem, options: OptionSpace, table: OptionTable, rows: Table) -> Mask:
    """Rows of which some option may fit."""
    count = len(rows["tensor"])
    min_memory_A = _offloaded(table)
    min_memory_A[table.axes.index("recompute")] = len(options.choices["recompute"]) - 1
    min_memory_CA = np.tile(min_memory_A, (count, 1))
    return _fits(
        problem, options, table, rows, min_memory_CA, _any_stage(table, count), is_idle=True
    )


def fits_without_recompute(
    problem: TrainProblem, options: OptionSpace, table: OptionTable, rows: Table, dispatch: Ints
) -> Mask:
    """Rows that may fit at a dispatch setting without recomputation, in one chunk."""
    min_memory_CA = table.dispatch_DA[dispatch] + _offloaded(table)
    return _fits(problem, options, table, rows, min_memory_CA, _any_stage(table, len(dispatch)))


def no_recompute_level_fits(
    problem: TrainProblem, options: OptionSpace, candidates: Candidates
) -> Mask:
    """Groups of which some option may fit: checked with full recomputation."""
    whole = np.full(len(candidates), len(options.choices["recompute"]) - 1)
    whole_recompute = Candidates(
        rows=candidates.rows, options={**candidates.options, "recompute": whole}
    )
    return may_fit(problem, options, whole_recompute, is_idle=True)


def recompute_level_fits(
    problem: TrainProblem, options: OptionSpace, table: OptionTable, rows: Table, recompute: Ints
) -> Mask:
    """Rows of which some option of a recompute group may fit."""
    min_memory_CA, stages_CZ = table.min_memory_RA[recompute], table.zero_RZ[recompute]
    return _fits(problem, options, table, rows, min_memory_CA, stages_CZ)


def _offloaded(table: OptionTable) -> Ints:
    offloaded_A: Ints = table.min_memory_RA.max(axis=0, initial=0) * np.isin(
        table.axes, OFFLOAD_AXES
    )
    return offloaded_A


def _any_stage(table: OptionTable, count: int) -> Mask:
    return np.tile(table.zero_RZ.any(axis=0), (count, 1))


def _fits(
    problem: TrainProblem,
    options: OptionSpace,
    table: OptionTable,
    rows: Table,
    min_memory_CA: Ints,
    stages_CZ: Mask,
    *,
    is_idle: bool = False,
) -> Mask:
    fits_C = np.zeros(len(min_memory_CA), dtype=np.bool_)
    at = table.axes.index("zero_stage")
    for stage in reversed(range(stages_CZ.shape[1])):
        left = np.flatnonzero(~fits_C & stages_CZ[:, stage])
        if not len(left):
            continue
        options_CA = min_memory_CA[left]
        options_CA[:, at] = stage
        some = Candidates(
            rows={name: column[left] for name, column in rows.items()},
            options=table.columns(options_CA),
        )
        fits_C[left] = may_fit(problem, options, some, is_idle=is_idle)
    return fits_C
