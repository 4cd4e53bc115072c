"""Instances for tests: tiny random ones, and clusters of racks with a few bad links.

Letters: N nodes, S stages.
"""

import numpy as np

from solvers.rank_placement.problem import RankPlacementProblem

SHAPES = ((1, 2), (1, 4), (2, 1), (2, 2), (2, 2), (3, 1), (4, 1), (4, 1), (4, 1), (4, 1))
"""Pipelines and stages of tiny instances."""


def tiny_problem(rng: np.random.Generator) -> RankPlacementProblem:
    """A random instance small enough to try everything."""
    pipelines, stages = SHAPES[rng.integers(len(SHAPES))]
    nodes = pipelines * stages + int(rng.integers(0, 2))
    rates_NN = 1e9 * rng.integers(1, 9, size=(nodes, nodes)).astype(np.float64)
    if rng.random() < 0.5:
        rates_NN = np.minimum(rates_NN, rates_NN.T)
    block = int(rng.choice([size for size in range(1, pipelines + 1) if pipelines % size == 0]))
    return RankPlacementProblem(
        pipelines=pipelines,
        stages=stages,
        num_microbatches=int(rng.integers(1, 9)),
        bytes_per_s_NN=rates_NN,
        hop_bytes=1e6 * float(rng.integers(0, 9)),
        gradient_bytes_S=1e6 * rng.integers(0, 30, size=stages).astype(np.float64),
        block=block,
        all_to_all_bytes_S=1e6 * rng.integers(0, 5, size=stages).astype(np.float64),
        block_gradient_bytes_S=1e6 * rng.integers(0, 20, size=stages).astype(np.float64),
    )


def racks(
    rng: np.random.Generator, *, num_racks: int, nodes_per_rack: int, pipelines: int
) -> RankPlacementProblem:
    """Racks of 50 GB/s inside and 12.5 GB/s between, shuffled, links off by up to a tenth."""
    nodes = num_racks * nodes_per_rack
    rack_N = rng.permutation(np.arange(nodes) // nodes_per_rack)
    rates_NN = np.where(rack_N[:, None] == rack_N, 50e9, 12.5e9)
    stages = nodes // pipelines
    return RankPlacementProblem(
        pipelines=pipelines,
        stages=stages,
        num_microbatches=4 * stages,
        bytes_per_s_NN=rates_NN * rng.uniform(0.9, 1.0, size=(nodes, nodes)),
        hop_bytes=64e6,
        gradient_bytes_S=np.full(stages, 8e9),
        block=1,
        all_to_all_bytes_S=np.zeros(stages),
        block_gradient_bytes_S=np.zeros(stages),
    )
