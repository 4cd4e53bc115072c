"""Our own exact method: shortest paths over cuts and stages used, walked down along the bottleneck.

A state is how many stages of each pool the end of the chain already has, which pool its first stage
is in, and the layer where that stage begins. Building the chain from its end, a new stage knows how
many follow it, hence how many micro-batches it holds, so memory is settled stage by stage; a pool
may be entered only if none of its stages was used, which keeps it in one stretch. Under a ceiling
on stage and hop times the smallest total is a shortest path over these states. The ceiling walks
down the Pareto front of (total, slowest): each path's slowest is the next ceiling, or less where
the best partition so far leaves less room. The walk ends when not even the smallest possible
slowest, under the totals still to come, can beat that partition, as in `solvers/layout/exact.py`.

O(prod_p (max_p + 1) P^2 L^2) per path, all chains of one length at once. Proves optimality and
infeasibility; when time runs out the claim is FEASIBLE with the walk's bound, or UNKNOWN before the
first path.

Letters: P pools, A and B cut points 0..L, K numbers of stages used, one tuple per state.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.partition.problem import Partition, PartitionProblem, PartitionStage, Seconds
from solvers.result import Claim, Status

Ints = npt.NDArray[np.int64]

Used = tuple[int, ...]
"""Stages of each pool in the end of the chain that is already built."""

Join = Callable[[Seconds, Seconds], Seconds]
"""Function that combines a new stage's cost with that of the chain behind it: sum or maximum."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PricedChain:
    """A chain with its cost."""

    objective: float
    total_s: float
    slowest_s: float
    partition: Partition


class _OutOfTimeError(Exception):
    """The deadline passed inside a path; nothing of that path is known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """One more stage, of one pool, before chains that begin in one pool and are equally long."""

    pool: int
    behind: int
    """Pool of the stage after it; -1 where it is the last of the chain."""
    flight: int
    new_K: Ints
    """Stages used with it, by position in `used_K`."""
    old_K: Ints
    """Stages used without it, by position in `used_K`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tables:
    """Every interval of layers on every pool, by how many micro-batches are in flight."""

    problem: PartitionProblem
    time_s_PAB: Seconds
    """Seconds of the interval on the pool; `inf` where the interval is empty."""
    fits_FPAB: npt.NDArray[np.bool_]
    """The interval fits with F + 1 micro-batches in flight."""
    used_K: tuple[Used, ...]
    """Numbers of stages used by pool, those of shorter chains first."""
    steps: tuple[_Step, ...]
    deadline_s: float


def solve(problem: PartitionProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Partition]:
    """Return the proven optimum, or what was found and proven in time."""
    tables = _tables(problem, deadline_s=time.perf_counter() + time_limit_s)
    best: _PricedChain | None = None
    bound = -math.inf
    try:
        smallest_s, _ = _best_chain(tables, ceiling_s=math.inf, is_bottleneck=True)
        if math.isinf(smallest_s):
            return Claim(status=Status.INFEASIBLE, solution=None, bound=math.inf)
        best = _cheapest_under(tables, smallest_s)
        ceiling_s = math.inf
        repeats = problem.num_microbatches - 1
        while True:
            path = _cheapest_under(tables, ceiling_s)
            best = path if path.objective < best.objective else best
            bound = path.total_s + repeats * smallest_s
            if bound >= best.objective:
                return Claim(status=Status.OPTIMAL, solution=best.partition, bound=best.objective)
            room_s = (best.objective - path.total_s) / repeats
            ceiling_s = min(float(np.nextafter(path.slowest_s, 0.0)), room_s)
    except _OutOfTimeError:
        if best is None:
            return Claim(status=Status.UNKNOWN, solution=None, bound=-math.inf)
        return Claim(status=Status.FEASIBLE, solution=best.partition, bound=bound)


def _tables(problem: PartitionProblem, *, deadline_s: float) -> _Tables:
    layers, pools = problem.num_layers, problem.num_pools
    after_s_PA = np.zeros((pools, layers + 1))
    after_s_PA[:, 1:] = np.cumsum(problem.time_s_PL, axis=1)
    time_s_PAB = np.maximum(after_s_PA[:, None, :] - after_s_PA[:, :, None], 0.0)
    empty_AB = np.tri(layers + 1, dtype=bool)
    time_s_PAB[:, empty_AB] = math.inf
    flights = min(problem.max_stages, problem.num_microbatches)
    fits_FPAB = np.empty((flights, pools, layers + 1, layers + 1), dtype=bool)
    for flight in range(flights):
        resident_PL = problem.static_bytes_PL + (flight + 1) * problem.saved_bytes_PL
        after_PA = np.zeros((pools, layers + 1), dtype=np.int64)
        after_PA[:, 1:] = np.cumsum(resident_PL, axis=1)
        needed_PAB = after_PA[:, None, :] - after_PA[:, :, None]
        fits_FPAB[flight] = needed_PAB <= problem.memory_limit_bytes_P[:, None, None]
    used_K = tuple(_counts(problem))
    return _Tables(
        problem=problem,
        time_s_PAB=time_s_PAB,
        fits_FPAB=fits_FPAB,
        used_K=used_K,
        steps=_steps(problem, used_K),
        deadline_s=deadline_s,
    )


