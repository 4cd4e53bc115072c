from typing import Any

import pytest

from solvers.rank_placement.check import all_to_all_s, gradient_s, objective, pipeline_s, violations
from solvers.rank_placement.problem import RankPlacement, RankPlacementProblem
from tests.solvers.refusals import unrefused


def make(**changes: Any) -> RankPlacementProblem:
    """Two pipelines of two stages on five nodes; any field can be replaced."""
    rates = [[10.0] * 5 for _ in range(5)]
    rates[0][1], rates[1][0] = 5.0, 2.0
    given: dict[str, Any] = {
        "pipelines": 2,
        "stages": 2,
        "num_microbatches": 6,
        "bytes_per_s_NN": rates,
        "hop_bytes": 10.0,
        "gradient_bytes_S": [30.0, 40.0],
        "block": 1,
        "all_to_all_bytes_S": [0.0, 0.0],
        "block_gradient_bytes_S": [0.0, 0.0],
    }
    return RankPlacementProblem(**(given | changes))


def test_a_step_by_hand() -> None:
    placement = RankPlacement(node_RS=((0, 1), (2, 3)))
    # 3 rounds of 10 / 5 + 10 / 2, and of 1 + 1
    assert pipeline_s(make(), placement) == pytest.approx((21.0, 6.0))
    # 2 * 1/2 * 30 and 40 bytes over links of 10 bytes/s
    assert gradient_s(make(), placement) == pytest.approx((3.0, 4.0))
    assert objective(make(), placement) == pytest.approx(25.0)
    # The slowest link of a ring sets its pace: stage 0 runs on nodes 0 and 1, whose links are 5 and
    # 2 bytes/s, 30 / 2.
    assert gradient_s(make(), RankPlacement(node_RS=((0, 2), (1, 3)))) == pytest.approx((15.0, 4.0))
    # One pipeline sums no gradients.
    assert gradient_s(make(pipelines=1), RankPlacement(node_RS=((0, 1),))) == (0.0, 0.0)


def test_block_all_to_all_and_reduction_by_hand() -> None:
    exchanging = make(
        pipelines=4,
        stages=1,
        block=2,
        all_to_all_bytes_S=[20.0],
        gradient_bytes_S=[30.0],
        block_gradient_bytes_S=[50.0],
    )
    placement = RankPlacement(node_RS=((0,), (1,), (2,), (3,)))
    # Nodes 0 and 1 send each other 20 bytes at 5 and at 2 bytes/s, nodes 2 and 3 at 10.
    assert [*all_to_all_s(exchanging, placement, 1)] == pytest.approx([10.0])
    assert [*all_to_all_s(exchanging, placement, 2)] == pytest.approx([2.0])
    # 6 micro-batches of 10 s, of 2 s
    assert pipeline_s(exchanging, placement) == pytest.approx((60.0, 60.0, 12.0, 12.0))
    # 2 * 3/4 * 30 bytes over 5 bytes/s, then 2 * 1/2 * 50 over the 10 between 0 and 2, 1 and 3
    assert gradient_s(exchanging, placement) == pytest.approx((9.0 + 5.0,))


def test_hops_recur_once_for_every_batch_in_flight() -> None:
    chain = RankPlacement(node_RS=((2, 3), (0, 4)))
    few, many = (pipeline_s(make(num_microbatches=m), chain)[0] for m in (1, 8))
    assert few == pytest.approx(2.0)  # one round of 1 + 1 at least
    assert many == pytest.approx(4 * 2.0)


def test_ranks_are_numbered_stage_by_stage() -> None:
    assert RankPlacement(node_RS=((0, 1), (2, 3), (4, 5))).launch_order == (0, 2, 4, 1, 3, 5)


def test_every_broken_rule_is_named() -> None:
    for node_RS, complaint in (
        (((0, 1),), "1 pipelines are placed, there are 2"),
        (((0, 1), (2,)), "pipeline 1 has 1 nodes, its stages are 2"),
        (((0, 1), (2, 5)), "pipeline 1 runs on node 5, there are 5"),
        (((0, 1), (2, 0)), "node 0 runs 2 stages, at most 1"),
    ):
        assert complaint in violations(make(), RankPlacement(node_RS=node_RS))


def test_an_allowed_placement_breaks_nothing() -> None:
    assert violations(make(), RankPlacement(node_RS=((0, 4), (2, 3)))) == ()


def test_an_impossible_problem_cannot_be_made() -> None:
    rows: tuple[tuple[dict[str, Any], str], ...] = (
        ({"pipelines": 3}, "3 pipelines of 2 stages need 6 nodes, there are 5"),
        ({"stages": 0}, "must be at least 1"),
        ({"block": 3}, "blocks of 3 do not divide 2 pipelines"),
        ({"all_to_all_bytes_S": [1.0]}, "all_to_all_bytes_S must be finite"),
        ({"bytes_per_s_NN": [[1.0]] * 5}, r"must be \[5, 5\]"),
        ({"bytes_per_s_NN": [[0.0] * 5] * 5}, "must be positive between every two nodes"),
        ({"hop_bytes": -1.0}, "hop_bytes -1.0 must be at least 0"),
        ({"gradient_bytes_S": [1.0]}, "gradient_bytes_S must be finite"),
        ({"gradient_bytes_S": [1.0, float("nan")]}, "gradient_bytes_S must be finite"),
    )
    assert unrefused(make, rows) == []
