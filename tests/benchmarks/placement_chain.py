"""Layer chains: savings of the local search; run as `python
tests/benchmarks/placement_chain.py`.

1. Latent clusters at the sizes of Qwen3, DeepSeek-V3 and Mixtral: cost of the search's placement
   over EPLB's, at a largest rank load per layer that is at most EPLB's; with the bound.
2. MoETuner's two integer programs on 8 experts and 4 ranks: how far CBC gets with more layers,
   beside the best of all namings of the same clusters. No bar: a measurement.
3. Co-activation: copies into nodes and ranks under the methods of that family, over those of
   experts in order, with the bound. No bar either.

Every figure is printed with its bar, and misses are marked. Exit code 1: a miss. Both wall and
processor seconds are printed; with other load on the machine only the latter are comparable.
"""

import dataclasses
import functools
import itertools
import os
import sys
from dataclasses import dataclass
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from solvers.placement.balance.eplb import eplb
from solvers.placement.chain import check
from solvers.placement.chain.moetuner import balanced_clusters, cluster_flows, clusters_to_ranks
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.coactivation import check as coactivation_check
from solvers.placement.ranks import Floats, Ranks, contiguous
from solvers.placement.single_check import rank_loads
from solvers.registry import CHAIN, COACTIVATION
from tests.benchmarks.bars import machine, parse, say, timed
from tests.expect import present
from tests.solvers.placement.chain.testing import latent_clusters
from tests.solvers.placement.coactivation.testing import with_topics

LEAST_SAVED_RATIO: Final = 0.25
MOST_SEARCH_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model on ranks."""

    name: str
    layers: int
    experts: int
    ranks: int
    ranks_per_node: int

    def chain(self, seed: int) -> ChainProblem:
        """Return the instance of a seed, limited to the loads that EPLB's rule leaves."""
        ranks = Ranks.uniform(
            ranks=self.ranks,
            slots_per_rank=self.experts // self.ranks,
            ranks_per_node=self.ranks_per_node,
        )
        problem = latent_clusters(
            np.random.default_rng(seed),
            num_layers=self.layers,
            num_experts=self.experts,
            ranks=ranks,
        )
        loads_LG = rank_loads(problem, eplb(problem.load_LE, ranks=ranks))
        return dataclasses.replace(problem, most_load_L=loads_LG.max(axis=1))


QWEN: Final = Size(
    name="Qwen3, 48 x 128 on 16 ranks / 2 nodes", layers=48, experts=128, ranks=16, ranks_per_node=8
)
DEEPSEEK: Final = Size(
    name="DeepSeek-V3, 58 x 256 on 64 ranks / 8 nodes",
    layers=58,
    experts=256,
    ranks=64,
    ranks_per_node=8,
)
MIXTRAL: Final = tuple(
    Size(
        name=f"Mixtral, 32 x 8 on 8 ranks / {8 // per_node} nodes",
        layers=32,
        experts=8,
        ranks=8,
        ranks_per_node=per_node,
    )
    for per_node in (8, 4)
)


def searched(size: Size, seed: int, *, time_limit_s: float) -> dict[str, Any]:
    """Compare the local search with EPLB's rule on one instance."""
    problem = size.chain(seed)
    rule = eplb(problem.load_LE, ranks=problem.ranks)
    outcome, wall_s, cpu_s = timed(
        lambda: CHAIN.solve(problem, method="local_search", time_limit_s=time_limit_s)
    )
    loads_LG = rank_loads(problem, present(outcome.solution))
    mean_L = problem.load_LE.sum(axis=1) / size.ranks
    saved_ratio = 1.0 - outcome.objective / check.objective(problem, rule)
    return {
        "case": f"{size.name}, seed {seed}",
        "saved_ratio": saved_ratio,
        "gap_ratio": outcome.gap_ratio,
        "bound": outcome.bound,
        "cost": outcome.objective,
        "imbalance": float((loads_LG.max(axis=1) / mean_L).mean()),
        "imbalance_of_rule": float((problem.most_load_L / mean_L).mean()),
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "missed": [
            *(["saving"] if saved_ratio < LEAST_SAVED_RATIO else []),
            *(["time"] if wall_s > MOST_SEARCH_S else []),
        ],
    }


