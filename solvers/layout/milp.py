"""Integer program over stage patterns, solved by CBC through PuLP.

    minimise    (m - 1/v) * peak + (1/v) * sum_{s,n} time[s, n] x[s, n]
    such that   sum_n x[s, n] = 1                                       each stage is one pattern
                sum_{s,n} layers[s, n, r] x[s, n] = length[r]           every layer is placed
                peak >= sum_{s on d, n} time[s, n] x[s, n]              each device d
                sum_{n with run r+1} x[s, n] <= done[s, r]              r+1 waits until r is done
                sum_{n with run r} x[s, n] <= 1 - done[s - 1, r]        and then r is over
                done[s - 1, r] <= done[s, r]
                sum_{n with option o} x[s, n] <= global[o], sum_o global[o] = 1     if uniform
                sum_{s on d, n} held[s, n] x[s, n] + transient[d] <= limit[d]       if v > 1
                transient[d] >= sum_n transient[s, n] x[s, n]           each stage s of d, if v > 1

x, done and global are binary. With one stage per device memory needs no row: patterns that do not
fit were never made. Choosing whole patterns instead of counts and options makes the relaxation the
convex hull of each stage, which is what lets CBC prove optimality in a fraction of a second.

Proves optimality and infeasibility up to CBC's tolerances; the bound is lowered by them. Memory is
exact all the same: where the tolerance on a row lets a device overstep its limit, that combination
of patterns is cut off and the program is re-solved. Exponential in the worst case; with several
stages per device the time limit usually ends it, and the even start (`start.py`) replaces a layout
that is no better.

Letters: R runs, O options, S stages, D devices, N patterns of one stage.
"""

import math
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pulp
from pulp.apis.coin_api import pulp_cbc_path

from solvers.cbc import CbcResult, run_cbc
from solvers.layout.patterns import (
    StagePatterns,
    layout_of_choice,
    least_objective_s,
    overfull_devices,
    patterns_of_stages,
)
from solvers.layout.problem import Layout, LayoutProblem
from solvers.layout.start import better_of, even_start
from solvers.result import Claim, Status

SCALED_OBJECTIVE = 1e4
"""Least objective in the model's units: CBC's absolute tolerance of 1e-5 is then 1e-9 of it."""

RELATIVE_TOLERANCE = 1e-7
"""Taken off every bound."""

SHORTEST_RUN_S = 0.05
"""What CBC gets even when writing the model has used up the time."""

Columns = list[list[pulp.LpVariable]]


def solve(problem: LayoutProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Layout]:
    """Return CBC's best layout with a proven lower bound on the step time."""
    deadline_s = time.perf_counter() + time_limit_s
    claim = _search(problem, deadline_s, threads)
    return better_of(problem, claim, even_start(problem))


def _search(problem: LayoutProblem, deadline_s: float, threads: int) -> Claim[Layout]:
    patterns = patterns_of_stages(problem)
    if not all(len(stage) for stage in patterns):
        return Claim(status=Status.INFEASIBLE, solution=None, bound=math.inf)
    bound = least_objective_s(problem)
    scale = SCALED_OBJECTIVE / bound if bound > 0.0 else 1.0
    model, x_SN = _model(problem, patterns, scale)
    while True:
        result = run_cbc(
            executable=pulp_cbc_path,
            write_model=model.writeMPS,
            time_limit_s=max(SHORTEST_RUN_S, deadline_s - time.perf_counter()),
            threads=threads,
        )
        if result.status is Status.INFEASIBLE:
            return Claim(status=Status.INFEASIBLE, solution=None, bound=math.inf)
        bound = max(bound, result.bound / scale * (1.0 - RELATIVE_TOLERANCE))
        if not result.status.has_solution:
            return Claim(status=Status.UNKNOWN, solution=None, bound=bound)
        chosen = _chosen_patterns(patterns, result)
        overfull = overfull_devices(problem, patterns, chosen)
        if not overfull:
            layout = layout_of_choice(patterns, chosen)
            return Claim(status=result.status, solution=layout, bound=bound)
        if time.perf_counter() >= deadline_s:
            return Claim(status=Status.UNKNOWN, solution=None, bound=bound)
        for device in overfull:
            stages = problem.stages_of_device(device)
            model += pulp.lpSum(x_SN[s][chosen[s]] for s in stages) <= len(stages) - 1


