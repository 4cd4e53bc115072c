"""Claims of backends (Claim) and the outcomes that passed the check (Outcome).

A backend only claims. `Family.solve` (family.py) hands the claim to the family's checker, which
shares no code with any backend, recomputes the objective, and only then makes an `Outcome`.
Objectives are minimised throughout.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

S = TypeVar("S")


class Status(StrEnum):
    """Degree of certainty that a solve reached."""

    OPTIMAL = "optimal"
    """Proven: the bound equals the objective up to the tolerance."""
    FEASIBLE = "feasible"
    """A checked solution whose optimality is not proven; the bound says how far it can be."""
    INFEASIBLE = "infeasible"
    """Proven: no solution exists."""
    UNKNOWN = "unknown"
    """No solution and no proof within the time limit."""

    @property
    def has_solution(self) -> bool:
        """A solution must accompany this status."""
        return self in (Status.OPTIMAL, Status.FEASIBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Generic[S]):
    """Result of a backend for a problem, before the check."""

    status: Status
    solution: S | None
    bound: float
    """Lower bound on the objective; `-inf` when nothing was proven, `inf` when infeasible."""
    objective: float | None = None
    """Cost of the solution by the backend's reckoning, which the check compares; None: not
    stated."""
    objective_error: float = 0.0
    """Standard error of `objective` where that is a mean over draws."""

    def __post_init__(self) -> None:
        if self.status.has_solution != (self.solution is not None):
            raise ValueError(f"status {self.status} and solution {self.solution!r} disagree")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[S]):
    """A claim that passed the independent checker."""

    status: Status
    solution: S | None
    objective: float
    """Objective as recomputed by the checker; `inf` without a solution."""
    bound: float
    solve_s: float
    method: str

    def __post_init__(self) -> None:
        if self.status.has_solution != (self.solution is not None):
            raise ValueError(f"status {self.status} and solution {self.solution!r} disagree")

    @property
    def gap_ratio(self) -> float:
        """(objective - bound) / objective, 0 when proven optimal, 1 when nothing is known."""
        if not self.status.has_solution:
            return 1.0
        if self.objective <= 0.0:
            return 0.0
        return min(1.0, max(0.0, (self.objective - self.bound) / self.objective))
