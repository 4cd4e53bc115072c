"""Deployments from spec to launch files: placements, drafts, assumptions, devices that lie."""

import json
from pathlib import Path

import pytest

from tests.expect import present, refused
from tests.tuner.engines.placement.testing import sample_decision, sample_placement
from tests.tuner.models import MODELS
from tuner.errors import SpecError
from tuner.goals.serve_folder import write_serve_plan
from tuner.goals.serve_plan import Deployed, deploy

LAYERS, EXPERTS, RANKS = 32, 8, 4


def deployed(
    folder: Path,
    *,
    extra: str = "",
    engine: str = "sglang",
    model: str = "mixtral-8x7b",
    traffic: str = "{rate: 10/s, input_tokens: 2000, output_tokens: 300}",
    pool: str = "",
) -> Deployed:
    path = folder / "spec.yaml"
    path.write_text(
        "schema_version: 1\n"
        f"model: {MODELS / model}\n"
        "cluster: {pools: [{name: h100, device: h100-sxm, nodes: 2, devices_per_node: 8"
        f"{pool}}}]}}\n"
        "goal:\n"
        "  kind: serve\n"
        f"  engine: {{name: {engine}}}\n"
        f"  traffic: {traffic}\n"
        "  slo: {ttft: {p90: 2s}, tpot: {p90: 60ms}}\n"
        "  modes: [aggregated]\n"
        f"  {extra}\n"
        f"emit: [{engine}]\n"
    )
    return deploy(path, time_limit_s=20.0)


def recorded(folder: Path) -> str:
    skewed = [9, 1, 1, 1, 1, 1, 1, 1]
    (folder / "routing.json").write_text(
        json.dumps(
            {
                "num_logical_experts": EXPERTS,
                "top_k": 2,
                "layer_ids": list(range(LAYERS)),
                "logical_count": [skewed] * LAYERS,
            }
        )
    )
    return "routing: {path: routing.json}"


def placed(folder: Path) -> str:
    # Expert 0 has five copies; two slots of a rank hold it and one other.
    row = [0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 6, 7]
    decision = sample_decision(
        physical_to_logical=[row] * LAYERS,
        num_experts=EXPERTS,
        layer_ids=tuple(range(LAYERS)),
        num_layers=LAYERS,
        ranks=RANKS,
        slots_per_rank=(len(row) // RANKS,) * RANKS,
    )
    (folder / "place").mkdir()
    (folder / "place" / "plan.json").write_text(sample_placement(decision).plan.model_dump_json())
    return "placement: place/plan.json"


def test_a_placement_is_priced_served_and_emitted(tmp_path: Path) -> None:
    loads = recorded(tmp_path)
    # SGLang 0.5.23 keeps no copies of Mixtral's experts.
    alone = deployed(tmp_path, extra=loads, engine="vllm").plan
    made = deployed(tmp_path, extra=f"{loads}\n  {placed(tmp_path)}", engine="vllm")
    groups = present(made.plan.decision).instances
    assert {(group.ep, group.redundant_experts) for group in groups} == {(RANKS, 12 - EXPERTS)}
    assert any("as placed in" in note for note in made.plan.provenance.notes)
    assert any("in order of ids" in note for note in alone.provenance.notes)
    out = tmp_path / "out"
    assert "used/placement.json" in write_serve_plan(out, made.plan, spec=made.spec).files
    scripts = [file.read_text() for file in (out / "launch" / "vllm").glob("*.sh")]
    assert any("moetune_placement" in text for text in scripts)
    assert any(f'"num_redundant_experts": {12 - EXPERTS}' in text for text in scripts)


def test_without_a_recording_the_plan_says_which_loads_it_took(tmp_path: Path) -> None:
    plan = deployed(tmp_path).plan
    assert any("not recorded ones" in note for note in plan.provenance.notes)


def test_a_closed_loop_says_how_it_is_simulated(tmp_path: Path) -> None:
    traffic = "{concurrency: 32, input_tokens: 2000, output_tokens: 300}"
    plan = deployed(tmp_path, traffic=traffic).plan
    assert any("32 requests at once, 320 in all" in note for note in plan.provenance.notes)


def test_long_outputs_are_said_to_run_longest(tmp_path: Path) -> None:
    tail = "{kind: pareto_tailed, mean: 250, cv: 1.0, tail_ratio: 0.05, tail_index: 1.3}"
    tailed, fixed = (
        deployed(tmp_path, traffic=f"{{rate: 4/s, input_tokens: 2000, output_tokens: {law}}}").plan
        for law in (tail, "300")
    )
    assert any("long outputs run longest" in note for note in tailed.provenance.notes)
    assert not any("long outputs" in note for note in fixed.provenance.notes)


def test_drafts_need_a_model_with_heads_for_them(tmp_path: Path) -> None:
    drafts = "speculative: {method: mtp, draft_tokens: 2, acceptance: 0.8}"
    with refused(SpecError, "has no heads for further tokens"):
        deployed(tmp_path, extra=drafts)


def test_tensorrt_parts_prompts_that_no_budget_holds(tmp_path: Path) -> None:
    plan = deployed(tmp_path, engine="trtllm").plan
    assert all(group.chunked_prefill for group in present(plan.decision).instances)


def test_a_device_has_no_more_memory_than_it_was_built_with(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"1000 GiB is more than the 80\.0 GiB of h100-sxm"):
        deployed(tmp_path, pool=", memory_per_device: 1000GiB")
