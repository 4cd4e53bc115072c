"""A family of solvers: its methods by name, and the check between claim and outcome.

A backend only claims. A family imports the named method lazily, so a missing optional backend
affects only that method. The family's checker, which shares no code with any backend, turns the
claim into an `Outcome`: the solution breaks no rule, the objective is recomputed, the bound does
not exceed it, and the objective that the backend claims agrees.

Objectives are minimised and at least zero.
"""

import importlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar, cast

from solvers.errors import RejectedClaimError, UnknownSolverError
from solvers.result import Claim, Outcome, Status

Problem = TypeVar("Problem")
Solution = TypeVar("Solution")
ProblemIn = TypeVar("ProblemIn", contravariant=True)
SolutionIn = TypeVar("SolutionIn", contravariant=True)
SolutionOut = TypeVar("SolutionOut", covariant=True)

OPTIMALITY_TOLERANCE: Final = 1e-6
"""Largest relative gap that still counts as proven optimal."""

BOUND_TOLERANCE: Final = 1e-9
"""Largest relative excess of a bound over the objective that rounding alone explains."""

AGREE_TOLERANCE: Final = 1e-6
"""Largest relative difference of two computations of one objective that rounding alone explains."""

AGREE_ERRORS: Final = 8.0
"""Most standard errors that two means over draws may differ by: of 16, Student's t passes 8 once in
a million."""


class Solver(Protocol[ProblemIn, Solution]):
    """Signature of every method of a family; one that has no parallel part ignores `threads`."""

    def __call__(
        self, problem: ProblemIn, /, *, time_limit_s: float, threads: int = 1
    ) -> Claim[Solution]: ...


class Checker(Protocol[ProblemIn, SolutionIn]):
    """Functions of a family's `check.py`; the module itself is passed."""

    def violations(self, problem: ProblemIn, solution: SolutionIn, /) -> tuple[str, ...]:
        """Return every broken rule as one line with its numbers; empty where all hold."""
        ...

    def objective(self, problem: ProblemIn, solution: SolutionIn, /) -> float:
        """Return the cost of an allowed solution."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Generic[Problem, Solution]):
    """One kind of problem with everything that solves it."""

    name: str
    """Name of the family in messages."""
    methods: Mapping[str, str]
    """Address of each method, `module:function`, by the name that users type."""
    default: str
    """The method of `solve` where none is named."""
    check: Checker[Problem, Solution]
    standard_error: Callable[[Problem, Solution], float] | None = None
    """Standard error of the check's objective, where that is a mean over draws; None: it never is
    one."""

    def __post_init__(self) -> None:
        if self.default not in self.methods:
            raise ValueError(f"{self.default!r} is not one of {', '.join(self.methods)}")

    def solver(self, method: str) -> Solver[Problem, Solution]:
        """Import the method of that name.

        Raises:
            UnknownSolverError: the family has no such method.
        """
        if method not in self.methods:
            raise UnknownSolverError(
                f"{self.name} method {method!r} is not one of {', '.join(self.methods)}"
            )
        module, _, function = self.methods[method].partition(":")
        return cast("Solver[Problem, Solution]", getattr(importlib.import_module(module), function))

    def solve(
        self,
        problem: Problem,
        *,
        method: str | None = None,
        time_limit_s: float,
        threads: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Outcome[Solution]:
        """Solve by the named method and return only what survives the check.

        Args:
            problem: of this family.
            method: of `methods`; None takes the default.
            time_limit_s: for the backend; the check comes on top.
            threads: that the backend may use.
            clock: seconds that only grow.

        Raises:
            UnknownSolverError: the family has no such method.
            RejectedClaimError: as `checked` says.
        """
        if not time_limit_s > 0.0 or threads < 1:
            raise ValueError(f"time_limit_s {time_limit_s} and threads {threads} must be positive")
        chosen = self.default if method is None else method
        started_s = clock()
        claim = self.solver(chosen)(problem, time_limit_s=time_limit_s, threads=threads)
        return self.checked(problem, claim, method=chosen, solve_s=clock() - started_s)

    def checked(
        self, problem: Problem, claim: Claim[Solution], *, method: str, solve_s: float
    ) -> Outcome[Solution]:
        """Turn a claim into an outcome, or refuse it.

        An OPTIMAL claim whose own bound leaves a gap above `OPTIMALITY_TOLERANCE` is kept as
        FEASIBLE: the solution and the bound are valid, the status is not.

        Raises:
            RejectedClaimError: the solution breaks a rule, the bound exceeds its objective, or the
                backend claims another objective.
        """
        if math.isnan(claim.bound):
            raise RejectedClaimError(f"{method} claims a bound that is not a number")
        if claim.solution is None:
            return Outcome(
                status=claim.status,
                solution=None,
                objective=math.inf,
                bound=claim.bound,
                solve_s=solve_s,
                method=method,
            )
        broken = self.check.violations(problem, claim.solution)
        if broken:
            raise RejectedClaimError(f"{method} claims a solution that is not allowed: {broken[0]}")
        value = self.check.objective(problem, claim.solution)
        if claim.bound > value * (1.0 + BOUND_TOLERANCE):
            raise RejectedClaimError(
                f"{method} claims that nothing is below {claim.bound}, its solution costs {value}"
            )
        self._compare(problem, claim, claim.solution, value, method=method)
        proven = value - claim.bound <= OPTIMALITY_TOLERANCE * value
        unproven_optimum = claim.status is Status.OPTIMAL and not proven
        return Outcome(
            status=Status.FEASIBLE if unproven_optimum else claim.status,
            solution=claim.solution,
            objective=value,
            bound=min(claim.bound, value),
            solve_s=solve_s,
            method=method,
        )

    def _compare(
        self,
        problem: Problem,
        claim: Claim[Solution],
        solution: Solution,
        value: float,
        *,
        method: str,
    ) -> None:
        if claim.objective is None:
            return
        error = 0.0 if self.standard_error is None else self.standard_error(problem, solution)
        tolerance = AGREE_TOLERANCE * value + AGREE_ERRORS * math.hypot(
            error, claim.objective_error
        )
        if not abs(claim.objective - value) <= tolerance:
            raise RejectedClaimError(
                f"{method} takes its solution to cost {claim.objective:.6g}, its check finds"
                f" {value:.6g}, and they may differ by {tolerance:.2g}"
            )
