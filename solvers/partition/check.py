"""Recompute what a partition is worth and name every rule it breaks; trusts no backend.

Plain Python numbers and loops on purpose: the definitions of `problem.py`, read line by line.
"""

import itertools
import math
from collections.abc import Iterator

from solvers.partition.problem import Partition, PartitionProblem


def violations(problem: PartitionProblem, partition: Partition) -> tuple[str, ...]:
    """Every broken rule as one line with its numbers; empty when the partition is allowed."""
    broken_shape = tuple(_shape_violations(problem, partition))
    if broken_shape:
        return broken_shape
    return (
        *_pool_violations(problem, partition),
        *_link_violations(problem, partition),
        *_memory_violations(problem, partition),
    )


def objective(problem: PartitionProblem, partition: Partition) -> float:
    """Seconds of one optimizer step's pipeline; the formula is in `problem.py`."""
    stage_s = stage_time_s(problem, partition)
    hop_s = hop_time_s(problem, partition)
    slowest_s = max((*stage_s, *hop_s))
    return sum(stage_s) + 2.0 * sum(hop_s) + (problem.num_microbatches - 1) * slowest_s


def stage_time_s(problem: PartitionProblem, partition: Partition) -> tuple[float, ...]:
    """Seconds of one micro-batch on each stage, forward and backward."""
    return tuple(
        sum(float(problem.time_s_PL[pool, layer]) for layer in layers)
        for pool, layers in _stage_layers(partition)
    )


def hop_time_s(problem: PartitionProblem, partition: Partition) -> tuple[float, ...]:
    """Seconds that each cut carries one micro-batch one way."""
    return tuple(
        float(problem.hop_s_PP[left.pool, right.pool])
        for left, right in itertools.pairwise(partition.stages)
    )


def memory_bytes(problem: PartitionProblem, partition: Partition) -> tuple[int, ...]:
    """Peak bytes on each device of each stage."""
    last = len(partition.stages) - 1
    return tuple(
        sum(
            int(problem.static_bytes_PL[pool, layer])
            + min(last - stage + 1, problem.num_microbatches)
            * int(problem.saved_bytes_PL[pool, layer])
            for layer in layers
        )
        for stage, (pool, layers) in enumerate(_stage_layers(partition))
    )


def _stage_layers(partition: Partition) -> Iterator[tuple[int, range]]:
    first = 0
    for stage in partition.stages:
        yield stage.pool, range(first, first + stage.layers)
        first += stage.layers


def _shape_violations(problem: PartitionProblem, partition: Partition) -> Iterator[str]:
    if not partition.stages:
        yield "there is no stage"
    for number, stage in enumerate(partition.stages):
        if not 0 <= stage.pool < problem.num_pools:
            yield f"stage {number} is in pool {stage.pool}, there are {problem.num_pools}"
        if stage.layers < 1:
            yield f"stage {number} holds {stage.layers} layers, at least 1"
    placed = sum(stage.layers for stage in partition.stages)
    if placed != problem.num_layers:
        yield f"the model has {problem.num_layers} layers, {placed} are placed"


def _pool_violations(problem: PartitionProblem, partition: Partition) -> Iterator[str]:
    in_order = [stage.pool for stage in partition.stages]
    for pool, name in enumerate(problem.pools):
        used, allowed = in_order.count(pool), problem.max_stages_P[pool]
        if used > allowed:
            yield f"pool {name!r} runs {used} stages, it has devices for {allowed}"
        stretches = sum(key == pool for key, _ in itertools.groupby(in_order))
        if stretches > 1:
            yield f"pool {name!r} takes part in {stretches} stretches of the chain, at most 1"


def _link_violations(problem: PartitionProblem, partition: Partition) -> Iterator[str]:
    for cut, hop_s in enumerate(hop_time_s(problem, partition)):
        if math.isinf(hop_s):
            yield f"no link joins stages {cut} and {cut + 1}"


def _memory_violations(problem: PartitionProblem, partition: Partition) -> Iterator[str]:
    for number, needed in enumerate(memory_bytes(problem, partition)):
        pool = partition.stages[number].pool
        limit = int(problem.memory_limit_bytes_P[pool])
        if needed > limit:
            yield (
                f"stage {number} in pool {problem.pools[pool]!r} needs {needed} bytes, its devices "
                f"have {limit}"
            )
