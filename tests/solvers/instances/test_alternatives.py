import dataclasses
import itertools

import numpy as np
import pytest

from solvers.instances.alternatives import alternatives
from solvers.instances.check import violations
from solvers.instances.counts import common_unit
from solvers.instances.dominance import undominated
from solvers.instances.problem import Column, InstanceObjective, InstancePlan, InstancesProblem
from solvers.registry import INSTANCES
from tests.expect import present
from tests.solvers.instances import brute_force
from tests.solvers.instances.testing import mixed_pool, one_pool, tiny_problem

TIME_LIMIT_S = 60.0


def solved(problem: InstancesProblem) -> InstancePlan | None:
    return INSTANCES.solve(problem, time_limit_s=TIME_LIMIT_S).solution


def test_a_tie_is_found_and_idle_instances_are_no_alternative() -> None:
    # 2P + 1D serve on three devices. 2P + 2D do so within half more, but one of them is idle. A
    # decode column of two devices makes a second way, on four.
    plain = one_pool()
    best = present(solved(plain))
    only = alternatives(plain, best, band_ratio=0.5, max_plans=9, time_limit_s=TIME_LIMIT_S)
    assert [plan.count_J for plan in only.plans] == [(2, 1)]
    assert only.is_complete

    decode = dataclasses.replace(plain.columns[1], name="faster", rate_per_s=11.0, devices_P=(2,))
    two = dataclasses.replace(plain, columns=(*plain.columns, decode))
    best = present(solved(two))
    both = alternatives(two, best, band_ratio=0.4, max_plans=9, time_limit_s=TIME_LIMIT_S)
    assert [plan.count_J for plan in both.plans] == [(2, 1, 0), (2, 0, 1)]
    assert both.is_complete
    first = alternatives(two, best, band_ratio=0.4, max_plans=1, time_limit_s=TIME_LIMIT_S)
    assert (len(first.plans), first.is_complete) == (1, False)


def test_the_least_rate_follows_the_band() -> None:
    # 8P + 4D serve 40 requests/s on twelve devices, 7P + 4D 39.2 on eleven: 2.04 % more time each.
    problem = one_pool(objective=InstanceObjective.RATE, demand_per_s=0.0)
    best = present(solved(problem))
    for band_ratio, counts in ((0.0, [(8, 4)]), (0.0203, [(8, 4)]), (0.0205, [(7, 4)])):
        actual = alternatives(
            problem, best, band_ratio=band_ratio, max_plans=9, time_limit_s=TIME_LIMIT_S
        )
        assert [plan.count_J for plan in actual.plans] == counts, band_ratio
        assert actual.is_complete, band_ratio


def test_finds_what_trying_everything_finds() -> None:
    objectives = itertools.cycle((InstanceObjective.COST, InstanceObjective.DEVICES))
    assert not [line for seed in range(12) for line in differences(seed, next(objectives))]


@pytest.mark.slow
def test_finds_what_trying_everything_finds_with_either_objective() -> None:
    every = itertools.product(range(12), (InstanceObjective.COST, InstanceObjective.DEVICES))
    assert not [line for seed, objective in every for line in differences(seed, objective)]


def differences(seed: int, objective: InstanceObjective) -> list[str]:
    """What is found and does not exist, is missed, or is called complete and is not."""
    problem = distinct(tiny_problem(np.random.default_rng([seed, 9]), objective))
    best = solved(problem)
    if best is None:
        return []
    limit = 1.3 * weight(problem, best) * (1.0 + 1e-6)
    light = [p for p in brute_force.plans(problem) if weight(problem, p) <= limit]
    lean = {
        plan.count_J
        for plan in light
        if not any(contains(plan.count_J, other.count_J) for other in light)
    }
    actual = alternatives(problem, best, band_ratio=0.3, max_plans=500, time_limit_s=TIME_LIMIT_S)
    kept = {plan.count_J for plan in actual.plans}
    missed = [each for each in lean - kept if not uses_dominated(problem, each)]
    wrong = [] if actual.is_complete else [f"seed {seed} {objective}: not complete"]
    wrong += [f"seed {seed} {objective}: {each} is not lean" for each in kept - lean]
    return wrong + [f"seed {seed} {objective}: {each} is missed" for each in missed]


def distinct(problem: InstancesProblem) -> InstancesProblem:
    """Without limits on kinds, so that every plan contains a lean one."""
    return dataclasses.replace(problem, max_kinds=None)


def weight(problem: InstancesProblem, plan: InstancePlan) -> float:
    return sum(w * n for w, n in zip(problem.weight_J, plan.count_J, strict=True))


def contains(more: tuple[int, ...], less: tuple[int, ...]) -> bool:
    return more != less and all(a >= b for a, b in zip(more, less, strict=True))


def uses_dominated(problem: InstancesProblem, count_J: tuple[int, ...]) -> bool:
    kept = undominated(problem)
    return any(count for j, count in enumerate(count_J) if j not in kept)


@pytest.mark.parametrize(
    "objective",
    [
        *(InstanceObjective.COST, InstanceObjective.DEVICES),
        pytest.param(InstanceObjective.RATE, marks=pytest.mark.slow),
    ],
)
def test_alternatives_of_a_mixed_pool_are_allowed_and_near(objective: InstanceObjective) -> None:
    problem = mixed_pool(objective=objective)
    best = present(solved(problem))
    actual = alternatives(problem, best, band_ratio=0.02, max_plans=4, time_limit_s=TIME_LIMIT_S)
    assert actual.plans
    least = INSTANCES.check.objective(problem, best)
    for plan in actual.plans:
        assert violations(problem, plan) == ()
        assert INSTANCES.check.objective(problem, plan) <= least * 1.02 * (1.0 + 1e-5)
    if objective.rate_is_fixed:  # CP-SAT's opinion on what CBC has proven
        assert INSTANCES.check.objective(problem, actual.plans[0]) == pytest.approx(least, rel=2e-6)


def test_weights_are_whole_numbers_of_a_unit_where_they_are_decimals() -> None:
    for weights, unit in (
        ((3.0, 0.9, 1.8), 0.3),
        ((2.0, 4.0, 8.0), 2.0),
        ((2.49, 0.9999), 0.0003),
        ((2.0**0.5, 1.0), 2.0**0.5 * 1e-9),
    ):
        assert common_unit(weights) == pytest.approx(unit, rel=1e-9)


def test_identical_columns_count_once() -> None:
    problem = one_pool()
    twin = Column(name="p again", group=0, devices_P=(1,), rate_per_s=5.6, price_per_hour=2.0)
    doubled = dataclasses.replace(problem, columns=(*problem.columns, twin))
    best = present(solved(doubled))
    actual = alternatives(doubled, best, band_ratio=0.0, max_plans=9, time_limit_s=TIME_LIMIT_S)
    assert len(actual.plans) == 1
