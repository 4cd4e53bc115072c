"""Recompute what a chain placement costs and name every rule it breaks; trusts no backend.

    L layers   T = L - 1 pairs of layers   E experts   G ranks   S = E slots of a layer

The definitions of `problem.py`, one layer at a time.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.ranks import Floats, Placement

LOAD_TOLERANCE_RATIO: Final = 1e-9
"""How far a rank may pass its load limit by rounding alone: sums of a few hundred doubles."""


def violations(problem: ChainProblem, placement: Placement) -> tuple[str, ...]:
    """Every broken rule as one line with its numbers; empty when the placement is allowed."""
    broken_shape = tuple(_shape_violations(problem, placement))
    return broken_shape or tuple(_load_violations(problem, placement))


def objective(problem: ChainProblem, placement: Placement) -> float:
    """Cost of an allowed placement; the formulas are in `problem.py`."""
    return float(pair_costs(problem, placement).sum())


def pair_costs(problem: ChainProblem, placement: Placement) -> Floats:
    """Return cost_T: what each pair of layers contributes."""
    rank_S, num_ranks = problem.ranks.rank_S, problem.ranks.num_ranks
    cost_T = np.zeros(problem.num_layers - 1)
    for layer, flow_EE in enumerate(problem.flow_TEE):
        here_S, there_S = placement.expert_LS[layer], placement.expert_LS[layer + 1]
        between_SS = flow_EE[here_S][:, there_S]
        pair_SS = rank_S[:, None] * num_ranks + rank_S[None, :]
        sums = np.bincount(pair_SS.ravel(), between_SS.ravel(), minlength=num_ranks**2)
        priced_GG = problem.cost_GG * sums.reshape(num_ranks, num_ranks)
        is_total = problem.measure is Measure.TOTAL
        cost_T[layer] = priced_GG.sum() if is_total else priced_GG.max()
    return cost_T


def rank_loads(problem: ChainProblem, placement: Placement) -> Floats:
    """Return load_LG: what each rank has to do in each layer."""
    first_G = problem.ranks.first_slot_G
    load_LS = np.take_along_axis(problem.load_LE, placement.expert_LS, axis=1)
    return np.asarray(np.add.reduceat(load_LS, first_G, axis=1))


def _shape_violations(problem: ChainProblem, placement: Placement) -> Iterator[str]:
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


def _load_violations(problem: ChainProblem, placement: Placement) -> Iterator[str]:
    if problem.most_load_L is None:
        return
    load_LG = rank_loads(problem, placement)
    allowed_L = problem.most_load_L * (1.0 + LOAD_TOLERANCE_RATIO)
    for layer, rank in np.argwhere(load_LG > allowed_L[:, None]):
        yield (
            f"rank {rank} has load {load_LG[layer, rank]:.9g} in layer {layer}, at most"
            f" {problem.most_load_L[layer]:.9g} is allowed"
        )
