"""Recompute what a placement is worth and name every rule it breaks; trusts no backend.

Plain Python numbers and loops on purpose, where that is fast enough: the definitions of
`problem.py`, read line by line. Shares of near replicas are computed independently in
`dispatch_law.py`, which no backend uses.
"""

import math
from collections.abc import Iterator

import numpy as np

from solvers.placement.balance.dispatch_law import slot_ratios
from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch, Robust
from solvers.placement.ranks import Floats, Placement
from solvers.placement.single_check import table_violations

LAUNCHES = 32
"""Draws of static dispatch that a placement is evaluated by."""

LAUNCH_SEED = 0
"""Seed of the static-dispatch draws that certify a placement; no search uses it."""

CHOICE_SEED = 20_233
"""Seed of the launches that candidates are compared by."""


def violations(problem: BalanceProblem, placement: Placement) -> tuple[str, ...]:
    """Every broken rule as one line with its numbers; empty when the placement is allowed."""
    broken = table_violations(
        placement,
        layers=problem.num_layers,
        slots=problem.ranks.num_slots,
        experts=problem.num_experts,
    )
    return broken or (*_missing(problem, placement), *_migration_violations(problem, placement))


def objective(problem: BalanceProblem, placement: Placement, *, seed: int = LAUNCH_SEED) -> float:
    """The robust imbalance; the formula is in `problem.py`.

    Args:
        problem: with loads and ranks.
        placement: of every layer.
        seed: of launches, where dispatch is random; `CHOICE_SEED` to choose a placement by.
    """
    return _of_times(problem, layer_times(problem, placement, seed=seed))


def standard_error(problem: BalanceProblem, placement: Placement) -> float:
    """Return the standard error of `objective` over drawn launches (leave-one-out jackknife)."""
    if problem.dispatch is not ReplicaDispatch.STATIC:
        return 0.0
    time_DWL = launch_times(problem, placement).max(axis=3)
    total_WL, launches = time_DWL.sum(axis=0), len(time_DWL)
    without_D = np.array(
        [_of_times(problem, (total_WL - time_WL) / (launches - 1)) for time_WL in time_DWL]
    )
    return math.sqrt((launches - 1) * float(without_D.var()))


def _of_times(problem: BalanceProblem, time_WL: Floats) -> float:
    speed = sum(problem.ranks.speed_G.tolist())
    imbalances = []
    for loads_LE, times_L in zip(problem.load_WLE.tolist(), time_WL.tolist(), strict=True):
        mean = sum(math.fsum(load_E) / speed for load_E in loads_LE)
        imbalances.append(math.fsum(times_L) / mean)
    return _robust(problem, imbalances)


def layer_times(
    problem: BalanceProblem, placement: Placement, *, seed: int = LAUNCH_SEED
) -> Floats:
    """Time of the most-loaded rank, [W][L]; its mean over launches where dispatch is random."""
    return np.asarray(launch_times(problem, placement, seed=seed).max(axis=3).mean(axis=0))


def launch_times(
    problem: BalanceProblem, placement: Placement, *, seed: int = LAUNCH_SEED
) -> Floats:
    """Time of every rank in so many launches, [D][W][L][G]; one where none differs from another.

    Far ranks are assigned replicas by a seed that no method draws from.
    """
    ranks, expert_LS = problem.ranks, placement.expert_LS
    if problem.dispatch is ReplicaDispatch.STATIC:
        ratio_DLS = slot_ratios(placement, ranks, seed=seed, launches=LAUNCHES)
    elif problem.dispatch is ReplicaDispatch.NEAR:
        ratio_DLS = slot_ratios(placement, ranks, seed=None, launches=1)
    else:
        ratio_DLS = 1.0 / np.array([[(row == row[:, None]).sum(axis=0) for row in expert_LS]])
    load_DWLS = np.array(
        [row_LE[np.arange(len(row_LE))[:, None], expert_LS] for row_LE in problem.load_WLE]
    )
    load_DWLS = ratio_DLS[:, None] * load_DWLS
    if problem.active_load > 0.0:
        load_DWLS = load_DWLS + problem.active_load * (1.0 - np.exp(-load_DWLS))
    work = [load_DWLS[..., ranks.rank_S == rank].sum(axis=-1) for rank in range(ranks.num_ranks)]
    return np.stack(work, axis=-1) / ranks.speed_G


def _robust(problem: BalanceProblem, imbalances: list[float]) -> float:
    if problem.robust is Robust.WORST:
        return max(imbalances)
    weights = problem.weight_W.tolist()
    tail = 1.0 if problem.robust is Robust.MEAN else problem.tail_ratio
    left, total = tail, 0.0
    for imbalance, weight in sorted(zip(imbalances, weights, strict=True), reverse=True):
        taken = min(weight, left)
        total += taken * imbalance
        left -= taken
    return total / tail


def _missing(problem: BalanceProblem, placement: Placement) -> Iterator[str]:
    for layer, expert_S in enumerate(placement.expert_LS.tolist()):
        missing = sorted(set(range(problem.num_experts)).difference(expert_S))
        if missing:
            yield f"layer {layer} has no slot for expert {missing[0]} ({len(missing)} missing)"


def _migration_violations(problem: BalanceProblem, placement: Placement) -> Iterator[str]:
    if problem.migration is None:
        return
    rank_S = problem.ranks.rank_S.tolist()
    moved = 0
    rows = zip(
        problem.migration.current.expert_LS.tolist(), placement.expert_LS.tolist(), strict=True
    )
    for before_S, after_S in rows:
        resident = set(zip(rank_S, before_S, strict=True))
        moved += len(set(zip(rank_S, after_S, strict=True)) - resident)
    if moved > problem.migration.most_moved:
        yield f"{moved} experts move to new ranks, at most {problem.migration.most_moved} may"
