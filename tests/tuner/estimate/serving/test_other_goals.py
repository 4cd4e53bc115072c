"""Says of a launch that serves under a spec that trains, and of the reverse, what to change."""

from pathlib import Path

import pytest

from tuner import api
from tuner.errors import SpecError

MODELS = Path(__file__).parents[4] / "examples" / "models"
HEAD = f"""
schema_version: 1
model: {MODELS / "mixtral-8x7b"}
cluster:
  pools: [{{name: pool, device: h100-sxm, nodes: 1, devices_per_node: 8}}]
"""
TRAIN = f"{HEAD}goal: {{kind: train, global_batch_size: 256, sequence_length: 4096}}\n"
SERVE = f"""{HEAD}goal:
  kind: serve
  engine: {{name: vllm}}
  traffic: {{concurrency: 8, input_tokens: 1000, output_tokens: 100}}
"""


def test_a_server_under_a_spec_that_trains_is_named(tmp_path: Path) -> None:
    spec, compose = tmp_path / "spec.yaml", tmp_path / "compose.yaml"
    spec.write_text(TRAIN)
    compose.write_text("services: {s: {image: 'vllm/vllm-openai:v1', command: [m, -tp, 8]}}\n")
    for launch, engine in (
        ("vllm serve m --tensor-parallel-size 8", "vllm"),
        ("docker run --gpus all vllm/vllm-openai:v1 --model m -tp 8", "vllm"),
        ("python -m sglang.launch_server --model m --tp 8", "sglang"),
        ("trtllm-serve serve m --tp_size 8", "trtllm"),
        (str(compose), "vllm"),
    ):
        with pytest.raises(SpecError, match=f"serves, by {engine}, the spec trains; give"):
            api.estimate(spec, launch=launch)
    with pytest.raises(SpecError, match="no program"):
        api.estimate(spec, launch="python train.py")


def test_a_training_run_under_a_spec_that_serves_is_named(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SERVE)
    for launch in (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8",
        "NPROC_PER_NODE=8 megatron sft --model m",
        "torchrun -m torchtitan.train",
        "deepspeed train.py --deepspeed ds.json",
    ):
        with pytest.raises(SpecError, match="trains, the spec serves; give a spec with goal"):
            api.estimate_serving(spec, launch=launch)
    with pytest.raises(SpecError, match="no server"):
        api.estimate_serving(spec, launch="python other.py")