def _cheapest_under(tables: _Tables, ceiling_s: float) -> _PricedChain:
    """The smallest total when nothing may take longer than the ceiling."""
    problem = tables.problem
    total_s, partition = _best_chain(tables, ceiling_s=ceiling_s, is_bottleneck=False)
    if partition is None:
        # Nothing is left below the ceiling: every total still to come is infinite.
        return _PricedChain(
            objective=math.inf,
            total_s=math.inf,
            slowest_s=ceiling_s,
            partition=Partition(stages=()),
        )
    slowest_s = _slowest_s(tables, partition)
    return _PricedChain(
        objective=total_s + (problem.num_microbatches - 1) * slowest_s,
        total_s=total_s,
        slowest_s=slowest_s,
        partition=partition,
    )


def _slowest_s(tables: _Tables, partition: Partition) -> float:
    slowest, start = 0.0, 0
    for stage in partition.stages:
        slowest = max(slowest, float(tables.time_s_PAB[stage.pool, start, start + stage.layers]))
        start += stage.layers
    for left, right in itertools.pairwise(partition.stages):
        slowest = max(slowest, float(tables.problem.hop_s_PP[left.pool, right.pool]))
    return slowest


def _best_chain(
    tables: _Tables, *, ceiling_s: float, is_bottleneck: bool
) -> tuple[float, Partition | None]:
    """The chain whose total, or whose slowest part, is smallest under the ceiling."""
    problem = tables.problem
    if not tables.used_K:
        return math.inf, None
    pools, points = problem.num_pools, problem.num_layers + 1
    join: Join = np.maximum if is_bottleneck else np.add
    hop_s_PP = np.where(problem.hop_s_PP <= ceiling_s, problem.hop_s_PP, math.inf)
    round_trip_s_PP = hop_s_PP if is_bottleneck else 2.0 * hop_s_PP
    stage_s_PAB = np.where(tables.time_s_PAB <= ceiling_s, tables.time_s_PAB, math.inf)
    # cost[used, pool, a]: layers a.. on a chain that uses these stages and begins in the pool
    cost_s_KPA = np.full((len(tables.used_K), pools, points), math.inf)
    behind_KPA = np.full(cost_s_KPA.shape, -1, dtype=np.int64)
    end_KPA = np.full(cost_s_KPA.shape, points - 1, dtype=np.int64)
    for step in tables.steps:
        if time.perf_counter() >= tables.deadline_s:
            raise _OutOfTimeError
        pool = step.pool
        stage_s_AB = np.where(tables.fits_FPAB[step.flight, pool], stage_s_PAB[pool], math.inf)
        if step.behind < 0:
            cost_s_KPA[step.new_K, pool] = stage_s_AB[:, -1]
            continue
        rest_s_KB = join(cost_s_KPA[step.old_K, step.behind], round_trip_s_PP[pool, step.behind])
        whole_s_KAB = join(stage_s_AB, rest_s_KB[:, None, :])
        end_KA = whole_s_KAB.argmin(axis=2)
        chain_s_KA = np.take_along_axis(whole_s_KAB, end_KA[:, :, None], axis=2)[:, :, 0]
        better_KA = chain_s_KA < cost_s_KPA[step.new_K, pool]
        at, layer = np.nonzero(better_KA)
        cost_s_KPA[step.new_K[at], pool, layer] = chain_s_KA[at, layer]
        behind_KPA[step.new_K[at], pool, layer] = step.behind
        end_KPA[step.new_K[at], pool, layer] = end_KA[at, layer]
    best, first = divmod(int(cost_s_KPA[:, :, 0].argmin()), pools)
    if math.isinf(cost_s_KPA[best, first, 0]):
        return math.inf, None
    chain = _traced(tables, behind_KPA, end_KPA, used=tables.used_K[best], pool=first)
    return float(cost_s_KPA[best, first, 0]), chain


def _steps(problem: PartitionProblem, used_K: Sequence[Used]) -> tuple[_Step, ...]:
    """Order all extensions of a chain by one stage, so that shorter chains come first."""
    place = {used: at for at, used in enumerate(used_K)}
    grouped: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for new, used in enumerate(used_K):
        for pool in (p for p, n in enumerate(used) if n):
            before = tuple(n - (p == pool) for p, n in enumerate(used))
            for behind in _behind(before, pool):
                pair = (new, place[before] if behind >= 0 else -1)
                grouped.setdefault((sum(used), pool, behind), []).append(pair)
    return tuple(
        _Step(
            pool=pool,
            behind=behind,
            flight=problem.in_flight(total - 1) - 1,
            new_K=np.array([new for new, _ in pairs]),
            old_K=np.array([old for _, old in pairs]),
        )
        for (total, pool, behind), pairs in sorted(grouped.items())
    )


def _counts(problem: PartitionProblem) -> list[Used]:
    ranges = [range(max_stages + 1) for max_stages in problem.max_stages_P]
    every = (used for used in itertools.product(*ranges) if 0 < sum(used) <= problem.max_stages)
    return sorted(every, key=sum)


def _behind(before: Used, pool: int) -> list[int]:
    """Pools that the next stage can be in: the same, or any where this pool is entered anew.

    -1 where there is no next stage.
    """
    if not any(before):
        return [-1]
    return [pool] if before[pool] else [p for p, n in enumerate(before) if n]


def _traced(
    tables: _Tables, behind_KPA: Ints, end_KPA: Ints, *, used: Used, pool: int
) -> Partition:
    place = {counts: at for at, counts in enumerate(tables.used_K)}
    stages: list[PartitionStage] = []
    start = 0
    while True:
        at = place[used]
        behind, end = int(behind_KPA[at, pool, start]), int(end_KPA[at, pool, start])
        stages.append(PartitionStage(pool=pool, layers=end - start))
        if behind < 0:
            return Partition(stages=tuple(stages))
        used = tuple(n - (p == pool) for p, n in enumerate(used))
        pool, start = behind, end
