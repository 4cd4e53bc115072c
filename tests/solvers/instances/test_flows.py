import numpy as np
import pytest

from solvers.instances.check import violations
from solvers.instances.flows import first_cuts, fullest, slowed
from solvers.instances.problem import InstancesProblem, Objective
from tests.solvers.instances import brute_force
from tests.solvers.instances.testing import tiny_problem


def drawn(seed: int) -> tuple[InstancesProblem, list[tuple[int, ...]]]:
    rng = np.random.default_rng([seed, 5])
    problem = tiny_problem(rng, Objective.RATE)
    counts = [tuple(rng.integers(0, 4, size=len(problem.columns)).tolist()) for _ in range(5)]
    return problem, counts


@pytest.mark.parametrize("seed", range(40))
def test_serves_as_much_as_exact_fractions_say(seed: int) -> None:
    problem, counts = drawn(seed)
    for count_J in counts:
        exact = brute_force.fullest_plan(problem, count_J)
        assert fullest(problem, count_J).plan.rate_per_s == pytest.approx(exact.rate_per_s)


@pytest.mark.parametrize("seed", range(40))
def test_a_cut_holds_for_all_counts_and_is_met_by_its_own(seed: int) -> None:
    problem, counts = drawn(seed)
    cuts = [fullest(problem, count_J).cut for count_J in counts]
    for own, count_J in enumerate(counts):
        most_per_s = brute_force.fullest_plan(problem, count_J).rate_per_s
        for number, cut in enumerate((*cuts, *first_cuts(problem))):
            allowed = np.dot(cut.slope_J, count_J) + cut.constant
            assert allowed >= most_per_s - 1e-9
            if number == own:
                assert allowed == pytest.approx(most_per_s)


@pytest.mark.parametrize("seed", range(40))
def test_flows_are_allowed_at_any_lower_rate(seed: int) -> None:
    problem, counts = drawn(seed)
    about_flows = ("group", "aggregated", "link", "class")
    for count_J in counts:
        plan = fullest(problem, count_J).plan
        if plan.rate_per_s > 0.0:
            for one in (plan, slowed(plan, 0.3 * plan.rate_per_s)):
                broken = violations(problem, one)
                assert not [line for line in broken if line.startswith(about_flows)]
            assert slowed(plan, 0.3 * plan.rate_per_s).rate_per_s == pytest.approx(
                0.3 * plan.rate_per_s
            )
