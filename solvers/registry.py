"""The solvers by the name that users type, and the check that stands between claim and outcome.

Adding a method is one file with `solve(problem, *, time_limit_s, threads) -> Claim` and one line
here; the contract tests of the family run over this table.
"""

import importlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from solvers.errors import RejectedClaimError, UnknownSolverError
from solvers.layout import check as layout_check
from solvers.layout.problem import Layout, LayoutProblem
from solvers.result import Claim, Outcome, Status

LAYOUT: Final[Mapping[str, str]] = {
    "exact": "solvers.layout.exact:solve",
    "milp": "solvers.layout.milp:solve",
    "cp_sat": "solvers.layout.cp_sat:solve",
}

OPTIMALITY_TOLERANCE = 1e-6
"""Largest relative gap that still counts as proven optimal."""

BOUND_TOLERANCE = 1e-9
"""How far, relatively, a bound may pass the objective by rounding alone."""


class LayoutSolver(Protocol):
    """What every entry of `LAYOUT` is."""

    def __call__(
        self, problem: LayoutProblem, *, time_limit_s: float, threads: int = 1
    ) -> Claim[Layout]: ...


def layout_solver(method: str) -> LayoutSolver:
    """Import the solver of that name.

    Raises:
        UnknownSolverError: the name is not in `LAYOUT`.
    """
    if method not in LAYOUT:
        raise UnknownSolverError(f"layout method {method!r} is not one of {', '.join(LAYOUT)}")
    module, _, function = LAYOUT[method].partition(":")
    solver: LayoutSolver = getattr(importlib.import_module(module), function)
    return solver


def solve_layout(
    problem: LayoutProblem,
    *,
    method: str = "milp",
    time_limit_s: float,
    threads: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome[Layout]:
    """Solve by the named method and return only what survives the check.

    An OPTIMAL claim whose own bound leaves a gap above `OPTIMALITY_TOLERANCE` is kept as FEASIBLE:
    the layout and the bound are true, only the word is not.

    Raises:
        UnknownSolverError: the name is not in `LAYOUT`.
        RejectedClaimError: the layout breaks a rule, or the bound lies above its objective.
    """
    if not time_limit_s > 0.0 or threads < 1:
        raise ValueError(f"time_limit_s {time_limit_s} and threads {threads} must be positive")
    solver = layout_solver(method)
    started_s = clock()
    claim = solver(problem, time_limit_s=time_limit_s, threads=threads)
    solve_s = clock() - started_s
    return checked_layout(problem, claim, method=method, solve_s=solve_s)


def checked_layout(
    problem: LayoutProblem, claim: Claim[Layout], *, method: str, solve_s: float
) -> Outcome[Layout]:
    """Turn a claim into an outcome, or refuse it.

    Raises:
        RejectedClaimError: the layout breaks a rule, or the bound lies above its objective.
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
    broken = layout_check.violations(problem, claim.solution)
    if broken:
        raise RejectedClaimError(f"{method} claims a layout that is not allowed: {broken[0]}")
    objective = layout_check.objective(problem, claim.solution)
    if claim.bound > objective * (1.0 + BOUND_TOLERANCE):
        raise RejectedClaimError(
            f"{method} claims that nothing is below {claim.bound} s, its layout takes {objective} s"
        )
    proven = objective - claim.bound <= OPTIMALITY_TOLERANCE * objective
    unproven_optimum = claim.status is Status.OPTIMAL and not proven
    return Outcome(
        status=Status.FEASIBLE if unproven_optimum else claim.status,
        solution=claim.solution,
        objective=objective,
        bound=min(claim.bound, objective),
        solve_s=solve_s,
        method=method,
    )
