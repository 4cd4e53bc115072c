"""Whatever is planned on a measured processor can be launched by the engine it is for."""

from pathlib import Path

import pytest

from tests.expect import present
from tuner import api
from tuner.engines.writers import broken_rules, emitted_targets

EXAMPLES = Path(__file__).parents[3] / "examples"
PROFILE = EXAMPLES / "profiles" / "epyc-quickstart-1" / "used" / "profile"


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits", ["{micro_batch_size: [1, 4]}", pytest.param("{}", marks=pytest.mark.slow)]
)
def test_no_decision_breaks_a_rule_of_its_target(tmp_path: Path, limits: str) -> None:
    failures = []
    for target in ("deepspeed", "torchtitan", "megatron-lm", "reference"):
        file = tmp_path / "spec.yaml"
        file.write_text(
            f"""
schema_version: 1
model: {EXAMPLES / "models" / "tiny-moe" / "config.json"}
cluster: {{pools: [{{name: here, profile: {PROFILE}, nodes: 1, devices_per_node: 2}}]}}
goal: {{kind: train, sequence_length: 256, global_batch_size: 16, precision: bf16}}
search: {limits}
emit: [{target}]
""",
            encoding="utf-8",
        )
        made = api.plan_training(file, top=500).plan
        decisions = [present(made.decision), *(one.decision for one in made.runners_up)]
        assert len(decisions) > 10
        failures += [
            f"{one}: {rule}"
            for decision in decisions
            for one in emitted_targets(made)
            for rule in broken_rules(one, made, decision)
        ]
    assert not failures
