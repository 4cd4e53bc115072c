"""Repack experts under a known table of static dispatch, without changing the table.

    W workloads   L layers   E experts   G ranks   S slots

The table says which ranks use which replica. It depends on the nodes and the order of the replicas
of experts that have several, not on experts of one replica, and not on the rank within a node where
an expert has at most one replica on each node: such a replica serves its node and those far ranks
that were assigned its place in the order (`dispatch/static.py`), on whatever rank of the node it
stands. So every slot has a fixed load, experts of one replica may go to any rank, replicas to the
ranks of their node, all others stay; the local search packs slots as if each were an expert.

Proves nothing. Where there is one node, replicas stay where they are.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from solvers.placement.balance.local_search import MOST_STEPS, search
from solvers.placement.balance.objective import planning_loads, value_of
from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch
from solvers.placement.balance.starts import LOADS_CAUTION, best_layers, drawn_times, with_draws
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.static import Streams, layer_targets, split
from solvers.placement.ranks import Floats, Ints, Placement, Ranks

DRAWS_RATIO = 0.5
"""Of the time, for the search on drawn loads, where it is known how loads scatter together."""

CHOICE_RATIO = 0.5
"""Of the time, for the choice of every layer's replicas."""

LEAST_GAIN = 0.01
"""Of the mean: what is made for one table must save as much beside a base, which was not: another
release of the engine, or another number of layers, draws another table."""

ORDERS = 12
"""Orders of the nodes in which every base is tried."""

SEED = 0
"""Of the orders."""


def repacked(
    problem: BalanceProblem,
    placement: Placement,
    split_LEG: Floats,
    *,
    time_limit_s: float,
    most_steps: int = MOST_STEPS,
) -> Placement:
    """Return a placement of the same table whose ranks are more even, or the same one.

    Args:
        problem: whose loads are spread.
        placement: that the table is of.
        split_LEG: share of each expert's tokens that each rank takes under the table.
        time_limit_s: for both searches.
        most_steps: of each layer in both.
    """
    deadline_s = time.perf_counter() + time_limit_s
    slots = of_slots(problem, placement, split_LEG)
    domain_LGS = _domain(placement, problem.ranks, num_experts=problem.num_experts)
    candidates = [slots_in_order(slots)]
    is_drawn = slots.scatter_BWLE is not None
    candidates.append(
        search(
            slots,
            time_limit_s=time_limit_s * (1.0 - DRAWS_RATIO * is_drawn),
            most_steps=most_steps,
            start=candidates[0],
            caution=LOADS_CAUTION,
            domain_LGE=domain_LGS,
        )
    )
    if is_drawn:
        left_s = max(deadline_s - time.perf_counter(), 0.0)
        drawn = with_draws(slots)
        candidates.append(
            search(
                drawn,
                time_limit_s=left_s,
                most_steps=most_steps,
                start=candidates[-1],
                domain_LGE=domain_LGS,
            )
        )
    times = np.stack([drawn_times(slots, one) for one in candidates])
    slot_LS = best_layers(slots, candidates, times).expert_LS
    return Placement(expert_LS=np.take_along_axis(placement.expert_LS, slot_LS, axis=1))


def table_times(problem: BalanceProblem, placement: Placement, split_LEG: Floats) -> Floats:
    """Time of the most-loaded rank under a table, [W][L]; its mean over loads of other passes."""
    slots = of_slots(problem, placement, split_LEG)
    return drawn_times(slots, slots_in_order(slots))


def slots_in_order(slots: BalanceProblem) -> Placement:
    """Return the placement of `of_slots` that moves no expert."""
    order_LS = np.tile(np.arange(slots.ranks.num_slots), (slots.num_layers, 1))
    return Placement(expert_LS=order_LS)


def of_slots(problem: BalanceProblem, placement: Placement, split_LEG: Floats) -> BalanceProblem:
    """Return the problem with every slot as an expert of one replica."""
    ranks, layer_L1 = problem.ranks, np.arange(problem.num_layers)[:, None]
    held_LEG = np.zeros_like(split_LEG)
    np.add.at(held_LEG, (layer_L1, placement.expert_LS, ranks.rank_S[None]), 1.0)
    cell = (layer_L1, placement.expert_LS, ranks.rank_S[None])
    share_LS = split_LEG[cell] / held_LEG[cell]

    def taken(of_XLE: Floats, factor_LS: Floats) -> Floats:
        return np.asarray(of_XLE[..., layer_L1, placement.expert_LS] * factor_LS)

    scatter, variance = problem.scatter_BWLE, problem.variance_WLE
    return dataclasses.replace(
        problem,
        dispatch=ReplicaDispatch.NEAR,
        migration=None,
        load_WLE=taken(problem.load_WLE, share_LS),
        variance_WLE=None if variance is None else taken(variance, np.square(share_LS)),
        scatter_BWLE=None if scatter is None else taken(scatter, share_LS),
    )


def _domain(placement: Placement, ranks: Ranks, *, num_experts: int) -> npt.NDArray[np.bool_]:
    """Ranks that each slot's expert may go to, [L][G][S]."""
    layer_L1 = np.arange(len(placement.expert_LS))[:, None]
    node_S = ranks.node_G[ranks.rank_S]
    held_LNE = np.zeros((len(layer_L1), ranks.num_nodes, num_experts), dtype=np.int64)
    np.add.at(held_LNE, (layer_L1, node_S[None], placement.expert_LS), 1)
    copies_LS = held_LNE.sum(axis=1)[layer_L1, placement.expert_LS]
    is_spread_LS = (held_LNE.max(axis=1)[layer_L1, placement.expert_LS] == 1) & (copies_LS > 1)
    is_own_GS = ranks.rank_S == np.arange(ranks.num_ranks)[:, None]
    is_near_GS = node_S == ranks.node_G[:, None]
    return np.asarray((copies_LS == 1)[:, None] | is_own_GS | (is_spread_LS[:, None] & is_near_GS))


