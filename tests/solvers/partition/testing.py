"""Instances for tests: tiny random ones, and a model of 61 layers over two heterogeneous pools.

Letters: P pools, L layers.
"""

from typing import Any

import numpy as np

from solvers.partition.problem import PartitionProblem


def tiny_problem(rng: np.random.Generator) -> PartitionProblem:
    """A random instance small enough to try everything, sometimes without a solution.

    Small integers on purpose: ties and limits that are met exactly are frequent.
    """
    pools, layers = int(rng.integers(1, 4)), int(rng.integers(1, 7))
    hop_s_PP = 1e-3 * rng.integers(0, 9, size=(pools, pools)).astype(np.float64)
    if rng.random() < 0.3:
        hop_s_PP[rng.random(size=(pools, pools)) < 0.3] = np.inf
    return PartitionProblem(
        pools=tuple(f"pool {pool}" for pool in range(pools)),
        max_stages_P=tuple(int(n) for n in rng.integers(0, 4, size=pools)),
        time_s_PL=1e-3 * rng.integers(1, 9, size=(pools, layers)).astype(np.float64),
        static_bytes_PL=rng.integers(0, 9, size=(pools, layers)),
        saved_bytes_PL=rng.integers(0, 5, size=(pools, layers)),
        memory_limit_bytes_P=rng.integers(6, 60, size=pools),
        hop_s_PP=hop_s_PP,
        num_microbatches=int(rng.integers(1, 7)),
    )


def two_pools(**changes: Any) -> PartitionProblem:
    """61 equal layers; the second pool computes at 0.45 of the first's pace behind a slow link.

    Round numbers of a plausible size, not measurements.
    """
    layers = 61
    given: dict[str, Any] = {
        "pools": ("new", "old"),
        "max_stages_P": (8, 8),
        "time_s_PL": np.outer([0.016, 0.016 / 0.45], np.ones(layers)),
        "static_bytes_PL": np.full((2, layers), 9_500_000_000),
        "saved_bytes_PL": np.full((2, layers), 150_000_000),
        "memory_limit_bytes_P": [76_000_000_000, 76_000_000_000],
        "hop_s_PP": [[0.001, 0.008], [0.008, 0.001]],
        "num_microbatches": 64,
    }
    return PartitionProblem(**(given | changes))
