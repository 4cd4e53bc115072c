"""Instances for tests: a few random strategies over one tiny model."""

import numpy as np

from solvers.layout.testing import tiny_problem
from solvers.strategy.problem import StrategyProblem


def tiny_strategies(rng: np.random.Generator) -> StrategyProblem:
    """Up to four strategies, each small enough to try everything; some fit in no layout.

    Times that are paid once are of the size of the pipelines', so that neither decides alone.
    """
    count = int(rng.integers(1, 5))
    return StrategyProblem(
        layouts_K=tuple(tiny_problem(rng) for _ in range(count)),
        once_s_K=tuple(1e-3 * float(rng.integers(0, 60)) for _ in range(count)),
    )
