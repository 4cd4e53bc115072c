"""Lengths of those that run, beside lengths of those that come."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tuner.errors import SpecError
from tuner.planner.serve.demand import Demand
from tuner.planner.serve.options import most_running

Made = Callable[..., Demand]
TAIL = {"kind": "pareto_tailed", "mean": 400, "cv": 1.5, "tail_ratio": 0.05, "tail_index": 1.5}


def test_fixed_lengths_run_as_they_come(demand: Made) -> None:
    found = demand()
    assert found.held_tokens == pytest.approx(2400.0)
    assert found.held_spread_tokens == pytest.approx(0.0, abs=1e-6)
    assert found.past_tokens == pytest.approx(2200.0)


def test_two_kinds_of_answers_run_in_proportion_to_their_length(demand: Made) -> None:
    # Answers of 100 and 900: of ten steps nine are of the long one, so held is
    # 2000 + 0.1 * 100 + 0.9 * 900 = 2820, spread sqrt(0.1 * 0.9) * 800 = 240, past 2000 + 410.
    found = demand(output_tokens={"kind": "empirical", "values": [100, 900]}, longest=4096)
    assert found.output_tokens == pytest.approx(500.0)
    assert found.held_tokens == pytest.approx(2820.0, rel=0.01)
    assert found.held_spread_tokens == pytest.approx(240.0, rel=0.05)
    assert found.past_tokens == pytest.approx(2410.0, rel=0.01)


def test_a_heavy_tail_leaves_room_for_fewer_sequences_than_its_mean(demand: Made) -> None:
    tailed = demand(output_tokens=TAIL)
    fixed = demand(output_tokens=round(tailed.output_tokens))
    cache = 1e6
    assert fixed.output_tokens == pytest.approx(tailed.output_tokens, rel=0.01)
    assert tailed.held_tokens > 1.5 * fixed.held_tokens
    assert most_running(cache, tailed) < 0.7 * most_running(cache, fixed)


def test_fixed_lengths_fill_the_cache(demand: Made) -> None:
    assert most_running(2400.0 * 37, demand()) == 37.0
    assert most_running(0.0, demand()) == 1.0


def test_a_trace_whose_requests_come_at_once_has_no_rate(demand: Made, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    row = "2023-11-16 18:00:00.0,100,10\n"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + 3 * row)
    with pytest.raises(SpecError, match="all requests come at once"):
        demand(rate=None, input_tokens=None, output_tokens=None, trace=str(trace))
