"""Integer program over stage patterns, where devices run several stages, solved by CP-SAT.

    minimise    (m - 1/v) * peak + (1/v) * sum_{s,n} time[s, n] x[s, n]
    such that   sum_n x[s, n] = 1                                       each stage is one pattern
                sum_{s,n} layers[s, n, r] x[s, n] = length[r]           every layer is placed
                peak >= sum_{s on d, n} time[s, n] x[s, n]              each device d
                x[s, n] => done[s, r]                  n holds run r+1, which waits until r is done
                x[s, n] => not done[s - 1, r]          n holds run r
                done[s - 1, r] => done[s, r]
                x[s, n] => global[o], exactly one global[o]         n is under option o, if uniform
                sum_{s on d, n} held[s, n] x[s, n] + transient[d] <= limit[d]
                transient[d] >= sum_n transient[s, n] x[s, n]           each stage s of d

x, done and global are booleans. Choosing whole patterns instead of counts and options makes the
relaxation the convex hull of each stage. Memory is exact, because bytes are integers.

Times become integer multiples of a unit, rounded *down*, so that the solver's bound, times the
unit, is a valid lower bound on the true step time. The unit is chosen so that all rounding together
moves the objective by less than 1e-7 of its least possible value; only where that would overflow 64
bits is it coarser, and the claim's bound says so.

Proves optimality (within that rounding) and infeasibility (exactly). The search starts from even
stages under their best options, which replace a layout that is no better. One thread and a fixed
seed give the same result every time, unless the time limit ends the search. An interrupt stops the
search and is re-raised.

Letters: R runs, O options, S stages, D devices, N patterns of one stage.
"""

import dataclasses
import itertools
import math

import numpy as np
import numpy.typing as npt
from ortools.sat.python import cp_model

from solvers.arrays import LARGEST_BYTES
from solvers.cp_sat import run_cp_sat
from solvers.layout import check
from solvers.layout.fixed_cuts import even_layout, fastest_options
from solvers.layout.patterns import (
    StagePatterns,
    layout_of_choice,
    least_objective_s,
    patterns_of_stages,
)
from solvers.layout.problem import Layout, LayoutProblem
from solvers.result import Claim, Status

ROUNDING_TOLERANCE = 1e-7
LARGEST_SUM = 2**60

Columns = list[list[cp_model.IntVar]]


def solve(problem: LayoutProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Layout]:
    """Return the best layout with a proven lower bound on the step time; the cuts must be free."""
    patterns = patterns_of_stages(problem)
    if not all(len(stage) for stage in patterns):
        return Claim(status=Status.INFEASIBLE, solution=None, bound=math.inf)
    model, x_SN = _model_of_layouts(problem, patterns)
    _limit_memory(model, problem, patterns, x_SN, extra=0)
    unit_s = _unit_s(problem, patterns)
    _minimise_time(model, problem, patterns, x_SN, unit_s)
    start = fastest_options(even_layout(problem)).solution
    if start is not None:
        _hint(model, patterns, x_SN, start)
    claim = _run(model, patterns, x_SN, time_limit_s=time_limit_s, threads=threads)
    bound = max(claim.bound * unit_s / problem.stages_per_device, least_objective_s(problem))
    if start is None or claim.status in (Status.OPTIMAL, Status.INFEASIBLE):
        return dataclasses.replace(claim, bound=bound)
    layouts = (start,) if claim.solution is None else (claim.solution, start)
    best = min(layouts, key=lambda layout: check.objective(problem, layout))
    return Claim(status=Status.FEASIBLE, solution=best, bound=bound)


def least_extra_bytes(
    problem: LayoutProblem, *, most_extra_bytes: int, time_limit_s: float
) -> Claim[Layout]:
    """Return the layout whose largest excess over a device's memory limit is least.

    The claim's bound is in bytes. A layout must exist within `most_extra_bytes`. No time counts.
    """
    timeless = dataclasses.replace(
        problem,
        time_s_RO=np.zeros_like(problem.time_s_RO),
        fixed_time_s_S=np.zeros_like(problem.fixed_time_s_S),
        memory_limit_bytes_D=problem.memory_limit_bytes_D + most_extra_bytes,
    )
    patterns = patterns_of_stages(timeless)
    model, x_SN = _model_of_layouts(problem, patterns)
    extra = model.new_int_var(0, most_extra_bytes, "extra")
    _limit_memory(model, problem, patterns, x_SN, extra=extra)
    model.minimize(extra)
    return _run(model, patterns, x_SN, time_limit_s=time_limit_s, threads=1)


def _model_of_layouts(
    problem: LayoutProblem, patterns: tuple[StagePatterns, ...]
) -> tuple[cp_model.CpModel, Columns]:
    """Every layer placed, runs in order, one option where uniform; memory limits are not in it."""
    model = cp_model.CpModel()
    x_SN = [
        [model.new_bool_var(f"x{stage}_{n}") for n in range(len(of_stage))]
        for stage, of_stage in enumerate(patterns)
    ]
    for x_N in x_SN:
        model.add_exactly_one(x_N)
    for run, length in enumerate(problem.run_lengths):
        counts = [
            _dot(of_stage.layers_NR[:, run], x_N)
            for of_stage, x_N in zip(patterns, x_SN, strict=True)
        ]
        model.add(cp_model.LinearExpr.sum(counts) == length)
    _keep_runs_in_order(model, problem, patterns, x_SN)
    if problem.uniform_option:
        _share_one_option(model, problem, patterns, x_SN)
    return model, x_SN


