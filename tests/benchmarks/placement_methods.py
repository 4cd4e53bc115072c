"""Results of the methods by size; run as `python tests/benchmarks/placement_methods.py`.

1. Balance: CP-SAT on log-normal loads, beside the local search, and the integers of their
   program per layer (`MOST_CHOICES` in tuner/search/place/methods.py).
2. MoETuner's second program on clusters of experts in order, by ranks and layers, and its pairings
   (`MOST_PAIRINGS`).

No bar: measurements that the limits of the methods are based on.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from typing import Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.chain.moetuner import clusters_to_ranks
from solvers.placement.chain.problem import Measure
from solvers.placement.ranks import Ranks
from solvers.registry import BALANCE
from tests.solvers.placement.chain.testing import latent_clusters

SIGMA: Final = 0.6
LAYERS: Final = 2
BALANCE_CASES: Final = ((16, 4, 5), (32, 8, 5), (64, 8, 9), (64, 8, 10))
"""Experts, ranks, slots of a rank."""
MOETUNER_CASES: Final = ((4, 32), (6, 8), (8, 8))
"""Ranks, layers."""
SLOTS: Final = 2


def balanced(case: tuple[int, int, int], *, time_limit_s: float) -> Iterator[str]:
    """Solve loads of some layers by both methods and report the results."""
    experts, ranks, slots = case
    rng = np.random.default_rng(0)
    problem = BalanceProblem(
        load_WLE=1000.0 * np.exp(rng.normal(0.0, SIGMA, (1, LAYERS, experts))),
        weight_W=np.ones(1),
        ranks=Ranks.uniform(ranks=ranks, slots_per_rank=slots),
    )
    choices = experts * ranks * (ranks * slots - experts + 1)
    for method in ("local_search", "cp_sat"):
        result = BALANCE.solve(problem, method=method, time_limit_s=LAYERS * time_limit_s)
        above = f"{result.objective / result.bound - 1.0:.2%} above its bound"
        yield (
            f"{experts} experts on {ranks} ranks x {slots}, {choices:,} whole numbers a layer:"
            f" {method} {result.status.value}, {above if result.solution else 'no placement'},"
            f" {result.solve_s:.1f} s"
        )


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
    parser.add_argument("--time-limit", type=float, default=3.0, help="seconds a layer")
    parser.add_argument("--order-limit", type=float, default=10.0, help="of the second program")
    parser.add_argument("--only", choices=("balance", "moetuner"), default=None)
    chosen = parser.parse_args()
    if chosen.only != "moetuner":
        for case in BALANCE_CASES:
            for line in balanced(case, time_limit_s=chosen.time_limit):
                sys.stdout.write(line + "\n")
    if chosen.only != "balance":
        for pair in MOETUNER_CASES:
            sys.stdout.write(named(pair, time_limit_s=chosen.order_limit) + "\n")


if __name__ == "__main__":
    main()
