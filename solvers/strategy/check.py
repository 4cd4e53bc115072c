"""Recompute what a strategy is worth and name every rule it breaks; trusts no backend."""

from solvers.layout import check as layout_check
from solvers.strategy.problem import Strategy, StrategyProblem


def violations(problem: StrategyProblem, strategy: Strategy) -> tuple[str, ...]:
    """Every broken rule as one line with its numbers; empty when the strategy is allowed."""
    if not 0 <= strategy.index < len(problem.layouts_K):
        return (f"strategy {strategy.index} is chosen, there are {len(problem.layouts_K)}",)
    broken = layout_check.violations(problem.layouts_K[strategy.index], strategy.layout)
    return tuple(f"strategy {strategy.index}: {rule}" for rule in broken)


def objective(problem: StrategyProblem, strategy: Strategy) -> float:
    """Seconds of one optimizer step; the formula is in `problem.py`."""
    layout_s = layout_check.objective(problem.layouts_K[strategy.index], strategy.layout)
    return problem.once_s_K[strategy.index] + layout_s
