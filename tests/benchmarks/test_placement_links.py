import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tuner.plans.place import LinkFacts


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).with_name("placement_links.py")
    spec = importlib.util.spec_from_file_location("placement_links", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_slow_link_is_left_and_later_tokens_pay_less_than_by_the_rule(
    benchmark: ModuleType,
) -> None:
    case = benchmark.cases("layer_chain")[0]
    result = benchmark.compared(case, objective="layer_chain", traffic="total", time_limit_s=2.0)
    assert result["passes"]
    assert result["moved"]
    # One of six links ten times slower; every node's share of it is a third of its ways.
    assert 2.0 * result["rule_even_s"] < result["rule_s"] < 10.0 * result["rule_even_s"]
    assert result["judged_ratio"] > 0.2
    assert result["plan_s"] < 0.9 * result["even_plan_s"]


def test_costs_are_assigned_to_the_routes_that_the_plan_names(benchmark: ModuleType) -> None:
    links = LinkFacts(
        unit="seconds",
        inside_source="a",
        inside_cost=1.0,
        between_source="b",
        between_cost=6.0,
        slowest_cost=60.0,
        slowest_ranks=(5, 2),
    )
    cost_GG = benchmark.costs_of(links, ranks=6, per_node=2)
    assert cost_GG[4:, 2:4].tolist() == [[60.0, 60.0], [60.0, 60.0]]
    assert (cost_GG == cost_GG.T).all()
    assert np.unique(cost_GG).tolist() == [0.0, 1.0, 6.0, 60.0]


def test_ten_cases_without_published_recordings(benchmark: ModuleType) -> None:
    assert len(benchmark.cases("co_activation", Path("/nowhere"))) == 10
    assert len(benchmark.cases("layer_chain", Path("/nowhere"))) == 6


def test_a_miss_is_marked(benchmark: ModuleType) -> None:
    row = {
        "case": "a case",
        "objective": "layer_chain, total",
        "rule_even_s": 1.0,
        "rule_s": 2.0,
        "plan_s": 3.0,
        "even_plan_s": None,
        "predicted_ratio": 0.1,
        "judged_ratio": -0.5,
        "moved": True,
        "passes": False,
    }
    assert "0 of 1 beat EPLB's rule as predicted  MISSED" in benchmark.report_text([row])
