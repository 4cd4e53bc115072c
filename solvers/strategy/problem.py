"""Which of several strategies to run, together with its layout of layers, as one problem.

A strategy is a combination of degrees. It brings its own layout problem (stages, times, bytes,
micro-batches) and the seconds that it pays once a step beside the pipeline, for example for its
optimizer and its gradient sums. Exactly one strategy is run, in one layout that its problem allows.

Objective (to be minimised): once_s of the strategy + the layout's objective (solvers/layout).

Letters: K strategies. Not covered: strategies whose layouts are tied to each other.
"""

import math
from dataclasses import dataclass

from solvers.layout.problem import Layout, LayoutProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A solution: which strategy, and how it lays the layers out."""

    index: int
    """Into the problem's strategies."""
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrategyProblem:
    """One instance."""

    layouts_K: tuple[LayoutProblem, ...]
    """The layout problem of every strategy."""
    once_s_K: tuple[float, ...]
    """What each strategy pays once a step beside its pipeline."""

    def __post_init__(self) -> None:
        if not self.layouts_K or len(self.layouts_K) != len(self.once_s_K):
            raise ValueError(
                f"{len(self.layouts_K)} layout problems and {len(self.once_s_K)} times; "
                "every strategy needs one of each, and there must be one"
            )
        if not all(0.0 <= once_s < math.inf for once_s in self.once_s_K):
            raise ValueError(f"once_s_K {self.once_s_K} must be finite seconds >= 0")
