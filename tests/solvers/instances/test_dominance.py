import dataclasses
import itertools

import numpy as np
import pytest

from solvers.instances.dominance import undominated
from solvers.instances.problem import Column, InstanceObjective
from tests.solvers.instances import brute_force
from tests.solvers.instances.testing import mixed_pool, one_pool, tiny_problem


def column(devices: int, rate_per_s: float, price: float, group: int = 0) -> Column:
    return Column(
        name="", group=group, devices_P=(devices,), rate_per_s=rate_per_s, price_per_hour=price
    )


def test_what_several_of_another_beat_is_left_out() -> None:
    columns = (
        column(1, 2.0, 1.0),
        column(2, 4.0, 2.0),  # as good as two of the first
        column(2, 4.1, 2.0),  # serves more than two of the first
        column(4, 8.1, 3.9),  # two of the third serve more, but cost more
        column(4, 7.0, 4.5),  # four of the first
        column(4, 1.0, 9.0, group=1),  # nothing else of its group
        column(13, 99.0, 1.0),  # the pool has twelve
        column(1, 2.0, 1.0),  # the first once more
    )
    assert undominated(one_pool(columns=columns)) == (0, 2, 3, 5)


def test_most_columns_of_a_mixed_pool_are_dominated() -> None:
    problem = mixed_pool()
    assert len(problem.columns) == 306
    assert 40 <= len(undominated(problem)) <= 150


def lost(
    seed: int, objective: InstanceObjective
) -> list[tuple[int, InstanceObjective, float, float]]:
    """The instance with its optimum without and with dominated columns, where they differ."""
    problem = tiny_problem(np.random.default_rng([seed, 77]), objective)
    kept = undominated(problem)
    alone = dataclasses.replace(problem, columns=tuple(problem.columns[j] for j in kept))
    least, full = (brute_force.solve(one, time_limit_s=60.0).bound for one in (alone, problem))
    return [] if least == pytest.approx(full, rel=1e-12) else [(seed, objective, least, full)]


def test_no_optimum_is_lost() -> None:
    # Each objective on seeds of its own.
    objectives = itertools.cycle(InstanceObjective)
    assert not [actual for seed in range(12) for actual in lost(seed, next(objectives))]


@pytest.mark.slow
def test_no_optimum_of_any_objective_is_lost() -> None:
    every = itertools.product(range(12), InstanceObjective)
    assert not [actual for seed, objective in every for actual in lost(seed, objective)]
