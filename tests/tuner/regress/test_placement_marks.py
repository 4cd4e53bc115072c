"""Checks of a placement that was made for another release, or for other nodes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuner.regress.check import check
from tuner.regress.checks import Manner
from tuner.regress.observed import plan_facts
from tuner.regress.rules import Judgement, Tolerance, judge

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


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scenario whose plan is accepted."""
    folder = tmp_path_factory.mktemp("checks") / "placed"
    rng = np.random.default_rng(3)
    counts = rng.multinomial(5000, rng.dirichlet(np.full(8, 2.0)), size=(4, 2))
    folder.mkdir()
    recording = {"num_logical_experts": 8, "layer_ids": [0, 1], "passes": counts.tolist()}
    recording |= {"logical_count": counts.sum(axis=0).tolist(), "top_k": 2}
    (folder / "chat.json").write_text(json.dumps(recording))
    (folder / "spec.yaml").write_text(SPEC)
    assert not check(folder.parent, update=True, manner=Manner()).failed
    return folder


def stored(folder: Path) -> Any:
    return json.loads((folder / "plan.json").read_text())


def made_for(folder: Path, **mark: Any) -> Judgement:
    """Judge the plan beside one that was made for something else."""
    accepted = stored(folder)
    accepted["made_for"][0] |= mark
    return judge(plan_facts(accepted), plan_facts(stored(folder)), tolerance=Tolerance())


@pytest.mark.slow
def test_another_release_or_nodes_than_a_placement_was_made_for_are_reported(
    placed: Path,
) -> None:
    assert made_for(placed).verdict.value == "pass"
    release = made_for(placed, release="1.2.0")
    assert release.verdict.value == "drift"
    assert "made for trtllm with release 1.2.0 (now 1.3.0rc27)" in release.reason
    for name, value, now in (("nodes", 1, 2), ("ep_size", 8, 4)):
        result = made_for(placed, **{name: value})
        assert result.verdict.value == "incomparable"
        assert f"{name} {value} (now {now})" in result.reason


@pytest.mark.slow
def test_a_decision_that_differs_in_no_slot_names_the_field_that_differs(placed: Path) -> None:
    accepted = stored(placed)
    accepted["decision"]["num_layers"] = None
    result = judge(plan_facts(accepted), plan_facts(stored(placed)), tolerance=Tolerance())
    assert "slots" not in result.reason
    assert "num_layers" in result.reason


# Seconds, of solving anew: that a check hands on what plans are marked with.
@pytest.mark.slow
def test_a_placement_on_other_nodes_is_planned_and_reported(placed: Path) -> None:
    (placed / "spec.yaml").write_text(SPEC.replace("ranks_per_node: 2", "ranks_per_node: 4"))
    (moved,) = check(placed.parent, manner=Manner()).scenarios
    assert moved.verdict.value == "incomparable"
    assert "nodes 2 (now 1)" in moved.reason
    (placed / "spec.yaml").write_text(SPEC)