def _keep_runs_in_order(
    model: cp_model.CpModel,
    problem: LayoutProblem,
    patterns: tuple[StagePatterns, ...],
    x_SN: Columns,
) -> None:
    for run in range(problem.num_runs - 1):
        done_S = [model.new_bool_var(f"d{run}_{s}") for s in range(problem.num_stages)]
        for before, after in itertools.pairwise(done_S):
            model.add_implication(before, after)
        for stage, (of_stage, x_N) in enumerate(zip(patterns, x_SN, strict=True)):
            holds_NR = of_stage.layers_NR > 0
            for n in np.flatnonzero(holds_NR[:, run + 1]):
                model.add_implication(x_N[n], done_S[stage])
            for n in np.flatnonzero(holds_NR[:, run] & (stage > 0)):
                model.add_implication(x_N[n], ~done_S[stage - 1])


def _share_one_option(
    model: cp_model.CpModel,
    problem: LayoutProblem,
    patterns: tuple[StagePatterns, ...],
    x_SN: Columns,
) -> None:
    global_O = [model.new_bool_var(f"g{option}") for option in range(problem.num_options)]
    model.add_exactly_one(global_O)
    for of_stage, x_N in zip(patterns, x_SN, strict=True):
        for x, option in zip(x_N, of_stage.option_N, strict=True):
            model.add_implication(x, global_O[option])


def _limit_memory(
    model: cp_model.CpModel,
    problem: LayoutProblem,
    patterns: tuple[StagePatterns, ...],
    x_SN: Columns,
    *,
    extra: cp_model.LinearExprT,
) -> None:
    for device, limit in enumerate(problem.memory_limit_bytes_D.tolist()):
        stages = problem.stages_of_device(device)
        transient = model.new_int_var(0, LARGEST_BYTES, f"t{device}")
        resident = cp_model.LinearExpr.sum(
            [_dot(patterns[s].resident_bytes_N, x_SN[s]) for s in stages]
        )
        model.add(resident + transient <= limit + extra)
        for s in stages:
            model.add(_dot(patterns[s].transient_bytes_N, x_SN[s]) <= transient)


def _minimise_time(
    model: cp_model.CpModel,
    problem: LayoutProblem,
    patterns: tuple[StagePatterns, ...],
    x_SN: Columns,
    unit_s: float,
) -> None:
    """Minimise v / unit times the objective: (m v - 1) peak + the sum over the stages."""
    time_S = [
        _dot(np.floor(of_stage.time_s_N / unit_s).astype(np.int64), x_N)
        for of_stage, x_N in zip(patterns, x_SN, strict=True)
    ]
    weight = problem.num_microbatches * problem.stages_per_device - 1
    peak = model.new_int_var(0, LARGEST_SUM // max(weight, 1), "peak")
    for device in range(problem.num_devices):
        stages = problem.stages_of_device(device)
        model.add(cp_model.LinearExpr.sum([time_S[s] for s in stages]) <= peak)
    model.minimize(weight * peak + cp_model.LinearExpr.sum(time_S))


def _hint(
    model: cp_model.CpModel,
    patterns: tuple[StagePatterns, ...],
    x_SN: Columns,
    start: Layout,
) -> None:
    """Hint the start to the search; a stage whose pattern was dominated gets no hint."""
    for stage, (of_stage, x_N) in enumerate(zip(patterns, x_SN, strict=True)):
        same_N = of_stage.option_N == start.option_S[stage]
        same_N &= (of_stage.layers_NR == start.layers_SR[stage]).all(axis=1)
        if same_N.any():
            for x, same in zip(x_N, same_N.tolist(), strict=True):
                model.add_hint(x, same)


def _unit_s(problem: LayoutProblem, patterns: tuple[StagePatterns, ...]) -> float:
    """The finest resolution that the tolerance needs and 64-bit sums allow, in seconds."""
    per_device = problem.stages_per_device
    weight = problem.num_microbatches * per_device
    roundings = (weight * per_device + problem.num_stages) / per_device
    fine_s = ROUNDING_TOLERANCE * least_objective_s(problem) / roundings
    largest_s = weight * sum(float(of_stage.time_s_N.sum()) for of_stage in patterns)
    return max(fine_s, largest_s / LARGEST_SUM) or 1.0


def _run(
    model: cp_model.CpModel,
    patterns: tuple[StagePatterns, ...],
    x_SN: Columns,
    *,
    time_limit_s: float,
    threads: int,
) -> Claim[Layout]:
    """Solve; the claim's bound is in the model's own units.

    Raises:
        BackendFailedError: CP-SAT refuses the model.
    """
    status, solver = run_cp_sat(
        model,
        time_limit_s=time_limit_s,
        threads=threads,
        linearization_level=2,  # relaxations over patterns are nearly tight
        presolve=False,  # takes all of 10 s where patterns are thousands, and finds little
    )
    if status is Status.INFEASIBLE:
        return Claim(status=status, solution=None, bound=math.inf)
    if not status.has_solution:
        return Claim(status=status, solution=None, bound=solver.best_objective_bound)
    chosen = [[solver.boolean_value(x) for x in x_N].index(True) for x_N in x_SN]
    layout = layout_of_choice(patterns, chosen)
    return Claim(status=status, solution=layout, bound=solver.best_objective_bound)


def _dot(weights_N: npt.NDArray[np.int64], x_N: list[cp_model.IntVar]) -> cp_model.LinearExpr:
    return cp_model.LinearExpr.weighted_sum(x_N, weights_N.tolist())
