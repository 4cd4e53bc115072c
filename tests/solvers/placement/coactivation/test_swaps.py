"""The tables say exactly what the checker finds after every swap."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.placement.coactivation.check import layer_costs
from solvers.placement.coactivation.swaps import CoactivatedLayer, Tables
from solvers.placement.ranks import contiguous, placed
from solvers.placement.swap_search import largest_without_two
from tests.solvers.placement.coactivation.testing import tiny_problem
from tests.solvers.placement.testing import rank_of_expert


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_every_swap_is_foretold(seed: int) -> None:
    problem = tiny_problem(np.random.default_rng(seed))
    experts = problem.num_experts
    in_order = contiguous(num_layers=problem.num_layers, num_experts=experts, num_slots=experts)
    rank_LE = rank_of_expert(in_order, problem.ranks)
    layer = CoactivatedLayer.of(problem, 0, rank_LE[0])
    before = layer_costs(problem, in_order)[0]
    assert layer.cost() == pytest.approx(before)
    changed_EE = layer.changes_EE()
    for one, two in np.argwhere(layer.rank_E[:, None] != layer.rank_E):
        swapped_LE = rank_LE.copy()
        swapped_LE[0, [one, two]] = rank_LE[0, [two, one]]
        after = layer_costs(problem, placed(swapped_LE))[0]
        assert changed_EE[one, two] == pytest.approx(after - before)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_tables_stay_true_as_swaps_are_made(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = tiny_problem(rng)
    layer = CoactivatedLayer.of(problem, 0, problem.ranks.rank_S)
    for _ in range(5):
        one, two = rng.choice(problem.num_experts, size=2, replace=False)
        layer.swap(int(one), int(two))
    for level, tables in zip(problem.levels, layer.tables_H, strict=True):
        fresh = Tables.of(level, problem.expert_LTK[0], layer.rank_E)
        for name in ("group_E", "count_J", "touch_EJ", "lost_EE"):
            assert (getattr(tables, name) == getattr(fresh, name)).all(), name


def test_the_largest_of_the_other_groups() -> None:
    for counts in (
        [5],
        [5, 3],
        [1, 7, 4],
        [2, 2, 2, 9],
        [4, 1, 8, 8, 3],
    ):
        found_JJ = largest_without_two(np.array(counts, dtype=float))
        for one in range(len(counts)):
            for two in range(len(counts)):
                rest = [count for at, count in enumerate(counts) if at not in (one, two)]
                assert found_JJ[one, two] == max(rest, default=0)
