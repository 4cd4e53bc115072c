"""What a goal trains: groups, the model's matrices, refusals in one line."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.expect import refused
from tests.rows import each_row
from tuner.errors import SpecError
from tuner.goals.train_spec import read_spec
from tuner.spec.goal import TrainGoal
from tuner.spec.huggingface.read import read_model
from tuner.spec.tune import Adapters, adapted, adapters_words, matrices

MODELS = Path(__file__).parents[3] / "examples/models"


def written(folder: Path, tune: Any, *, model: str = "llama-3.1-8b") -> Path:
    """Write a spec that trains so."""
    keys = {
        "schema_version": 1,
        "model": str(MODELS / model / "config.json"),
        "cluster": {
            "pools": [{"name": "a", "device": "h100-sxm", "nodes": 1, "devices_per_node": 8}]
        },
        "goal": {
            "kind": "train",
            "sequence_length": 4096,
            "global_batch_size": 8,
            "tune": tune,
        },
        "emit": ["transformers-peft"],
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(keys), encoding="utf-8")
    return path


def test_all_weights_are_trained_by_default(tmp_path: Path) -> None:
    goal = TrainGoal(kind="train", sequence_length=1, global_batch_size=1)
    assert goal.tune == "full"
    assert goal.adapters is None
    assert read_spec(written(tmp_path, "full")).goal.adapters is None


def test_groups_are_the_matrices_that_the_model_has() -> None:
    dense, moe = (read_model(MODELS / name) for name in ("llama-3.1-8b", "mixtral-8x7b"))
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    network = ("gate_proj", "up_proj", "down_proj")
    tune = Adapters(method="lora", rank=8)
    assert adapted(tune, dense) == attention
    every = tune.model_copy(update={"targets": ("all-linear",)})
    assert adapted(every, dense) == (*attention, *network)
    assert adapted(every, moe) == (*attention, "experts")
    # Llama 3.1 8B: 8 key-value heads of 128 on 4096.
    assert matrices(dense)["k_proj"] == (4096, 1024)
    names = tuple(matrices(read_model(MODELS / "deepseek-v3")))
    assert names[:5] == ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    assert names[5:] == ("gate_proj", "up_proj", "down_proj", "experts")
    assert Adapters(method="lora", rank=8).effective_alpha == 16.0
    assert Adapters(method="lora", rank=8, alpha=4.0).effective_alpha == 4.0
    assert "rank 8 on attention" in adapters_words(Adapters(method="lora", rank=8))


@each_row(
    ("tune", "said"),
    [
        ("half", "goal.tune: 'half' is neither 'full' nor a mapping"),
        (["lora"], "neither 'full' nor a mapping"),
        ({"method": "dora", "rank": 8}, "goal.tune.method: 'dora' should be 'lora' or 'qlora'"),
        ({"method": "lora"}, "goal.tune.rank: missing"),
        ({"method": "lora", "rank": 0}, "goal.tune.rank: 0 should be greater"),
        ({"method": "lora", "rank": 2000, "targets": "k_proj"}, "goal.tune.rank: 2000 exceeds"),
        ({"method": "lora", "rank": 8, "targets": []}, "goal.tune.targets: an empty list"),
        ({"method": "lora", "rank": 8, "targets": ["qkv"]}, "goal.tune.targets[0]: 'qkv' is no"),
        ({"method": "lora", "rank": 8, "targets": "experts"}, "has no 'experts'; it has q_proj"),
        ({"method": "lora", "rank": 8, "targets": "kv_b_proj"}, "has no 'kv_b_proj'"),
        ({"method": "lora", "rank": 8, "rnak": 8}, "unknown key; did you mean 'rank'?"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    tune: Any, said: str, tmp_path: Path
) -> None:
    with refused(SpecError, said):
        read_spec(written(tmp_path, tune))


@each_row("targets", (["attention"], ["q_a_proj", "o_proj"], ["mlp"]))
def test_attention_with_one_key_for_all_heads_has_no_adapters(tmp_path: Path, targets: Any) -> None:
    said = (
        "goal.tune.method: lora is not priced beside deepseek-v4-flash's attention, which has one"
        " key for all heads; train all weights (tune: full)"
    )
    tune = {"method": "lora", "rank": 16, "targets": targets}
    with pytest.raises(SpecError) as refused:
        read_spec(written(tmp_path, tune, model="deepseek-v4-flash"))
    assert str(refused.value).endswith(said)
