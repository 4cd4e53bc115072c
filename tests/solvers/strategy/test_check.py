import dataclasses

import numpy as np
import pytest

from solvers.errors import RejectedClaimError
from solvers.registry import LAYOUT, STRATEGY
from solvers.result import Claim, Status
from solvers.strategy import check
from solvers.strategy.problem import Strategy, StrategyProblem
from tests.solvers.layout.testing import large_problem
from tests.solvers.strategy.testing import tiny_strategies


@pytest.fixture(scope="module")
def problem() -> StrategyProblem:
    return StrategyProblem(layouts_K=(large_problem(), large_problem()), once_s_K=(0.5, 0.25))


@pytest.fixture(scope="module")
def found(problem: StrategyProblem) -> Strategy:
    layout = LAYOUT.solver("exact")(problem.layouts_K[1], time_limit_s=60.0).solution
    assert layout is not None
    return Strategy(index=1, layout=layout)


def test_a_strategy_costs_its_layout_and_what_it_pays_once(
    problem: StrategyProblem, found: Strategy
) -> None:
    # The layout takes 10.17716 s, tests/solvers/layout/test_contract.py.
    assert check.objective(problem, found) == pytest.approx(10.17716 + 0.25, rel=1e-6)
    assert not check.violations(problem, found)


def test_a_strategy_that_does_not_exist_is_named(problem: StrategyProblem, found: Strategy) -> None:
    other = dataclasses.replace(found, index=2)
    assert check.violations(problem, other) == ("strategy 2 is chosen, there are 2",)


def test_a_bound_above_the_objective_is_rejected(problem: StrategyProblem, found: Strategy) -> None:
    claim = Claim(status=Status.OPTIMAL, solution=found, bound=11.0)
    with pytest.raises(RejectedClaimError, match="nothing is below 11"):
        STRATEGY.checked(problem, claim, method="lie", solve_s=0.0)


def test_a_dear_second_strategy_is_left(problem: StrategyProblem) -> None:
    dear = dataclasses.replace(problem, once_s_K=(0.5, 9.0))
    outcome = STRATEGY.solve(dear, method="one_by_one", time_limit_s=60.0)
    assert outcome.solution is not None
    assert outcome.solution.index == 0


@pytest.mark.parametrize("once_s", [-1.0, float("inf"), float("nan")])
def test_impossible_times_are_refused(once_s: float) -> None:
    given = tiny_strategies(np.random.default_rng(0))
    with pytest.raises(ValueError, match="finite seconds"):
        StrategyProblem(layouts_K=given.layouts_K, once_s_K=(once_s,) * len(given.layouts_K))


def test_every_strategy_needs_its_time() -> None:
    given = tiny_strategies(np.random.default_rng(0))
    with pytest.raises(ValueError, match="every strategy needs one of each"):
        StrategyProblem(layouts_K=given.layouts_K, once_s_K=())
