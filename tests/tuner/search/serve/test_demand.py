"""Lengths of those that run, beside lengths of those that come."""

from pathlib import Path

import numpy as np
import pytest

from tests.tuner.search.serve.testing import demand
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.errors import SpecError
from tuner.search.serve.occupancy import grown, joint_quantiles
from tuner.search.serve.options import most_running

TAIL = {"kind": "pareto_tailed", "mean": 400, "cv": 1.5, "tail_ratio": 0.05, "tail_index": 1.5}


def test_fixed_lengths_run_as_they_come() -> None:
    found = demand()
    assert found.held_tokens == pytest.approx(2400.0)
    assert found.past_tokens == pytest.approx(2200.0)
    np.testing.assert_allclose(found.reserved_N[:50], 2400.0 * np.arange(1, 51))


def test_two_kinds_of_outputs_run_in_proportion_to_their_length() -> None:
    # Answers of 100 and 900: of ten steps nine are of the long one, so held is
    # 2000 + 0.1 * 100 + 0.9 * 900 = 2820, past 2000 + 410.
    found = demand(output_tokens={"kind": "empirical", "values": [100, 900]}, longest=4096)
    assert found.output_tokens == pytest.approx(500.0)
    assert found.held_tokens == pytest.approx(2820.0, rel=0.01)
    # Of 40 that run the share of long ones is binomial: 40 of 40 in 1.5 % of looks, 39 in the rest
    # of the hundredth above it.
    assert found.reserved_N[39] == pytest.approx(40 * 2900.0, rel=0.01)
    assert found.past_tokens == pytest.approx(2410.0, rel=0.01)


def test_the_longest_of_a_heavy_tail_are_not_lost() -> None:
    # Of a lognormal law E[O^2] / E[O] is mean (1 + cv^2).
    for mean, cv in ((350.0, 1.8), (2000.0, 0.5), (100.0, 2.5)):
        law = {"kind": "lognormal", "mean": mean, "cv": cv, "most": 10**6}
        found = demand(output_tokens=law, longest=10**7)
        assert found.held_tokens - 2000.0 == pytest.approx(mean * (1.0 + cv**2), rel=0.01)
        assert found.past_tokens - 2000.0 == pytest.approx(mean * (1.0 + cv**2) / 2, rel=0.01)


def test_a_heavy_tail_leaves_room_for_fewer_sequences_than_its_mean() -> None:
    tailed = demand(output_tokens=TAIL)
    fixed = demand(output_tokens=round(tailed.output_tokens))
    cache = 1e6
    engine: str = "sglang"
    assert fixed.output_tokens == pytest.approx(tailed.output_tokens, rel=0.01)
    assert tailed.held_tokens > 1.5 * fixed.held_tokens
    ratio = most_running(cache, tailed, traits=ENGINE_TRAITS[engine]) / most_running(
        cache, fixed, traits=ENGINE_TRAITS[engine]
    )
    assert ratio < 0.7


def test_fixed_lengths_fill_the_cache() -> None:
    assert most_running(2400.0 * 37, demand(), traits=ENGINE_TRAITS["trtllm"]) == 37.0
    assert most_running(0.0, demand(), traits=ENGINE_TRAITS["trtllm"]) == 1.0


def test_where_pages_are_taken_as_outputs_grow_more_sequences_run() -> None:
    for found in (demand(), demand(output_tokens=TAIL)):
        for cache in (1e5, 1e6):
            grows, reserves = (
                most_running(cache, found, traits=ENGINE_TRAITS[engine])
                for engine in ("vllm", "sglang")
            )
            assert grows > reserves


def test_what_sequences_take_together_is_what_drawn_ones_take() -> None:
    rng = np.random.default_rng(7)
    output_lengths = np.minimum(rng.lognormal(7.0, 1.1, 4000), 32000.0)
    prompt_lengths = rng.integers(1, 900, len(output_lengths)).astype(np.float64)
    weight = output_lengths / output_lengths.sum()
    taken = {
        "reserved": joint_quantiles(prompt_lengths + output_lengths, weight, most_sequences=300),
        "grown": joint_quantiles(
            *grown(prompt_lengths, output_lengths, weight), most_sequences=300
        ),
    }
    looks = 20_000
    for count in (1, 3, 17, 300):
        drawn = rng.choice(len(output_lengths), size=(looks, count), p=weight)
        share = rng.random(drawn.shape)
        for name, parts in (("reserved", np.ones_like(share)), ("grown", share)):
            held = (prompt_lengths[drawn] + parts * output_lengths[drawn]).sum(axis=1)
            # One in a hundred, rather fewer where the longest answers are alike.
            assert 0.006 < np.mean(held > taken[name][count - 1]) < 0.0125, (name, count)


def test_a_trace_whose_requests_come_at_once_has_no_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    row = "2023-11-16 18:00:00.0,100,10\n"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + 3 * row)
    with pytest.raises(SpecError, match="all requests come at once"):
        demand(rate=None, input_tokens=None, output_tokens=None, trace=str(trace))
