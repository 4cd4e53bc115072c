"""Storage formats of the parts of a checkpoint, by how it is quantised."""

from pathlib import Path

from tests.rows import each_row
from tests.tuner.models import example_model
from tuner.search.serve.instances import goal_formats
from tuner.spec.huggingface.read import read_model
from tuner.spec.serving.goal import ServeGoal

MODEL = example_model("deepseek-v3")


@each_row(
    ("quantization", "attention", "dense", "experts"),
    [
        ("bf16", "bf16", "bf16", "bf16"),
        ("fp8_block", "fp8_block", "fp8_block", "fp8_block"),
        ("nvfp4", "bf16", "nvfp4", "nvfp4"),
        ("mxfp4", "bf16", "bf16", "mxfp4"),
    ],
)
def test_fp4_checkpoints_keep_attention_in_bf16_and_gpt_oss_all_but_experts(
    quantization: str, attention: str, dense: str, experts: str
) -> None:
    goal = ServeGoal.model_validate(
        {
            "kind": "serve",
            "engine": {"name": "vllm"},
            "traffic": {"concurrency": 8, "input_tokens": 1000, "output_tokens": 100},
            "quantization": quantization,
        }
    )
    found = goal_formats(goal, MODEL)
    assert (found.attention, found.output) == (attention, attention)
    assert (found.ffn, found.experts, found.head) == (dense, experts, "bf16")


def test_parts_that_a_checkpoint_leaves_unquantised_are_in_bf16() -> None:
    goal = ServeGoal.model_validate(
        {
            "kind": "serve",
            "engine": {"name": "vllm"},
            "traffic": {"concurrency": 8, "input_tokens": 1000, "output_tokens": 100},
            "quantization": "fp8",
        }
    )
    found = goal_formats(goal, MODEL.model_copy(update={"unquantized": ("attention",)}))
    assert (found.attention, found.output, found.ffn, found.experts) == (
        "bf16",
        "bf16",
        "fp8",
        "fp8",
    )
    found = goal_formats(goal, MODEL.model_copy(update={"unquantized": ("networks",)}))
    assert (found.attention, found.ffn, found.experts) == ("fp8", "bf16", "fp8")
    assert goal_formats(goal, MODEL.model_copy(update={"int4_bytes": 0.5})).int4_bytes == 0.5
    goal = goal.model_copy(update={"quantization": "nvfp4"})
    for released, parts, attention in (
        ("", (), "bf16"),
        ("fp8", (), "bf16"),
        ("nvfp4", (), "nvfp4"),
        ("nvfp4", ("attention",), "bf16"),
    ):
        update = {"released_weights": released, "unquantized": parts}
        found = goal_formats(goal, MODEL.model_copy(update=update))
        assert (found.attention, found.ffn, found.experts) == (attention, "nvfp4", "nvfp4")


def test_nvfp4_of_nemotron_3_holds_mamba_and_shared_experts_in_fp8() -> None:
    # NVIDIA/Model-Optimizer, modelopt_recipes/models/Nemotron-3-Super-120B-A12B/super-nvfp4.yaml.
    goal = ServeGoal.model_validate(
        {
            "kind": "serve",
            "engine": {"name": "vllm"},
            "traffic": {"concurrency": 8, "input_tokens": 1000, "output_tokens": 100},
            "quantization": "nvfp4",
        }
    )
    folder = Path(__file__).parents[4] / "examples/models"
    for name in ("nemotron-3-super", "nemotron-3-ultra", "nemotron-3-nano"):
        found = goal_formats(goal, read_model(folder / name))
        assert found.linear_projections == ("fp8", "fp8")
        assert (found.attention, found.ffn, found.experts) == ("bf16", "fp8", "nvfp4")
        assert found.latent_projections == "bf16"
    other = goal_formats(goal, read_model(folder / "qwen3-next-80b-a3b"))
    assert other.linear_projections == ("bf16", "bf16")
    assert (other.ffn, other.latent_projections) == ("nvfp4", "nvfp4")
