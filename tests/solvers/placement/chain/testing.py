"""Instances for tests and benchmarks: tiny random chains, and large ones with latent clusters.

L layers, E experts, G ranks.
"""

import numpy as np

from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.ranks import Floats, Ints, Ranks

SHAPE_OF_CELLS = 0.5
"""Of the gamma distribution that the cells of a flow are drawn from: few large, many small."""


def node_costs(ranks: Ranks, *, same_node: float = 1.0, other_node: float = 6.0) -> Floats:
    """Return cost_GG: 0 on a rank, two prices beyond it."""
    node_G = ranks.node_G
    cost_GG = np.where(node_G[:, None] == node_G, same_node, other_node)
    np.fill_diagonal(cost_GG, 0.0)
    return cost_GG


def latent_clusters(
    rng: np.random.Generator, *, num_layers: int, num_experts: int, ranks: Ranks
) -> ChainProblem:
    """Return a chain in which half of the flow stays in its cluster, without a load limit.

    Every layer has as many clusters as ranks, of equal sizes, its experts dealt at random. Cells of
    a flow are gamma(0.5) draws; those inside clusters are scaled to the sum of those outside. Then
    rows are scaled so that a layer sends on what it received, and loads are what an expert
    received (in the first layer, what it sends).
    """
    of_place_E = np.arange(num_experts) * ranks.num_ranks // num_experts
    cluster_LE = np.array([rng.permutation(of_place_E) for _ in range(num_layers)])
    flow_TEE = np.empty((num_layers - 1, num_experts, num_experts))
    load_LE = np.empty((num_layers, num_experts))
    for layer in range(num_layers - 1):
        flow_EE = clustered_flow(rng, cluster_LE[layer], cluster_LE[layer + 1])
        if layer == 0:
            load_LE[0] = flow_EE.sum(axis=1)
        flow_EE *= (load_LE[layer] / flow_EE.sum(axis=1))[:, None]
        flow_TEE[layer] = flow_EE
        load_LE[layer + 1] = flow_EE.sum(axis=0)
    return ChainProblem(flow_TEE=flow_TEE, load_LE=load_LE, ranks=ranks, cost_GG=node_costs(ranks))


def clustered_flow(rng: np.random.Generator, here_E: Ints, there_E: Ints) -> Floats:
    """Return flow_EE of sum 1, half of it between experts of equal clusters."""
    flow_EE = rng.gamma(SHAPE_OF_CELLS, size=(len(here_E), len(there_E)))
    stays_EE = here_E[:, None] == there_E
    inside, outside = flow_EE[stays_EE].sum(), flow_EE[~stays_EE].sum()
    return np.asarray(np.where(stays_EE, flow_EE / inside, flow_EE / outside) / 2.0)


def tiny_problem(rng: np.random.Generator, *, has_equal_costs: bool | None = None) -> ChainProblem:
    """Return a random instance small enough to try everything, sometimes without a solution."""
    num_layers, slots_G, node_G = [
        (3, (2, 2), (0, 0)),
        (3, (2, 2), (0, 1)),
        (2, (1, 1, 1, 1), (0, 0, 1, 1)),
        (2, (1, 1, 1, 1), (0, 0, 0, 0)),
        (2, (2, 2, 1), (0, 0, 1)),
        (3, (1, 1, 1), (0, 0, 0)),
        (1, (2, 2), (0, 1)),
    ][rng.integers(7)]
    ranks = Ranks(slots_G=np.array(slots_G), node_G=np.array(node_G), speed_G=np.ones(len(slots_G)))
    num_experts = ranks.num_slots
    flow_TEE = rng.integers(0, 9, size=(num_layers - 1, num_experts, num_experts)).astype(float)
    load_LE = rng.integers(1, 9, size=(num_layers, num_experts)).astype(np.float64)
    equal = rng.random() < 0.5 if has_equal_costs is None else has_equal_costs
    drawn_GG = rng.integers(0, 9, size=(len(slots_G),) * 2).astype(np.float64)
    cost_GG = node_costs(ranks) if equal else drawn_GG
    share = load_LE.sum(axis=1) / len(slots_G)
    limit_L = np.ceil(share * rng.uniform(1.0, 1.6)) if rng.random() < 0.6 else None
    return ChainProblem(
        flow_TEE=flow_TEE,
        load_LE=load_LE,
        ranks=ranks,
        cost_GG=cost_GG,
        most_load_L=limit_L,
        measure=Measure.TOTAL if rng.random() < 0.7 else Measure.MOST_LOADED_PAIR,
    )
