"""Biases that make random routing as uneven as a recording, held against draws that are counted."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tuner import api
from tuner.plans.train import Plan
from tuner.spec.routing import RoutingRecord
from tuner.verify.forced_routing import bias_deviation, expert_shares, forced_routing

EXPERTS = 8
UNEVEN = (0.30, 0.20, 0.10, 0.10, 0.10, 0.10, 0.05, 0.05)


@each_row(("num_experts", "top_k"), [(8, 2), (16, 1), (64, 6), (128, 8)])
@each_row("deviation", [0.0, 0.2, 1.0])
def test_shares_are_those_of_counted_tokens(num_experts: int, top_k: int, deviation: float) -> None:
    rng = np.random.default_rng(7)
    bias_E = deviation * rng.standard_normal(num_experts)
    logit_TE = rng.standard_normal((40_000, num_experts)) + bias_E
    chosen = np.argpartition(-logit_TE, top_k - 1, axis=1)[:, :top_k]
    counted_E = np.bincount(chosen.ravel(), minlength=num_experts) / chosen.size
    (share_E,) = expert_shares(bias_E[None, :], top_k=top_k)
    # Four standard errors of a count, and 2 % of an even share for the normal law of few others.
    error_E = 4.0 * np.sqrt(counted_E / chosen.size) + 0.02 / num_experts
    assert np.all(np.abs(share_E - counted_E) <= error_E)


def test_a_deviation_reaches_what_is_wanted_in_fresh_draws() -> None:
    deviation, reached = bias_deviation(1.5, num_experts=64, top_k=6, degree=8)
    assert reached == pytest.approx(1.5, rel=0.01)
    fresh_BE = deviation * np.random.default_rng(3).standard_normal((200, 64))
    load_BR = expert_shares(fresh_BE, top_k=6).reshape(200, 8, 8).sum(axis=2)
    most_loaded_B = 8 * load_BR.max(axis=1)
    # Mean of 200 draws, and of the 32 that the deviation was found with.
    assert most_loaded_B.mean() == pytest.approx(1.5, abs=4.0 * most_loaded_B.std() / np.sqrt(32))


@settings(deadline=None, max_examples=25)
@given(st.floats(0.0, 3.0), st.floats(0.0, 3.0), st.integers(1, 7))
def test_larger_biases_are_never_more_even(one: float, other: float, top_k: int) -> None:
    low, high = sorted((one, other))
    draw_BE = np.random.default_rng(1).standard_normal((4, EXPERTS))
    imbalances = [
        expert_shares(deviation * draw_BE, top_k=top_k).max(axis=1).mean()
        for deviation in (low, high)
    ]
    assert imbalances[0] <= imbalances[1] + 1e-3


def test_where_every_expert_is_chosen_all_are_even() -> None:
    shares = expert_shares(np.array([[3.0, 0.0]]), top_k=2)
    assert shares.tolist() == [[0.5, 0.5]]


@pytest.fixture(scope="module")
def planned(
    write_spec: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Plan, RoutingRecord]:
    """A plan of the tiny model, and its recording."""
    folder = tmp_path_factory.mktemp("uneven")
    record = {
        "num_logical_experts": EXPERTS,
        "layer_ids": [0, 1, 2, 3],
        "logical_count": [[round(1000 * share) for share in UNEVEN]] * 4,
    }
    (folder / "routing.json").write_text(json.dumps(record))
    spec = write_spec(
        folder,
        pool={"profile": None, "device": "H200", "memory_per_device": None},
        goal={"routing": {"path": "routing.json"}},
        search={"micro_batch_size": [1]},
        emit=("megatron-lm",),
    )
    made = api.plan(spec)
    assert made.spec.routing is not None
    return made.plan, made.spec.routing


def test_a_trial_is_as_uneven_as_the_recording(
    planned: tuple[Plan, RoutingRecord],
) -> None:
    plan, record = planned
    assert plan.decision is not None
    decision = plan.decision.model_copy(
        update={"expert_model_parallel_size": 4, "expert_data_parallel_size": 1}
    )
    result = forced_routing(plan, decision, record)
    # Ranks hold 0.5, 0.2, 0.2 and 0.1: the most-loaded one has twice the mean of 0.25.
    assert "4 expert ranks 2.00 times the mean (recorded: 2.00)" in result.note
    (argument,) = result.arguments
    name, _, value = argument.partition("=")
    assert name == "--moe-router-force-biased"
    # Negative: drawn once a layer.
    assert -2.0 < float(value) < -0.5


def test_even_ranks_are_forced_to_be_even(
    planned: tuple[Plan, RoutingRecord],
) -> None:
    plan, record = planned
    assert plan.decision is not None
    alone = plan.decision.model_copy(update={"expert_model_parallel_size": 1})
    result = forced_routing(plan, alone, record)
    assert result.arguments == ("--moe-router-force-load-balancing",)
    assert "1 expert ranks are as balanced as recorded" in result.note


def test_nothing_is_forced_where_nothing_was_recorded_or_no_flag_exists(
    planned: tuple[Plan, RoutingRecord],
) -> None:
    plan, record = planned
    assert plan.decision is not None
    assert forced_routing(plan, plan.decision, None).arguments == ()
    for engine in ("megatron-lm-0.16", "torchtitan"):
        other = plan.model_copy(update={"emit": (engine,)})
        result = forced_routing(other, plan.decision, record)
        assert result.arguments == ()
        assert result.note == (
            f"expert loads are the router's own: {engine} cannot force recorded loads"
        )
    reference = plan.model_copy(update={"emit": ("reference",)})
    assert forced_routing(reference, plan.decision, record).note == ""
