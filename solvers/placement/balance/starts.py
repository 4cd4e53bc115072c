"""The default method: local search from starts that suit the runtime's dispatch.

    L layers   W workloads   C placements found

Under an even split one start does (`local_search.py`). Where near replicas come first, the first
replica on a node serves the node, so that a second one there is of little use. Where far ranks are
assigned a replica once a launch, a rank's load is random, and the busiest of many is the unlucky
one. No deviation comes from an expert of one replica, nor from one on every node (on every rank,
where there is one node); hardly any from one that few tokens choose. Starts therefore give copies
to few experts, and to each of them as many as are of use (`copies.py`). The search changes them, on
mean + caution * deviation of every rank. Launches are drawn of what it finds, of EPLB's placement
and of the even split's, every layer takes the best, and the best of all is returned. Where far
ranks draw for each token (`ReplicaDispatch.NEAR`), nothing is assigned, and no rank deviates.

Left out, as none moved a figure of the benchmark by 0.1 %: more starts and cautions, EPLB's
placement as a start, and the scatter of recorded loads over other passes as a deviation.

Proves the bound of `bound.py`. Where migration is limited, `migration.py` picks what to move.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from solvers.placement.balance.bound import bound, layer_bounds
from solvers.placement.balance.copies import start_placement
from solvers.placement.balance.eplb import eplb
from solvers.placement.balance.local_search import MOST_STEPS, search
from solvers.placement.balance.migration import CAUTION, within_limit
from solvers.placement.balance.objective import (
    largest_times,
    planning_loads,
    time_weights,
    value_of,
)
from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch
from solvers.placement.ranks import Floats, Placement
from solvers.result import Claim, Status

CEILINGS: Final[Mapping[ReplicaDispatch, tuple[float | None, ...]]] = {
    ReplicaDispatch.STATIC: (0.75, 0.95),
    ReplicaDispatch.NEAR: (0.0, None),
}
"""Starts (`copies.py`) by rule; which is best differs by layer."""

SEARCH_RATIO: Final = 0.9
"""Share of the time limit for all searches; the rest is for the final selection."""

EVEN_RATIO: Final = 0.15
"""Share of the time limit for the search under even split, whose placement is one candidate."""

SEED: Final = 20_231
"""Seed of the launches drawn for the final selection; the checker draws others."""

CLAIM_SEED: Final = 20_232
"""Seed of the launches that the claimed objective averages; the checker draws its own to
compare."""


def solve(problem: BalanceProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Placement]:
    """Return the best placement found in time, with the bound of `bound.py`."""
    look = search_near if problem.dispatch.is_near else search
    if problem.migration is None:
        placement = look(problem, time_limit_s=time_limit_s, threads=threads)
    else:
        placement = within_limit(
            problem,
            problem.migration,
            time_limit_s=time_limit_s,
            bound_WL=layer_bounds(problem),
            unlimited=lambda limit_s: look(problem, time_limit_s=limit_s, threads=threads),
        )
    value, error = claimed(problem, placement)
    return Claim(
        status=Status.FEASIBLE,
        solution=placement,
        bound=bound(problem),
        objective=value,
        objective_error=error,
    )


def claimed(problem: BalanceProblem, placement: Placement) -> tuple[float, float]:
    """Return the objective, and its standard error where launches are drawn for it."""
    # Other launches than those of the last choice, which the placement did well in.
    time_DWL = largest_times(problem, placement, seed=CLAIM_SEED)
    value_D = [value_of(problem, time_WL) for time_WL in time_DWL]
    error = float(np.std(value_D, ddof=1)) / np.sqrt(len(value_D)) if len(value_D) > 1 else 0.0
    return value_of(problem, time_DWL.mean(axis=0)), error


def search_near(
    problem: BalanceProblem, *, time_limit_s: float, threads: int = 1, most_steps: int = MOST_STEPS
) -> Placement:
    """Return the best of the starts, layer by layer, or what another rule places, if better."""
    deadline_s = time.perf_counter() + SEARCH_RATIO * time_limit_s
    run = partial(search, threads=threads, most_steps=most_steps)
    even = replace(problem, dispatch=ReplicaDispatch.EVEN, migration=None)
    rule = eplb(planning_loads(problem), ranks=problem.ranks)
    candidates = [run(even, time_limit_s=EVEN_RATIO * time_limit_s), rule]
    ceilings = CEILINGS[problem.dispatch]
    for number, ceiling in enumerate(ceilings):
        left_s = deadline_s - time.perf_counter()
        if len(candidates) > 2 and left_s <= 0.0:
            break
        limit_s = max(left_s, 0.0) / (len(ceilings) - number)
        start = start_placement(problem, ceiling=ceiling)
        candidates.append(run(problem, time_limit_s=limit_s, start=start, caution=CAUTION))
    time_CWL = [
        largest_times(problem, candidate, seed=SEED).mean(axis=0) for candidate in candidates
    ]
    candidates.append(best_layers(problem, candidates, np.stack(time_CWL)))
    time_CWL.append(largest_times(problem, candidates[-1], seed=SEED).mean(axis=0))
    best = min(range(len(candidates)), key=lambda at: value_of(problem, time_CWL[at]))
    return candidates[best]


def best_layers(
    problem: BalanceProblem, candidates: list[Placement], time_CWL: Floats
) -> Placement:
    """Join the placement of least time in each layer; workloads weigh as at the best whole one."""
    best = min(range(len(candidates)), key=lambda number: value_of(problem, time_CWL[number]))
    slope_W = time_weights(problem, time_CWL[best])
    chosen_L = np.einsum("w,cwl->cl", slope_W, time_CWL).argmin(axis=0)
    expert_CLS = np.stack([candidate.expert_LS for candidate in candidates])
    return Placement(expert_LS=expert_CLS[chosen_L, np.arange(len(chosen_L))])
