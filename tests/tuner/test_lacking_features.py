from pathlib import Path
from typing import Any

from tuner.goals.train_plan import plan_training

MODELS = Path(__file__).parents[2] / "examples" / "models"
SPEC = """\
schema_version: 1
model: {models}/mixtral-8x7b/config.json
cluster: {{pools: [{{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 8}}]}}
goal: {{kind: train, sequence_length: 4096, global_batch_size: 128, precision: bf16}}
search: {{context_parallel_size: 1, micro_batch_size: 1}}
emit: [deepspeed]
"""


def test_nothing_but_what_the_targets_lack_depends_on_asking_for_it(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(SPEC.format(models=MODELS), encoding="utf-8")

    def planned(*, with_unlaunchable: bool) -> dict[str, Any]:
        made = plan_training(file, with_unlaunchable=with_unlaunchable).plan.model_dump(mode="json")
        made["certificate"].pop("solve_s")
        return made

    asked, unasked = planned(with_unlaunchable=True), planned(with_unlaunchable=False)
    assert asked.pop("unlaunchable")
    assert unasked.pop("unlaunchable") == []
    assert asked == unasked
