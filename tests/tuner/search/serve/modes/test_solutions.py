"""Every mode in one run, whatever the traffic, the pools and the model."""

from pathlib import Path

import pytest

from tests.expect import present
from tests.rows import each_row
from tests.tuner import serve_specs
from tests.tuner.search.serve.testing import problem_of
from tests.tuner.serve_specs import H100, serve_spec
from tuner.config.serve import Role
from tuner.plans.serve import ServeModeResult, ServePlan
from tuner.search.serve.causes import explain_no_solution

H20 = "{name: h20, device: h20, nodes: 1, devices_per_node: 8, price_per_device_hour: 1.5}"
TWO_H100, TWO_H20 = (
    one.replace("devices_per_node: 8", "devices_per_node: 2") for one in (H100, H20)
)
LINK = "{between: [h100, h20], bandwidth: 100Gbit/s, latency: 200us}"
SPREAD = "input_tokens: {kind: lognormal, mean: 4000, cv: 1.5, most: 30000}, output_tokens: 200"
MODES = ["aggregated", "disaggregated", "attention_expert", "shared_device", "prefill_offload"]


SPEC = {
    "pools": f"{H100.replace('nodes: 2', 'nodes: 1')}, {H20}",
    "links": LINK,
    "traffic": f"{{rate: 6/s, {SPREAD}}}",
    "slo": "{ttft: {p90: 3s}, tpot: {p90: 50ms}}",
}
"""Every mode on two pools."""


def planned(folder: Path, **fields: str) -> ServePlan:
    return serve_specs.planned(folder, **(SPEC | fields))


def by_mode(plan: ServePlan) -> dict[str, ServeModeResult]:
    return {one.mode: one for one in plan.modes}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> ServePlan:
    return planned(tmp_path_factory.mktemp("modes"))


def test_one_run_solves_every_mode(plan: ServePlan) -> None:
    assert [one.mode for one in plan.modes] == MODES
    solutions = by_mode(plan)
    assert sum(one.status == "chosen" for one in plan.modes) == 1
    for mode in ("attention_expert", "shared_device", "prefill_offload"):
        one = solutions[mode]
        assert one.status == "unlaunchable"
        assert None not in (one.devices, one.ttft_s, one.tpot_s)
        (told,) = (line for line in plan.unlaunchable if line.feature.startswith(mode))
        assert told.gain_ratio == pytest.approx(max(one.gain_ratio or 0.0, 0.0))
    assert present(plan.decision).num_devices == solutions[present(plan.decision).mode].devices

    # What a mode saves is what its devices are fewer.
    for one in plan.modes:
        if one.devices is not None:
            assert one.gain_ratio == pytest.approx(
                1.0 - one.devices / present(plan.decision).num_devices
            )
    # Ties and the bound are of modes that can be launched.
    certificate = plan.certificate
    assert present(certificate.bound) <= present(certificate.objective)
    assert certificate.within_band >= sum(other.within_band for other in plan.alternatives)


def test_shared_devices_are_a_plan_where_the_release_launches_them(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        engine="sglang",
        model="qwen3-235b-a22b",
        extra="modes: [shared_device]\n  quantization: fp8",
        traffic="{rate: 2/s, input_tokens: 2000, output_tokens: 200}",
    )
    (group,) = present(plan.decision).instances
    assert group.role is Role.AGGREGATED
    assert group.attention_dp == group.pp == 1
    assert not group.chunked_prefill
    # In steps of eight multiprocessors.
    steps = present(group.prefill_share_ratio) * {"h100": 132, "h20": 78}[group.pool] / 8
    assert steps == pytest.approx(round(steps))
    assert present(plan.predicted).ttft_s.p90 <= 3.0
    assert present(plan.predicted).tpot_s.p90 <= 0.05
    assert plan.certificate.status == "optimal"


FIXED = "{rate: 6/s, input_tokens: 4000, output_tokens: 200}"


@each_row(
    ("pools", "links", "traffic", "says"),
    [
        (TWO_H100, "", f"{{rate: 6/s, {SPREAD}}}", "no second pool"),
        (f"{TWO_H100}, {TWO_H20}", "", f"{{rate: 6/s, {SPREAD}}}", "no link joins the pools"),
        (f"{TWO_H100}, {TWO_H20}", LINK, FIXED, "equally long"),
    ],
)
def test_what_keeps_prompts_from_being_offloaded_is_stated(
    tmp_path: Path, pools: str, links: str, traffic: str, says: str
) -> None:
    problem = problem_of(serve_spec(tmp_path, pools=pools, links=links, traffic=traffic))
    assert says in explain_no_solution("prefill_offload", problem)


def trace(folder: Path) -> str:
    path = folder / "trace.csv"
    rows = [
        f"2024-05-10 00:{i // 60:02}:{i % 60:02}.0000000,{200 + 13 * i},{20 + i % 90}"
        for i in range(400)
    ]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    return f"{{trace: {path}}}"


LOOP = f"{{concurrency: 24, {SPREAD}}}"


@each_row(
    "fields",
    [{"engine": "sglang", "traffic": LOOP}, {"engine": "trtllm", "traffic": LOOP}, {"slo": "{}"}],
)
def test_no_mode_breaks_on_a_closed_loop_or_without_targets(
    tmp_path: Path, fields: dict[str, str]
) -> None:
    plan = planned(tmp_path, **fields)
    assert plan.decision is not None
    assert [one.mode for one in plan.modes] == MODES


def test_no_mode_breaks_on_a_trace(tmp_path: Path) -> None:
    plan = planned(tmp_path, traffic=trace(tmp_path))
    assert plan.decision is not None
    assert by_mode(plan)["prefill_offload"].status == "unlaunchable"


@pytest.mark.slow
def test_no_mode_breaks_on_targets_that_nothing_keeps(tmp_path: Path) -> None:
    # Few devices: relaxations are searched for in every mode.
    pools = f"{TWO_H100}, {TWO_H20}"
    plan = planned(tmp_path, pools=pools, slo="{tpot: {p90: 1ms}}")
    assert plan.decision is None
    assert [one.status for one in plan.modes] == ["none"] * 5
    # Tails that no mode keeps once requests are simulated.
    few = "modes: [aggregated, attention_expert, shared_device, prefill_offload]"
    plan = planned(tmp_path, pools=pools, slo="{ttft: {p99: 200ms}}", extra=few)
    statuses = {one.mode: one.status for one in plan.modes}
    assert set(statuses.values()) <= {"none", "missed"}


def test_no_mode_breaks_on_cached_prefixes(plan: ServePlan, tmp_path: Path) -> None:
    hit = f"{{rate: 6/s, prefix_hit: 0.6, {SPREAD}}}"
    few = "objective: devices\n  modes: [aggregated, shared_device, prefill_offload]"
    one, other = by_mode(planned(tmp_path, traffic=hit, extra=few)), by_mode(plan)
    for mode in ("shared_device", "prefill_offload"):
        assert (one[mode].devices or 0) <= (other[mode].devices or 0)
