"""What is offered where nothing fits, each way out held against a plan of its own."""

import re
from pathlib import Path

import pytest

from tuner.serve_api import deploy
from tuner.serve_plan import ServePlan

MODELS = Path(__file__).parents[4] / "examples" / "models"
LENGTHS = "input_tokens: 2000, output_tokens: 300"


def planned(
    folder: Path,
    *,
    nodes: int = 1,
    traffic: str = f"{{rate: 60/s, {LENGTHS}}}",
    slo: str = "{ttft: {p90: 1s}, tpot: {p90: 50ms}}",
    engine: str = "vllm",
    extra: str = "objective: devices",
) -> ServePlan:
    path = folder / "spec.yaml"
    path.write_text(
        "schema_version: 1\n"
        f"model: {MODELS / 'mixtral-8x7b'}\n"
        "cluster:\n"
        f"  pools: [{{name: h100, device: h100-sxm, nodes: {nodes}, devices_per_node: 8}}]\n"
        "goal:\n"
        "  kind: serve\n"
        f"  engine: {{name: {engine}}}\n"
        f"  traffic: {traffic}\n"
        f"  slo: {slo}\n"
        f"  {extra}\n"
    )
    return deploy(path, time_limit_s=20.0).plan


def test_the_closest_plan_serves_what_it_says_and_not_much_more(tmp_path: Path) -> None:
    plan = planned(tmp_path, traffic=f"{{rate: 500/s, {LENGTHS}}}")
    assert plan.decision is None
    assert "the closest plan serves" in plan.binding_constraint
    (way,) = (one for one in plan.relaxations if one.limit == "rate")
    rate = float(re.findall(r"[\d.e+]+", way.change)[0])
    assert way.decision is not None
    assert way.decision.num_devices == 8
    assert planned(tmp_path, traffic=f"{{rate: {0.9 * rate}/s, {LENGTHS}}}").decision is not None
    assert planned(tmp_path, traffic=f"{{rate: {1.3 * rate}/s, {LENGTHS}}}").decision is None


def test_one_more_node_and_half_the_context_are_solved(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert plan.decision is None
    ways = {way.change: way.decision for way in plan.relaxations}
    more = ways["one more node of h100"]
    assert more is not None
    own = planned(tmp_path, nodes=2)
    assert own.decision is not None
    assert more.num_devices == own.decision.num_devices
    half = ways["prompts and answers half as long"]
    assert half is not None
    shorter = "{rate: 60/s, input_tokens: 1000, output_tokens: 150}"
    own = planned(tmp_path, traffic=shorter)
    assert own.decision is not None
    assert half.num_devices == own.decision.num_devices
    # Of one node there is no twice beside one more.
    assert "twice the nodes of every pool" not in ways


def test_a_little_more_time_to_the_first_token_is_offered_where_it_helps(tmp_path: Path) -> None:
    # One prompt alone takes 22.6 ms on the fastest instance; a target 4 % below that is missed.
    traffic = f"{{rate: 0.1/s, {LENGTHS}}}"
    missed = planned(tmp_path, traffic=traffic, slo="{ttft: {mean: 5ms}, tpot: {p90: 50ms}}")
    found = re.search(r"one prompt alone takes ([\d.]+) ms", missed.binding_constraint)
    assert found is not None
    slo = f"{{ttft: {{p50: {0.97 * float(found[1])}ms}}, tpot: {{p90: 50ms}}}}"
    plan = planned(tmp_path, traffic=traffic, slo=slo)
    assert plan.decision is None
    assert "5 % more time to the first token" in {way.change for way in plan.relaxations}


@pytest.mark.parametrize(
    ("slo", "name"), [("{tpot: {p90: 1ms}}", "tpot"), ("{ttft: {p90: 5ms}}", "ttft")]
)
def test_a_target_that_one_request_misses_is_moved_until_something_fits(
    tmp_path: Path, slo: str, name: str
) -> None:
    plan = planned(tmp_path, traffic=f"{{rate: 5/s, {LENGTHS}}}", slo=slo)
    assert plan.decision is None
    assert plan.binding_constraint.startswith(f"{name}: one")
    (way,) = (one for one in plan.relaxations if one.change.startswith(f"a {name} of"))
    assert way.decision is not None


def test_a_closed_loop_is_told_how_many_requests_fit(tmp_path: Path) -> None:
    plan = planned(tmp_path, traffic=f"{{concurrency: 4096, {LENGTHS}}}")
    assert plan.decision is None
    (way,) = (one for one in plan.relaxations if one.limit == "rate")
    fewer = int(way.change.split()[0])
    assert way.change == f"{fewer} requests at a time in place of 4096"
    less = planned(tmp_path, traffic=f"{{concurrency: {int(0.9 * fewer)}, {LENGTHS}}}")
    assert less.decision is not None


def test_a_release_that_launches_no_way_is_what_binds(tmp_path: Path) -> None:
    # TensorRT-LLM reads whole prompts: its 8192 tokens a step are below what Mixtral may be sent.
    plan = planned(tmp_path, engine="trtllm", extra="modes: [disaggregated]")
    assert plan.decision is None
    assert plan.binding_constraint.startswith("release: trtllm")
    assert "lower max_model_len" in plan.binding_constraint
