"""Every placement of tiny problems, the oracle of the tests; shares only the checker.

    W workloads   L layers   E experts   S slots of a layer

Each layer's placements are listed (slots of one rank in ascending order, as their order there
changes nothing), reduced to those that no other beats in every workload's time and in moved
experts, and combined over the layers. Proves optimality. Exponential: E ** S a layer.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from solvers.placement.balance import check
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.ranks import Placement
from solvers.result import Claim
from tests.solvers.exhaustion import best_of

Row = tuple[int, ...]


def solve(problem: BalanceProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Placement]:
    """Return the best of all placements; takes as long as it takes."""
    del time_limit_s, threads
    layers = (list(_useful_rows(problem, layer)) for layer in range(problem.num_layers))
    return best_of(
        (
            Placement(expert_LS=np.array(rows, dtype=np.int64))
            for rows in itertools.product(*layers)
        ),
        violations=lambda each: check.violations(problem, each),
        objective=lambda each: check.objective(problem, each),
    )


def _useful_rows(problem: BalanceProblem, layer: int) -> Iterator[Row]:
    """The rows of one layer that no other row beats in all that counts."""
    alone = _only_layer(problem, layer)
    price_of: dict[tuple[float, ...], Row] = {}
    for row in _rows(problem):
        placement = Placement(expert_LS=np.array([row], dtype=np.int64))
        times = check.layer_times(alone, placement)[:, 0].tolist()
        price_of.setdefault((_moved(problem, layer, row), *times), row)
    for price, row in price_of.items():
        if not any(
            other != price and all(a <= b for a, b in zip(other, price, strict=True))
            for other in price_of
        ):
            yield row


def _rows(problem: BalanceProblem) -> Iterator[Row]:
    experts = range(problem.num_experts)
    on_ranks = (
        itertools.combinations_with_replacement(experts, int(slots))
        for slots in problem.ranks.slots_G
    )
    for parts in itertools.product(*on_ranks):
        row = tuple(itertools.chain.from_iterable(parts))
        if len(set(row)) == len(experts):
            yield row


def _moved(problem: BalanceProblem, layer: int, row: Row) -> int:
    if problem.migration is None:
        return 0
    rank_S = problem.ranks.rank_S.tolist()
    before = problem.migration.current.expert_LS[layer].tolist()
    return len(set(zip(rank_S, row, strict=True)) - set(zip(rank_S, before, strict=True)))


def _only_layer(problem: BalanceProblem, layer: int) -> BalanceProblem:
    load_WLE = problem.load_WLE[:, layer : layer + 1].copy()
    return dataclasses.replace(problem, load_WLE=load_WLE, migration=None)
