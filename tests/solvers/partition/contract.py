"""What partitions of a model over pools are held to, tests/solvers/contract.py."""

from collections.abc import Iterable

import numpy as np

from solvers import registry
from solvers.partition.problem import Partition, PartitionProblem
from solvers.result import Outcome, Status
from tests.solvers.contract import Contract
from tests.solvers.partition import brute_force
from tests.solvers.partition.testing import tiny_problem, two_pools


def _features(problem: PartitionProblem, best: Outcome[Partition]) -> Iterable[str]:
    yield f"pools {problem.num_pools}"
    if np.isinf(problem.hop_s_PP).any():
        yield "cut links"
    if best.solution is None:
        return
    used = {stage.pool for stage in best.solution.stages}
    yield "several pools used" if len(used) > 1 else "one pool used"
    if len(used) < problem.num_pools:
        yield "a pool left alone"
    if len(best.solution.stages) > 2:
        yield "several stages"


def _broken(problem: PartitionProblem, partition: Partition) -> Partition:
    return Partition(stages=(*partition.stages, partition.stages[-1]))


PARTITION = Contract(
    family=registry.PARTITION,
    draw=lambda seed: tiny_problem(np.random.default_rng(seed)),
    oracle=brute_force.solve,
    first=(
        *(2, 6, 7, 10, 12, 18, 23, 28, 31, 39, 40, 47),
        *(51, 52, 58, 59),
    ),
    count=60,
    features=_features,
    expected=frozenset(
        {
            *("pools 1", "pools 2", "pools 3", "optimal", "infeasible", "cut links"),
            *("several pools used", "a pool left alone", "several stages"),
        }
    ),
    often=5,
    exact=frozenset({"exact"}),
    broken=_broken,
    large=two_pools,
    hurried={"exact": (Status.OPTIMAL, Status.UNKNOWN)},
)
