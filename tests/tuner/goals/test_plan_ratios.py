"""The band of the ratio of two plans' figures: shared errors cancel, those of two settings add."""

import math
from pathlib import Path

import pytest

from tests.expect import present
from tuner.costs.serve.bands import ratio_bands
from tuner.goals.goal import StoredPlan
from tuner.goals.plan_ratios import PlanRatio
from tuner.goals.registry import goal_of, read_any_plan
from tuner.plans.serve import ServePlan
from tuner.plans.train import Plan
from tuner.search.ratios import ties_ratio

CHECKS = Path(__file__).parents[3] / "examples" / "checks"


def ratio_band(first: StoredPlan, other: StoredPlan, *, figure: str) -> PlanRatio | None:
    return goal_of(first).ratio_band(first, other, figure)


def _train() -> Plan:
    plan = read_any_plan(CHECKS / "train-mixtral")
    assert isinstance(plan, Plan)
    return plan


def _serve() -> ServePlan:
    plan = read_any_plan(CHECKS / "serve-mixed-pool")
    assert isinstance(plan, ServePlan)
    return plan


def test_runners_up_of_one_plan_get_the_band_that_the_plan_stored() -> None:
    plan = _train()
    failures = []
    for other in plan.alternatives:
        as_plan = plan.model_copy(update={"decision": other.decision, "predicted": other.predicted})
        result = present(ratio_band(plan, as_plan, figure="step_time_s"))
        ratio = other.predicted.step_time_s / present(plan.predicted).step_time_s
        band = (result.band[0] * ratio, result.band[1] * ratio)
        if band != pytest.approx(present(other.ratio_band)):
            failures.append(f"{band} is not {other.ratio_band}")
        rate = present(ratio_band(plan, as_plan, figure="tokens_per_s"))
        assert rate.band == pytest.approx((1.0 / result.band[1], 1.0 / result.band[0]))
    assert plan.alternatives
    assert failures == []


def test_errors_of_two_settings_add_up_as_squares_of_logarithms() -> None:
    plan = _train()
    elsewhere = plan.model_copy(update={"model": plan.model.model_copy(update={"vocab_size": 9})})
    result = present(ratio_band(plan, elsewhere, figure="step_time_s"))
    single = math.log1p(ties_ratio(present(plan.predicted).step_time_s_band))
    assert result.band[1] == pytest.approx(math.exp(math.sqrt(2.0) * single))
    assert result.band[0] == pytest.approx(1.0 / result.band[1])
    assert "settings differ" in result.source


def test_layouts_at_equal_load_take_the_band_of_published_pairs() -> None:
    plan = _serve()
    for figure, band in (("ttft_p90_s", ratio_bands()[0]), ("tpot_mean_s", ratio_bands()[1])):
        result = present(ratio_band(plan, plan, figure=figure))
        assert result.band == (band.low_ratio, band.high_ratio)
        assert "equal load" in result.source


def test_under_another_traffic_a_deployment_takes_the_wider_of_both_stated_bands() -> None:
    plan = _serve()
    own = present(plan.predicted)
    wide = own.model_copy(update={"tpot_s_band": (own.tpot_s.mean / 2.0, own.tpot_s.mean * 2.0)})
    traffic = plan.goal.traffic.model_copy(update={"prefix_hit": 0.5})
    goal = plan.goal.model_copy(update={"traffic": traffic})
    other = plan.model_copy(update={"predicted": wide, "goal": goal})
    for figure in ("tpot_mean_s", "cost_per_hour", "num_devices", "goodput_per_device"):
        result = present(ratio_band(plan, other, figure=figure))
        assert result.band == pytest.approx((0.5, 2.0))
        assert "wider" in result.source
    assert ratio_band(plan, other, figure="requests_per_s") is None
    first_token = present(ratio_band(plan, other, figure="ttft_p90_s"))
    assert first_token.band[1] == pytest.approx(1.0 + ties_ratio(own.ttft_s_band))


def test_the_most_requests_have_the_band_of_steps_whatever_rates_are_found() -> None:
    # The rate is what both look for, so it is no difference of their traffic; its law is.
    plans = []
    for fields in ({"rate": 10.0}, {"rate": 12.0}, {"rate": 12.0, "prefix_hit": 0.5}):
        plan = _serve()
        traffic = plan.goal.traffic.model_copy(update=fields)
        goal = plan.goal.model_copy(update={"traffic": traffic, "objective": "rate"})
        plans.append(plan.model_copy(update={"goal": goal}))
    tpot = ratio_bands()[1]
    result = present(ratio_band(*plans[:2], figure="requests_per_s"))
    assert result.band == (tpot.low_ratio, tpot.high_ratio)
    assert "wider" in present(ratio_band(plans[0], plans[2], figure="requests_per_s")).source
    assert ratio_band(plans[0], _serve(), figure="requests_per_s") is None


def test_nothing_is_stated_of_memory_or_without_a_decision() -> None:
    plan = _train()
    assert ratio_band(plan, plan, figure="peak_memory_bytes") is None
    infeasible = read_any_plan(CHECKS / "train-infeasible")
    assert ratio_band(plan, infeasible, figure="step_time_s") is None
