"""The most requests a second of given devices: a closed case, and what is simulated around it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.expect import present
from tests.printed import words_of
from tests.tuner.search.serve.testing import problem_of
from tests.tuner.serve_specs import plan_of, serve_spec
from tuner.config.serve import Role
from tuner.goals.registry import goal_of
from tuner.plans.serve import ServePlan
from tuner.report.serve_page import serve_report
from tuner.search.serve.most_rate import RATE_STEP, at_rate, solve_goal
from tuner.search.serve.plan_serve import solve_modes
from tuner.search.serve.routers import router_choices
from tuner.search.serve.solve_mode import simulate_traffic

EVEN = "{rate: 3/s, arrival: {kind: constant}, input_tokens: 1000, output_tokens: 200}"
SHAPE = "{input_tokens: 2000, output_tokens: 400}"
Spec = Callable[..., Path]


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    def made(
        *,
        nodes: int = 4,
        per_node: int = 1,
        engine: str = "vllm",
        modes: str = "[aggregated]",
        extra: str = "",
        more_pools: str = "",
        **fields: str,
    ) -> Path:
        spec = {
            "model": "llama-3.1-8b",
            "traffic": SHAPE,
            "slo": "{ttft: {p90: 1s}, tpot: {p90: 40ms}}",
            "extra": f"objective: rate\n  modes: {modes}\n  {extra}",
        }
        pools = f"{{name: h100, device: h100-sxm, nodes: {nodes}, devices_per_node: {per_node}}}"
        pools += more_pools
        return serve_spec(tmp_path, pools=pools, engine=engine, emit=engine, **(spec | fields))

    return made


def test_even_arrivals_are_served_up_to_what_the_instances_can(spec: Spec) -> None:
    # One kind of instance, one device each: four times its rate. Nothing waits at even gaps.
    problem = problem_of(spec(traffic=EVEN, extra="max_model_len: 8192"))
    each = {
        option.devices: option.rate_per_s / option.devices
        for option in sorted(problem.options.options, key=lambda one: one.rate_per_s)
    }
    found = present(solve_goal(problem, "aggregated"))
    assert not found.missed_at_goal_spare
    assert 1.0 / found.bound == pytest.approx(4.0 * max(each.values()), rel=1e-6)
    assert present(found.rate_per_s) == pytest.approx(4.0 * max(each.values()) / (1.0 + RATE_STEP))


def test_a_rate_above_what_is_found_misses_a_target(spec: Spec) -> None:
    for slo in ("{ttft: {mean: 400ms}}", "{ttft: {p99: 600ms}, tpot: {p90: 40ms}}"):
        problem = problem_of(
            spec(
                nodes=1, engine="sglang", traffic="{input_tokens: 8192, output_tokens: 20}", slo=slo
            )
        )
        found = present(solve_goal(problem, "aggregated"))
        assert found.missed_at_goal_spare
        assert present(found.rate_per_s) < 0.95 / found.bound
        targets = problem.spec.goal.slo
        for factor, holds in ((1.0, True), (1.0 + 2.0 * RATE_STEP, False)):
            more = at_rate(problem, factor * present(found.rate_per_s))
            simulated = simulate_traffic(more, "aggregated", found.groups)
            assert (not simulated.missed(targets)) == holds, (slo, factor)


def test_no_rate_is_named_where_a_single_request_misses_a_target(spec: Spec) -> None:
    plan = plan_of(spec(slo="{ttft: {p90: 1ms}}"))
    assert plan.decision is None
    assert plan.certificate.status == "infeasible"
    assert "a single prompt takes" in plan.binding_constraint


def test_more_devices_and_longer_targets_never_serve_less(spec: Spec) -> None:
    rates = [
        served.rate_per_s or 0.0
        for nodes, slo in (
            (1, "{tpot: {p90: 20ms}}"),
            (1, "{tpot: {p90: 40ms}}"),
            (2, "{tpot: {p90: 40ms}}"),
        )
        if (served := solve_goal(problem_of(spec(nodes=nodes, slo=slo)), "aggregated"))
    ]
    assert rates[0] <= rates[1] * (1.0 + RATE_STEP)
    assert rates[2] == pytest.approx(2.0 * rates[1], rel=0.05)


@pytest.mark.slow
def test_several_kinds_behind_a_router_that_follows_load_serve_more_than_one(spec: Spec) -> None:
    # Of one kind a role, only one pool of the two would serve.
    pools = ", {name: h20, device: h20, nodes: 2, devices_per_node: 1}"
    problem = problem_of(spec(nodes=2, more_pools=pools))
    one_kind, by_load = router_choices(
        problem.spec.goal,
        problem.spec.emit,
        is_disaggregated=False,
        releases=problem.spec.releases.values(),
    )
    one = present(solve_goal(replace(problem, routers=(one_kind,)), "aggregated"))
    found = present(solve_goal(problem, "aggregated"))
    assert {group.option.serving_pool.pool.name for group in one.groups} == {"h100"}
    assert {group.option.serving_pool.pool.name for group in found.groups} == {"h100", "h20"}
    assert found.router == by_load
    assert found.covered_kinds == by_load.most_kinds
    assert 1.1 * present(one.rate_per_s) < present(found.rate_per_s) <= 1.0 / found.bound
    targets = problem.spec.goal.slo
    for factor, holds in ((1.0, True), (1.0 + 2.0 * RATE_STEP, False)):
        more = at_rate(problem, factor * present(found.rate_per_s))
        simulated = simulate_traffic(more, "aggregated", found.groups, router=found.router)
        assert (not simulated.missed(targets)) == holds or not found.missed_at_goal_spare


@pytest.mark.slow
def test_every_mode_with_a_program_is_solved(spec: Spec) -> None:
    modes = "[aggregated, disaggregated, attention_expert, shared_device]"
    problem = problem_of(spec(model="mixtral-8x7b", nodes=2, per_node=8, modes=modes))
    solutions = solve_modes(problem)
    assert {one.mode for one in solutions.serving} == {
        "aggregated",
        "disaggregated",
        "attention_expert",
        "shared_device",
    }
    for one in solutions.serving:
        assert present(one.rate_per_s) <= 1.0 / one.bound
        if one.mode == "disaggregated":
            for role in (Role.PREFILL, Role.DECODE):
                served = sum(group.rate_per_s for group in one.groups if group.option.role is role)
                assert present(one.rate_per_s) <= served
    assert solutions.fitting[0].rate_per_s == max(
        one.rate_per_s or 0.0 for one in solutions.fitting
    )


def test_a_plan_says_the_rate_its_bound_and_the_benchmark_that_sends_it(spec: Spec) -> None:
    plan = plan_of(spec(model="mixtral-8x7b", nodes=2, per_node=8, modes="[aggregated]"))
    certificate = plan.certificate
    assert certificate.objective == pytest.approx(present(plan.predicted).requests_per_s)
    assert present(certificate.objective) <= present(certificate.bound)
    assert certificate.gap_ratio == pytest.approx(
        1.0 - present(certificate.objective) / present(certificate.bound)
    )
    assert plan.goal.traffic.rate == certificate.objective
    assert [one.requests_per_s for one in plan.modes] == [present(certificate.objective)]
    assert ServePlan.model_validate_json(plan.model_dump_json()) == plan
    shown = words_of(serve_report(plan))
    assert ": requests/s within the SLO " in shown
    assert ", upper bound " in shown
    assert "devices requests/s" in shown
    figures = present(goal_of(plan).figures(plan))
    assert (figures.objective, figures.more_is_better) == ("requests_per_s", True)
