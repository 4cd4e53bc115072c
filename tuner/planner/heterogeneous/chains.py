"""The best chain of stages for one column over given pools: the solver's, checked in full.

The solver (solvers/partition) minimises sum C + 2 sum X' + (m - 1) max(C, X'). What a chain pays
(stage_prices.py) is more than sum D + 2 sum X + (m - 1) max(D, X), and both parts beyond are handed
to the solver as far as that leaves its optimum a bound:

- A send over cut c also holds up every further micro-batch by 2 X / p, and p stages are at most
  those that all devices suffice for. X' = min(X (1 + (m - 1) / p_most), max(X, least pace)) never
  exceeds what the chain pays, and equals it where all devices are used.
- Once a step a stage pays at least a fixed part and w per layer (bounds.py). With n layers,
  C = D + n w / (m - 1 + p_most) adds at most the largest n w to the optimum.

The optimum and the least fixed part bound every chain of the column. Where the full price of the
memory finds a stage too full, the limit of its pool is lowered by the excess and the problem solved
again; the bound stays the first one.

Letters: P the chosen pools, S stages.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from solvers.partition.problem import Partition, PartitionProblem
from solvers.registry import PARTITION
from tuner.formulate.heterogeneous import PoolPrices, partition_problem
from tuner.planner.analytic.candidates import Candidates
from tuner.planner.heterogeneous.bounds import OnceParts, most_stages
from tuner.planner.heterogeneous.space import Pools
from tuner.planner.heterogeneous.stage_prices import (
    ChainPrice,
    Floats,
    LayerBytes,
    OnPool,
    chain_price,
    pool_prices,
)
from tuner.spec.cluster import Cluster

TIGHTENINGS: Final = 4
"""How often limits are lowered before a column is given up."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """One column over the chosen pools, with what the solver is told about it."""

    candidate: Candidates
    """A single one."""
    chosen: Pools
    """Positions of the pools in the cluster."""
    pools: tuple[OnPool, ...]
    bytes_of: tuple[LayerBytes, ...]
    once_of: tuple[OnceParts, ...]
    least_pace_s: float
    """Of every chain (bounds.py)."""

    @property
    def num_microbatches(self) -> int:
        """Of one pipeline, m."""
        return int(np.ravel(self.pools[0].strategies.num_microbatches)[0])

    def on(self, index: int) -> OnPool:
        """Price it on a pool, by position in the cluster."""
        return self.pools[self.chosen.index(index)]

    @property
    def most_stages(self) -> int:
        """Stages that the devices suffice for."""
        return int(most_stages(self.pools)[0])

    @property
    def least_fixed_s(self) -> float:
        """Paid once a step whatever the chain."""
        return min(float(once.fixed_C[0]) for once in self.once_of)

    @property
    def solver_prices(self) -> list[PoolPrices]:
        """Layers as the solver sees them."""
        share = 1.0 / (self.num_microbatches - 1 + self.most_stages)
        return [
            pool_prices(on, part, more_s_K=once.per_layer_KC[:, 0] * share)
            for on, part, once in zip(self.pools, self.bytes_of, self.once_of, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """One column with its stages."""

    column: Column
    pool_S: tuple[int, ...]
    """Position in the cluster of every stage's pool."""
    layers_S: tuple[int, ...]
    price: ChainPrice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """What is known of a column over some pools."""

    chain: Chain | None
    bound_s: float
    """No chain of the column is faster; infinite where none fits."""


def solved(column: Column, cluster: Cluster, *, method: str, time_limit_s: float) -> Solved:
    """Find the best chain of one column over its pools.

    Args:
        column: what to solve.
        cluster: all pools.
        method: of solvers/registry.py.
        time_limit_s: for one call of the solver.
    """
    between_s, problem = _problem(column, _part(cluster, column.chosen))
    bounds_s = []
    for _ in range(TIGHTENINGS + 1):
        outcome = PARTITION.solve(problem, method=method, time_limit_s=time_limit_s)
        bounds_s.append(outcome.bound + column.least_fixed_s)
        if outcome.solution is None:
            break
        price = _priced(outcome.solution, column.pools, between_s)
        excess = _excess_bytes(outcome.solution, price, column.pools)
        if not any(excess):
            chain = Chain(
                column=column,
                pool_S=tuple(column.chosen[stage.pool] for stage in outcome.solution.stages),
                layers_S=tuple(stage.layers for stage in outcome.solution.stages),
                price=price,
            )
            return Solved(chain=chain, bound_s=bounds_s[0])
        problem = replace(
            problem,
            memory_limit_bytes_P=np.maximum(problem.memory_limit_bytes_P - np.array(excess), 0),
        )
    return Solved(chain=None, bound_s=bounds_s[0])


def _part(cluster: Cluster, chosen: Pools) -> Cluster:
    pools = tuple(cluster.pools[index] for index in chosen)
    names = {pool.name for pool in pools}
    return Cluster(
        pools=pools, links=tuple(link for link in cluster.links if names >= set(link.between))
    )


def _problem(column: Column, cluster: Cluster) -> tuple[Floats, PartitionProblem]:
    """Seconds between pools, and the problem."""
    pools, m = column.pools, column.num_microbatches
    prices = column.solver_prices
    sent_bytes = float(pools[0].memory.boundary_C[0]) * prices[0].stage_devices
    problem = partition_problem(cluster, prices, boundary_bytes=sent_bytes, num_microbatches=m)
    visible = np.array([float(on.question.constants.boundary_exposed_ratio) for on in pools])
    between_s = problem.hop_s_PP * np.maximum.outer(visible, visible)
    # The nearest two stages of a pool can be.
    np.fill_diagonal(between_s, [float(np.ravel(on.send_s(stages=2))[0]) for on in pools])
    every_s = between_s * (1.0 + (m - 1) / column.most_stages)
    capped_s = np.minimum(every_s, np.maximum(between_s, column.least_pace_s))
    return between_s, replace(problem, hop_s_PP=capped_s)


def _priced(partition: Partition, pools: Sequence[OnPool], between_s: Floats) -> ChainPrice:
    return chain_price(
        pools,
        pool_S=[stage.pool for stage in partition.stages],
        layers_S=[stage.layers for stage in partition.stages],
        between_s=between_s,
    )


def _excess_bytes(
    partition: Partition, price: ChainPrice, pools: Sequence[OnPool]
) -> tuple[int, ...]:
    """Bytes by which the fullest stage of each pool exceeds its devices."""
    excess = [0] * len(pools)
    for stage, needed in zip(partition.stages, price.bytes_S, strict=True):
        over = math.ceil(needed - pools[stage.pool].question.memory_limit_bytes)
        excess[stage.pool] = max(excess[stage.pool], over)
    return tuple(excess)


def stretches(pool_S: Sequence[int]) -> list[tuple[int, int]]:
    """Pools in execution order with the number of their stages."""
    return [(pool, len(list(stages))) for pool, stages in itertools.groupby(pool_S)]
