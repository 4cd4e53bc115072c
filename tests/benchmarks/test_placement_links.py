from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks import placement_links
from tuner.plans.place import LinkFacts


@pytest.mark.slow
def test_a_slow_link_is_left_and_later_tokens_pay_less_than_by_the_rule() -> None:
    case = placement_links.cases("layer_chain")[0]
    result = placement_links.compared(
        case, objective="layer_chain", traffic="total", time_limit_s=2.0
    )
    assert result["passes"]
    assert result["moved"]
    # One of six links ten times slower; every node's share of it is a third of its ways.
    assert 2.0 * result["rule_even_s"] < result["rule_s"] < 10.0 * result["rule_even_s"]
    assert result["judged_ratio"] > 0.2
    assert result["plan_s"] < 0.9 * result["even_plan_s"]


def test_costs_are_assigned_to_the_routes_that_the_plan_names() -> None:
    links = LinkFacts(
        unit="seconds",
        inside_source="a",
        inside_cost=1.0,
        between_source="b",
        between_cost=6.0,
        slowest_cost=60.0,
        slowest_ranks=(5, 2),
    )
    cost_GG = placement_links.costs_of(links, ranks=6, per_node=2)
    assert cost_GG[4:, 2:4].tolist() == [[60.0, 60.0], [60.0, 60.0]]
    assert (cost_GG == cost_GG.T).all()
    assert np.unique(cost_GG).tolist() == [0.0, 1.0, 6.0, 60.0]


def test_ten_cases_without_published_recordings() -> None:
    assert len(placement_links.cases("co_activation", Path("/nowhere"))) == 10
    assert len(placement_links.cases("layer_chain", Path("/nowhere"))) == 6
