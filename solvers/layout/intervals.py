"""Cost of every interval of layers as one stage, and shortest paths over cut points.

An interval [a, b) holds layers a .. b-1 in model order. With one stage per device a stage's time
and memory depend on nothing but its interval and its option, so both are tables; a layout is then
a path 0 = c_0 <= c_1 <= ... <= c_S = L through the cut points, found stage by stage in O(S L^2).

Letters: R runs, O options, S stages, A and B cut points 0..L. Not covered: limits shared by stages.
"""

import itertools
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from solvers.layout.problem import Bytes, Layout, LayoutProblem, Seconds

Indices = npt.NDArray[np.int64]
Costs = TypeVar("Costs", Seconds, Bytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntervalTables:
    """Times and bytes of all intervals, before what belongs to one stage alone."""

    layers_ABR: Indices
    time_s_ABO: Seconds
    static_bytes_AB: Bytes
    saved_bytes_ABO: Bytes
    transient_bytes_ABO: Bytes


def interval_tables(problem: LayoutProblem) -> IntervalTables:
    """Tabulate the intervals of the model; entries with a > b are zero and never used."""
    run_of_layer = np.repeat(np.arange(problem.num_runs), problem.run_lengths)
    before_BR = np.zeros((problem.num_layers + 1, problem.num_runs), dtype=np.int64)
    before_BR[1:] = np.cumsum(run_of_layer[:, None] == np.arange(problem.num_runs), axis=0)
    layers_ABR = np.maximum(before_BR[None] - before_BR[:, None], 0)
    transient_ABO = np.zeros((*layers_ABR.shape[:2], problem.num_options), dtype=np.int64)
    for run in range(problem.num_runs):
        of_run = (layers_ABR[:, :, run] > 0)[..., None] * problem.transient_bytes_RO[run]
        np.maximum(transient_ABO, of_run, out=transient_ABO)
    return IntervalTables(
        layers_ABR=layers_ABR,
        time_s_ABO=layers_ABR @ problem.time_s_RO,
        static_bytes_AB=layers_ABR @ problem.static_bytes_R,
        saved_bytes_ABO=layers_ABR @ problem.saved_bytes_RO,
        transient_bytes_ABO=transient_ABO,
    )


def memory_bytes_ABO(problem: LayoutProblem, tables: IntervalTables, *, stage: int) -> Bytes:
    """Peak bytes of every interval under every option if `stage` had a device to itself."""
    in_flight = problem.in_flight_S[stage]
    stage_bytes = problem.fixed_bytes_S[stage] + in_flight * problem.fixed_saved_bytes_S[stage]
    per_option = in_flight * tables.saved_bytes_ABO + tables.transient_bytes_ABO
    total: Bytes = per_option + (tables.static_bytes_AB + stage_bytes)[..., None]
    return total


def allowed_AB(problem: LayoutProblem, *, stage: int) -> npt.NDArray[np.bool_]:
    """Return the intervals that the stage may hold, memory aside."""
    cuts = np.arange(problem.num_layers + 1)
    length_AB = cuts - cuts[:, None]
    if problem.fixed_layout is not None:
        return np.asarray(length_AB == problem.fixed_layout[stage])
    return np.asarray(length_AB >= problem.min_layers_per_stage)


def cheapest_path(cost_SAB: Seconds) -> tuple[float, Indices]:
    """Smallest sum of costs over the stages with its S + 1 cut points; `inf` when there is none."""
    best_B = np.full(cost_SAB.shape[2], np.inf)
    best_B[0] = 0.0
    start_SB = np.empty((len(cost_SAB), len(best_B)), dtype=np.int64)
    for stage, cost_AB in enumerate(cost_SAB):
        total_AB = best_B[:, None] + cost_AB
        start_SB[stage] = total_AB.argmin(axis=0)
        best_B = total_AB.min(axis=0)
    return float(best_B[-1]), _trace_back(start_SB)


def bottleneck_path(cost_SAB: Costs, *, never: float) -> tuple[float, Indices]:
    """Smallest largest cost over the stages with its S + 1 cut points; `never` marks no path."""
    best_B = np.full(cost_SAB.shape[2], never, dtype=cost_SAB.dtype)
    best_B[0] = cost_SAB.min()  # Nothing is placed yet: below whatever comes.
    start_SB = np.empty((len(cost_SAB), len(best_B)), dtype=np.int64)
    for stage, cost_AB in enumerate(cost_SAB):
        peak_AB = np.maximum(best_B[:, None], cost_AB)
        start_SB[stage] = peak_AB.argmin(axis=0)
        best_B = peak_AB.min(axis=0)
    return best_B[-1].item(), _trace_back(start_SB)


def layout_of_cuts(tables: IntervalTables, option_SAB: Indices, cuts: Indices) -> Layout:
    """The layout whose stage s holds the layers between cuts s and s + 1."""
    steps = list(enumerate(itertools.pairwise(cuts.tolist())))
    return Layout(
        layers_SR=tuple(tuple(tables.layers_ABR[a, b].tolist()) for _, (a, b) in steps),
        option_S=tuple(int(option_SAB[stage, a, b]) for stage, (a, b) in steps),
    )


def _trace_back(start_SB: Indices) -> Indices:
    cuts = [start_SB.shape[1] - 1]
    for start_B in start_SB[::-1]:
        cuts.append(int(start_B[cuts[-1]]))
    return np.array(cuts[::-1])
