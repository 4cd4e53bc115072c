"""The oracle of tiny instances: every candidate, judged by the checker alone."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from solvers.result import Claim, Status

Solution = TypeVar("Solution")


def best_of(
    candidates: Iterable[Solution],
    *,
    violations: Callable[[Solution], Sequence[object]],
    objective: Callable[[Solution], float],
) -> Claim[Solution]:
    """Return the best allowed candidate, or the proof that none is allowed."""
    best, best_objective = None, math.inf
    for candidate in candidates:
        if violations(candidate):
            continue
        value = objective(candidate)
        if value < best_objective:
            best, best_objective = candidate, value
    status = Status.INFEASIBLE if best is None else Status.OPTIMAL
    return Claim(status=status, solution=best, bound=best_objective)
