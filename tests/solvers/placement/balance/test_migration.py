import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.placement.balance import check, local_search
from solvers.placement.balance.migration import moved, relabelled
from solvers.placement.balance.problem import BalanceProblem, Migration
from solvers.placement.ranks import Placement, Ranks, contiguous
from solvers.registry import BALANCE
from tests.expect import present
from tests.solvers.placement.balance.testing import even_weights, families

RANKS = Ranks.uniform(ranks=8, slots_per_rank=9)
CURRENT = contiguous(num_layers=3, num_experts=64, num_slots=72)


def problem(most_moved: int) -> BalanceProblem:
    return BalanceProblem(
        load_WLE=families(np.random.default_rng(2), num_families=2, num_layers=3, num_experts=64),
        weight_W=even_weights(2),
        ranks=RANKS,
        migration=Migration(current=CURRENT, most_moved=most_moved),
    )


def test_an_expert_moves_when_its_rank_lacked_it() -> None:
    ranks = Ranks.uniform(ranks=2, slots_per_rank=2)
    before = Placement(expert_LS=np.array([[0, 1, 2, 0], [0, 1, 2, 0]]))
    after = Placement(expert_LS=np.array([[1, 0, 0, 2], [2, 1, 0, 0]]))
    assert moved(before, before, ranks) == 0
    # Slots of a rank changed places in the first layer; in the second rank 0 loads expert 2.
    assert moved(before, after, ranks) == 1


@settings(deadline=None, max_examples=20, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_renamed_ranks_move_nothing_when_only_names_changed(seed: int) -> None:
    order = np.random.default_rng(seed).permutation(8)
    renamed = Placement(
        expert_LS=CURRENT.expert_LS.reshape(3, 8, 9)[:, order].reshape(3, 72).copy()
    )
    assert moved(CURRENT, renamed, RANKS) > 0 or (order == np.arange(8)).all()
    assert moved(CURRENT, relabelled(CURRENT, renamed, RANKS), RANKS) == 0


def test_renaming_changes_no_time_on_unequal_ranks() -> None:
    ranks = Ranks(
        slots_G=np.array([9, 9, 10, 8, 9, 9, 9, 9]),
        node_G=np.zeros(8, dtype=np.int64),
        speed_G=np.array([1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 2.0, 1.0]),
    )
    stated = dataclasses.replace(problem(0), ranks=ranks, migration=None)
    new = local_search.search(stated, time_limit_s=60.0, most_steps=50)
    renamed = relabelled(CURRENT, new, ranks)
    assert check.objective(stated, renamed) == pytest.approx(check.objective(stated, new))
    assert moved(CURRENT, renamed, ranks) <= moved(CURRENT, new, ranks)


def test_more_moves_never_balance_worse_and_few_bring_most() -> None:
    values = []
    for most_moved in (0, 24, 1000):
        stated = problem(most_moved)
        outcome = BALANCE.solve(stated, method="local_search", time_limit_s=1.0)
        assert moved(CURRENT, present(outcome.solution), RANKS) <= most_moved
        values.append(outcome.objective)
    assert values[0] == pytest.approx(check.objective(stated, CURRENT))
    assert values == sorted(values, reverse=True)
    # 24 of about 170 moves bring more than half of the gain.
    assert values[0] - values[1] > 0.5 * (values[0] - values[2])


def test_a_start_that_is_no_placement_is_refused() -> None:
    for current, most_moved, complaint in (
        (contiguous(num_layers=2, num_experts=64, num_slots=72), 1, r"is \(2, 72\), expected"),
        (contiguous(num_layers=3, num_experts=63, num_slots=72), 1, "lacks an expert"),
        (contiguous(num_layers=3, num_experts=65, num_slots=72), 1, "experts outside 0..63"),
        (CURRENT, -1, "most_moved is -1"),
    ):
        migration = Migration(current=current, most_moved=most_moved)
        with pytest.raises(ValueError, match=complaint):
            dataclasses.replace(problem(0), migration=migration)
