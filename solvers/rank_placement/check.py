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
    return broken_shape or tuple(_node_violations(placement))


def objective(problem: RankPlacementProblem, placement: RankPlacement) -> float:
    """Seconds of one optimizer step; the formula is in `problem.py`."""
    return max(pipeline_s(problem, placement)) + max(gradient_s(problem, placement))


def pipeline_s(problem: RankPlacementProblem, placement: RankPlacement) -> tuple[float, ...]:
    """Seconds of each pipeline without its gradients."""
    return tuple(
        _pipeline_s(problem, nodes, all_to_all_s=tuple(all_to_all_s(problem, placement, pipeline)))
        for pipeline, nodes in enumerate(placement.node_RS)
    )


def all_to_all_s(
    problem: RankPlacementProblem, placement: RankPlacement, pipeline: int
) -> Iterator[float]:
    """Seconds of one micro-batch that each stage of a pipeline spends in its block's all-to-all."""
    first = pipeline - pipeline % problem.block
    for stage in range(problem.stages):
        block = [placement.node_RS[row][stage] for row in range(first, first + problem.block)]
        slowest = max(
            sum(
                1.0 / float(problem.bytes_per_s_NN[here, there]) for there in block if there != here
            )
            for here in block
        )
        yield float(problem.all_to_all_bytes_S[stage]) * slowest


def gradient_s(problem: RankPlacementProblem, placement: RankPlacement) -> tuple[float, ...]:
    """Seconds of each stage's reductions: over all its nodes, and over one node of every block."""
    seconds = []
    for stage, nodes in enumerate(zip(*placement.node_RS, strict=True)):
        places = [nodes[place :: problem.block] for place in range(problem.block)]
        far = max(
            _ring_s(problem, ring, float(problem.block_gradient_bytes_S[stage])) for ring in places
        )
        seconds.append(_ring_s(problem, nodes, float(problem.gradient_bytes_S[stage])) + far)
    return tuple(seconds)


def _ring_s(problem: RankPlacementProblem, ring: tuple[int, ...], summed_bytes: float) -> float:
    if len(ring) == 1:
        return 0.0
    slowest = min(
        float(problem.bytes_per_s_NN[here, there])
        for here, there in zip(ring, (*ring[1:], ring[0]), strict=True)
    )
    return 2.0 * (len(ring) - 1) / len(ring) * summed_bytes / slowest


def _pipeline_s(
    problem: RankPlacementProblem, nodes: tuple[int, ...], *, all_to_all_s: tuple[float, ...]
) -> float:
    hops = sum(
        problem.hop_bytes / float(problem.bytes_per_s_NN[here, there])
        + problem.hop_bytes / float(problem.bytes_per_s_NN[there, here])
        for here, there in itertools.pairwise(nodes)
    )
    repeats = problem.num_microbatches - 1
    return sum(all_to_all_s) + repeats * max(all_to_all_s) + problem.rounds * hops


def _shape_violations(problem: RankPlacementProblem, placement: RankPlacement) -> Iterator[str]:
    if len(placement.node_RS) != problem.pipelines:
        yield f"{len(placement.node_RS)} pipelines are placed, there are {problem.pipelines}"
    for pipeline, nodes in enumerate(placement.node_RS):
        if len(nodes) != problem.stages:
            yield f"pipeline {pipeline} has {len(nodes)} nodes, its stages are {problem.stages}"
        for node in nodes:
            if not 0 <= node < problem.num_nodes:
                yield f"pipeline {pipeline} runs on node {node}, there are {problem.num_nodes}"


def _node_violations(placement: RankPlacement) -> Iterator[str]:
    count = Counter(node for nodes in placement.node_RS for node in nodes)
    for node, times in sorted(count.items()):
        if times > 1:
            yield f"node {node} runs {times} stages, at most 1"
