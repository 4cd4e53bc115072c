"""Modes without published runs, and what the bound of the chosen one holds for."""

import math
from pathlib import Path

import pytest

from tests.expect import present
from tests.printed import words_of
from tests.tuner import serve_specs
from tests.tuner.search.serve.testing import problem_of
from tuner.plans.serve import ServePlan
from tuner.report.serve_page import serve_report


def planned(
    folder: Path, *, modes: str, rate: float = 10.0, ttft: str = "3s", engine: str = "sglang"
) -> ServePlan:
    return serve_specs.planned(
        folder,
        model="qwen3-235b-a22b",
        engine=engine,
        traffic=f"{{rate: {rate}/s, input_tokens: 2000, output_tokens: 200}}",
        slo=f"{{ttft: {{p90: {ttft}}}, tpot: {{p90: 50ms}}}}",
        extra=f"quantization: fp8\n  objective: devices\n  modes: [{modes}]",
    )


def test_a_mode_without_runs_is_not_chosen_where_its_band_takes_the_gain_away(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path, modes="aggregated, shared_device")
    both = {one.mode: one for one in plan.modes}
    measured, guessed = both["aggregated"], both["shared_device"]
    assert measured.status == "chosen"
    assert guessed.status == "alternative"
    assert (guessed.devices or 0) < (measured.devices or 0)
    assert "no published run backs shared_device" in guessed.told
    # The bound is of both modes, so that the measured one is not called optimal.
    assert plan.certificate.status == "feasible"
    assert present(plan.certificate.bound) <= (guessed.devices or 0)
    assert "aggregated, shared_device" in plan.certificate.covers


def test_a_mode_without_runs_that_is_the_only_one_requested_is_chosen_with_a_caution(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path, modes="shared_device")
    assert present(plan.decision).mode == "shared_device"
    assert present(plan.predicted).is_new_pair
    (note,) = (note for note in plan.provenance.notes if "no published run of" in note)
    assert "this model on" in note
    assert "of mode shared_device" in note


def test_a_mode_that_misses_a_target_once_simulated_still_counts_for_the_bound(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path, modes="aggregated, disaggregated", rate=2.0, ttft="160ms")
    missed = [one for one in plan.modes if one.status == "missed"]
    assert plan.decision is not None
    assert missed
    assert all(one.mode in plan.certificate.covers for one in missed)


def test_the_bound_is_the_least_of_all_instances_when_they_are_counted_one_by_one(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path, modes="aggregated")
    asked = problem_of(tmp_path / "spec.yaml")
    rate = asked.demand.rate_per_s
    least = min(
        math.ceil(rate / option.rate_per_s) * option.devices for option in asked.options.options
    )
    assert plan.certificate.bound == pytest.approx(least, rel=1e-6)


def test_the_text_names_what_is_proven_and_no_saving_of_nothing(tmp_path: Path) -> None:
    plan = planned(tmp_path, modes="aggregated, attention_expert, shared_device", engine="vllm")
    text = words_of(serve_report(plan))
    assert f", for {plan.certificate.covers};" in text
    assert "save 0%" not in text
    assert "1 others" not in text
