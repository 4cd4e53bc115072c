"""The JSON against DeepSpeed's own parser, and what the README asks of the user's program."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.expect import present
from tests.patience import patient_s
from tests.rows import each_row
from tests.tuner.engines.testing import (
    Recorders,
    changed,
    sample_decision,
    sample_verified,
    texts_of,
    values_at,
    write_emitted,
)
from tests.tuner.models import example_model
from tuner import api
from tuner.costs.reference.workload import Workload
from tuner.engines.deepspeed.write import emit
from tuner.engines.targets import programs
from tuner.engines.writers import broken_rules
from tuner.plans.train import VerifiedPlan
from tuner.search.reference.space import enumerate_degrees
from tuner.spec.search import Search
from tuner.spec.tune import Adapters

MODELS = Path(__file__).parents[3] / "examples" / "models"

ONE_STAGE: dict[str, Any] = {
    "pipeline_model_parallel_size": 1,
    "stage_recompute": ("none",),
    "chunks": (1,),
    "pipeline_layout": (32,),
}
TWO_TENSOR_RANKS = {"tensor_model_parallel_size": 2, "expert_data_parallel_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "two stages": {},
    "parameters sharded, optimizer in host memory, DeepEP": {
        **ONE_STAGE,
        "zero_stage": 3,
        "optimizer_offload": True,
        "dispatcher": "deepep",
    },
    "gradients sharded in bf16": {**ONE_STAGE, "zero_stage": 2, "gradient_bytes": 2},
    "tensor ranks": {**ONE_STAGE, **TWO_TENSOR_RANKS},
}

READ = """\
import json, sys, warnings
warnings.simplefilter("ignore")
from deepspeed.module_inject.auto_ep_config import validate_autoep_config
from deepspeed.runtime.config import DeepSpeedConfig

import deepspeed.comm as dist
dist.get_rank = lambda *given: 0
found = []
for path, devices, stages, tensor in json.loads(sys.argv[1]):
    # As `deepspeed.initialize` has it of a program that hands over no mpu; a pipeline has its own.
    dist.get_world_size = lambda *given: devices // stages
    config = DeepSpeedConfig(path)
    stage = int(config.zero_optimization_stage)
    offload = config.zero_config.offload_optimizer is not None
    validate_autoep_config(
        config.expert_parallel_config, devices, stages, tensor, 1,
        zero_stage=stage, zero_offload_optimizer=offload,
    )
    assert int(config.tensor_parallel_config.autotp_size or 1) == tensor
    found.append([config.train_batch_size, config.gradient_accumulation_steps,
                  stage, config.expert_parallel_config.autoep_size])
