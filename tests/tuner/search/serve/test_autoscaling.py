"""Triggers of an autoscaler follow from what the planned instances are simulated to hold."""

from pathlib import Path

import pytest

from tests.expect import present
from tests.tuner.serve_specs import planned
from tuner.config.serve import Role
from tuner.errors import SpecError
from tuner.plans.autoscaling import Autoscaling
from tuner.plans.serve import ServePlan

EMIT = "vllm, kubernetes, keda"


CHAT = (
    "{rate: 17/s, input_tokens: {kind: lognormal, mean: 1260, cv: 1.0},"
    " output_tokens: {kind: lognormal, mean: 209, cv: 0.7}}"
)


def scaled_plan(
    folder: Path, *, limits: str = "", modes: str = "aggregated", **fields: str
) -> ServePlan:
    extra = f"objective: devices\n  modes: [{modes}]\n  autoscaler: {{{limits}}}"
    return planned(folder, **{"extra": extra, "emit": EMIT} | fields)


def scaling(plan: ServePlan) -> Autoscaling:
    return present(plan.autoscaling)


def test_requests_in_flight_are_the_rate_times_the_latency(tmp_path: Path) -> None:
    plan = scaled_plan(tmp_path, limits="start_up: 60s")
    (group,), (scaled,) = present(plan.decision).instances, scaling(plan).roles
    predicted, capacity_per_s = present(plan.predicted), scaling(plan).capacity_per_s
    # The planned rate is held, and more, whose requests take as long at least (Little's law).
    assert capacity_per_s >= predicted.requests_per_s
    mean_s = predicted.ttft_s.mean + 299 * predicted.tpot_s.mean
    assert scaled.requests >= 0.99 * capacity_per_s * mean_s / group.count
    slowest_s = 1.0 + 299 * 0.05  # within the targets
    assert scaled.requests <= 1.05 * capacity_per_s * slowest_s / group.count
    assert scaled.target == pytest.approx(0.85 * scaled.requests)
    # 2000 tokens of a prompt and half of 300 are there of each at a random time.
    held = scaled.requests / group.attention_dp * 2150 / present(group.kv_tokens)
    assert scaled.kv_usage_ratio * group.attention_dp == pytest.approx(
        held * group.attention_dp, rel=0.02
    )
    assert scaled.longest_request_s >= 299 * predicted.tpot_s.mean
    assert scaling(plan).start_up_s == 60.0


def test_instances_are_of_one_kind_and_fill_their_pool_at_most(tmp_path: Path) -> None:
    plan = scaled_plan(tmp_path)
    (group,), (scaled,) = present(plan.decision).instances, scaling(plan).roles
    assert scaled.at_most == 16 // group.devices
    assert scaled.at_least == min(2, group.count)
    assert scaling(plan).start_up_s is None
    assert present(present(plan.decision).router).policy.value == "least_requests"
    stated = scaled_plan(tmp_path, limits="at_least: 1")
    assert scaling(stated).roles[0].at_least == 1


def test_roles_share_the_pool_in_the_plans_proportion(tmp_path: Path) -> None:
    plan = scaled_plan(tmp_path, modes="disaggregated", limits="at_least: 1")
    instances, roles = present(plan.decision).instances, scaling(plan).roles
    assert [scaled.role for scaled in roles] == [Role.PREFILL, Role.DECODE]
    used = sum(group.count * group.devices for group in instances)
    assert [scaled.at_most for scaled in roles] == [group.count * 16 // used for group in instances]
    most = zip(roles, instances, strict=True)
    assert sum(scaled.at_most * group.devices for scaled, group in most) <= 16
    # Prompts wait for less time than outputs take.
    prefill, decode = (
        scaled.requests * group.count for scaled, group in zip(roles, instances, strict=True)
    )
    assert prefill < decode


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (
            "at_least: 17",
            r"at_least: 17 instances of .* are more than the \d+ that pool",
        ),
        ("kv_usage: 99%", r"kv_usage: 99 % of the KV cache are never in use: at .* fill \d+ %;"),
    ],
)
def test_limits_that_cannot_hold_are_one_line(tmp_path: Path, limits: str, said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        scaled_plan(tmp_path, limits=limits)
    assert "\n" not in str(caught.value)


def test_a_share_of_the_cache_that_is_reached_fires_too(tmp_path: Path) -> None:
    plan = scaled_plan(tmp_path, limits="kv_usage: 1%")
    assert scaling(plan).kv_usage == 0.01
    assert "and above 1 % of the KV cache" in [*scaling(plan).words()][1]


def test_what_one_kind_of_instances_costs_is_said(tmp_path: Path) -> None:
    plan = scaled_plan(
        tmp_path, model="qwen3-30b-a3b", traffic=CHAT, slo="{ttft: {p90: 1s}, tpot: {p90: 25ms}}"
    )
    (lack,) = plan.unlaunchable
    assert lack.feature.endswith("keda counts one kind of instances a role")
    assert lack.gain_ratio > 0.1


def test_without_an_autoscaler_nothing_is_said(tmp_path: Path) -> None:
    plan = planned(tmp_path, extra="objective: devices\n  modes: [aggregated]")
    assert plan.autoscaling is None
