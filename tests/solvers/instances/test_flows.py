import numpy as np
import pytest

from solvers.instances.check import violations
from solvers.instances.flows import at_lower_rate, first_cuts, max_flow_plan
from solvers.instances.problem import InstanceObjective, InstancesProblem
from tests.solvers.instances import brute_force
from tests.solvers.instances.testing import tiny_problem

SEEDS = range(40)


def drawn(seed: int) -> tuple[InstancesProblem, list[tuple[int, ...]]]:
    rng = np.random.default_rng([seed, 5])
    problem = tiny_problem(rng, InstanceObjective.RATE)
    counts = [tuple(rng.integers(0, 4, size=len(problem.columns)).tolist()) for _ in range(5)]
    return problem, counts


def test_serves_as_much_as_exact_fractions_say() -> None:
    for seed in SEEDS:
        problem, counts = drawn(seed)
        for count_J in counts:
            exact_per_s = brute_force.max_flow_plan(problem, count_J).rate_per_s
            found_per_s = max_flow_plan(problem, count_J).plan.rate_per_s
            assert found_per_s == pytest.approx(exact_per_s), (
                seed,
                count_J,
                found_per_s,
                exact_per_s,
            )


def test_a_cut_holds_for_all_counts_and_is_met_by_its_own() -> None:
    for seed in SEEDS:
        problem, counts = drawn(seed)
        cuts = [max_flow_plan(problem, count_J).cut for count_J in counts]
        for own, count_J in enumerate(counts):
            most_per_s = brute_force.max_flow_plan(problem, count_J).rate_per_s
            for number, cut in enumerate((*cuts, *first_cuts(problem))):
                allowed = np.dot(cut.slope_J, count_J) + cut.constant
                is_met = number != own or allowed == pytest.approx(most_per_s)
                assert allowed >= most_per_s - 1e-9, (
                    seed,
                    count_J,
                    number,
                    allowed,
                    most_per_s,
                )
                assert is_met, (
                    seed,
                    count_J,
                    number,
                    allowed,
                    most_per_s,
                )


def test_flows_are_allowed_at_any_lower_rate() -> None:
    about_flows = ("group", "aggregated", "link", "class")
    for seed in SEEDS:
        problem, counts = drawn(seed)
        for count_J in counts:
            plan = max_flow_plan(problem, count_J).plan
            if plan.rate_per_s == 0.0:
                continue
            slower = at_lower_rate(plan, 0.3 * plan.rate_per_s)
            lines = (*violations(problem, plan), *violations(problem, slower))
            broken = [line for line in lines if line.startswith(about_flows)]
            assert not broken, (
                seed,
                count_J,
                slower.rate_per_s,
                broken,
            )
            assert slower.rate_per_s == pytest.approx(0.3 * plan.rate_per_s), (
                seed,
                count_J,
                slower.rate_per_s,
                broken,
            )
