"""Try everything: the oracle that every other method must meet on tiny instances; for tests only.

Every order of every choice of pools, every number of stages of each, every way to cut the layers.
"""

import itertools
import math
from collections.abc import Iterator

from solvers.partition import check
from solvers.partition.problem import Partition, PartitionProblem, PartitionStage
from solvers.result import Claim, Status


def solve(problem: PartitionProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Partition]:
    """Return the best allowed partition, or the proof that there is none."""
    best, best_objective = None, math.inf
    for partition in partitions(problem):
        if check.violations(problem, partition):
            continue
        value = check.objective(problem, partition)
        if value < best_objective:
            best, best_objective = partition, value
    status = Status.INFEASIBLE if best is None else Status.OPTIMAL
    return Claim(status=status, solution=best, bound=best_objective)


def partitions(problem: PartitionProblem) -> Iterator[Partition]:
    """Every chain of stretches of pools with every cut of the layers, allowed or not."""
    for chain in _chains(problem):
        for inner in itertools.combinations(range(1, problem.num_layers), len(chain) - 1):
            ends = itertools.pairwise((0, *inner, problem.num_layers))
            yield Partition(
                stages=tuple(
                    PartitionStage(pool=pool, layers=stop - start)
                    for pool, (start, stop) in zip(chain, ends, strict=True)
                )
            )


def _chains(problem: PartitionProblem) -> Iterator[tuple[int, ...]]:
    for count in range(1, problem.num_pools + 1):
        for order in itertools.permutations(range(problem.num_pools), count):
            for lengths in itertools.product(
                *(range(1, problem.max_stages_P[pool] + 1) for pool in order)
            ):
                if sum(lengths) <= problem.num_layers:
                    yield tuple(
                        pool
                        for pool, length in zip(order, lengths, strict=True)
                        for _ in range(length)
                    )
