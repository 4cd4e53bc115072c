"""The rules of placements, for the checkers alone; no backend calls this file.

    L layers   E experts   G ranks   S slots of a layer

Every table names experts that exist. Where every expert is in one slot (S = E): each once a layer,
and no rank above the layer's load limit.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from solvers.placement.ranks import Floats, Placement
from solvers.placement.single import SingleProblem

LOAD_TOLERANCE_RATIO: Final = 1e-9
"""Share by which rounding alone may take a rank over its load limit: sums of a few hundred
doubles."""


def table_violations(
    placement: Placement, *, layers: int, slots: int, experts: int
) -> tuple[str, ...]:
    """Name tables of a wrong shape, and ids of experts that do not exist."""
    if placement.expert_LS.shape != (layers, slots):
        rows, columns = placement.expert_LS.shape
        return (f"{rows} layers of {columns} slots are placed, there are {layers} of {slots}",)
    unknown_LS = (placement.expert_LS < 0) | (placement.expert_LS >= experts)
    return tuple(
        f"layer {layer} holds expert {placement.expert_LS[layer, slot]}, there are {experts}"
        for layer, slot in np.argwhere(unknown_LS)
    )


def violations(problem: SingleProblem, placement: Placement) -> tuple[str, ...]:
    """Every broken rule as one line with its numbers; empty when the placement is allowed."""
    broken = table_violations(
        placement,
        layers=problem.num_layers,
        slots=problem.ranks.num_slots,
        experts=problem.num_experts,
    )
    return broken or (*_repeated(placement), *_load_violations(problem, placement))


def rank_loads(problem: SingleProblem, placement: Placement) -> Floats:
    """Return load_LG: what each rank has to do in each layer."""
    load_LS = np.take_along_axis(problem.load_LE, placement.expert_LS, axis=1)
    return np.asarray(np.add.reduceat(load_LS, problem.ranks.first_slot_G, axis=1))


def _repeated(placement: Placement) -> Iterator[str]:
    for layer, expert_S in enumerate(placement.expert_LS):
        for expert, count in zip(*np.unique(expert_S, return_counts=True), strict=True):
            if count > 1:
                yield f"layer {layer} holds expert {expert} {count} times, once is allowed"


def _load_violations(problem: SingleProblem, placement: Placement) -> Iterator[str]:
    load_LG = rank_loads(problem, placement)
    allowed_L = problem.limit_L * (1.0 + LOAD_TOLERANCE_RATIO)
    for layer, rank in np.argwhere(load_LG > allowed_L[:, None]):
        yield (
            f"rank {rank} has load {load_LG[layer, rank]:.9g} in layer {layer}, at most"
            f" {problem.limit_L[layer]:.9g} is allowed"
        )
