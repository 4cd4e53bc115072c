"""Instances for tests: a few random strategies over one tiny model."""

import dataclasses

import numpy as np

from solvers.strategy.problem import StrategyProblem
from tests.solvers.layout.testing import tiny_problem


def tiny_strategies(rng: np.random.Generator) -> StrategyProblem:
    """Up to four strategies, each small enough to try everything; some fit in no layout.

    Times that are paid once are of the size of the pipelines', so that neither decides alone. One
    instance in four has next to no memory at all.
    """
    count = int(rng.integers(1, 5))
    layouts = [tiny_problem(rng) for _ in range(count)]
    if rng.random() < 0.25:
        layouts = [
            dataclasses.replace(one, memory_limit_bytes_D=np.full(one.num_devices, 2))
            for one in layouts
        ]
    return StrategyProblem(
        layouts_K=tuple(layouts),
        once_s_K=tuple(1e-3 * float(rng.integers(0, 60)) for _ in range(count)),
    )
