"""The solvers by the name that users type, and the check that stands between claim and outcome.

Adding a method is one file with `solve(problem, *, time_limit_s, threads) -> Claim` and one line
here; the contract tests of the family run over this table.
"""

import importlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeVar

from solvers.errors import RejectedClaimError, UnknownSolverError
from solvers.layout import check as layout_check
from solvers.layout.problem import Layout, LayoutProblem
from solvers.partition import check as partition_check
from solvers.partition.problem import Partition, PartitionProblem
from solvers.rank_placement import check as rank_placement_check
from solvers.rank_placement.problem import RankPlacement, RankPlacementProblem
from solvers.result import Claim, Outcome, Status
from solvers.strategy import check as strategy_check
from solvers.strategy.problem import Strategy, StrategyProblem

LAYOUT: Final[Mapping[str, str]] = {
    "exact": "solvers.layout.exact:solve",
    "milp": "solvers.layout.milp:solve",
    "cp_sat": "solvers.layout.cp_sat:solve",
}

STRATEGY: Final[Mapping[str, str]] = {
    "milp": "solvers.strategy.milp:solve",
    "one_by_one": "solvers.strategy.one_by_one:solve",
}

PARTITION: Final[Mapping[str, str]] = {
    "exact": "solvers.partition.exact:solve",
    "milp": "solvers.partition.milp:solve",
}

RANK_PLACEMENT: Final[Mapping[str, str]] = {
    "annealing": "solvers.rank_placement.annealing:solve",
    "milp": "solvers.rank_placement.milp:solve",
}

S = TypeVar("S")

OPTIMALITY_TOLERANCE = 1e-6
"""Largest relative gap that still counts as proven optimal."""

BOUND_TOLERANCE = 1e-9
"""How far, relatively, a bound may pass the objective by rounding alone."""


class LayoutSolver(Protocol):
    """What every entry of `LAYOUT` is."""

    def __call__(
        self, problem: LayoutProblem, *, time_limit_s: float, threads: int = 1
    ) -> Claim[Layout]: ...


class StrategySolver(Protocol):
    """What every entry of `STRATEGY` is."""

    def __call__(
        self, problem: StrategyProblem, *, time_limit_s: float, threads: int = 1
    ) -> Claim[Strategy]: ...


class PartitionSolver(Protocol):
    """What every entry of `PARTITION` is."""

    def __call__(
        self, problem: PartitionProblem, *, time_limit_s: float, threads: int = 1
    ) -> Claim[Partition]: ...


class RankPlacementSolver(Protocol):
    """What every entry of `RANK_PLACEMENT` is."""

    def __call__(
        self, problem: RankPlacementProblem, *, time_limit_s: float, threads: int = 1
    ) -> Claim[RankPlacement]: ...


def layout_solver(method: str) -> LayoutSolver:
    """Import the solver of that name.

    Raises:
        UnknownSolverError: the name is not in `LAYOUT`.
    """
    solver: LayoutSolver = _solver(LAYOUT, "layout", method)
    return solver


def strategy_solver(method: str) -> StrategySolver:
    """Import the solver of that name.

    Raises:
        UnknownSolverError: the name is not in `STRATEGY`.
    """
    solver: StrategySolver = _solver(STRATEGY, "strategy", method)
    return solver


def partition_solver(method: str) -> PartitionSolver:
    """Import the solver of that name.

    Raises:
        UnknownSolverError: the name is not in `PARTITION`.
    """
    solver: PartitionSolver = _solver(PARTITION, "partition", method)
    return solver


def rank_placement_solver(method: str) -> RankPlacementSolver:
    """Import the solver of that name.

    Raises:
        UnknownSolverError: the name is not in `RANK_PLACEMENT`.
    """
    solver: RankPlacementSolver = _solver(RANK_PLACEMENT, "rank placement", method)
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
    started_s = _started_s(clock, time_limit_s=time_limit_s, threads=threads)
    claim = layout_solver(method)(problem, time_limit_s=time_limit_s, threads=threads)
    return checked_layout(problem, claim, method=method, solve_s=clock() - started_s)


