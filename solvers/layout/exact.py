"""Shortest paths over cut points, walked down along the bottleneck; else an integer program.

One stage per device (v = 1). A stage's best option is settled locally: the fastest that fits. What
is left is to choose the cut points that minimise total + (m - 1) * peak. Under a ceiling on the
stage time the smallest total is a shortest path (`intervals.py`). The ceiling walks down the Pareto
front of (total, peak): each path has a peak, and the next ceiling lies below it and below what the
best layout so far leaves room for. The walk ends when not even the smallest possible peak, under
the totals still to come, can beat that layout. This is the chains-to-chains problem of Bokhari
(IEEE Trans. Computers 37(1), 1988) with a second criterion. O(S L^2) per path; at most as many
paths as distinct stage times, in practice a handful. A uniform option repeats the walk per option
with a common incumbent.

Several stages per device couple the intervals: solved where the layout is fixed (`fixed_cuts.py`),
otherwise by CP-SAT (`cp_sat.py`), which the time limit may end.

Proves optimality and infeasibility. Letters: O options, S stages, A and B cut points 0..L.
"""

import math
import time
from dataclasses import dataclass

import numpy as np

from solvers.layout.fixed_cuts import fastest_options, option_sets
from solvers.layout.intervals import (
    Indices,
    IntervalTables,
    allowed_AB,
    bottleneck_path,
    cheapest_path,
    interval_tables,
    layout_of_cuts,
    memory_bytes_ABO,
)
from solvers.layout.problem import Layout, LayoutProblem, Seconds
from solvers.result import Claim, Status


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stages:
    """Every interval on every stage under the best option that fits; `inf` where none does."""

    time_s_SAB: Seconds
    option_SAB: Indices
    repeats: int
    """Times that the slowest stage counts beyond once: m - 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Path:
    """Cut points with the stages they refer to."""

    objective: float
    total_s: float
    peak_s: float
    cuts: Indices
    stages: _Stages


def solve(problem: LayoutProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Layout]:
    """Return the proven optimum, or the best layout found in time with a lower bound."""
    deadline_s = time.perf_counter() + time_limit_s
    if problem.stages_per_device == 1:
        return _walk_every_option_set(problem, deadline_s)
    if problem.fixed_layout is not None:
        return fastest_options(problem)
    from solvers.layout import cp_sat  # OR-Tools is loaded only where it is needed.

    return cp_sat.solve(problem, time_limit_s=time_limit_s, threads=threads)


def _walk_every_option_set(problem: LayoutProblem, deadline_s: float) -> Claim[Layout]:
    tables = interval_tables(problem)
    best: _Path | None = None
    bound = math.inf
    for options in option_sets(problem):
        stages = _fastest_that_fit(problem, tables, options)
        best, walk_bound = _walk(stages, best, deadline_s)
        bound = min(bound, walk_bound)
    if best is None:
        return Claim(status=Status.INFEASIBLE, solution=None, bound=math.inf)
    status = Status.OPTIMAL if bound >= best.objective else Status.FEASIBLE
    layout = layout_of_cuts(tables, best.stages.option_SAB, best.cuts)
    return Claim(status=status, solution=layout, bound=min(bound, best.objective))


def _walk(stages: _Stages, best: _Path | None, deadline_s: float) -> tuple[_Path | None, float]:
    """Improve on `best` with these stages; also a lower bound on whatever they allow."""
    smallest_peak_s, _ = bottleneck_path(stages.time_s_SAB, never=math.inf)
    if math.isinf(smallest_peak_s):
        return best, math.inf
    best = _better(best, _cheapest_under(smallest_peak_s, stages))
    ceiling_s = math.inf
    while True:
        path = _cheapest_under(ceiling_s, stages)
        best = _better(best, path)
        bound = path.total_s + stages.repeats * smallest_peak_s
        if bound >= best.objective:
            return best, best.objective
        if time.perf_counter() >= deadline_s:
            return best, bound
        room_s = (best.objective - path.total_s) / stages.repeats
        ceiling_s = min(float(np.nextafter(path.peak_s, 0.0)), room_s)


def _better(best: _Path | None, path: _Path) -> _Path:
    return path if best is None or path.objective < best.objective else best


def _cheapest_under(ceiling_s: float, stages: _Stages) -> _Path:
    """The smallest total when no stage may take longer than the ceiling."""
    time_s_SAB = stages.time_s_SAB
    total_s, cuts = cheapest_path(np.where(time_s_SAB <= ceiling_s, time_s_SAB, math.inf))
    peak_s = float(time_s_SAB[np.arange(len(time_s_SAB)), cuts[:-1], cuts[1:]].max())
    return _Path(
        objective=total_s + stages.repeats * peak_s,
        total_s=total_s,
        peak_s=peak_s,
        cuts=cuts,
        stages=stages,
    )


def _fastest_that_fit(
    problem: LayoutProblem, tables: IntervalTables, options: list[int]
) -> _Stages:
    shape = (problem.num_stages, *tables.static_bytes_AB.shape)
    time_s_SAB, option_SAB = np.empty(shape), np.empty(shape, dtype=np.int64)
    for stage, device in enumerate(problem.device_of_stage):
        needed_ABO = memory_bytes_ABO(problem, tables, stage=stage)[:, :, options]
        fits_ABO = needed_ABO <= problem.memory_limit_bytes_D[device]
        fits_ABO &= allowed_AB(problem, stage=stage)[..., None]
        time_s_ABO = np.where(fits_ABO, tables.time_s_ABO[:, :, options], math.inf)
        time_s_SAB[stage] = time_s_ABO.min(axis=2) + problem.fixed_time_s_S[stage]
        option_SAB[stage] = np.asarray(options)[time_s_ABO.argmin(axis=2)]
    return _Stages(
        time_s_SAB=time_s_SAB, option_SAB=option_SAB, repeats=problem.num_microbatches - 1
    )
