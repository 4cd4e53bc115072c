import dataclasses
import re

import numpy as np
import pytest

from solvers.placement.balance import check
from solvers.placement.balance.problem import BalanceProblem, Migration, ReplicaDispatch, Robust
from solvers.placement.ranks import Placement, Ranks


def problem(**changes: object) -> BalanceProblem:
    """Two workloads, one layer, three experts, two ranks of two slots."""
    made = BalanceProblem(
        load_WLE=np.array([[[6.0, 2.0, 4.0]], [[2.0, 8.0, 2.0]]]),
        weight_W=np.array([0.75, 0.25]),
        ranks=Ranks.uniform(ranks=2, slots_per_rank=2),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type] # fields by name


def placed(*rows: list[int]) -> Placement:
    return Placement(expert_LS=np.array(rows))


def test_times_are_the_sums_of_shares() -> None:
    # Expert 0 in two copies: 3 + 2 | 3 + 4, and 1 + 8 | 1 + 2; both means are 6.
    times = check.launch_times(problem(), placed([0, 1, 0, 2])).mean(axis=0)
    assert times.tolist() == [[[5.0, 7.0]], [[9.0, 3.0]]]
    assert check.layer_times(problem(), placed([0, 1, 0, 2])).tolist() == [[7.0], [9.0]]


def test_workloads_become_one_number() -> None:
    for robust, tail_ratio, expected in (
        (Robust.MEAN, 0.5, (0.75 * 7 + 0.25 * 9) / 6),
        (Robust.WORST, 0.5, 9 / 6),
        (Robust.CVAR, 0.5, (0.25 * 9 + 0.25 * 7) / 0.5 / 6),
        (Robust.CVAR, 0.2, 9 / 6),
        (Robust.CVAR, 1.0, (0.75 * 7 + 0.25 * 9) / 6),
    ):
        stated = problem(robust=robust, tail_ratio=tail_ratio)
        assert check.objective(stated, placed([0, 1, 0, 2])) == pytest.approx(expected)


def test_a_mean_over_launches_has_the_standard_error_that_other_launches_show() -> None:
    rng = np.random.default_rng(1)
    dealt = BalanceProblem(
        load_WLE=rng.lognormal(size=(2, 2, 10)) * np.where(np.arange(10) < 3, 20.0, 1.0),
        weight_W=np.array([0.75, 0.25]),
        ranks=Ranks(slots_G=np.full(8, 2), node_G=np.arange(8) // 2, speed_G=np.ones(8)),
        dispatch=ReplicaDispatch.STATIC,
    )
    expert_S = [*range(10), 0, 1, 2, 0, 1, 2]
    placement = placed(expert_S, expert_S)
    values = [check.objective(dealt, placement, seed=seed) for seed in range(40)]
    assert values[0] == check.objective(dealt, placement)
    assert 0.6 < check.standard_error(dealt, placement) / np.std(values, ddof=1) < 1.6
    exact = dataclasses.replace(dealt, dispatch=ReplicaDispatch.EVEN)
    assert check.standard_error(exact, placement) == 0.0


def test_a_slow_rank_takes_longer() -> None:
    ranks = Ranks(slots_G=np.array([2, 2]), node_G=np.array([0, 0]), speed_G=np.array([1.0, 0.5]))
    stated = problem(ranks=ranks)
    assert check.layer_times(stated, placed([0, 1, 0, 2])).tolist() == [[14.0], [9.0]]
    assert check.objective(stated, placed([0, 1, 0, 2])) == pytest.approx(
        (0.75 * 14 + 0.25 * 9) / 8
    )


def test_a_copy_that_is_reached_costs_its_weights() -> None:
    # Rank 1: shares 3 and 4, each reached by a token with probability 1 - exp(-share).
    stated = problem(active_load=10.0)
    expected = 7.0 + 10.0 * ((1 - np.exp(-3.0)) + (1 - np.exp(-4.0)))
    assert check.launch_times(stated, placed([0, 1, 0, 2])).mean(axis=0)[0, 0, 1] == pytest.approx(
        expected
    )


def test_twins_on_one_rank_are_allowed() -> None:
    assert check.violations(problem(), placed([0, 0, 1, 2])) == ()
    assert check.launch_times(problem(), placed([0, 0, 1, 2])).mean(axis=0)[0, 0].tolist() == [
        6.0,
        6.0,
    ]


def test_a_broken_placement_is_named() -> None:
    for placed_rows, complaint in (
        ([[0, 1, 0]], "1 layers of 3 slots are placed, there are 1 of 4"),
        ([[0, 1, 0, 2], [0, 1, 0, 2]], "2 layers of 4 slots"),
        ([[0, 1, 0, 1]], r"layer 0 has no slot for expert 2 \(1 missing\)"),
        ([[0, 1, 2, 3]], "layer 0 holds expert 3, there are 3"),
        ([[0, 1, 2, -1]], "layer 0 holds expert -1, there are 3"),
    ):
        broken = check.violations(problem(), placed(*placed_rows))
        assert broken, (complaint, broken)
        assert re.search(complaint, broken[0]), (complaint, broken)


def test_moved_experts_are_counted_by_rank() -> None:
    # 0 and 1 change places inside rank 0: nothing moves. 2 and 0 change ranks: two loads.
    stated = problem(migration=Migration(current=placed([0, 1, 0, 2]), most_moved=1))
    assert check.violations(stated, placed([1, 0, 2, 0])) == ()
    assert check.violations(stated, placed([2, 1, 0, 0])) == ()
    assert check.violations(stated, placed([0, 2, 0, 1])) == (
        "2 experts move to new ranks, at most 1 may",
    )
