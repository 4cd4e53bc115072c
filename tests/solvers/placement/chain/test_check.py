from typing import Any

import numpy as np

from solvers.placement.chain.check import objective, pair_costs, violations
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.ranks import Placement, Ranks
from solvers.placement.single_check import rank_loads
from tests.solvers.refusals import unrefused


def chain(**changes: Any) -> ChainProblem:
    """Two layers of three experts on two ranks, of two slots and one."""
    given: dict[str, Any] = {
        "flow_TEE": np.array([[[1.0, 2.0, 0.0], [0.0, 4.0, 8.0], [16.0, 0.0, 32.0]]]),
        "load_LE": np.array([[3.0, 12.0, 48.0], [17.0, 6.0, 40.0]]),
        "ranks": Ranks(slots_G=np.array([2, 1]), node_G=np.array([0, 1]), speed_G=np.ones(2)),
        "cost_GG": np.array([[0.0, 2.0], [3.0, 0.0]]),
    }
    return ChainProblem(**(given | changes))


PLACED = Placement(expert_LS=np.array([[0, 2, 1], [1, 2, 0]]))


def test_a_chain_by_hand() -> None:
    # Layer 0: experts 0 and 2 on rank 0. Layer 1: 1 and 2. From rank 0 to 1: 1 + 16 at 2 each;
    # from rank 1 to 0: 4 + 8 at 3 each.
    assert pair_costs(chain(), PLACED).tolist() == [34.0 + 36.0]
    assert objective(chain(measure=Measure.MOST_LOADED_PAIR), PLACED) == 36.0
    assert rank_loads(chain(), PLACED).tolist() == [[51.0, 12.0], [46.0, 17.0]]


def test_one_layer_costs_nothing() -> None:
    problem = chain(flow_TEE=np.zeros((0, 3, 3)), load_LE=np.ones((1, 3)))
    assert objective(problem, Placement(expert_LS=np.array([[0, 1, 2]]))) == 0.0


def test_every_broken_rule_is_named() -> None:
    limited = chain(most_load_L=np.array([55.0, 55.0]))
    for expert_LS, complaint in (
        ([[0, 1, 2]], "1 layers of 3 slots are placed, there are 2 of 3"),
        ([[0, 1, 2], [0, 1, 3]], "layer 1 holds expert 3, there are 3"),
        ([[0, 0, 2], [0, 1, 2]], "layer 0 holds expert 0 2 times, once is allowed"),
        ([[1, 2, 0], [0, 1, 2]], "rank 0 has load 60 in layer 0, at most 55 is allowed"),
    ):
        assert complaint in violations(limited, Placement(expert_LS=np.array(expert_LS)))


def test_a_limit_forgives_rounding_and_no_more() -> None:
    assert not violations(chain(most_load_L=np.array([51.0 * (1 - 1e-12), 46.0])), PLACED)
    assert violations(chain(most_load_L=np.array([51.0 * (1 - 1e-6), 46.0])), PLACED)


def test_an_impossible_problem_cannot_be_made() -> None:
    rows: tuple[tuple[dict[str, Any], str], ...] = (
        ({"flow_TEE": np.zeros((2, 3, 3))}, "flows must be"),
        ({"cost_GG": np.zeros((3, 3))}, "costs must be"),
        ({"cost_GG": np.array([[0.0, np.nan], [0.0, 0.0]])}, "non-negative numbers"),
        ({"load_LE": -np.ones((2, 3))}, "non-negative numbers"),
        ({"most_load_L": np.ones(3)}, "one number a layer"),
        ({"ranks": Ranks.uniform(ranks=2, slots_per_rank=2)}, "4 slots for 3 experts"),
    )
    assert unrefused(chain, rows) == []
