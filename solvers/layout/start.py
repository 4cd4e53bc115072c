"""A layout to start from where a search may run out of time: even stages under their best options.

Used where stages share devices and cuts are free; everywhere else the searches find an optimum
themselves. Proves nothing. Letters: S stages, D devices.
"""

import numpy as np

from solvers.layout.fixed_cuts import even_layout, fastest_options
from solvers.layout.problem import Layout, LayoutProblem
from solvers.result import Claim, Status


def even_start(problem: LayoutProblem) -> Layout | None:
    """The best layout with even stages; nothing where none fits or none is needed."""
    if problem.stages_per_device == 1 or problem.fixed_layout is not None:
        return None
    return fastest_options(even_layout(problem)).solution


def better_of(problem: LayoutProblem, claim: Claim[Layout], start: Layout | None) -> Claim[Layout]:
    """The claim, with the start in place of an unproven layout that is no better."""
    if start is None or claim.status in (Status.OPTIMAL, Status.INFEASIBLE):
        return claim
    claimed = claim.solution
    if claimed is not None and _step_s(problem, claimed) <= _step_s(problem, start):
        return claim
    return Claim(status=Status.FEASIBLE, solution=start, bound=claim.bound)


def _step_s(problem: LayoutProblem, layout: Layout) -> float:
    time_s_SR = problem.time_s_RO.T[list(layout.option_S)]
    time_s_S = (np.array(layout.layers_SR) * time_s_SR).sum(axis=1) + problem.fixed_time_s_S
    time_s_D = np.bincount(problem.device_of_stage, weights=time_s_S)
    share = 1.0 / problem.stages_per_device
    return float((problem.num_microbatches - share) * time_s_D.max() + share * time_s_D.sum())
