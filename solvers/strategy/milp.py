"""One integer program that chooses a strategy together with its layout, solved by CBC through PuLP.

    minimise    sum_k  once[k] y[k] + layout objective of k
    such that   sum_k y[k] = 1
                the rows of solvers/layout/milp.py for every k, with y[k] in place of 1

y is binary; where it is 0 every stage pattern of that strategy is 0, and so is its peak. The rows
of a strategy thus describe nothing or a layout, which is as tight as each layout's own program.

A strategy whose own bound exceeds what another surely takes could be left out before; that is the
caller's business. Proves optimality and infeasibility up to CBC's tolerances; the bound is lowered
by them. Memory is exact, as in solvers/layout/milp.py. Exponential in the worst case, and large:
meant for a few dozen strategies.
"""

import math
import time

import pulp
from pulp.apis.coin_api import pulp_cbc_path

from solvers.cbc import run_cbc
from solvers.layout.milp import (
    RELATIVE_TOLERANCE,
    SCALED_OBJECTIVE,
    SHORTEST_RUN_S,
    LayoutPart,
    add_layout,
    chosen_patterns,
)
from solvers.layout.patterns import (
    StagePatterns,
    layout_of_choice,
    least_objective_s,
    overfull_devices,
    patterns_of_stages,
)
from solvers.result import Claim, Status
from solvers.strategy.problem import Strategy, StrategyProblem


def solve(problem: StrategyProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Strategy]:
    """Return CBC's best strategy and layout with a proven lower bound on the step time."""
    deadline_s = time.perf_counter() + time_limit_s
    every = enumerate(patterns_of_stages(layout) for layout in problem.layouts_K)
    patterns_K = {index: patterns for index, patterns in every if all(map(len, patterns))}
    if not patterns_K:
        return Claim(status=Status.INFEASIBLE, solution=None, bound=math.inf)
    bound_s = min(
        problem.once_s_K[index] + least_objective_s(problem.layouts_K[index])
        for index in patterns_K
    )
    scale = SCALED_OBJECTIVE / bound_s if bound_s > 0.0 else 1.0
    model, parts = _model(problem, patterns_K, scale)
    while True:
        answer = run_cbc(
            executable=pulp_cbc_path,
            write_model=model.writeMPS,
            time_limit_s=max(SHORTEST_RUN_S, deadline_s - time.perf_counter()),
            threads=threads,
        )
        if answer.status is Status.INFEASIBLE:
            return Claim(status=Status.INFEASIBLE, solution=None, bound=math.inf)
        bound_s = max(bound_s, answer.bound / scale * (1.0 - RELATIVE_TOLERANCE))
        if not answer.status.has_solution:
            return Claim(status=Status.UNKNOWN, solution=None, bound=bound_s)
        index = max(parts, key=lambda k: answer.value_of_column.get(f"y{k}", 0.0))
        layout = problem.layouts_K[index]
        chosen = chosen_patterns(patterns_K[index], answer, prefix=_prefix(index))
        overfull = overfull_devices(layout, patterns_K[index], chosen)
        if not overfull:
            found = Strategy(index=index, layout=layout_of_choice(patterns_K[index], chosen))
            return Claim(status=answer.status, solution=found, bound=bound_s)
        if time.perf_counter() >= deadline_s:
            return Claim(status=Status.UNKNOWN, solution=None, bound=bound_s)
        for device in overfull:
            stages = layout.stages_of_device(device)
            together = pulp.lpSum(parts[index].x_SN[s][chosen[s]] for s in stages)
            model += together <= len(stages) - 1


def _model(
    problem: StrategyProblem, patterns_K: dict[int, tuple[StagePatterns, ...]], scale: float
) -> tuple[pulp.LpProblem, dict[int, LayoutPart]]:
    model = pulp.LpProblem("strategy", pulp.LpMinimize)
    runs_K = {index: model.add_variable(f"y{index}", cat=pulp.LpBinary) for index in patterns_K}
    parts = {
        index: add_layout(
            model,
            problem.layouts_K[index],
            patterns,
            scale=scale,
            active=runs_K[index],
            prefix=_prefix(index),
        )
        for index, patterns in patterns_K.items()
    }
    once = pulp.lpSum(problem.once_s_K[index] * scale * runs for index, runs in runs_K.items())
    model += once + pulp.lpSum(part.objective for part in parts.values())
    model += pulp.lpSum(runs_K.values()) == 1
    return model, parts


def _prefix(index: int) -> str:
    return f"k{index}_"