def scaled(layers: int, *, time_limit_s: float) -> dict[str, Any]:
    """Run MoETuner's programs, and try every naming of the clusters of the first."""
    ranks = Ranks.uniform(ranks=4, slots_per_rank=2, ranks_per_node=2)
    problem = dataclasses.replace(
        latent_clusters(np.random.default_rng(0), num_layers=layers, num_experts=8, ranks=ranks),
        measure=Measure.MOST_LOADED_PAIR,
    )
    clusters, clusters_s, _ = timed(lambda: balanced_clusters(problem, time_limit_s=time_limit_s))
    cluster_LE = present(clusters.number_LE)
    named, named_s, _ = timed(
        lambda: clusters_to_ranks(problem, cluster_LE, time_limit_s=time_limit_s)
    )
    flow_TCC = cluster_flows(problem, cluster_LE)
    least, least_s, _ = timed(lambda: least_cost(flow_TCC, problem.cost_GG))
    cost = None
    if named.number_LE is not None:
        cost = sum(
            float((flow_CC * problem.cost_GG[np.ix_(here, there)]).max())
            for flow_CC, here, there in zip(
                flow_TCC, named.number_LE[:-1], named.number_LE[1:], strict=True
            )
        )
    return {
        "layers": layers,
        "clusters_s": clusters_s,
        "clusters_status": str(clusters.status),
        "ranks_s": named_s,
        "ranks_status": str(named.status),
        "cost": cost,
        "bound": max(0.0, named.bound),
        "least_s": least_s,
        "least_cost": least,
    }


def least_cost(flow_TCC: Floats, cost_GG: Floats) -> float:
    """Return the least sum of most-loaded pairs over all namings of clusters, layer by layer."""
    namings = [list(one) for one in itertools.permutations(range(len(cost_GG)))]
    best_N = np.zeros(len(namings))
    for flow_CC in flow_TCC:
        pair_NN = [
            [(flow_CC * cost_GG[np.ix_(here, there)]).max() for here in namings]
            for there in namings
        ]
        best_N = (best_N + np.array(pair_NN)).min(axis=1)
    return float(best_N.min())


def coactivated(size: Size, *, tokens: int, layers: int, time_limit_s: float) -> dict[str, Any]:
    """Compare both co-activation methods with experts in order."""
    slots = size.experts // size.ranks
    problem = with_topics(
        np.random.default_rng(0),
        num_layers=layers,
        num_tokens=tokens,
        num_chosen=8,
        num_experts=size.experts,
        ranks=Ranks.uniform(
            ranks=size.ranks, slots_per_rank=slots, ranks_per_node=size.ranks_per_node
        ),
    )
    in_order = contiguous(num_layers=layers, num_experts=size.experts, num_slots=size.experts)
    base = coactivation_check.objective(problem, in_order)
    results: dict[str, Any] = {"case": f"{layers} layers of {size.name}, {tokens} tokens a layer"}
    for method in COACTIVATION.methods:
        outcome, wall_s, cpu_s = timed(
            functools.partial(COACTIVATION.solve, problem, method=method, time_limit_s=time_limit_s)
        )
        results[method] = {
            "cost_ratio": outcome.objective / base,
            "bound_ratio": outcome.bound / base,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
        }
    return results


def main() -> None:
    """Print the figures; exit status 1 where a bar is missed."""
    given = parse(
        __doc__,
        {
            "--seeds": 2,
            "--time-limit": MOST_SEARCH_S,
            "--ilp-layers": {"type": int, "nargs": "*", "default": [2, 4, 8, 16, 32]},
            "--ilp-time": 30.0,
            "--tokens": 20_000,
        },
    )
    say(f"{machine()}, one thread")
    missed: list[str] = []
    for size, seed in itertools.product((QWEN, DEEPSEEK, *MIXTRAL), range(given.seeds)):
        one = searched(size, seed, time_limit_s=given.time_limit)
        missed += one["missed"]
        say(
            f"{one['case']}: cost {one['saved_ratio']:.1%} under the rule's (bar"
            f" {LEAST_SAVED_RATIO:.0%}), largest / mean load {one['imbalance']:.4f} (rule"
            f" {one['imbalance_of_rule']:.4f}), bound {one['bound']:.5g}, gap"
            f" {one['gap_ratio']:.1%}, {one['wall_s']:.2f} s (bar {MOST_SEARCH_S:g} s),"
            f" {one['cpu_s']:.2f} s of the processor, missed: {one['missed']}"
        )
    for layers in given.ilp_layers:
        one = scaled(layers, time_limit_s=given.ilp_time)
        cost = "no placement" if one["cost"] is None else f"cost {one['cost']:.3f}"
        say(
            f"MoETuner's programs, {one['layers']} layers x 8 experts on 4 ranks: clusters"
            f" {one['clusters_status']} in {one['clusters_s']:.1f} s; ranks {one['ranks_status']},"
            f" {cost}, bound {one['bound']:.3f} in {one['ranks_s']:.1f} s; the best of all"
            f" namings of these clusters: {one['least_cost']:.3f} in {one['least_s']:.2f} s"
        )
    for size in (QWEN, DEEPSEEK):
        one = coactivated(size, tokens=given.tokens, layers=2, time_limit_s=given.time_limit)
        for method in COACTIVATION.methods:
            say(
                f"co-activation, {one['case']}: {method} {1 - one[method]['cost_ratio']:.1%} under"
                f" experts in order, bound {1 - one[method]['bound_ratio']:.1%} under,"
                f" {one[method]['wall_s']:.2f} s, {one[method]['cpu_s']:.2f} s of the processor"
            )
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
