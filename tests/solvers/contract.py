"""What every method of every family of solvers owes on instances small enough to try everything.

A family states a `Contract` in its folder's `contract.py`: how an instance is drawn, the oracle
that tries everything, which methods prove optimality, and what its instances show. test_contract.py
runs the checks below over every family of the registry, so that a new method is tested by its line
there and a new family by its contract.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Generic, TypeVar

import numpy as np

from solvers.family import Family, Solver
from solvers.result import Outcome, Status
from tests.expect import present

Problem = TypeVar("Problem")
Solution = TypeVar("Solution")

LONG_S = 60.0
"""Enough for every tiny instance."""

SHORT_S = 0.2
"""The time limit that a method is given on a large instance."""

GRACE_S = 20.0
"""Within which it returns, on a machine that does other things too."""


def covers_everything(method: str, problem: object) -> bool:
    """No method leaves an instance out."""
    return True


@dataclass(frozen=True, kw_only=True, eq=False)
class Contract(Generic[Problem, Solution]):
    """One family, with what its methods are held to."""

    family: Family[Problem, Solution]
    draw: Callable[[int], Problem]
    """The tiny instance of a seed, some of which have no solution."""
    oracle: Solver[Problem, Solution]
    """Tries everything and shares only the checker with the methods."""
    first: tuple[int, ...]
    """Seeds of a default run: eight or, where they are cheap, more, that show every feature."""
    count: int
    """All seeds are those below."""
    features: Callable[[Problem, Outcome[Solution]], Iterable[str]]
    """What an instance and its optimum show."""
    expected: frozenset[str]
    """The features that matter."""
    often: int
    """How many instances show each of them at least."""
    exact: frozenset[str]
    """The methods that prove optimality and infeasibility."""
    covers: Callable[[str, Problem], bool] = covers_everything
    """Whether a method takes the instance on; UNKNOWN is its answer otherwise."""
    excess: Mapping[str, float] = field(default_factory=dict)
    """By how much, relatively, the objectives of a method may add up to more than the optima."""
    tolerance: float = 1e-9
    """Relative, of what counts as the same objective."""
    bound: Callable[[Problem], float] | None = None
    """A lower bound that the methods share, worked out without a search."""
    broken: Callable[[Problem, Solution], Solution]
    """An allowed solution with one rule broken."""
    large: Callable[[], Problem]
    """An instance that takes longer than `SHORT_S`."""
    hurried: Mapping[str, tuple[Status, ...]]
    """How each method may end on it."""

    @functools.cache  # noqa: B019 - contracts live as long as the tests
    def instance(self, seed: int) -> Problem:
        return self.draw(seed)

    @functools.cache  # noqa: B019 - contracts live as long as the tests
    def best(self, seed: int) -> Outcome[Solution]:
        problem = self.instance(seed)
        claim = self.oracle(problem, time_limit_s=LONG_S)
        return self.family.checked(problem, claim, method="oracle", solve_s=0.0)

    def rest(self) -> tuple[int, ...]:
        """The seeds that are left to a slow run."""
        return tuple(seed for seed in range(self.count) if seed not in self.first)

    def solved_seed(self, method: str) -> int:
        """The first seed that a method solves and whose optimum costs something."""
        return next(
            seed
            for seed in self.first
            if 0.0 < self.best(seed).objective < math.inf
            and self.covers(method, self.instance(seed))
        )


def breaches(contract: Contract[Problem, Solution], method: str, seeds: Iterable[int]) -> list[str]:
    """Name each way in which a method falls short of the oracle."""
    actual, total, least = [], 0.0, 0.0
    for seed in seeds:
        problem, best = contract.instance(seed), contract.best(seed)
        outcome = contract.family.solve(problem, method=method, time_limit_s=LONG_S)
        if not contract.covers(method, problem):
            if outcome.status is not Status.UNKNOWN:
                actual.append(f"seed {seed}: {outcome.status} of what {method} leaves out")
            continue
        actual += [f"seed {seed}: {line}" for line in _differences(contract, method, outcome, best)]
        if best.solution is not None:
            total, least = total + outcome.objective, least + best.objective
    most_ratio = contract.excess.get(method, math.inf)
    if total > least * (1.0 + most_ratio) and method not in contract.exact:
        actual.append(f"objectives add up to {total}, optima to {least}")
    return actual


def _differences(
    contract: Contract[Problem, Solution],
    method: str,
    outcome: Outcome[Solution],
    best: Outcome[Solution],
) -> Iterable[str]:
    tolerance = contract.tolerance
    is_proven = outcome.status in (Status.OPTIMAL, Status.INFEASIBLE)
    if (outcome.solution is None) != (best.solution is None):
        yield f"{outcome.status}, the oracle says {best.status}"
    if outcome.objective < best.objective * (1.0 - tolerance):
        yield f"objective {outcome.objective} below the optimum {best.objective}"
    if outcome.bound > best.objective * (1.0 + tolerance):
        yield f"bound {outcome.bound} above the optimum {best.objective}"
    if is_proven and outcome.objective > best.objective * (1.0 + tolerance):
        yield f"{outcome.status} with {outcome.objective}, the optimum is {best.objective}"
    if method in contract.exact and outcome.status is not best.status:
        yield f"{outcome.status} of a method that proves, the oracle says {best.status}"


def bound_breaches(contract: Contract[Problem, Solution], seeds: Iterable[int]) -> list[str]:
    """Name each instance whose optimum lies below the bound."""
    pairs = [
        (seed, present(contract.bound)(contract.instance(seed)), contract.best(seed).objective)
        for seed in seeds
    ]
    return [
        f"seed {seed}: bound {bound} above the optimum {best}"
        for seed, bound, best in pairs
        if bound > best * (1.0 + 1e-12)
    ]


def shown(contract: Contract[Problem, Solution], seeds: Iterable[int]) -> Counter[str]:
    """Count the instances that show each expected feature, and each status."""
    seen = Counter[str](dict.fromkeys(contract.expected, 0))
    for seed in seeds:
        problem, best = contract.instance(seed), contract.best(seed)
        seen.update(contract.expected & {*contract.features(problem, best), str(best.status)})
    return seen


def are_equal(one: object, two: object) -> bool:
    """Whether two solutions are the same, field by field."""
    return type(one) is type(two) and all(
        np.array_equal(getattr(one, each.name), getattr(two, each.name))
        for each in fields(one)  # type: ignore[arg-type] # solutions are dataclasses
    )
