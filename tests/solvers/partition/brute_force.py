"""Try everything: the oracle that every other method must meet on tiny instances; for tests only.

Every order of every choice of pools, every number of stages of each, every way to cut the layers.
"""

import itertools
from collections.abc import Iterator

from solvers.partition import check
from solvers.partition.problem import Partition, PartitionProblem, PartitionStage
from solvers.result import Claim
from tests.solvers.exhaustion import best_of


def solve(problem: PartitionProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Partition]:
    """Return the best allowed partition, or the proof that there is none."""
    return best_of(
        partitions(problem),
        violations=lambda each: check.violations(problem, each),
        objective=lambda each: check.objective(problem, each),
    )


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
