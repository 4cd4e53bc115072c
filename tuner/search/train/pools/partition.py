"""Heterogeneous pools: build the problem that assigns stages to a cluster's pools.

TP and CP stay inside a node and DP inside a pool, so that only the activations between stages cross
pools (the mapping of Holmes, arXiv:2312.03549). The spec states the links between pools of
different devices; solvers/partition decides which pool runs which stages, and how many layers each.

A cut carries the activations of one micro-batch of every replica; `boundary_bytes` is their sum.
Inside a pool they use the NICs of all devices of a stage, between pools the stated link, or the
NICs where those are slower. Two pools without a link are not connected.

Letters: P pools, L layers (any units in model order), S stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from solvers.partition.problem import PartitionProblem
from tuner.arrays import Floats
from tuner.errors import SpecError
from tuner.prices.peer_link import PeerLink
from tuner.spec.cluster import Cluster


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