def solve_strategy(
    problem: StrategyProblem,
    *,
    method: str = "milp",
    time_limit_s: float,
    threads: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome[Strategy]:
    """Solve by the named method and return only what survives the check, as `solve_layout` does.

    Raises:
        UnknownSolverError: the name is not in `STRATEGY`.
        RejectedClaimError: the strategy breaks a rule, or the bound lies above its objective.
    """
    started_s = _started_s(clock, time_limit_s=time_limit_s, threads=threads)
    claim = strategy_solver(method)(problem, time_limit_s=time_limit_s, threads=threads)
    return checked_strategy(problem, claim, method=method, solve_s=clock() - started_s)


def solve_partition(
    problem: PartitionProblem,
    *,
    method: str = "exact",
    time_limit_s: float,
    threads: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome[Partition]:
    """Solve by the named method and return only what survives the check, as `solve_layout` does.

    Raises:
        UnknownSolverError: the name is not in `PARTITION`.
        RejectedClaimError: the partition breaks a rule, or the bound lies above its objective.
    """
    started_s = _started_s(clock, time_limit_s=time_limit_s, threads=threads)
    claim = partition_solver(method)(problem, time_limit_s=time_limit_s, threads=threads)
    return checked_partition(problem, claim, method=method, solve_s=clock() - started_s)


def solve_rank_placement(
    problem: RankPlacementProblem,
    *,
    method: str = "annealing",
    time_limit_s: float,
    threads: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome[RankPlacement]:
    """Solve by the named method and return only what survives the check, as `solve_layout` does.

    Raises:
        UnknownSolverError: the name is not in `RANK_PLACEMENT`.
        RejectedClaimError: the placement breaks a rule, or the bound lies above its objective.
    """
    started_s = _started_s(clock, time_limit_s=time_limit_s, threads=threads)
    claim = rank_placement_solver(method)(problem, time_limit_s=time_limit_s, threads=threads)
    return checked_rank_placement(problem, claim, method=method, solve_s=clock() - started_s)


def checked_layout(
    problem: LayoutProblem, claim: Claim[Layout], *, method: str, solve_s: float
) -> Outcome[Layout]:
    """Turn a claim into an outcome, or refuse it.

    Raises:
        RejectedClaimError: the layout breaks a rule, or the bound lies above its objective.
    """
    return _checked(
        claim,
        violations=lambda layout: layout_check.violations(problem, layout),
        objective=lambda layout: layout_check.objective(problem, layout),
        method=method,
        solve_s=solve_s,
    )


def checked_strategy(
    problem: StrategyProblem, claim: Claim[Strategy], *, method: str, solve_s: float
) -> Outcome[Strategy]:
    """Turn a claim into an outcome, or refuse it.

    Raises:
        RejectedClaimError: the strategy breaks a rule, or the bound lies above its objective.
    """
    return _checked(
        claim,
        violations=lambda strategy: strategy_check.violations(problem, strategy),
        objective=lambda strategy: strategy_check.objective(problem, strategy),
        method=method,
        solve_s=solve_s,
    )


def checked_partition(
    problem: PartitionProblem, claim: Claim[Partition], *, method: str, solve_s: float
) -> Outcome[Partition]:
    """Turn a claim into an outcome, or refuse it.

    Raises:
        RejectedClaimError: the partition breaks a rule, or the bound lies above its objective.
    """
    return _checked(
        claim,
        violations=lambda partition: partition_check.violations(problem, partition),
        objective=lambda partition: partition_check.objective(problem, partition),
        method=method,
        solve_s=solve_s,
    )


def checked_rank_placement(
    problem: RankPlacementProblem, claim: Claim[RankPlacement], *, method: str, solve_s: float
) -> Outcome[RankPlacement]:
    """Turn a claim into an outcome, or refuse it.

    Raises:
        RejectedClaimError: the placement breaks a rule, or the bound lies above its objective.
    """
    return _checked(
        claim,
        violations=lambda placement: rank_placement_check.violations(problem, placement),
        objective=lambda placement: rank_placement_check.objective(problem, placement),
        method=method,
        solve_s=solve_s,
    )


def _solver(table: Mapping[str, str], family: str, method: str) -> Any:
    if method not in table:
        raise UnknownSolverError(f"{family} method {method!r} is not one of {', '.join(table)}")
    module, _, function = table[method].partition(":")
    return getattr(importlib.import_module(module), function)


def _started_s(clock: Callable[[], float], *, time_limit_s: float, threads: int) -> float:
    if not time_limit_s > 0.0 or threads < 1:
        raise ValueError(f"time_limit_s {time_limit_s} and threads {threads} must be positive")
    return clock()


def _checked(
    claim: Claim[S],
    *,
    violations: Callable[[S], tuple[str, ...]],
    objective: Callable[[S], float],
    method: str,
    solve_s: float,
) -> Outcome[S]:
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
    broken = violations(claim.solution)
    if broken:
        raise RejectedClaimError(f"{method} claims a solution that is not allowed: {broken[0]}")
    value = objective(claim.solution)
    if claim.bound > value * (1.0 + BOUND_TOLERANCE):
        raise RejectedClaimError(
            f"{method} claims that nothing is below {claim.bound} s, its solution takes {value} s"
        )
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
