"""What is offered where nothing fits, each relaxation held against a plan of its own."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.expect import present
from tests.rows import each_row
from tests.tuner.models import MODELS
from tests.tuner.search.serve.testing import problem_of
from tests.tuner.serve_specs import plan_of, serve_spec
from tuner.config.serve import Role
from tuner.goals.serve_plan import deploy
from tuner.plans.serve import ServePlan
from tuner.search.serve.relaxations import Closest, find_closest
from tuner.search.serve.simulation import InstanceGroup
from tuner.search.serve.solve_mode import simulate_traffic
from tuner.search.settings import SearchSettings

LENGTHS = "input_tokens: 2000, output_tokens: 300"
TOGETHER = "objective: devices\n  modes: [aggregated]"


def written(folder: Path, *, nodes: int = 1, **fields: str) -> Path:
    pools = f"{{name: h100, device: h100-sxm, nodes: {nodes}, devices_per_node: 8}}"
    return serve_spec(folder, pools=pools, **({"traffic": f"{{rate: 60/s, {LENGTHS}}}"} | fields))


def planned(folder: Path, **asked: Any) -> ServePlan:
    return plan_of(written(folder, **asked))


@pytest.mark.slow
def test_the_closest_plan_serves_what_it_says_and_not_much_more(tmp_path: Path) -> None:
    plan = planned(tmp_path, traffic=f"{{rate: 500/s, {LENGTHS}}}", extra=TOGETHER)
    assert plan.decision is None
    assert plan.certificate.status == "infeasible"
    assert plan.binding_constraint.startswith("devices: 500 requests/s")
    assert "the closest plan serves" in plan.binding_constraint
    (way,) = (one for one in plan.relaxations if one.limit == "rate")
    rate = float(re.findall(r"[\d.e+]+", way.change)[0])
    assert present(way.decision).num_devices == 8
    for share, fits in ((0.9, True), (1.3, False)):
        again = planned(tmp_path, traffic=f"{{rate: {share * rate}/s, {LENGTHS}}}", extra=TOGETHER)
        assert (again.decision is not None) == fits, share


def test_once_time_is_up_the_closest_plan_is_the_first_that_serves(tmp_path: Path) -> None:
    path = written(tmp_path, traffic=f"{{rate: 500/s, {LENGTHS}}}")

    def closest(seconds_a_look: float) -> Closest:
        looks = itertools.count()
        settings = SearchSettings(time_limit_s=20.0, clock=lambda: next(looks) * seconds_a_look)
        return present(find_closest(problem_of(path, settings=settings)))

    hasty, patient = closest(30.0), closest(0.0)
    assert hasty.decision.mode == "aggregated"
    assert 0.0 < hasty.requests_per_s <= patient.requests_per_s


@pytest.mark.slow
def test_one_more_node_and_half_the_context_are_solved(tmp_path: Path) -> None:
    traffic = f"{{rate: 40/s, {LENGTHS}}}"
    plan = planned(tmp_path, traffic=traffic, extra=TOGETHER)
    assert plan.decision is None
    ways = {way.change: way.decision for way in plan.relaxations}
    assert all(ways.values())
    more = present(ways["one more node of h100"])
    own = planned(tmp_path, nodes=2, traffic=traffic, extra=TOGETHER)
    assert more.num_devices == present(own.decision).num_devices
    half = present(ways["prompts and outputs half as long"])
    shorter = "{rate: 40/s, input_tokens: 1000, output_tokens: 150}"
    own = planned(tmp_path, traffic=shorter, extra=TOGETHER)
    assert half.num_devices == present(present(own.decision)).num_devices
    # Of one node there is no twice beside one more.
    assert "twice the nodes of every pool" not in ways


def fastest_s(spec: Path) -> float:
    """The least median time to the first token of any one instance."""
    problem = problem_of(spec)
    return min(
        float(
            np.median(
                simulate_traffic(
                    problem, "aggregated", [InstanceGroup(option=one, count=1)]
                ).ttft_s_R
            )
        )
        for one in problem.options.options
        if one.role is Role.AGGREGATED
    )


@pytest.mark.slow
def test_a_little_more_time_to_the_first_token_is_offered_where_it_helps(tmp_path: Path) -> None:
    traffic = f"{{rate: 0.1/s, {LENGTHS}}}"
    only = "modes: [aggregated]"
    assert planned(tmp_path, traffic=traffic, extra=only).decision is not None
    least_s = fastest_s(tmp_path / "spec.yaml")
    slo = f"{{ttft: {{p50: {0.97e3 * least_s}ms}}, tpot: {{p90: 50ms}}}}"
    plan = planned(tmp_path, traffic=traffic, slo=slo, extra=only)
    assert plan.decision is None
    assert "5 % more time to the first token" in {way.change for way in plan.relaxations}


@pytest.mark.slow
@each_row(
    ("slo", "name", "binds"),
    [
        ("{tpot: {p90: 1ms}}", "tpot", "a single request"),
        ("{ttft: {p90: 5ms}}", "ttft", "a single prompt"),
    ],
)
def test_a_target_that_one_request_misses_is_moved_until_something_fits(
    tmp_path: Path, slo: str, name: str, binds: str
) -> None:
    plan = planned(tmp_path, traffic=f"{{rate: 5/s, {LENGTHS}}}", slo=slo)
    assert plan.decision is None
    assert plan.certificate.status == "infeasible"
    assert plan.binding_constraint.startswith(f"{name}: {binds}")
    (way,) = (one for one in plan.relaxations if one.change.startswith(f"a {name} of"))
    assert way.decision is not None


@pytest.mark.slow
def test_a_closed_loop_states_how_many_requests_fit(tmp_path: Path) -> None:
    plan = planned(tmp_path, traffic=f"{{concurrency: 4096, {LENGTHS}}}", extra=TOGETHER)
    assert plan.decision is None
    (way,) = (one for one in plan.relaxations if one.limit == "rate")
    fewer = int(way.change.split()[0])
    assert way.change == f"{fewer} requests at a time in place of 4096"
    traffic = f"{{concurrency: {int(0.9 * fewer)}, {LENGTHS}}}"
    assert planned(tmp_path, traffic=traffic, extra=TOGETHER).decision is not None


@pytest.mark.slow
def test_a_release_that_launches_no_option_is_what_binds(tmp_path: Path) -> None:
    # SGLang shares devices between prefill and decode, but not of Mixtral.
    less = f"{{rate: 5/s, {LENGTHS}}}"
    plan = planned(tmp_path, engine="sglang", extra="modes: [shared_device]", traffic=less)
    assert plan.decision is None
    assert plan.binding_constraint.startswith("release: sglang")
    assert [one.status for one in plan.modes] == ["unlaunchable"]


@pytest.mark.slow
def test_modes_that_no_release_has_are_priced_and_listed(tmp_path: Path) -> None:
    modes = ["attention_expert", "shared_device", "prefill_offload"]
    extra = f"modes: [{', '.join(modes)}]"
    plan = planned(tmp_path, extra=extra, traffic=f"{{rate: 5/s, {LENGTHS}}}")
    assert plan.decision is None
    assert "launches none of the requested modes" in plan.binding_constraint
    assert [one.mode for one in plan.modes] == modes


def test_pools_that_nothing_links_are_said_to_lack_a_link(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    pool = "{{name: {}, device: h100-sxm, nodes: 1, devices_per_node: 2}}"
    path.write_text(
        "schema_version: 1\n"
        f"model: {MODELS / 'mixtral-8x7b'}\n"
        f"cluster: {{pools: [{pool.format('one')}, {pool.format('other')}]}}\n"
        "goal:\n"
        "  kind: serve\n"
        "  engine: {name: vllm}\n"
        "  modes: [disaggregated]\n"
        f"  traffic: {{rate: 4/s, {LENGTHS}}}\n"
        "  slo: {ttft: {p90: 2s}, tpot: {p90: 50ms}}\n"
    )
    plan = deploy(path, time_limit_s=20.0).plan
    assert plan.decision is None
    assert plan.binding_constraint.startswith("link: no link joins the pools")
    ways = {way.limit: way for way in plan.relaxations}
    assert present(ways["link"].decision).num_devices <= 4
