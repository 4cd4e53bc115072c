"""What a plan's folder gives to later plans: its profile, and what its trials said of an engine."""

import json
import shutil
from pathlib import Path

import pytest

from profilers.store import read_profile
from tests.expect import present
from tuner import api
from tuner.costs.residuals import UNKNOWN_BAND
from tuner.errors import PlanUnreadableError
from tuner.goals.profiles import stored_profile, trial_residual
from tuner.goals.verify import decision_space
from tuner.plans.train import Plan

VERIFIED = Path(__file__).parents[3] / "examples" / "profiles" / "epyc-quickstart-1"
MODEL = Path(__file__).parents[3] / "examples" / "models" / "tiny-moe" / "config.json"


def planned(folder: Path, *, profile: Path, emit: str) -> Plan:
    spec = folder / "spec.yaml"
    spec.write_text(
        f"""
schema_version: 1
model: {MODEL}
cluster: {{pools: [{{name: here, profile: {profile}, nodes: 1, devices_per_node: 2}}]}}
goal: {{kind: train, sequence_length: 256, global_batch_size: 8, precision: bf16}}
search: {{pipeline_model_parallel_size: [1], expert_model_parallel_size: [1], micro_batch_size: [2],
  zero_stage: [1]}}
emit: [{emit}]
"""
    )
    made = api.plan(spec).plan
    assert isinstance(made, Plan)
    return made


def test_a_verified_plans_folder_corrects_later_plans_of_its_engine(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(VERIFIED, kept)
    plain = planned(tmp_path, profile=VERIFIED / "used" / "profile", emit="deepspeed")
    assert present(plain.provenance.residual).engine == "deepspeed"
    # What was learned of the reference step says nothing about DeepSpeed.
    assert present(plain.provenance.residual).band_ratio == UNKNOWN_BAND
    assert any("not deepspeed's own: verify" in note for note in plain.provenance.notes)
    verified = json.loads((kept / "verified.json").read_text())
    residual = verified["residual"] | {
        "engine": "deepspeed",
        "computation": 1.5,
        "communication": 1.5,
        "band_ratio": 0.1,
    }
    (kept / "verified.json").write_text(json.dumps(verified | {"residual": residual}))
    later = planned(tmp_path, profile=kept, emit="deepspeed")
    assert present(later.predicted).step_time_s == pytest.approx(
        1.5 * present(plain.predicted).step_time_s
    )
    low, high = present(later.predicted).step_time_s_band
    assert high / low < 1.3
    assert any("times are corrected by" in note for note in later.provenance.notes)
    # Another engine does not take it, and the plan's own trials start from what it holds.
    assert trial_residual(later.cluster.pools[0], (kept,), "megatron-lm") is None
    space = decision_space(later, read_profile(stored_profile(kept)))
    assert present(space.machine).residual == later.provenance.residual


def test_a_damaged_verification_is_named(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(VERIFIED, kept)
    (kept / "verified.json").write_text("{")
    with pytest.raises(PlanUnreadableError, match=r"verified\.json"):
        planned(tmp_path, profile=kept, emit="deepspeed")
    assert stored_profile(tmp_path) == tmp_path
