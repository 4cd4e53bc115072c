"""MoETuner's second program by size; run as `python tests/benchmarks/placement_methods.py`.

Clusters of experts in order, by ranks and layers, and its pairings (`MOST_PAIRINGS` in
tuner/search/place/problem.py).

No bar: measurements that the limits of the methods are based on.
"""

import argparse
import dataclasses
import os
import sys
import time
from typing import Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from solvers.placement.chain.moetuner import clusters_to_ranks
from solvers.placement.chain.problem import Measure
from solvers.placement.ranks import Ranks
from tests.solvers.placement.chain.testing import latent_clusters

MOETUNER_CASES: Final = ((4, 32), (6, 8), (8, 8))
"""Ranks, layers."""
SLOTS: Final = 2


def named(case: tuple[int, int], *, time_limit_s: float) -> str:
    """Assign clusters to ranks by MoETuner's second program and report whether it succeeded."""
    ranks, layers = case
    problem = latent_clusters(
        np.random.default_rng(1),
        num_layers=layers,
        num_experts=SLOTS * ranks,
        ranks=Ranks.uniform(ranks=ranks, slots_per_rank=SLOTS, ranks_per_node=ranks // 2),
    )
    problem = dataclasses.replace(problem, measure=Measure.MOST_LOADED_PAIR)
    cluster_LE = np.tile(np.arange(SLOTS * ranks) // SLOTS, (layers, 1))
    started_s = time.perf_counter()
    result = clusters_to_ranks(problem, cluster_LE, time_limit_s=time_limit_s)
    spent_s = time.perf_counter() - started_s
    return (
        f"MoETuner's second program, {ranks} ranks in {layers} layers,"
        f" {(layers - 1) * ranks**4:,} pairings: {result.status.value}, {spent_s:.1f} s"
    )


def main() -> None:
    """Print a line for each case and method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--order-limit", type=float, default=10.0, help="of the second program")
    chosen = parser.parse_args()
    for pair in MOETUNER_CASES:
        sys.stdout.write(named(pair, time_limit_s=chosen.order_limit) + "\n")


if __name__ == "__main__":
    main()
