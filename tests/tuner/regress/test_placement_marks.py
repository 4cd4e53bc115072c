"""Checks of a placement that was made for another release, or for other nodes."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tuner.regress.check import check
from tuner.regress.checking import Manner
from tuner.regress.records import ScenarioResult

SPEC = """\
schema_version: 1
goal:
  kind: place
  ranks: 4
  ranks_per_node: 2
  slots_per_rank: 3
  workloads: [{name: chat, path: chat.json}]
emit: [trtllm]
"""


def scenario(folder: Path) -> Path:
    rng = np.random.default_rng(3)
    counts = rng.multinomial(5000, rng.dirichlet(np.full(8, 2.0)), size=(4, 2))
    (folder / "placed").mkdir(parents=True)
    recording = {"num_logical_experts": 8, "layer_ids": [0, 1], "passes": counts.tolist()}
    recording |= {"logical_count": counts.sum(axis=0).tolist(), "top_k": 2}
    (folder / "placed" / "chat.json").write_text(json.dumps(recording))
    (folder / "placed" / "spec.yaml").write_text(SPEC)
    assert not check(folder, update=True, manner=Manner()).failed
    return folder / "placed"


def checked(folder: Path, **mark: Any) -> ScenarioResult:
    """Check against an accepted plan that was made for something else."""
    file = folder / "plan.json"
    plan = json.loads(file.read_text())
    kept = json.dumps(plan)
    plan["made_for"][0] |= mark
    file.write_text(json.dumps(plan))
    (found,) = check(folder.parent, manner=Manner()).scenarios
    file.write_text(kept)
    return found


def test_another_release_or_other_nodes_than_a_placement_was_made_for_are_told(
    tmp_path: Path,
) -> None:
    folder = scenario(tmp_path / "checks")
    assert checked(folder).verdict.value == "pass"
    release = checked(folder, release="1.2.0")
    assert release.verdict.value == "drift"
    assert "made for trtllm with release 1.2.0 (now 1.3.0rc27)" in release.reason
    for name, value, now in (("nodes", 1, 2), ("ep_size", 8, 4)):
        found = checked(folder, **{name: value})
        assert found.verdict.value == "incomparable"
        assert f"{name} {value} (now {now})" in found.reason
    (folder / "spec.yaml").write_text(SPEC.replace("ranks_per_node: 2", "ranks_per_node: 4"))
    moved = checked(folder)
    assert moved.verdict.value == "incomparable"
    assert "nodes 2 (now 1)" in moved.reason


def test_a_decision_that_differs_in_no_slot_names_the_field_that_differs(tmp_path: Path) -> None:
    folder = scenario(tmp_path)
    plan = json.loads((folder / "plan.json").read_text())
    plan["decision"]["num_layers"] = None
    (folder / "plan.json").write_text(json.dumps(plan))
    (result,) = check(tmp_path, manner=Manner()).scenarios
    assert "slots" not in result.reason
    assert "num_layers" in result.reason
