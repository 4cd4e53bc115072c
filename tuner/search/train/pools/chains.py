"""The best chain of stages of one candidate over given pools: solved, then priced in full.

TP and CP stay inside a node and DP inside a pool, so that only the activations between stages cross
pools (the mapping of Holmes, arXiv:2312.03549). The solver (solvers/partition) decides which pool
runs which stages, and how many layers each. A cut carries the activations of one micro-batch of
every replica. Inside a pool they use the NICs of all devices of a stage, between pools the stated
link, or the NICs where those are slower. Two pools without a link are not connected.

The solver minimises sum C + 2 sum X' + (m - 1) max(C, X'). The price of a chain (stage_prices.py)
exceeds sum D + 2 sum X + (m - 1) max(D, X) by two terms, which the solver gets as far as its
optimum stays a bound:

- A send over cut c also delays every further micro-batch by 2 X / p, and p is at most the number of
  stages that the devices suffice for. X' = min(X (1 + (m - 1) / p_most), max(X, least pace)) never
  exceeds the chain's price, and equals it where all devices are used.
- Once per step a stage pays at least a fixed part and w per layer (bounds.py). With n layers,
  C = D + n w / (m - 1 + p_most) adds at most the largest n w to the optimum.

The optimum plus the least fixed part bounds every chain of the candidate. If a stage exceeds its
memory at the full price, the limit of its pool is lowered by the excess and the problem is solved
again; the bound stays the first one.

Letters: P the chosen pools, L layers, S stages.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from profilers.steps.config import LayerKind
from solvers.partition.problem import Partition, PartitionProblem
from solvers.registry import PARTITION
from tuner.arrays import Floats
from tuner.config.shapes import taken
from tuner.costs.train.columns_of import nic_bytes_per_s
from tuner.errors import SpecError
from tuner.prices.peer_link import PeerLink
from tuner.search.train.candidates import Candidates
from tuner.search.train.pools.bounds import (
    OnceParts,
    least_pace_s,
    most_stages,
    once_parts,
    rooms_on,
    step_bound_s,
)
from tuner.search.train.pools.space import Pools
from tuner.search.train.pools.stage_prices import (
    DENSE,
    EMBEDDING,
    HEAD,
    MOE,
    MTP,
    ChainPrice,
    PoolPricing,
    StageBytes,
    chain_price,
    layer_bytes,
)
from tuner.spec.cluster import Cluster

TIGHTENINGS: Final = 4
"""Times that limits are lowered before a candidate is given up."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolPrices:
    """Costs of the layers on one pool, by the cost model."""

    stage_devices: int
    """Devices that one stage takes there: TP x CP x DP."""
    time_s_L: Floats
    """Forward and backward of one micro-batch; a step's gradient reduction are spread over its
    micro-batches."""
    static_bytes_L: Floats
    """Weights, gradients and optimizer state on one device."""
    saved_bytes_L: Floats
    """Activations on one device, per micro-batch in flight."""
    memory_limit_bytes: int
    """Usable bytes of one device."""
    nic_bytes_per_s: float
    """Network bandwidth of one device."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolsCandidate:
    """One candidate over the chosen pools, with its prices."""

    row: Candidates
    """Degrees and options, a single row."""
    chosen: Pools
    """Positions of the pools in the cluster."""
    pools: tuple[PoolPricing, ...]
    bytes_of: tuple[StageBytes, ...]
    once_of: tuple[OnceParts, ...]
    least_pace_s: float
    """Lower bound of the pace of every chain, in seconds (bounds.py)."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one pipeline, m."""
        return int(np.ravel(self.pools[0].strategies.num_microbatches)[0])

    def on(self, index: int) -> PoolPricing:
        """Return the prices on a pool, by position in the cluster."""
        return self.pools[self.chosen.index(index)]

    @property
    def most_stages(self) -> int:
        """Stages that the devices suffice for."""
        return int(most_stages(self.pools)[0])

    @property
    def least_fixed_s(self) -> float:
        """Paid once per step by any chain."""
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
    """One candidate with its stages."""

    candidate: PoolsCandidate
    pool_S: tuple[int, ...]
    """Position in the cluster of each stage's pool."""
    layers_S: tuple[int, ...]
    price: ChainPrice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainSolution:
    """The best chain of a candidate over some pools, with a bound."""

    chain: Chain | None
    bound_s: float
    """No chain of the candidate is faster; infinite where none fits."""


