from typing import Any

import numpy as np
import pytest

from solvers.placement.coactivation.check import layer_costs, touched, violations
from solvers.placement.coactivation.problem import CoactivationProblem, Level
from solvers.placement.ranks import Placement, Ranks
from solvers.placement.single_check import rank_loads
from tests.solvers.refusals import unrefused


def problem(**changes: Any) -> CoactivationProblem:
    """Three tokens of two experts, four experts on four ranks of two nodes."""
    given: dict[str, Any] = {
        "expert_LTK": np.array([[[0, 1], [2, 3], [1, 2]]]),
        "load_LE": np.array([[1.0, 2.0, 4.0, 8.0]]),
        "ranks": Ranks.uniform(ranks=4, slots_per_rank=1, ranks_per_node=2),
        "levels": (
            Level(group_G=np.array([0, 0, 1, 1]), total_cost=5.0, peak_cost=3.0),
            Level(group_G=np.arange(4), total_cost=1.0),
        ),
    }
    return CoactivationProblem(**(given | changes))


def test_a_layer_by_hand() -> None:
    placement = Placement(expert_LS=np.array([[0, 2, 1, 3]]))
    # Nodes hold {0, 2} and {1, 3}: every token touches both, 6 in all, 3 the most-loaded of 2
    # nodes. Ranks: every token touches 2, 6 in all.
    assert touched(problem(), placement, level=problem().levels[0], layer=0).tolist() == [3, 3]
    assert layer_costs(problem(), placement).tolist() == [5.0 * 6 + 3.0 * 2 * 3 + 6.0]
    assert rank_loads(problem(), placement).tolist() == [[1.0, 4.0, 2.0, 8.0]]
    # {0, 1} and {2, 3}: tokens 0 and 1 touch one node, token 2 both.
    together = Placement(expert_LS=np.array([[0, 1, 2, 3]]))
    assert layer_costs(problem(), together).tolist() == [5.0 * 4 + 3.0 * 2 * 2 + 6.0]


def test_a_group_behind_a_slow_link_costs_its_weight() -> None:
    # Tokens touch node 0 (experts 0, 2) and node 1 (1, 3) three times each, see above; a copy into
    # node 1 costs 10: 5 (3 + 30) in all and 3 x 2 groups x 30 for the most-loaded one.
    level = Level(
        group_G=np.array([0, 0, 1, 1]),
        total_cost=5.0,
        peak_cost=3.0,
        weight_J=np.array([1.0, 10.0]),
    )
    placement = Placement(expert_LS=np.array([[0, 2, 1, 3]]))
    assert layer_costs(problem(levels=(level,)), placement).tolist() == [5.0 * 33 + 3.0 * 2 * 30]


def test_weights_are_one_positive_number_a_group() -> None:
    for weights in (
        [1.0],
        [1.0, 0.0],
        [1.0, np.inf],
    ):
        with pytest.raises(ValueError, match=r"weights (for|of)"):
            Level(group_G=np.array([0, 0, 1, 1]), total_cost=1.0, weight_J=np.array(weights))


def test_every_broken_rule_is_named() -> None:
    limited = problem(most_load_L=np.array([7.0]))
    for expert_LS, complaint in (
        ([[0, 1, 2]], "1 layers of 3 slots are placed, there are 1 of 4"),
        ([[0, 1, 2, 4]], "layer 0 holds expert 4, there are 4"),
        ([[0, 1, 1, 3]], "layer 0 holds expert 1 2 times, once is allowed"),
        ([[0, 1, 2, 3]], "rank 3 has load 8 in layer 0, at most 7 is allowed"),
    ):
        assert complaint in violations(limited, Placement(expert_LS=np.array(expert_LS)))


def test_an_impossible_problem_cannot_be_made() -> None:
    rows: tuple[tuple[dict[str, Any], str], ...] = (
        ({"expert_LTK": np.zeros((1, 0, 2), dtype=int)}, "needs tokens and a level"),
        ({"expert_LTK": np.array([[[0, 4]]])}, "experts 0..3"),
        ({"expert_LTK": np.array([[[1, 1]]])}, "one expert twice"),
        ({"ranks": Ranks.uniform(ranks=4, slots_per_rank=2)}, "8 slots for 4 experts"),
        ({"load_LE": np.array([[1.0, np.nan, 1.0, 1.0]])}, "non-negative number"),
        ({"most_load_L": np.ones(2)}, "one number a layer"),
    )
    assert unrefused(problem, rows) == []