print(json.dumps(found))
"""


def _verified(**changes: Any) -> VerifiedPlan:
    model = example_model("mixtral-8x7b")
    plain: dict[str, Any] = {
        "recompute": "none",
        "recompute_modules": (),
        "stage_recompute": ("none", "none"),
        "chunks": (1, 1),
    }
    return sample_verified(model, sample_decision(**{**plain, **changes}), emit=("deepspeed",))


def _files(verified: VerifiedPlan) -> dict[str, str]:
    return texts_of(emit(verified))


def test_deepspeed_reads_the_configurations(tmp_path: Path) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed (extra: engines)")
    decisions, asked = [], []
    for number, changes in enumerate(CASES.values()):
        verified = _verified(**changes)
        write_emitted(tmp_path / str(number), emit(verified))
        decision = verified.decision
        decisions.append(decision)
        asked.append(
            [
                str(tmp_path / str(number) / "deepspeed.json"),
                decision.num_devices,
                decision.pipeline_model_parallel_size,
                decision.tensor_model_parallel_size,
            ]
        )
    # In a process of its own, because importing it sets up an accelerator and its logs.
    read = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
        timeout=patient_s(120),
    )
    assert read.returncode == 0, read.stderr[-2000:]
    expected = [
        [
            # Under AutoTP it takes every tensor rank for a replica.
            1536 * decision.tensor_model_parallel_size,
            decision.num_microbatches(1536),
            decision.zero_stage,
            1 if decision.pipeline_model_parallel_size > 1 else decision.expert_model_parallel_size,
        ]
        for decision in decisions
    ]
    assert json.loads(read.stdout.splitlines()[-1]) == expected


@each_row(("case", "changes"), CASES.items())
def test_the_batch_is_what_the_replicas_accumulate(case: Any, changes: Any) -> None:
    verified = _verified(**changes)
    config = json.loads(_files(verified)["deepspeed.json"])
    assert ("train_batch_size" in config) != (verified.decision.tensor_model_parallel_size > 1)
    assert config.get("train_batch_size", 1536) == (
        config["train_micro_batch_size_per_gpu"]
        * config["gradient_accumulation_steps"]
        * verified.decision.data_parallel_size
    )


@each_row(
    ("changes", "expected"),
    (
        (
            CASES["parameters sharded, optimizer in host memory, DeepEP"],
            {
                "zero_optimization.offload_optimizer.device": "cpu",
                "expert_parallel.comm_backend": "deepep",
                "expert_parallel.comm_max_tokens_per_rank": 4096,
                "expert_parallel.preset_model": "mixtral",
            },
        ),
        (CASES["gradients sharded in bf16"], {"data_types.grad_accum_dtype": "bf16"}),
        (
            CASES["tensor ranks"],
            {"optimizer.type": "AdamW", "log_level": "info", "steps_per_print": 1},
        ),
        ({"stage_recompute": ("full", "full")}, {"expert_parallel": None}),
    ),
)
def test_a_decision_becomes_settings(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = json.loads(_files(_verified(**changes))["deepspeed.json"])
    assert values_at(config, expected) == expected


def test_the_readme_says_what_the_program_must_build() -> None:
    piped = _files(_verified(stage_recompute=("full", "full")))
    assert "PipelineModule of 2 stages with 16 layers each" in piped["README.txt"]
    assert "deepspeed.moe.layer.MoE and ep_size 8" in piped["README.txt"]
    assert "turn on gradient checkpointing" in piped["README.txt"]


def test_autoep_gets_its_optimizer_and_autotp_the_weights_that_it_splits() -> None:
    files = _files(_verified(**CASES["tensor ranks"]))
    assert "AutoEP creates the optimizer" in files["README.txt"]
    assert "samples/s 2 times too high" in files["README.txt"]
    tensor = json.loads(files["deepspeed.json"])["tensor_parallel"]
    split = {
        spec["partition_type"]: re.compile("|".join(spec["patterns"]))
        for spec in tensor["partition_config"]["layer_specs"]
    }
    # Names of transformers 5: attention with and without latents, dense, shared and routed experts.
    for name, kind in {
        "self_attn.q_proj": "column",
        "self_attn.v_proj": "column",
        "self_attn.kv_b_proj": "column",
        "self_attn.q_a_proj": "",
        "self_attn.o_proj": "row",
        "mlp.gate_proj": "column",
        "mlp.down_proj": "row",
        "mlp.shared_experts.up_proj": "column",
        "mlp.shared_expert.down_proj": "row",
        "mlp.gate": "",
        "mlp.experts.gate_up_proj": "",
    }.items():
        found = [at for at, one in split.items() if one.fullmatch(f"model.layers.0.{name}.weight")]
        assert found == ([kind] if kind else []), name


def test_one_replica_and_adapters_are_planned_as_the_engine_takes_them() -> None:
    # deepspeed 0.19.8 on one rank: "unsupported mix of model_dtype=torch.bfloat16 and
    # grad_accum_dtype=torch.float32" without ZeRO.
    work = Workload(
        model=example_model("tiny-moe"),
        sequence_length=256,
        global_batch_size=8,
        precision="bf16",
    )
    for precision, gradient_bytes, least in (("bf16", 4, 1), ("bf16", 2, 0), ("fp32", 4, 0)):
        able = programs(("deepspeed",)).launchable(
            model=work.model, precision=precision, gradient_bytes=gradient_bytes
        )
        assert min(able.zero_stages) == least
    for target, stages in (("deepspeed", {1}), ("megatron-lm", {0})):
        found = enumerate_degrees(
            work,
            num_devices=1,
            capabilities=programs((target,)).launchable(model=work.model, precision="bf16"),
            search=Search(),
            ranks_per_node=1,
        )
        assert {degrees.zero_stage for degrees in found.legal} == stages
    for tune, expected in ((None, {1, 2}), (Adapters(method="lora", rank=8), {1})):
        able = programs(("deepspeed",)).launchable(
            model=work.model, precision="bf16", adapters=tune
        )
        found = enumerate_degrees(work, num_devices=2, capabilities=able, search=Search())
        assert {degrees.expert for degrees in found.legal} == expected
    assert {degrees.pipeline for degrees in found.legal} == {1}
    assert found.illegal["the target has no expert parallelism beside adapters"] > 0


@each_row(
    ("changes", "lacking"),
    (
        ({"expert_data_parallel_size": 8}, []),
        ({"expert_model_parallel_size": 8}, ["expert"]),
        ({"expert_model_parallel_size": 8, **TWO_TENSOR_RANKS}, ["tensor", "expert"]),
    ),
)
def test_adapters_are_written_for_replicas_alone(changes: dict[str, Any], lacking: Any) -> None:
    replicas = {**ONE_STAGE, "stage_recompute": ("full",), "expert_model_parallel_size": 1}
    plan = _verified(**replicas | changes).plan
    tuned = changed(plan, {"goal.tune": Adapters(method="lora", rank=8)})
    decision = present(plan.decision)
    assert broken_rules("deepspeed", plan, decision) == ()
    assert broken_rules("deepspeed", tuned, decision) == tuple(
        f"deepspeed: has no {kind} parallelism; {kind}_model_parallel_size must be 1"
        " beside adapters"
        for kind in lacking
    )


def test_the_script_hands_over_the_configuration(tmp_path: Path, recorders: Recorders) -> None:
    write_emitted(tmp_path, emit(_verified()))
    ran = recorders.start(
        tmp_path / "run.sh",
        "--epochs",
        "1",
        cwd=Path("/"),
        MASTER_ADDR="head",
        NODE_RANK="0",
        TRAIN="mine.py",
    )
    expected = ["mine.py", "--deepspeed_config", f"{tmp_path}/deepspeed.json", "--epochs", "1"]
    assert ran.only("torchrun")[-5:] == expected
    assert (
        recorders.run(tmp_path / "run.sh", cwd=Path("/"), MASTER_ADDR="head", NODE_RANK="0").code
        != 0
    )


def test_zero_computation_experts_train_on_replicas_of_whole_layers(tmp_path: Path) -> None:
    """LongCat-Flash, whose layers no AutoTP, AutoEP or pipeline takes."""
    file = tmp_path / "spec.yaml"
    file.write_text(
        f"""
schema_version: 1
model: {MODELS / "longcat-flash"}
cluster: {{pools: [{{name: b, device: b300-sxm, nodes: 32, devices_per_node: 8}}]}}
goal: {{kind: train, sequence_length: 4096, global_batch_size: 2048, precision: bf16}}
search: {{micro_batch_size: [1], zero_stage: [3]}}
emit: [deepspeed]
""",
        encoding="utf-8",
    )
    plan = api.plan_training(file, with_unlaunchable=False).plan
    own = present(plan.decision)
    assert (own.zero_stage, own.tensor_model_parallel_size, own.expert_model_parallel_size) == (
        3,
        1,
        1,
    )
    assert own.pipeline_layout == (56,)
    assert not broken_rules("deepspeed", plan, own)
    assert any("8 have weights" in note for note in plan.provenance.notes)
    split = changed(own, {"expert_model_parallel_size": 8, "expert_data_parallel_size": 32})
    assert any(
        "with shortcut-connected experts" in line for line in broken_rules("deepspeed", plan, split)
    )