def pools_candidates(
    candidates: Candidates, chosen: Pools, pools: Sequence[PoolPricing]
) -> tuple[Floats, list[PoolsCandidate]]:
    """Split priced candidates, and bound the steps of each one's chains in seconds."""
    bytes_of = [layer_bytes(on) for on in pools]
    once_of = [once_parts(on) for on in pools]
    rooms_P = rooms_on(pools, bytes_of)
    pace_s_C = least_pace_s(pools, rooms_P)
    return step_bound_s(pools, rooms_P), [
        PoolsCandidate(
            row=candidates.taken(at),
            chosen=chosen,
            pools=tuple(on.taken(at) for on in pools),
            bytes_of=tuple(taken(part, at) for part in bytes_of),
            once_of=tuple(taken(once, at) for once in once_of),
            least_pace_s=float(pace_s_C[at[0]]),
        )
        for at in np.arange(len(candidates))[:, None]
    ]


def solve_chain(
    candidate: PoolsCandidate, cluster: Cluster, *, time_limit_s: float
) -> ChainSolution:
    """Find the best chain of one candidate over its pools.

    Args:
        candidate: what to solve.
        cluster: all pools.
        time_limit_s: for one call of the solver.
    """
    between_s, problem = _problem(candidate, _part(cluster, candidate.chosen))
    bounds_s = []
    for _ in range(TIGHTENINGS + 1):
        outcome = PARTITION.solve(problem, time_limit_s=time_limit_s)
        bounds_s.append(outcome.bound + candidate.least_fixed_s)
        if outcome.solution is None:
            break
        price = _priced(outcome.solution, candidate.pools, between_s)
        excess = _excess_bytes(outcome.solution, price, candidate.pools)
        if not any(excess):
            chain = Chain(
                candidate=candidate,
                pool_S=tuple(candidate.chosen[stage.pool] for stage in outcome.solution.stages),
                layers_S=tuple(stage.layers for stage in outcome.solution.stages),
                price=price,
            )
            return ChainSolution(chain=chain, bound_s=bounds_s[0])
        problem = replace(
            problem,
            memory_limit_bytes_P=np.maximum(problem.memory_limit_bytes_P - np.array(excess), 0),
        )
    return ChainSolution(chain=None, bound_s=bounds_s[0])


def _part(cluster: Cluster, chosen: Pools) -> Cluster:
    pools = tuple(cluster.pools[index] for index in chosen)
    names = {pool.name for pool in pools}
    return Cluster(
        pools=pools, links=tuple(link for link in cluster.links if names >= set(link.between))
    )


def _problem(candidate: PoolsCandidate, cluster: Cluster) -> tuple[Floats, PartitionProblem]:
    """Seconds between pools, and the problem."""
    pools, m = candidate.pools, candidate.num_microbatches
    prices = candidate.solver_prices
    sent_bytes = float(pools[0].memory.boundary_C[0]) * prices[0].stage_devices
    problem = partition_problem(cluster, prices, boundary_bytes=sent_bytes, num_microbatches=m)
    visible = np.array([float(on.problem.constants.boundary_exposed_ratio) for on in pools])
    between_s = problem.hop_s_PP * np.maximum.outer(visible, visible)
    # The cheapest send between two stages of a pool.
    np.fill_diagonal(between_s, [float(np.ravel(on.send_s(stages=2))[0]) for on in pools])
    every_s = between_s * (1.0 + (m - 1) / candidate.most_stages)
    capped_s = np.minimum(every_s, np.maximum(between_s, candidate.least_pace_s))
    return between_s, replace(problem, hop_s_PP=capped_s)


def _priced(partition: Partition, pools: Sequence[PoolPricing], between_s: Floats) -> ChainPrice:
    return chain_price(
        pools,
        pool_S=[stage.pool for stage in partition.stages],
        layers_S=[stage.layers for stage in partition.stages],
        between_s=between_s,
    )


def _excess_bytes(
    partition: Partition, price: ChainPrice, pools: Sequence[PoolPricing]
) -> tuple[int, ...]:
    """Bytes by which the peak stage of each pool exceeds its devices' memory."""
    excess = [0] * len(pools)
    for stage, needed in zip(partition.stages, price.bytes_S, strict=True):
        over = math.ceil(needed - pools[stage.pool].problem.memory_limit_bytes)
        excess[stage.pool] = max(excess[stage.pool], over)
    return tuple(excess)


