"""Whole deployments' plans on datasheets."""

from pathlib import Path

import pytest

from tests.expect import present, refused
from tests.printed import words_of
from tests.rows import each_row
from tests.tuner.serve_specs import H100, planned
from tuner.config.serve import Role
from tuner.errors import SpecError
from tuner.plans.serve import ServePlan
from tuner.report.serve_page import serve_report

L40S = "{name: l40s, device: l40s, nodes: 4, devices_per_node: 8, price_per_device_hour: 0.9}"
H200 = "{name: h200, device: h200-sxm, nodes: 1, devices_per_node: 8}"
H20 = "{name: h20, device: h20, nodes: 1, devices_per_node: 8, price_per_device_hour: 1.5}"
FEW_MODES = "objective: devices\n  modes: [aggregated, disaggregated]"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> ServePlan:
    """Mixtral 8x7B on two H100 servers."""
    return planned(tmp_path_factory.mktemp("plain"))


def test_a_plan_meets_its_targets_on_a_certified_number_of_devices(plan: ServePlan) -> None:
    assert present(plan.predicted).ttft_s.p90 <= 1.0
    assert present(plan.predicted).tpot_s.p90 <= 0.05
    assert plan.certificate.status == "optimal"
    assert plan.certificate.bound == pytest.approx(present(plan.decision).num_devices)
    assert present(plan.decision).num_devices <= 16


@each_row(
    ("model", "engine", "state_mib", "devices"),
    [
        # 63 GB of weights: one device holds them, and has room for 68 GiB of pages and states.
        ("nemotron-3-nano", "vllm", "46.8 MiB", {1, 2}),
        # 159 GB: two devices at least; five states of every request are kept beside the pages.
        ("qwen3-next-80b-a3b", "sglang", "73.7 MiB", {2, 4}),
        # Two states of half the width.
        (
            "qwen3-next-80b-a3b",
            "vllm",
            "37.7 MiB of a request, whatever its length, in bf16",
            {2},
        ),
    ],
)
def test_hybrids_are_planned_with_their_states(
    tmp_path: Path, model: str, engine: str, state_mib: str, devices: set[int]
) -> None:
    made = planned(tmp_path, pools=H200, model=model, engine=engine, extra=FEW_MODES)
    assert present(made.decision).num_devices in devices
    # A step reads 3.6 or 3.9 billion active parameters at least once, and no more than all.
    assert 0.002 < present(made.predicted).tpot_s.mean < 0.05
    assert any(state_mib in note for note in made.provenance.notes)
    assert any("linear_update" in note for note in made.provenance.notes)
    (group,) = [one for one in present(made.decision).instances if one.role is not Role.PREFILL]
    assert group.kv_tokens > group.max_batch * 2300


@each_row("engine", ["vllm", "sglang"])
def test_zero_computation_experts_are_planned_as_engines_run_them(
    tmp_path: Path, engine: str
) -> None:
    extra = "objective: devices\n  modes: [aggregated]\n  quantization: fp8_block"
    made = planned(
        tmp_path,
        pools=H200,
        model="longcat-flash",
        engine=engine,
        traffic="{rate: 0.5/s, input_tokens: 2000, output_tokens: 300}",
        slo="{ttft: {p90: 10s}, tpot: {p90: 100ms}}",
        extra=extra,
    )
    # 561 GB of weights in fp8: a node of eight, or its half with little room beside them.
    assert present(made.decision).num_devices in (4, 8)
    # A step reads 18.7 billion parameters of attention and dense networks at least once.
    assert 0.002 < present(made.predicted).tpot_s.mean < 0.1
    notes = made.provenance.notes
    assert any("12 experts of a token 8" in note for note in notes)
    assert any(f"{engine}: copies for experts without weights" in note for note in notes)
    if engine == "sglang":
        assert {(one.pp, one.a2a_backend) for one in present(made.decision).instances} <= {
            (1, "none"),
            (1, "allgather"),
        }


def test_a_release_that_lacks_the_model_says_so(tmp_path: Path) -> None:
    made = planned(
        tmp_path,
        pools=H200.replace("devices_per_node: 8", "devices_per_node: 2"),
        model="kimi-linear-48b-a3b",
        engine="trtllm",
        extra=FEW_MODES,
    )
    assert made.decision is None
    assert "KimiLinearForCausalLM" in str(made.binding_constraint)


def test_every_mode_is_priced_and_compared(plan: ServePlan) -> None:
    modes = {present(plan.decision).mode, *(other.decision.mode for other in plan.alternatives)}
    assert modes == {"aggregated", "disaggregated"}
    assert any(one.feature.startswith("attention_expert") for one in plan.unlaunchable)


