"""What the notes of a training plan say of the nodes that it leaves unused."""

import re
from pathlib import Path

import yaml

from tests.expect import present
from tuner.goals.train_plan import plan_training
from tuner.plans.train import Plan

MODEL = Path(__file__).parents[3] / "examples" / "models" / "small-moe"


def _plan(folder: Path, *, nodes: int, batch: int, spares: str | int = 0) -> Plan:
    goal = {"kind": "train", "sequence_length": 1024, "global_batch_size": batch}
    if spares:
        goal["reliability"] = {
            "nodes_lost": "1% per week",
            "restart": "10min",
            "repair": "24h",
            "spare_nodes": spares,
        }
    spec = {
        "schema_version": 1,
        "model": str(MODEL),
        "cluster": {
            "pools": [{"name": "a", "device": "h100-sxm", "nodes": nodes, "devices_per_node": 2}]
        },
        "goal": goal,
        "emit": ["megatron-lm"],
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    return plan_training(path, with_unlaunchable=False).plan


def _batches(plan: Plan) -> list[int]:
    """The global batches that the notes name."""
    (note,) = [one for one in plan.provenance.notes if "a global batch of" in one]
    return [int(one) for one in re.findall(r"\d+", note.partition(" sequences")[0])]


def test_the_nearest_batches_that_use_every_node_are_named(tmp_path: Path) -> None:
    # Neither 22 nor 11 replicas divide 96, and the model has fewer than eleven layers.
    refused = _plan(tmp_path, nodes=11, batch=96)
    assert refused.decision is None
    assert _batches(refused) == [88, 99]
    for batch in _batches(refused):
        made = _plan(tmp_path, nodes=11, batch=batch)
        assert present(made.decision).num_devices == 22
        assert not any("a global batch of" in one for one in made.provenance.notes)
    spared = _plan(tmp_path, nodes=12, batch=96, spares="auto")
    assert present(spared.decision).num_devices < 22
    assert any(batch % 11 == 0 for batch in _batches(spared))