def stretches(pool_S: Sequence[int]) -> list[tuple[int, int]]:
    """Pools in execution order with the number of their stages."""
    return [(pool, len(list(stages))) for pool, stages in itertools.groupby(pool_S)]


def pool_prices(on: PoolPricing, bytes_of: StageBytes, *, more_s_K: Floats) -> PoolPrices:
    """Format one candidate as the solver's layers, adding `more_s_K` seconds per layer by kind."""
    model, mtp = on.problem.model, float(on.problem.shape.mtp_layers)
    kind_L = np.array([MOE if kind is LayerKind.MOE else DENSE for kind in model.layers])
    time_s_L = on.seconds_KC[kind_L, 0] + more_s_K[kind_L]
    time_s_L[0] += on.seconds_KC[EMBEDDING, 0]
    time_s_L[-1] += on.seconds_KC[HEAD, 0] + mtp * on.seconds_KC[MTP, 0]
    static_L, saved_L = bytes_of.static_KC[kind_L, 0], bytes_of.saved_KC[kind_L, 0]
    static_L[0] += bytes_of.static_KC[EMBEDDING, 0]
    saved_L[0] += bytes_of.saved_KC[EMBEDDING, 0]
    static_L[-1] += bytes_of.static_KC[HEAD, 0]
    limit = on.problem.memory_limit_bytes - float(bytes_of.without_C[0])
    return PoolPrices(
        stage_devices=int(on.devices_C[0]),
        time_s_L=time_s_L,
        static_bytes_L=static_L,
        saved_bytes_L=saved_L,
        memory_limit_bytes=max(0, int(limit)),
        nic_bytes_per_s=nic_bytes_per_s(on.pool),
    )


def partition_problem(
    cluster: Cluster,
    prices: Sequence[PoolPrices],
    *,
    boundary_bytes: float,
    num_microbatches: int,
) -> PartitionProblem:
    """Build the partition problem; prices are in the order of pools.

    Raises:
        SpecError: a stage of no pool has enough devices.
    """
    if len(prices) != len(cluster.pools):
        raise ValueError(f"{len(prices)} prices for {len(cluster.pools)} pools")
    max_stages = tuple(
        pool.num_devices // price.stage_devices
        for pool, price in zip(cluster.pools, prices, strict=True)
    )
    if not any(max_stages):
        smallest = min(price.stage_devices for price in prices)
        largest = max(pool.num_devices for pool in cluster.pools)
        raise SpecError(
            f"cluster: a stage takes {smallest} devices, the largest pool has {largest}; "
            "lower tensor, context or data parallelism"
        )
    return PartitionProblem(
        pools=tuple(pool.name for pool in cluster.pools),
        max_stages_P=max_stages,
        time_s_PL=np.array([price.time_s_L for price in prices]),
        static_bytes_PL=np.array([price.static_bytes_L for price in prices]),
        saved_bytes_PL=np.array([price.saved_bytes_L for price in prices]),
        memory_limit_bytes_P=np.array([price.memory_limit_bytes for price in prices]),
        hop_s_PP=_hop_s_PP(cluster, prices, boundary_bytes=boundary_bytes),
        num_microbatches=num_microbatches,
    )


def _hop_s_PP(cluster: Cluster, prices: Sequence[PoolPrices], *, boundary_bytes: float) -> Floats:
    """Seconds of one micro-batch over a cut, one direction; `inf` between unconnected pools."""
    names = [pool.name for pool in cluster.pools]
    nic_bytes_per_s_P = np.array([price.stage_devices * price.nic_bytes_per_s for price in prices])
    hop_s_PP = np.full((len(names), len(names)), np.inf)
    inside = PeerLink(latency_s=0.0, bytes_per_s=nic_bytes_per_s_P)
    np.fill_diagonal(hop_s_PP, inside.seconds(boundary_bytes))
    for link in cluster.links:
        first, second = (names.index(name) for name in link.between)
        rate = min(
            link.bandwidth, float(nic_bytes_per_s_P[first]), float(nic_bytes_per_s_P[second])
        )
        hop_s = float(PeerLink(latency_s=link.latency, bytes_per_s=rate).seconds(boundary_bytes))
        # Of several links between two pools the fastest is taken, as sends go over one.
        hop_s_PP[first, second] = hop_s_PP[second, first] = min(
            float(hop_s_PP[first, second]), hop_s
        )
    return hop_s_PP
