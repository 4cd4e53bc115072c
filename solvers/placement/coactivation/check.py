"""Recompute what a co-activation placement costs and name every rule it breaks; trusts no backend.

    L layers   T sampled tokens   K experts of a token   E experts   G ranks   J groups of a level

The definitions of `problem.py`, one layer and level at a time.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from solvers.placement.coactivation.problem import CoactivationProblem, Level
from solvers.placement.ranks import Floats, Ints, Placement

LOAD_TOLERANCE_RATIO: Final = 1e-9
"""How far a rank may pass its load limit by rounding alone: sums of a few hundred doubles."""


def violations(problem: CoactivationProblem, placement: Placement) -> tuple[str, ...]:
    """Every broken rule as one line with its numbers; empty when the placement is allowed."""
    broken_shape = tuple(_shape_violations(problem, placement))
    return broken_shape or tuple(_load_violations(problem, placement))


def objective(problem: CoactivationProblem, placement: Placement) -> float:
    """Cost of an allowed placement; the formula is in `problem.py`."""
    return float(layer_costs(problem, placement).sum())


def layer_costs(problem: CoactivationProblem, placement: Placement) -> Floats:
    """Return cost_L: what each layer contributes."""
    cost_L = np.zeros(problem.num_layers)
    for level in problem.levels:
        for layer in range(problem.num_layers):
            count_J = touched(problem, placement, level=level, layer=layer)
            cost_L[layer] += level.total_cost * count_J.sum()
            cost_L[layer] += level.busiest_cost * level.num_groups * count_J.max()
    return cost_L


def touched(
    problem: CoactivationProblem, placement: Placement, *, level: Level, layer: int
) -> Ints:
    """Return count_J: the sampled tokens of a layer that touch each group of a level."""
    group_S = level.group_G[problem.ranks.rank_S]
    group_E = np.empty(problem.num_experts, dtype=np.int64)
    group_E[placement.expert_LS[layer]] = group_S
    group_TK = group_E[problem.expert_LTK[layer]]
    is_touched_TJ = np.zeros((len(group_TK), level.num_groups), dtype=bool)
    is_touched_TJ[np.arange(len(group_TK))[:, None], group_TK] = True
    return np.asarray(is_touched_TJ.sum(axis=0), dtype=np.int64)


def rank_loads(problem: CoactivationProblem, placement: Placement) -> Floats:
    """Return load_LG: what each rank has to do in each layer."""
    load_LS = np.take_along_axis(problem.load_LE, placement.expert_LS, axis=1)
    return np.asarray(np.add.reduceat(load_LS, problem.ranks.first_slot_G, axis=1))


def _shape_violations(problem: CoactivationProblem, placement: Placement) -> Iterator[str]:
    wanted = (problem.num_layers, problem.ranks.num_slots)
    if placement.expert_LS.shape != wanted:
        rows, slots = placement.expert_LS.shape
        yield f"{rows} layers of {slots} slots are placed, there are {wanted[0]} of {wanted[1]}"
        return
    for layer, expert_S in enumerate(placement.expert_LS):
        present, times = np.unique(expert_S, return_counts=True)
        for expert in present[(present < 0) | (present >= problem.num_experts)]:
            yield f"layer {layer} holds expert {expert}, there are {problem.num_experts}"
        for expert, count in zip(present[times > 1], times[times > 1], strict=True):
            yield f"layer {layer} holds expert {expert} {count} times, once is allowed"


def _load_violations(problem: CoactivationProblem, placement: Placement) -> Iterator[str]:
    if problem.most_load_L is None:
        return
    load_LG = rank_loads(problem, placement)
    allowed_L = problem.most_load_L * (1.0 + LOAD_TOLERANCE_RATIO)
    for layer, rank in np.argwhere(load_LG > allowed_L[:, None]):
        yield (
            f"rank {rank} has load {load_LG[layer, rank]:.9g} in layer {layer}, at most"
            f" {problem.most_load_L[layer]:.9g} is allowed"
        )