def test_a_cheap_pool_is_taken_where_it_is_fast_enough(tmp_path: Path) -> None:
    cheap = planned(tmp_path, pools=f"{H100}, {L40S}, {H20}", extra="objective: cost")
    assert present(present(cheap.predicted).cost_per_hour) <= present(
        present(planned(tmp_path, pools=H100, extra="objective: cost").predicted).cost_per_hour
    )
    # Instances of a role are of one kind where one serves: routers share requests out evenly.
    roles = [group.role for group in present(cheap.decision).instances]
    assert len(roles) == len(set(roles))


def test_pools_without_a_link_hand_nothing_over(tmp_path: Path) -> None:
    plan = planned(
        tmp_path, pools=f"{H100}, {H20}", extra="modes: [disaggregated]\n  objective: cost"
    )
    assert all(way.from_pool == way.to_pool for way in present(plan.decision).handovers)
    linked = planned(
        tmp_path,
        pools=f"{H100}, {H20}",
        links="{between: [h100, h20], bandwidth: 400Gbit/s, latency: 10us}",
        extra="modes: [disaggregated]\n  objective: cost",
    )
    assert present(present(linked.predicted).cost_per_hour) <= present(
        present(plan.predicted).cost_per_hour
    )


def test_a_model_that_fits_nowhere_names_the_memory(tmp_path: Path) -> None:
    """What else may bind: test_relaxations.py."""
    small = "{name: small, device: l40s, nodes: 1, devices_per_node: 4}"
    plan = planned(tmp_path, model="deepseek-v3", pools=small)
    assert plan.decision is None
    assert plan.certificate.status == "infeasible"
    assert "memory: no parallel layout" in plan.binding_constraint


def test_burstier_traffic_takes_no_fewer_devices(tmp_path: Path) -> None:
    lengths = "input_tokens: 2000, output_tokens: 300"
    smooth = planned(tmp_path, traffic=f"{{rate: 20/s, arrival: {{kind: constant}}, {lengths}}}")
    bursty = planned(
        tmp_path, traffic=f"{{rate: 20/s, arrival: {{kind: gamma, cv: 4}}, {lengths}}}"
    )
    assert present(bursty.decision).num_devices >= present(smooth.decision).num_devices


def test_a_closed_loop_asks_for_what_its_targets_need(tmp_path: Path) -> None:
    plan = planned(tmp_path, traffic="{concurrency: 64, input_tokens: 2000, output_tokens: 300}")
    assert plan.decision is not None
    # 64 / (1 s + 300 x 50 ms) = 4 requests a second.
    assert any("asks for 4 requests/s" in note for note in plan.provenance.notes)


def test_the_same_problem_has_the_same_plan(plan: ServePlan, tmp_path: Path) -> None:
    again = planned(tmp_path)
    assert again.decision == plan.decision
    assert again.predicted == plan.predicted


@each_row(
    ("changes", "says"),
    [
        ({"slo": "{ttft: {p90: 0s}}"}, "slo"),
        (
            {"traffic": "{rate: 10/s, concurrency: 3, input_tokens: 1, output_tokens: 1}"},
            "keep one",
        ),
        ({"extra": "max_model_len: 100"}, "max_model_len is 100"),
        ({"extra": "objective: fastest"}, "objective"),
        ({"pools": "{name: x, profile: nowhere, nodes: 1, devices_per_node: 8}"}, "no 'device'"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, changes: dict[str, str], says: str) -> None:
    with refused(SpecError, match=says):
        planned(tmp_path, **changes)


def test_a_closed_loop_without_targets_is_planned_whatever_it_takes(tmp_path: Path) -> None:
    one = "{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 8}"
    for load in ("concurrency: 4, input_tokens: 30000, output_tokens: 1", LONG_LOOP):
        made = planned(
            tmp_path, pools=one, traffic=f"{{{load}}}", slo="{}", extra="modes: [aggregated]"
        )
        assert made.decision is not None, load
        provenance = made.provenance.model_copy(update={"notes": ()})
        text = words_of(serve_report(made.model_copy(update={"provenance": provenance})))
        assert "SLO" not in text
        assert "goodput" not in text
        # Instances are as busy as what they serve, not as a rate that nobody stated.
        (busy,) = present(made.predicted).utilisation_ratio.values()
        assert busy > 0.5, load
        assert any("without an SLO" in note for note in made.provenance.notes)


LONG_LOOP = "concurrency: 400, input_tokens: 31000, output_tokens: 16"
"""More than eight H100 read within ten seconds."""
