"""The rules of placements in which every expert is in one slot, for the checkers alone.

    L layers   E experts   G ranks   S = E slots of a layer

Each expert once a layer, and no rank above the layer's load limit. No backend calls this file.
"""

from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np

from solvers.placement.ranks import Floats, Placement, Ranks

LOAD_TOLERANCE_RATIO: Final = 1e-9
"""Share by which rounding alone may take a rank over its load limit: sums of a few hundred
doubles."""


class SingleProblem(Protocol):
    """Part of a problem that the rules read."""

    @property
    def load_LE(self) -> Floats: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def most_load_L(self) -> Floats | None: ...


def violations(problem: SingleProblem, placement: Placement) -> tuple[str, ...]:
    """Every broken rule as one line with its numbers; empty when the placement is allowed."""
    broken_shape = tuple(_shape_violations(problem, placement))
    return broken_shape or tuple(_load_violations(problem, placement))


def rank_loads(problem: SingleProblem, placement: Placement) -> Floats:
    """Return load_LG: what each rank has to do in each layer."""
    load_LS = np.take_along_axis(problem.load_LE, placement.expert_LS, axis=1)
    return np.asarray(np.add.reduceat(load_LS, problem.ranks.first_slot_G, axis=1))


def _shape_violations(problem: SingleProblem, placement: Placement) -> Iterator[str]:
    num_layers, num_experts = problem.load_LE.shape
    wanted = (num_layers, problem.ranks.num_slots)
    if placement.expert_LS.shape != wanted:
        rows, slots = placement.expert_LS.shape
        yield f"{rows} layers of {slots} slots are placed, there are {wanted[0]} of {wanted[1]}"
        return
    for layer, expert_S in enumerate(placement.expert_LS):
        present, times = np.unique(expert_S, return_counts=True)
        for expert in present[(present < 0) | (present >= num_experts)]:
            yield f"layer {layer} holds expert {expert}, there are {num_experts}"
        for expert, count in zip(present[times > 1], times[times > 1], strict=True):
            yield f"layer {layer} holds expert {expert} {count} times, once is allowed"


def _load_violations(problem: SingleProblem, placement: Placement) -> Iterator[str]:
    if problem.most_load_L is None:
        return
    load_LG = rank_loads(problem, placement)
    allowed_L = problem.most_load_L * (1.0 + LOAD_TOLERANCE_RATIO)
    for layer, rank in np.argwhere(load_LG > allowed_L[:, None]):
        yield (
            f"rank {rank} has load {load_LG[layer, rank]:.9g} in layer {layer}, at most"
            f" {problem.most_load_L[layer]:.9g} is allowed"
        )
