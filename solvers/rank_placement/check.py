"""Recompute what a placement is worth and name every rule it breaks; trusts no backend.

Plain Python numbers and loops on purpose: the definitions of `problem.py`, read line by line.
"""

import itertools
from collections import Counter
from collections.abc import Iterator

from solvers.rank_placement.problem import RankPlacement, RankPlacementProblem


def violations(problem: RankPlacementProblem, placement: RankPlacement) -> tuple[str, ...]:
    """Every broken rule as one line with its numbers; empty when the placement is allowed."""
    broken_shape = tuple(_shape_violations(problem, placement))
    return broken_shape or tuple(_node_violations(problem, placement))


def objective(problem: RankPlacementProblem, placement: RankPlacement) -> float:
    """Seconds of one optimizer step; the formula is in `problem.py`."""
    return max(pipeline_s(problem, placement)) + max(gradient_s(problem, placement))


def pipeline_s(problem: RankPlacementProblem, placement: RankPlacement) -> tuple[float, ...]:
    """Seconds of each pipeline without its gradients."""
    return tuple(_pipeline_s(problem, nodes) for nodes in placement.node_RS)


def gradient_s(problem: RankPlacementProblem, placement: RankPlacement) -> tuple[float, ...]:
    """Seconds of each stage's ring."""
    pipelines = problem.pipelines
    if pipelines == 1:
        return (0.0,) * problem.stages
    found = []
    for stage, ring in enumerate(zip(*placement.node_RS, strict=True)):
        slowest = min(
            float(problem.bytes_per_s_NN[ring[place], ring[(place + 1) % pipelines]])
            for place in range(pipelines)
        )
        volume = 2.0 * (pipelines - 1) / pipelines * float(problem.gradient_bytes_S[stage])
        found.append(volume / slowest)
    return tuple(found)


def _pipeline_s(problem: RankPlacementProblem, nodes: tuple[int, ...]) -> float:
    computing = [float(problem.stage_s_N[node]) for node in nodes]
    hops = sum(
        problem.hop_bytes / float(problem.bytes_per_s_NN[here, there])
        + problem.hop_bytes / float(problem.bytes_per_s_NN[there, here])
        for here, there in itertools.pairwise(nodes)
    )
    repeats = problem.num_microbatches - 1
    return sum(computing) + repeats * max(computing) + problem.rounds * hops


def _shape_violations(problem: RankPlacementProblem, placement: RankPlacement) -> Iterator[str]:
    if len(placement.node_RS) != problem.pipelines:
        yield f"{len(placement.node_RS)} pipelines are placed, there are {problem.pipelines}"
    for pipeline, nodes in enumerate(placement.node_RS):
        if len(nodes) != problem.stages:
            yield f"pipeline {pipeline} has {len(nodes)} nodes, its stages are {problem.stages}"
        for node in nodes:
            if not 0 <= node < problem.num_nodes:
                yield f"pipeline {pipeline} runs on node {node}, there are {problem.num_nodes}"


def _node_violations(problem: RankPlacementProblem, placement: RankPlacement) -> Iterator[str]:
    count = Counter(node for nodes in placement.node_RS for node in nodes)
    for node, times in sorted(count.items()):
        if times > 1:
            yield f"node {node} runs {times} stages, at most 1"
    for pipeline, nodes in enumerate(placement.node_RS):
        for stage, node in enumerate(nodes):
            needed = int(problem.stage_bytes_S[stage])
            limit = int(problem.memory_limit_bytes_N[node])
            if needed > limit:
                yield (
                    f"stage {stage} of pipeline {pipeline} needs {needed} bytes, node {node} has "
                    f"{limit}"
                )
