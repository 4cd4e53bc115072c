"""The start of a search: how many copies experts get, and largest shares packed first.

    L layers   W workloads   E experts   S slots   F spare slots

A second copy of an expert is useless on a rank, and where near replicas come first on a node, which
the first one serves. Copies of an expert go to different groups of ranks, therefore:

 1. to the largest share, one by one, while it is above a ceiling, a share of a rank's mean load;
 2. to the hottest of these, up to one a group, as long as slots are left;
 3. to the coldest experts, for slots have to be filled.

With few slots `fitting_copies` minds how many large shares there are instead.
"""

from typing import Final

import numpy as np

from solvers.placement.balance.packing import least_choices, packed
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.ranks import Floats, Ints, Placement

SMALL_SHARE: Final = 1.0 / 3.0
"""Share of a rank's mean load that a large expert exceeds. Replicating smaller ones does not lower
the number of ranks needed, so they get only leftover slots."""

SMALL_RATIO: Final = 3e-3
"""Share of the mean load by which one replica may exceed it before its weight is `ABOVE_MEAN`."""

ABOVE_MEAN: Final = 1e3
"""Weight, times the share, of a replica that exceeds a rank's mean load."""


def replica_groups(problem: BalanceProblem) -> Ints:
    """Return the group of each rank in which a second copy of an expert is useless."""
    ranks = problem.ranks
    if problem.dispatch.is_near and ranks.num_nodes > 1:
        return ranks.node_G
    return np.arange(ranks.num_ranks, dtype=np.int64)


def start_placement(
    problem: BalanceProblem, *, ceiling: float | None = 0.0, for_each: bool = True
) -> Placement:
    """Return a packed start.

    Args:
        problem: to be placed; several workloads are packed by their mean.
        ceiling: of a rank's mean, above which an expert gets copies; None: `fitting_copies`.
        for_each: an expert is hot that is hot in any workload; otherwise in their mean.
    """
    ranks, group_G = problem.ranks, replica_groups(problem)
    share_WLE = problem.load_WLE / problem.mean_WL[:, :, None]
    mean_LE = np.einsum("w,wle->le", problem.weight_W, share_WLE)
    spare, max_copies = ranks.num_slots - problem.num_experts, int(group_G.max()) + 1
    copies_LE = np.stack(
        [
            fitting_copies(share_E, spare=spare, max_copies=max_copies)
            if ceiling is None
            else _hottest_copies(share_E, spare=spare, max_copies=max_copies, ceiling=ceiling)
            for share_E in (share_WLE.max(axis=0) if for_each else mean_LE)
        ]
    )
    experts = np.arange(problem.num_experts)
    expert_LS = np.stack([np.repeat(experts, copies_E) for copies_E in copies_LE])
    item_LS = packed(
        np.take_along_axis(mean_LE / copies_LE, expert_LS, axis=1),
        ranks.slots_G,
        speed_G=ranks.speed_G,
        expert_LX=expert_LS,
        group_G=group_G,
    )
    return Placement(expert_LS=np.take_along_axis(expert_LS, item_LS, axis=1))


def _hottest_copies(share_E: Floats, *, spare: int, max_copies: int, ceiling: float) -> Ints:
    """Return the copies of every expert of a layer, `spare` more than experts."""
    copies_E = np.ones(len(share_E), dtype=np.int64)
    while copies_E.sum() < len(share_E) + spare:
        part_E = np.where(copies_E < max_copies, share_E / copies_E, 0.0)
        if part_E.max() <= ceiling:
            break
        copies_E[part_E.argmax()] += 1
    for expert in np.argsort(-share_E, kind="stable"):
        missing = max_copies - copies_E[expert]
        if copies_E[expert] > 1 and copies_E.sum() + missing <= len(share_E) + spare:
            copies_E[expert] = max_copies
    return _filled(copies_E, share_E, spare=spare, max_copies=max_copies)


def fitting_copies(share_E: Floats, *, spare: int, max_copies: int) -> Ints:
    """Return the copies of every expert of a layer that need the fewest ranks for large shares.

    With few slots a rank is full of one large share and small ones, and what counts is how many
    large ones there are, not how large the largest is. Of shares above a half no two fit in a
    rank's mean, of those above a third no three: both counts, with 1/2 for a share from a third to
    two thirds, bound the ranks that are needed (dual feasible functions; Fekete and Schepers, Math.
    Programming 91(1), 2001). Their sum is least, O(E max_copies spare); slots that are left go to
    the coldest experts.
    """
    large = np.flatnonzero(share_E > SMALL_SHARE)
    copies_C1 = np.arange(1, min(max_copies, spare + 1) + 1)[:, None]
    part_CE = share_E[large] / copies_C1
    weight_CE = (part_CE > 1.0 / 2.0) + 0.5 * (part_CE > 1.0 / 3.0) + 0.5 * (part_CE > 2.0 / 3.0)
    weight_CE = np.where(part_CE > 1.0 + SMALL_RATIO, ABOVE_MEAN * part_CE, weight_CE)
    more_CE = np.broadcast_to(copies_C1 - 1, part_CE.shape)
    copies_E = np.ones(len(share_E), dtype=np.int64)
    value_CE = np.asarray(copies_C1 * weight_CE, dtype=np.float64)
    copies_E[large] += least_choices(more_CE, value_CE, limit=spare)
    return _filled(copies_E, share_E, spare=spare, max_copies=max_copies)


def _filled(copies_E: Ints, share_E: Floats, *, spare: int, max_copies: int) -> Ints:
    """Give the slots that are left to the coldest experts, in place.

    Experts get more copies than there are groups only where each has one in every group.
    """
    while left := len(share_E) + spare - int(copies_E.sum()):
        copies_E[np.lexsort((share_E, copies_E >= max_copies))[:left]] += 1
    return copies_E
