"""Synthetic loads: families of workloads that share what makes experts hot.

    F families   L layers   E experts   J directions

    load(f, l, e) = exp(b(l, e) + spread * sum_j a(f, j) u(j, l, e))

b ~ N(0, 0.63) is how popular an expert is whatever the text, u_j ~ N(0, 1) are three directions in
which texts differ, shared by all families, and a_f is a unit vector drawn at random: families that
point the same way are alike. Counts have no noise: they stand for long recordings.
"""

import numpy as np

from solvers.placement.balance import check
from solvers.placement.balance.bound import layer_bounds
from solvers.placement.balance.problem import BalanceProblem, Migration, Robust
from solvers.placement.ranks import Floats, Placement, Ranks

POPULARITY_SPREAD = 0.63
"""Standard deviation of b."""

FAMILY_SPREAD = 0.3
"""Standard deviation of what a family adds to b."""

NUM_DIRECTIONS = 3
"""J."""


def families(
    rng: np.random.Generator, *, num_families: int, num_layers: int, num_experts: int
) -> Floats:
    """Return loads, [F][L][E]."""
    popularity_LE = rng.normal(0.0, POPULARITY_SPREAD, (num_layers, num_experts))
    direction_JLE = rng.normal(0.0, 1.0, (NUM_DIRECTIONS, num_layers, num_experts))
    axis_FJ = rng.normal(0.0, 1.0, (num_families, NUM_DIRECTIONS))
    axis_FJ /= np.linalg.norm(axis_FJ, axis=1, keepdims=True)
    change_FLE = FAMILY_SPREAD * np.einsum("fj,jle->fle", axis_FJ, direction_JLE)
    return np.asarray(np.exp(popularity_LE + change_FLE))


def even_weights(num_workloads: int) -> Floats:
    """Weights of workloads that all count the same."""
    return np.full(num_workloads, 1.0 / num_workloads)


def tiny_problem(rng: np.random.Generator, *, with_migration: bool = True) -> BalanceProblem:
    """Return a problem that brute force solves in well under a second, any feature in it."""
    num_workloads = int(rng.integers(1, 4))
    num_layers = int(rng.integers(1, 3))
    num_experts = int(rng.integers(2, 5))
    slots_G = rng.integers(1, 3, size=int(rng.integers(2, 4)))
    while slots_G.sum() < num_experts:
        slots_G[slots_G.argmin()] += 1
    num_ranks = len(slots_G)
    is_identical = rng.random() < 0.5
    ranks = Ranks(
        slots_G=slots_G.astype(np.int64),
        node_G=np.zeros(num_ranks, dtype=np.int64),
        speed_G=np.ones(num_ranks) if is_identical else rng.choice([0.5, 1.0, 2.0], size=num_ranks),
    )
    load_WLE = rng.exponential(2.0, (num_workloads, num_layers, num_experts))
    load_WLE[rng.random(load_WLE.shape) < 0.1] = 0.0
    load_WLE[:, :, 0] += 0.25
    weight_W = rng.dirichlet(np.full(num_workloads, 5.0))
    current = _any_placement(rng, num_layers, num_experts, ranks.num_slots)
    limited = with_migration and rng.random() < 0.4
    return BalanceProblem(
        load_WLE=load_WLE,
        weight_W=weight_W / weight_W.sum(),
        ranks=ranks,
        robust=rng.choice(np.array(list(Robust), dtype=object)),
        tail_ratio=float(rng.uniform(0.2, 1.0)),
        active_load=float(rng.choice([0.0, 0.0, 1.5])),
        migration=Migration(current=current, most_moved=int(rng.integers(0, 5)))
        if limited
        else None,
    )


def _any_placement(
    rng: np.random.Generator, num_layers: int, num_experts: int, num_slots: int
) -> Placement:
    rows = []
    for _ in range(num_layers):
        spare = rng.integers(0, num_experts, size=num_slots - num_experts)
        rows.append(rng.permutation(np.concatenate([np.arange(num_experts), spare])))
    return Placement(expert_LS=np.stack(rows).astype(np.int64))


def gap_ratio(problem: BalanceProblem, placement: Placement) -> float:
    """Return the mean over workloads of sum_l largest rank time / sum_l bound - 1."""
    time_W = check.layer_times(problem, placement).sum(axis=1)
    return float(np.mean(time_W / layer_bounds(problem).sum(axis=1)) - 1.0)