def search_on_table(
    problem: BalanceProblem, bases: Sequence[Placement], *, seed: int, time_limit_s: float
) -> Placement:
    """Return the best placement found for a launch whose seed is known.

    Layer by layer, as the streams run: the layer of a base, or of one with its nodes in another
    order, whose slots pack best by the largest-first rule under the table that it gets behind the
    layers before; then all layers are repacked. A few orders are tried, not those that a table
    would be hunted among.

    Args:
        problem: whose loads are spread.
        bases: placements of all layers, the best of which stays where nothing better is found.
        seed: of the engine's streams.
        time_limit_s: for all of it.
    """
    deadline_s = time.perf_counter() + CHOICE_RATIO * time_limit_s
    ranks, streams = problem.ranks, Streams(seed, num_ranks=problem.ranks.num_ranks)
    load_LE = planning_loads(problem)
    rows, splits = [], []
    for layer in range(problem.num_layers):
        share_s = (deadline_s - time.perf_counter()) / (problem.num_layers - layer)
        until_s = time.perf_counter() + share_s
        tried = []
        for row_S in _variants([base.expert_LS[layer] for base in bases], ranks, layer=layer):
            after = streams.copy()
            split_EG = _layer_split(row_S, load_LE.shape[1], ranks=ranks, streams=after)
            tried.append((row_S, split_EG, after))
            if time.perf_counter() >= until_s:
                break
        candidates = Placement(expert_LS=np.stack([row_S for row_S, _, _ in tried]))
        split_TEG = np.stack([split_EG for _, split_EG, _ in tried])
        best = int(_largest_first(candidates, split_TEG, load_LE[layer], ranks=ranks).argmin())
        row_S, split_EG, streams = tried[best]
        rows.append(row_S)
        splits.append(split_EG)
    chosen, split_LEG = Placement(expert_LS=np.stack(rows)), np.stack(splits)
    left_s = max(deadline_s - time.perf_counter(), 0.0) + (1.0 - CHOICE_RATIO) * time_limit_s
    placements = [repacked(problem, chosen, split_LEG, time_limit_s=left_s), *bases]
    values = [
        value_of(problem, table_times(problem, one, _split(problem, one, seed=seed)))
        for one in placements
    ]
    values[0] += LEAST_GAIN
    return placements[int(np.argmin(values))]


def _split(problem: BalanceProblem, placement: Placement, *, seed: int) -> Floats:
    load_PLE = problem.load_WLE
    case = DispatchCase(load_PLE=load_PLE, placement=placement, ranks=problem.ranks, seed=seed)
    return split(case)


def _variants(rows: Sequence[Ints], ranks: Ranks, *, layer: int) -> Iterator[Ints]:
    """Yield a layer of every base, then the same with equal nodes in other orders."""
    yield from rows
    slots_G, node_G = ranks.slots_G, ranks.node_G
    shape_N = [tuple(slots_G[node_G == node]) for node in range(ranks.num_nodes)]
    if ranks.num_nodes == 1 or len(set(shape_N)) > 1 or (np.diff(node_G) < 0).any():
        return
    rng = np.random.default_rng((SEED, layer))
    for _ in range(ORDERS):
        order_N = rng.permutation(ranks.num_nodes)
        for row_S in rows:
            yield row_S.reshape(ranks.num_nodes, -1)[order_N].ravel()


def _layer_split(expert_S: Ints, num_experts: int, *, ranks: Ranks, streams: Streams) -> Floats:
    """Return the share of each expert's tokens that each rank takes, [E][G]."""
    split_EG = np.zeros((num_experts, ranks.num_ranks))
    split_EG[expert_S, ranks.rank_S] = 1.0
    for expert, target_H in layer_targets(expert_S, ranks=ranks, streams=streams):
        split_EG[expert] = np.bincount(target_H, minlength=ranks.num_ranks) / ranks.num_ranks
    return split_EG


def _largest_first(
    candidates: Placement, split_TEG: Floats, load_E: Floats, *, ranks: Ranks
) -> Floats:
    """Largest rank time of one layer when slots are packed largest first, [T].

    Every row of the placement is another try; slots that may go to few ranks are packed first.
    """
    expert_TS, row_T1 = candidates.expert_LS, np.arange(len(split_TEG))[:, None]
    domain_TGS = _domain(candidates, ranks, num_experts=len(load_E))
    share_TS = split_TEG[row_T1, expert_TS, ranks.rank_S[None]]
    reach_TS = domain_TGS.sum(axis=1)
    cost_TS = load_E[expert_TS] * share_TS
    order_TS = np.lexsort((-cost_TS, reach_TS), axis=1)
    row_T = row_T1[:, 0]
    time_TG = np.zeros((len(row_T), ranks.num_ranks))
    free_TG = np.tile(ranks.slots_G, (len(row_T), 1))
    for slot_T in order_TS.T:
        cost_T = cost_TS[row_T, slot_T]
        is_open_TG = domain_TGS[row_T, :, slot_T] & (free_TG > 0)
        done_TG = np.where(is_open_TG, time_TG + cost_T[:, None] / ranks.speed_G, np.inf)
        rank_T = done_TG.argmin(axis=1)
        time_TG[row_T, rank_T] += cost_T / ranks.speed_G[rank_T]
        free_TG[row_T, rank_T] -= 1
    return np.asarray(time_TG.max(axis=1))