def _model(
    problem: LayoutProblem,
    patterns: tuple[StagePatterns, ...],
    scale: float,
) -> tuple[pulp.LpProblem, Columns]:
    model = pulp.LpProblem("layout", pulp.LpMinimize)
    x_SN = [
        [model.add_variable(_name(stage, n), cat=pulp.LpBinary) for n in range(len(of_stage))]
        for stage, of_stage in enumerate(patterns)
    ]
    time_SN = [(of_stage.time_s_N * scale).tolist() for of_stage in patterns]
    share = 1.0 / problem.stages_per_device
    peak = model.add_variable("peak", lowBound=0.0)
    total = pulp.lpSum(_dot(time_N, x_N) for time_N, x_N in zip(time_SN, x_SN, strict=True))
    for x_N in x_SN:
        model += pulp.lpSum(x_N) == 1
    for run, length in enumerate(problem.run_lengths):
        counts = [
            _dot(of_stage.layers_NR[:, run].tolist(), x_N)
            for of_stage, x_N in zip(patterns, x_SN, strict=True)
        ]
        model += pulp.lpSum(counts) == length
    for device in range(problem.num_devices):
        stages = problem.stages_of_device(device)
        model += pulp.lpSum(_dot(time_SN[s], x_SN[s]) for s in stages) <= peak
    rows = _RowContext(model=model, problem=problem, patterns=patterns, x_SN=x_SN)
    _keep_runs_in_order(rows)
    if problem.uniform_option:
        _share_one_option(rows)
    if problem.stages_per_device > 1:
        _limit_memory(rows)
    model += (problem.num_microbatches - share) * peak + share * total
    return model, x_SN


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RowContext:
    """What rows are written about."""

    model: pulp.LpProblem
    problem: LayoutProblem
    patterns: tuple[StagePatterns, ...]
    x_SN: Columns


def _keep_runs_in_order(rows: _RowContext) -> None:
    model, problem = rows.model, rows.problem
    for run in range(problem.num_runs - 1):
        done_S = [
            model.add_variable(f"d{run}_{stage}", cat=pulp.LpBinary)
            for stage in range(problem.num_stages)
        ]
        for stage, (of_stage, x_N) in enumerate(zip(rows.patterns, rows.x_SN, strict=True)):
            holds_NR = of_stage.layers_NR > 0
            model += pulp.lpSum(_those(holds_NR[:, run + 1], x_N)) <= done_S[stage]
            if stage:
                model += pulp.lpSum(_those(holds_NR[:, run], x_N)) + done_S[stage - 1] <= 1
                model += done_S[stage - 1] <= done_S[stage]


def _share_one_option(rows: _RowContext) -> None:
    model = rows.model
    global_O = [
        model.add_variable(f"g{option}", cat=pulp.LpBinary)
        for option in range(rows.problem.num_options)
    ]
    model += pulp.lpSum(global_O) == 1
    for of_stage, x_N in zip(rows.patterns, rows.x_SN, strict=True):
        for option, is_global in enumerate(global_O):
            model += pulp.lpSum(_those(of_stage.option_N == option, x_N)) <= is_global


def _limit_memory(rows: _RowContext) -> None:
    model, problem, patterns, x_SN = rows.model, rows.problem, rows.patterns, rows.x_SN
    for device, limit in enumerate(problem.memory_limit_bytes_D.tolist()):
        stages = problem.stages_of_device(device)
        share = 1.0 / max(limit, 1)
        transient = model.add_variable(f"t{device}", lowBound=0.0)
        resident = [_dot((patterns[s].resident_bytes_N * share).tolist(), x_SN[s]) for s in stages]
        model += pulp.lpSum(resident) + transient <= limit * share
        for s in stages:
            of_stage = (patterns[s].transient_bytes_N * share).tolist()
            model += _dot(of_stage, x_SN[s]) <= transient


def _name(stage: int, n: int) -> str:
    return f"x{stage}_{n}"


def _dot(weights: list[float], variables: list[pulp.LpVariable]) -> pulp.LpAffineExpression:
    return pulp.LpAffineExpression(zip(variables, weights, strict=True))


def _those(
    chosen_N: npt.NDArray[np.bool_], variables: list[pulp.LpVariable]
) -> list[pulp.LpVariable]:
    return [variables[n] for n in np.flatnonzero(chosen_N)]


def _chosen_patterns(patterns: tuple[StagePatterns, ...], result: CbcResult) -> list[int]:
    """The pattern of each stage whose column is 1 up to CBC's tolerance."""
    values = result.value_of_column
    return [
        max(range(len(of_stage)), key=lambda n: values.get(_name(stage, n), 0.0))
        for stage, of_stage in enumerate(patterns)
    ]
