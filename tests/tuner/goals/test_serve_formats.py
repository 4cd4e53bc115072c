"""Formats of weights and cache that a plan chooses among those whose quality is good enough."""

from pathlib import Path

import pytest

from tests.expect import present
from tuner.errors import SpecError
from tuner.goals.serve_folder import write_serve_plan
from tuner.goals.serve_plan import deploy
from tuner.goals.serve_planned import read_planned_serve_spec

MODEL = Path(__file__).parents[3] / "examples" / "models" / "llama-3.1-70b" / "config.json"
SPEC = f"""
schema_version: 1
model: {MODEL}
cluster:
  pools: [{{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 8, nic: 50GB/s}}]
goal:
  kind: serve
  engine: {{name: vllm}}
  traffic: {{rate: RATE, input_tokens: 1000, output_tokens: 200}}
  slo: {{tpot: {{p90: 40ms}}}}
  max_model_len: 4096
  modes: [aggregated]
  FORMATS
emit: [vllm]
"""
BF16, FP8 = "{quantization: bf16}", "{quantization: fp8, kv_cache_dtype: fp8}"


def test_a_plan_takes_the_first_of_the_formats_that_serve_best(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    # bf16 weights take two devices, fp8 ones leave room for requests beside them on one.
    for rate, formats, chosen in (
        ("1/s", (BF16, FP8), ("fp8", "fp8")),
        ("1/s", (BF16, "{quantization: bf16, kv_cache_dtype: bf16}"), ("bf16", "bf16")),
        ("4000/s", (BF16, FP8), ("bf16", "bf16")),
    ):
        text = SPEC.replace("RATE", rate).replace("FORMATS", f"formats: [{', '.join(formats)}]")
        spec.write_text(text)
        made = deploy(spec, time_limit_s=20.0)
        goal = made.plan.goal
        assert (goal.quantization, goal.kv_cache_dtype, goal.formats) == (*chosen, ())
        assert (made.plan.decision is None) == (rate == "4000/s")
        assert sum("cache" in note for note in made.plan.provenance.notes) >= 1
        if "fp8" in chosen:
            note = next(note for note in made.plan.provenance.notes if "not chosen" in note)
            assert note.startswith("bf16 weights and a bf16 cache: 2 devices")
            write_serve_plan(tmp_path / "plan", made.plan, spec=made.spec, profiles={})
            assert "--kv-cache-dtype fp8" in "".join(
                path.read_text() for path in (tmp_path / "plan").rglob("*.sh")
            )
            assert read_planned_serve_spec(tmp_path / "plan", made.plan).goal == goal
            assert present(made.plan.decision).num_devices == 1


def test_formats_are_stated_once(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    text = SPEC.replace("RATE", "1/s").replace("FORMATS", f"formats: [{BF16}]")
    spec.write_text(text.replace("  modes:", "  quantization: fp8\n  modes:"))
    with pytest.raises(SpecError, match="'formats' states quantization, too"):
        deploy(spec)
