"""Our own exact method: shortest paths over cuts and stages used, walked down along the bottleneck.

A state is how many stages of each pool the end of the chain already has, which pool its first stage
is in, and the layer where that stage begins. Building the chain from its end, a new stage knows how
many follow it, hence how many micro-batches it holds, so memory is settled stage by stage; a pool
may be entered only if none of its stages was used, which keeps it in one stretch. Under a ceiling
on stage and hop times the smallest total is a shortest path over these states. The ceiling walks
down the Pareto front of (total, slowest): each path's slowest is the next ceiling, or less where
the best partition so far leaves less room. The walk ends when not even the smallest possible
slowest, under the totals still to come, can beat that partition, as in `solvers/layout/exact.py`.

O(prod_p (max_p + 1) P^2 L^2) per path. Proves optimality and infeasibility; when time runs out the
claim is FEASIBLE with the walk's bound, or UNKNOWN before the first path.

Letters: P pools, A and B cut points 0..L, K numbers of stages used, one tuple per state.
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.partition.problem import Partition, PartitionProblem, PartitionStage, Seconds
from solvers.result import Claim, Status

Used = tuple[int, ...]
"""Stages of each pool in the end of the chain that is already built."""

Join = Callable[[Seconds, Seconds], Seconds]
"""How a new stage's cost and that of the chain behind it combine: their sum, or the larger."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Path:
    """A chain with what it costs."""

    objective: float
    total_s: float
    slowest_s: float
    partition: Partition


class _OutOfTimeError(Exception):
    """The deadline passed inside a path; nothing of that path is known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tables:
    """Every interval of layers on every pool, by how many micro-batches are in flight."""

    problem: PartitionProblem
    time_s_PAB: Seconds
    """`inf` where the interval is empty."""
    fits_FPAB: npt.NDArray[np.bool_]
    """Whether it fits with F + 1 micro-batches in flight."""
    deadline_s: float


def solve(problem: PartitionProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Partition]:
    """Return the proven optimum, or what was found and proven in time."""
    tables = _tables(problem, deadline_s=time.perf_counter() + time_limit_s)
    best: _Path | None = None
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
        held_PL = problem.static_bytes_PL + (flight + 1) * problem.saved_bytes_PL
        after_PA = np.zeros((pools, layers + 1), dtype=np.int64)
        after_PA[:, 1:] = np.cumsum(held_PL, axis=1)
        needed_PAB = after_PA[:, None, :] - after_PA[:, :, None]
        fits_FPAB[flight] = needed_PAB <= problem.memory_limit_bytes_P[:, None, None]
    return _Tables(
        problem=problem, time_s_PAB=time_s_PAB, fits_FPAB=fits_FPAB, deadline_s=deadline_s
    )


def _cheapest_under(tables: _Tables, ceiling_s: float) -> _Path:
    """The smallest total when nothing may take longer than the ceiling."""
    problem = tables.problem
    total_s, partition = _best_chain(tables, ceiling_s=ceiling_s, is_bottleneck=False)
    if partition is None:
        # Nothing is left below the ceiling: every total still to come is infinite.
        return _Path(
            objective=math.inf,
            total_s=math.inf,
            slowest_s=ceiling_s,
            partition=Partition(stages=()),
        )
    slowest_s = _slowest_s(tables, partition)
    return _Path(
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
    pools, points = problem.num_pools, problem.num_layers + 1
    join: Join = np.maximum if is_bottleneck else np.add
    hop_s_PP = np.where(problem.hop_s_PP <= ceiling_s, problem.hop_s_PP, math.inf)
    both_ways_s_PP = hop_s_PP if is_bottleneck else 2.0 * hop_s_PP
    stage_s_PAB = np.where(tables.time_s_PAB <= ceiling_s, tables.time_s_PAB, math.inf)
    # cost[used][pool, a]: layers a.. on a chain that uses these stages and begins in the pool
    cost: dict[Used, Seconds] = {}
    choice: dict[Used, npt.NDArray[np.int64]] = {}
    best, best_end = math.inf, None
    for used in sorted(_counts(problem), key=sum):
        if time.perf_counter() >= tables.deadline_s:
            raise _OutOfTimeError
        cost[used] = np.full((pools, points), math.inf)
        choice[used] = np.full((pools, points, 2), -1, dtype=np.int64)
        flight = problem.in_flight(sum(used) - 1) - 1
        for pool in np.flatnonzero(used):
            stage_s_AB = np.where(tables.fits_FPAB[flight, pool], stage_s_PAB[pool], math.inf)
            before = tuple(n - (p == pool) for p, n in enumerate(used))
            if not any(before):
                cost[used][pool] = stage_s_AB[:, -1]
                choice[used][pool, :, 1] = points - 1
                continue
            for behind in _behind(before, int(pool)):
                rest_s_B = join(cost[before][behind], both_ways_s_PP[pool, behind])
                whole_s_AB = join(stage_s_AB, rest_s_B[None, :])
                end_A = whole_s_AB.argmin(axis=1)
                found_s_A = whole_s_AB[np.arange(points), end_A]
                better_A = found_s_A < cost[used][pool]
                cost[used][pool][better_A] = found_s_A[better_A]
                choice[used][pool][better_A, 0] = behind
                choice[used][pool][better_A, 1] = end_A[better_A]
        first = int(cost[used][:, 0].argmin())
        if cost[used][first, 0] < best:
            best, best_end = float(cost[used][first, 0]), (used, first)
    return best, None if best_end is None else _traced(choice, *best_end)


def _counts(problem: PartitionProblem) -> list[Used]:
    ranges = [range(most + 1) for most in problem.max_stages_P]
    return [used for used in itertools.product(*ranges) if 0 < sum(used) <= problem.max_stages]


def _behind(before: Used, pool: int) -> list[int]:
    """Pools that the next stage can be in: the same, or any where this pool is entered anew."""
    return [pool] if before[pool] else [p for p, n in enumerate(before) if n]


def _traced(choice: dict[Used, npt.NDArray[np.int64]], used: Used, pool: int) -> Partition:
    stages: list[PartitionStage] = []
    start = 0
    while True:
        behind, end = choice[used][pool, start].tolist()
        stages.append(PartitionStage(pool=pool, layers=end - start))
        if behind < 0:
            return Partition(stages=tuple(stages))
        used = tuple(n - (p == pool) for p, n in enumerate(used))
        pool, start = behind, end
