"""Best-improvement swaps inside a layer that lower its most-loaded pairs of ranks.

    E experts   G ranks   e on rank a, f on rank b

With B the flow between the ranks of a pair of layers, a swap of e and f in the earlier layer
changes two rows of it, and the cost of the pair becomes

    max(most of the other rows, row(e, f), row(f, e))
    row(e, f) = max_h cost(a, h) * (B(a, h) - out(e, h) + out(f, h))

with out(e, h) what e sends to rank h; in the later layer columns take the place of rows. So all E
(E - 1) / 2 swaps of a layer are evaluated exactly, by arrays of E E numbers. Layers take turns
until none has a swap within the load limits that lowers the sum over pairs of layers: a local
optimum.
"""

import time
from typing import Final

import numpy as np

from solvers.placement.chain.problem import ChainProblem
from solvers.placement.ranks import Floats, Ints
from solvers.placement.single import forbid_swaps
from solvers.placement.start_placement import rank_loads

LEAST_GAIN_RATIO: Final = 1e-9
"""Of the largest cost of the two pairs; less is rounding."""


def descend(problem: ChainProblem, rank_LE: Ints, *, deadline_s: float) -> None:
    """Swap experts in place as long as it lowers the measure."""
    layer, unchanged = 0, 0
    while unchanged < problem.num_layers and time.perf_counter() < deadline_s:
        unchanged = 0 if _swap_best(problem, rank_LE, layer) else unchanged + 1
        if unchanged:
            layer = (layer + 1) % problem.num_layers


def changes_EE(problem: ChainProblem, rank_LE: Ints, layer: int) -> Floats:
    """Return by how much each swap in a layer changes the measure, limits ignored."""
    changed_EE = np.zeros((problem.num_experts, problem.num_experts))
    rank_E, cost_GG = rank_LE[layer], problem.cost_GG
    if layer > 0:
        sent_EE = problem.flow_TEE[layer - 1].T
        changed_EE += _changed_EE(sent_EE, rank_E, rank_LE[layer - 1], cost_GG.T)
    if layer < problem.num_layers - 1:
        sent_EE = problem.flow_TEE[layer]
        changed_EE += _changed_EE(sent_EE, rank_E, rank_LE[layer + 1], cost_GG)
    return changed_EE


def _swap_best(problem: ChainProblem, rank_LE: Ints, layer: int) -> bool:
    rank_E = rank_LE[layer]
    changed_EE = changes_EE(problem, rank_LE, layer)
    load_E = problem.load_LE[layer]
    forbid_swaps(
        changed_EE,
        rank_E=rank_E,
        load_E=load_E,
        load_G=rank_loads(load_E[None], rank_E[None], problem.ranks.num_ranks)[0],
        most_load=np.inf if problem.most_load_L is None else float(problem.most_load_L[layer]),
    )
    one, two = divmod(int(changed_EE.argmin()), len(rank_E))
    scale = float(problem.cost_GG.max()) * float(load_E.sum())
    if not changed_EE[one, two] < -LEAST_GAIN_RATIO * scale:
        return False
    rank_E[[one, two]] = rank_E[[two, one]]
    return True


def _changed_EE(sent_EE: Floats, rank_E: Ints, other_E: Ints, cost_GG: Floats) -> Floats:
    """What swaps change in the cost of one pair; `cost_GG` from these ranks to the others'."""
    num_ranks = len(cost_GG)
    on_other_EG = (other_E[:, None] == np.arange(num_ranks)).astype(np.float64)
    on_rank_EG = (rank_E[:, None] == np.arange(num_ranks)).astype(np.float64)
    out_EG = sent_EE @ on_other_EG
    between_GG = on_rank_EG.T @ out_EG
    row_G = (cost_GG * between_GG).max(axis=1)
    without_GG = np.zeros((num_ranks, num_ranks))
    for rank in np.argsort(row_G, kind="stable"):
        is_other = np.arange(num_ranks) != rank
        without_GG[np.ix_(is_other, is_other)] = row_G[rank]
    kept_EG = between_GG[rank_E] - out_EG
    row_EE = np.stack(
        [
            (cost_GG[rank] * (kept_G + out_EG)).max(axis=1)
            for rank, kept_G in zip(rank_E, kept_EG, strict=True)
        ]
    )
    without_EE = without_GG[rank_E][:, rank_E]
    after_EE = np.maximum(without_EE, np.maximum(row_EE, row_EE.T))
    return np.asarray(after_EE - row_G.max())
