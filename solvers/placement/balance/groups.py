"""Starts for static dispatch with few random assignments: replicas on whole groups of nodes.

    L layers   E experts   G ranks   S slots   U units: nodes, or ranks where there is one node
    J groups of units, two

Cut the units in two groups (of three, two would be far from an expert, each with a stream that
draws for both: at 72 ranks of 4 slots no better than one replica a node on all, on recordings of
256 experts). An expert with a replica on every unit of one group is near to all its
ranks and far from all others. So the ranks of a group draw for the same experts, one after another,
and share one stream (`dispatch/static.py`): the other group's ranks share one assignment, of
which the replicas get equal numbers, or numbers that differ by one. Nothing else varies. Such an
expert takes half the slots of one that is on every unit.

Streams diverge permanently where ranks of a group draw for different experts, so no expert may have
other copies: a `ReplicaSpread` fills every slot with experts on a group and on all units. Some
shapes have none.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.balance.state import replica_groups
from solvers.placement.ranks import Floats, Ints, Placement

MOST_EVERYWHERE = 1
"""Experts on all units, with which slots may come out even."""

Domain = npt.NDArray[np.bool_]
"""Where an expert may be put, [L][G][E]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpread:
    """How many experts are on groups and everywhere."""

    sizes: tuple[int, ...]
    """Units of each group."""
    on_group: tuple[int, ...]
    """Experts with a replica on every unit of the group."""
    everywhere: int
    """Experts with one on every unit."""


def layout_of(problem: BalanceProblem) -> ReplicaSpread | None:
    """Return the most even layout that fills the slots; None where there is none."""
    units = int(replica_groups(problem).max()) + 1
    spare = problem.ranks.num_slots - problem.num_experts
    sizes = (units // 2, units - units // 2)
    if sizes[0] < 2:
        return None
    for everywhere in range(MOST_EVERYWHERE + 1):
        left = spare - everywhere * (units - 1)
        # A group's expert takes a spare slot on each of its units but one.
        fitting = [
            (first, rest // (sizes[1] - 1))
            for first, rest in enumerate(range(left, -1, 1 - sizes[0]))
            if rest % (sizes[1] - 1) == 0
            and first + rest // (sizes[1] - 1) + everywhere <= problem.num_experts
        ]
        if fitting:
            even = min(fitting, key=lambda one: abs(one[0] / sizes[0] - one[1] / sizes[1]))
            return ReplicaSpread(sizes=sizes, on_group=even, everywhere=everywhere)
    return None


def group_start(problem: BalanceProblem) -> tuple[Placement, Domain] | None:
    """Return a packed start and where its experts may go; None where slots do not come out even.

    Ranks with few slots can leave a unit without any for a replica.
    """
    layout = layout_of(problem)
    if layout is None:
        return None
    share_WLE = problem.load_WLE / problem.mean_WL[:, :, None]
    share_LE = np.einsum("w,wle->le", problem.weight_W, share_WLE)
    unit_G = replica_groups(problem)
    rows, domains = [], []
    for share_E in share_LE:
        units_EU, is_many_E = _units(share_E, layout)
        row = _packed(problem, share_E, units_EU, is_many_E, unit_G)
        if row is None:
            return None
        rows.append(row)
        domains.append(units_EU[:, unit_G].T)
    return Placement(expert_LS=np.stack(rows)), np.stack(domains)


def _units(share_E: Floats, layout: ReplicaSpread) -> tuple[Domain, Domain]:
    """Units on which each expert has a replica, or may have its only one, and which have many."""
    group_U = np.repeat(np.arange(len(layout.sizes)), layout.sizes)
    found_EU = np.ones((len(share_E), len(group_U)), dtype=np.bool_)
    number = layout.everywhere + sum(layout.on_group)
    hottest = np.argsort(-share_E, kind="stable")[:number]
    load_J, left_J = np.zeros(len(layout.sizes)), np.array(layout.on_group)
    for expert in hottest[layout.everywhere :]:
        group = int(np.where(left_J > 0, load_J, np.inf).argmin())
        load_J[group] += share_E[expert] / layout.sizes[group]
        left_J[group] -= 1
        found_EU[expert] = group_U == group
    is_many_E = np.zeros(len(share_E), dtype=np.bool_)
    is_many_E[hottest] = True
    return found_EU, is_many_E


def _packed(
    problem: BalanceProblem, share_E: Floats, units_EU: Domain, is_many_E: Domain, unit_G: Ints
) -> Ints | None:
    """Put replicas, then single experts, largest first, on the rank of a unit that has least."""
    ranks = problem.ranks
    time_G, free_G = np.zeros(ranks.num_ranks), ranks.slots_G.copy()
    experts_on: list[list[int]] = [[] for _ in range(ranks.num_ranks)]
    part_E = share_E / np.where(is_many_E, units_EU.sum(axis=1), 1)
    for expert in np.lexsort((-part_E, ~is_many_E)).tolist():
        units = np.flatnonzero(units_EU[expert])
        places = [unit_G == unit for unit in units] if is_many_E[expert] else [unit_G >= 0]
        for is_place_G in places:
            open_G = is_place_G & (free_G > 0)
            if not open_G.any():
                return None
            rank = int(np.where(open_G, time_G, np.inf).argmin())
            time_G[rank] += part_E[expert] / ranks.speed_G[rank]
            free_G[rank] -= 1
            experts_on[rank].append(expert)
    return np.array([expert for of_rank in experts_on for expert in of_rank], dtype=np.int64)
