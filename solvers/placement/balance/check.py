"""Recompute what a placement is worth and name every rule it breaks; trusts no backend.

Plain Python numbers and loops on purpose: the definitions of `problem.py`, read line by line. Only
the launches of a dispatch that puts near replicas first are arrays; their distribution is computed
independently in `dispatch_law.py`, which no backend uses.
"""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Final

import numpy as np

from solvers.placement.balance.dispatch_law import expected_ratios, launched_ratios
from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch, Robust
from solvers.placement.ranks import Floats, Placement, Ranks

LAUNCHES = 32
"""Draws of static dispatch that a placement is evaluated by."""

LAUNCH_SEED = 0
"""Seed of the static-dispatch draws that certify a placement; no search uses it."""

CHOICE_SEED = 20_233
"""Seed of the launches that candidates are compared by."""


def violations(problem: BalanceProblem, placement: Placement) -> tuple[str, ...]:
    """Every broken rule as one line with its numbers; empty when the placement is allowed."""
    broken_shape = tuple(_shape_violations(problem, placement))
    if broken_shape:
        return broken_shape
    return (*_expert_violations(problem, placement), *_migration_violations(problem, placement))


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
    if problem.dispatch.is_near:
        return np.asarray(launch_times(problem, placement, seed=seed).max(axis=3).mean(axis=0))
    return np.asarray(rank_times(problem, placement).max(axis=2))


def rank_times(problem: BalanceProblem, placement: Placement) -> Floats:
    """Time of every rank, [W][L][G]; its mean over launches where dispatch is random."""
    if problem.dispatch.is_near:
        return np.asarray(launch_times(problem, placement).mean(axis=0))
    num_ranks = problem.ranks.num_ranks
    rank_S, speed_G = problem.ranks.rank_S.tolist(), problem.ranks.speed_G.tolist()
    times = np.zeros((problem.num_workloads, problem.num_layers, num_ranks))
    for layer, expert_S in enumerate(placement.expert_LS.tolist()):
        copies = Counter(expert_S)
        for workload in range(problem.num_workloads):
            load_E = problem.load_WLE[workload, layer].tolist()
            work_G = [0.0] * num_ranks
            for rank, expert in zip(rank_S, expert_S, strict=True):
                share = load_E[expert] / copies[expert]
                work_G[rank] += share + problem.active_load * (1.0 - math.exp(-share))
            times[workload, layer] = [
                work / speed for work, speed in zip(work_G, speed_G, strict=True)
            ]
    return times


def launch_times(
    problem: BalanceProblem, placement: Placement, *, seed: int = LAUNCH_SEED
) -> Floats:
    """Time of every rank in so many launches, [D][W][L][G]; one where none differs from another.

    Far ranks are assigned replicas by a seed that no method draws from.
    """
    num_ranks = problem.ranks.num_ranks
    launches = LAUNCHES if problem.dispatch is ReplicaDispatch.STATIC else 1
    work = np.zeros((launches, problem.num_workloads, problem.num_layers, num_ranks))
    single_LE = placement.copies_LE(problem.num_experts) == 1
    cost_WLE = single_LE * _cost(problem, problem.load_WLE)
    cost_WLS = np.take_along_axis(cost_WLE, placement.expert_LS[None], axis=2)
    for rank in range(num_ranks):
        work[:, :, :, rank] = cost_WLS[:, :, problem.ranks.rank_S == rank].sum(axis=2)
    for layer, expert, ratio_DG in _ratios(problem, placement, launches, seed):
        load_DWG = ratio_DG[:, None] * problem.load_WLE[:, layer, expert, None]
        work[:, :, layer] += _cost(problem, load_DWG)
    return np.asarray(work / problem.ranks.speed_G)


def _cost(problem: BalanceProblem, loads: Floats) -> Floats:
    if problem.active_load == 0.0:
        return loads
    return np.asarray(loads - problem.active_load * np.expm1(-loads))


def _ratios(
    problem: BalanceProblem, placement: Placement, launches: int, seed: int
) -> Iterator[tuple[int, int, Floats]]:
    """Shares of every replicated expert that ranks take, [D][G]."""
    if problem.dispatch is ReplicaDispatch.NEAR:
        for layer, expert, ratios in expected_ratios(placement, problem.ranks):
            yield layer, expert, np.array([ratios])
        return
    yield from _kept_launches(placement, problem.ranks, launches, seed)


MOST_KEPT: Final = 6
"""Placements whose launches are cached; of 58 layers of 288 slots on 32 ranks 20 MB each."""

_KEPT: Final[OrderedDict[bytes, list[tuple[int, int, Floats]]]] = OrderedDict()


def _kept_launches(
    placement: Placement, ranks: Ranks, launches: int, seed: int
) -> list[tuple[int, int, Floats]]:
    digest = hashlib.blake2b(f"{placement.expert_LS.shape} {launches} {seed}".encode())
    for array in (placement.expert_LS, ranks.slots_G, ranks.node_G):
        digest.update(np.ascontiguousarray(array).tobytes())
    key = digest.digest()
    if key not in _KEPT:
        drawn = launched_ratios(placement, ranks, seed=seed, launches=launches)
        _KEPT[key] = [(layer, expert, ratio_DG) for layer, expert, ratio_DG in drawn]
        if len(_KEPT) > MOST_KEPT:
            _KEPT.popitem(last=False)
    return _KEPT[key]


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


def _shape_violations(problem: BalanceProblem, placement: Placement) -> Iterator[str]:
    expected = (problem.num_layers, problem.ranks.num_slots)
    if placement.expert_LS.shape != expected:
        layers, slots = placement.expert_LS.shape
        yield (
            f"{layers} layers of {slots} slots are placed, the problem has {expected[0]} layers of"
            f" {expected[1]}"
        )


def _expert_violations(problem: BalanceProblem, placement: Placement) -> Iterator[str]:
    experts = range(problem.num_experts)
    for layer, expert_S in enumerate(placement.expert_LS.tolist()):
        for slot, expert in enumerate(expert_S):
            if expert not in experts:
                yield f"slot {slot} of layer {layer} holds expert {expert} of {len(experts)}"
        missing = sorted(set(experts).difference(expert_S))
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
