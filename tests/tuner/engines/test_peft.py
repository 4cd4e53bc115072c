"""Fine-tuning files: what the loop reads, what is refused, and Megatron-Bridge's adapters."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.expect import present
from tests.rows import Failures, each_row
from tests.tuner.engines.testing import changed, sample_decision, sample_verified, texts_of
from tests.tuner.models import example_model
from tests.tuner.spec.test_tune import written
from tuner.engines.megatron_bridge.lora import lora_arguments
from tuner.engines.megatron_bridge.write import overrides
from tuner.engines.megatron_lm.core import Core
from tuner.engines.peft.write import settings
from tuner.engines.targets import programs
from tuner.engines.torchtitan.lora import lora_fields
from tuner.engines.writers import emit
from tuner.errors import SpecError
from tuner.goals.train_plan import plan_training
from tuner.plans.train import Plan, VerifiedPlan
from tuner.spec.features import features
from tuner.spec.goal import TrainGoal
from tuner.spec.refusals import refusals
from tuner.spec.tune import Adapters

ROOT = Path(__file__).parents[3]
MIXTRAL = example_model("mixtral-8x7b")
REPLICAS = {
    "pipeline_model_parallel_size": 1,
    "data_parallel_size": 8,
    "expert_model_parallel_size": 1,
    "expert_data_parallel_size": 8,
    "zero_stage": 3,
    "recompute": "full",
    "stage_recompute": ("full",),
    "chunks": (1,),
    "pipeline_layout": (32,),
}


def waived(plan: Plan) -> VerifiedPlan:
    return VerifiedPlan.waive(plan, reason="moetune plan does not launch")


def goal_of(*targets: str, **fields: Any) -> TrainGoal:
    tune = Adapters(method=fields.pop("method", "lora"), rank=16, targets=targets, **fields)
    return TrainGoal(kind="train", sequence_length=4096, global_batch_size=64, tune=tune)


def test_the_loop_gets_names_that_peft_knows() -> None:
    found = settings(MIXTRAL, goal_of("all-linear"), sample_decision(**REPLICAS))
    assert found["adapters"] == {
        "quantise": False,
        "dtype": "fp32",
        "r": 16,
        "lora_alpha": 32.0,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    assert (found["fully_shard"], found["gradient_checkpointing"]) == (True, True)
    # 64 sequences over 8 replicas of 1.
    assert found["gradient_accumulation_steps"] == 8
    full = TrainGoal(kind="train", sequence_length=4096, global_batch_size=64)
    assert settings(MIXTRAL, full, sample_decision(**REPLICAS))["adapters"] is None


def test_the_example_reads_every_setting() -> None:
    tree = ast.parse((ROOT / "examples/finetuning/finetune.py").read_text(encoding="utf-8"))
    read = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    found = settings(MIXTRAL, goal_of("all-linear"), sample_decision(**REPLICAS))
    assert {*found, *found["adapters"]} <= read


@pytest.mark.slow
def test_the_loop_keeps_freed_memory_on_a_processor() -> None:
    # 64 MiB have 16,384 pages, which are mapped again where freed blocks go back to the kernel.
    program = """
import importlib.util, resource, sys, torch
spec = importlib.util.spec_from_file_location("finetune", sys.argv[1])
loop = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loop)
loop.keep_memory_and_kernels()
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""
    path = str(ROOT / "examples/finetuning/finetune.py")
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 1000


def test_torchtitan_gets_the_last_part_of_its_modules_names() -> None:
    llama, deepseek = (example_model(name) for name in ("llama-3.1-8b", "deepseek-v3"))
    for model, targets, modules in (
        (llama, ("all-linear",), ["wqkv", "wo", "w1", "w3", "w2"]),
        (llama, ("gate_proj",), ["w1"]),
        (deepseek, ("q_b_proj", "kv_b_proj", "o_proj"), ["wq_b", "wkv_b", "wo"]),
    ):
        found = lora_fields(Adapters(method="lora", rank=8, targets=targets), model)
        assert found == {"rank": 8, "alpha": 16.0, "target_modules": modules}


@each_row(
    ("emit_to", "model", "targets", "said"),
    (
        ("torchtitan", "mixtral-8x7b", "mlp", "has no adapters of experts; of mixtral-8x7b"),
        ("torchtitan", "deepseek-v3", "attention", "no adapters of kv_a_proj_with_mqa, q_a_proj"),
        (
            "torchtitan",
            "qwen3.5-397b-a17b",
            "attention",
            "beside layers with the gated delta",
        ),
        ("deepspeed", "mixtral-8x7b", "all-linear", "has no adapters of experts"),
        ("deepspeed", "nemotron-3-nano", "attention", "deepspeed has no adapters of out_proj; of"),
        ("transformers-peft", "nemotron-3-nano", "attention", "has no adapters of out_proj; of"),
        ("transformers-peft", "deepseek-v2-lite", "mlp", "no adapters of down_proj, gate_proj, up"),
        ("deepspeed", "qwen3-next-80b-a3b", "up_proj", "has no adapters of up_proj; of"),
        ("megatron-bridge", "qwen3-next-80b-a3b", "in_proj_ba", "fuses in_proj_ba, in_proj_qkvz"),
        ("megatron-bridge-26.04", "mixtral-8x7b", "experts", "has no adapters of experts"),
    ),
)
def test_models_and_matrices_without_adapters_are_refused_by_name(
    tmp_path: Path, emit_to: str, model: str, targets: str, said: str
) -> None:
    path = written(tmp_path, {"method": "lora", "rank": 8, "targets": targets}, model=model)
    text = path.read_text(encoding="utf-8").replace("transformers-peft", emit_to)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=said):
        plan_training(path)


def test_tensor_ranks_of_megatron_bridge_divide_the_rank_that_they_split(
    failures: Failures,
) -> None:
    dense = {"tensor_model_parallel_size": 4, "data_parallel_size": 2}
    experts = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 4}
    for target, targets, degrees, said in (
        ("megatron-bridge", ("q_proj", "k_proj", "v_proj"), dense, "tensor_model_parallel_size 4"),
        ("megatron-bridge-26.02", ("gate_proj", "up_proj"), dense, "tensor_model_parallel_size 4"),
        ("megatron-bridge", ("o_proj", "down_proj"), dense, ""),
        ("megatron-bridge", ("experts",), dense, ""),
        ("megatron-bridge", ("experts",), experts, "expert_tensor_parallel_size 4"),
        ("megatron-bridge", ("attention",), experts, ""),
    ):
        for rank in (6, 8):
            able = programs((target,)).launchable(
                model=MIXTRAL,
                precision="bf16",
                adapters=Adapters(method="lora", rank=rank, targets=targets),
            )
            decision = sample_decision(**degrees)
            lines = [
                line
                for line in refusals(able, model=MIXTRAL, decision=decision)
                if "rank" in line.split()
            ]
            expected = f"{target}: {said} must divide rank 6 beside adapters"
            with failures.of(target, targets, rank):
                assert lines == ([expected] if said and rank == 6 else [])


@each_row(("rank", "expected"), ((2, None), (4, 4)))
def test_a_plan_for_megatron_bridge_needs_tensor_ranks_that_divide_the_rank(
    tmp_path: Path, rank: int, expected: int | None
) -> None:
    path = written(tmp_path, {"method": "lora", "rank": rank, "targets": "attention"})
    text = path.read_text(encoding="utf-8").replace("transformers-peft", "megatron-bridge")
    text += "search: {tensor_model_parallel_size: [4]}\n"
    path.write_text(text, encoding="utf-8")
    decision = plan_training(path, with_unlaunchable=False).plan.decision
    assert (decision and decision.tensor_model_parallel_size) == expected


@each_row(
    ("release", "core"), {"v0.3.0": Core.V0_16, "v0.4.0": Core.V0_17, "v0.5.0": Core.V0_18}.items()
)
def test_every_field_for_megatron_bridge_is_one_of_its_release(release: str, core: Any) -> None:
    fields = json.loads((Path(__file__).parent / "bridge_fields.json").read_text("utf-8"))
    decisions: tuple[dict[str, Any], ...] = (
        {},
        {"zero_stage": 3, "optimizer_offload": True},
        {"cuda_graph": "full_iteration", "dispatcher": "hybridep", "ddp_bucket_size": 1000},
        {"a2a_overlap": True, "activation_offload": True, "dispatcher": "deepep"},
    )
    names = ("deepseek-v3", "gpt-oss-120b", "mixtral-8x7b", "nemotron-3-nano")
    known = fields["releases"][release]
    for name in names:
        model = example_model(name)
        half = model.num_layers // 2
        stages = {"chunks": (1, 1), "pipeline_layout": (model.num_layers - half, half)}
        for changes in decisions:
            decision = sample_decision(**stages, **changes)
            found = overrides(model, goal_of("attention"), decision, core=core)
            unknown = {path for path, _ in found} - set(known["overrides"])
            assert not unknown, (release, name, changes)
    lora = present(lora_arguments(MIXTRAL, goal_of("all-linear"), core=core))
    assert set(lora) <= set(known["LoRA"]), release


@each_row(
    ("targets", "modules"),
    [
        (("q_proj", "k_proj", "v_proj"), ["linear_qkv"]),
        (("attention",), ["linear_qkv", "linear_proj"]),
        (("experts",), ["*.experts.linear_fc1", "*.experts.linear_fc2"]),
    ],
)
def test_megatron_bridge_gets_its_own_names(targets: tuple[str, ...], modules: list[str]) -> None:
    found = present(lora_arguments(MIXTRAL, goal_of(*targets)))
    assert found["target_modules"] == modules
    assert (found["dim"], found["alpha"]) == (16, 32.0)


@each_row("name", ("qwen3-next-80b-a3b", "qwen3.5-397b-a17b", "nemotron-3-nano"))
def test_megatron_bridge_has_one_adapter_of_the_inputs_of_linear_attention(name: str) -> None:
    found = present(lora_arguments(example_model(name), goal_of("attention")))
    assert found["target_modules"] == ["linear_qkv", "linear_proj", "in_proj", "out_proj"], name


RECIPES = {
    "deepseek-v3": "deepseek_v3_pretrain_config",
    "glm-4.5-air": "glm45_air_106b{}",
    "gpt-oss-120b": "gpt_oss_120b{}",
    "llama-3.1-8b": "llama31_8b{}",
    "mixtral-8x7b": "vanilla_gpt_pretrain_config",
    "nemotron-3-nano": "nemotron_3_nano{}",
    "nemotron-h-56b": "nemotronh_56b{}",
    "olmoe-1b-7b": "olmoe_7b{}",
    "qwen3-30b-a3b": "qwen3_30b_a3b{}",
    "qwen3-next-80b-a3b": "qwen3_next_80b_a3b_pretrain_config",
}


def test_adapters_start_from_a_recipe_of_adapters_where_the_release_has_one(
    failures: Failures,
) -> None:
    fields = json.loads((Path(__file__).parent / "bridge_fields.json").read_text("utf-8"))
    for target, release, ending in (
        ("megatron-bridge-26.02", "v0.3.0", "_finetune_config"),
        ("megatron-bridge-26.04", "v0.4.0", "_peft_config"),
        ("megatron-bridge", "v0.5.0", "_peft_config"),
    ):
        for name, recipe in RECIPES.items():
            model = example_model(name)
            stages = {"chunks": (1,), "pipeline_layout": (model.num_layers,)}
            expected, finetunes = recipe.format(ending), "{}" in recipe
            decision = sample_decision(
                pipeline_model_parallel_size=1,
                data_parallel_size=4 if finetunes else 8,
                context_parallel_size=2 if finetunes else 1,
                stage_recompute=("none",),
                **stages,
            )
            plain = sample_verified(model, decision, emit=(target,))
            tuned = waived(changed(plain.plan, {"goal": goal_of("attention")}))
            files = texts_of(emit(target, tuned))
            with failures.of(target, name):
                if expected != "vanilla_gpt_pretrain_config" or release != "v0.3.0":
                    assert expected in fields["releases"][release]["recipes"]
                    assert f"RECIPE:-{expected}}}" in files["run.sh"]
                assert ("no recipe of adapters" in files["run.sh"]) is not finetunes
                assert ("dataset.seq_length=4096" in files["overrides.txt"]) is finetunes
                assert ("dataset.sequence_length=4096" in files["overrides.txt"]) is not finetunes
                # Two context ranks exchange halves of a sequence's halves.
                assert ("config.dataset.seq_length, 4\n" in files["train.py"]) is finetunes
                per_token = "model.calculate_per_token_loss=true" in files["overrides.txt"]
                assert per_token is finetunes


@each_row(
    ("changes", "is_packed"),
    (
        ({}, True),
        ({"micro_batch_size": 2}, False),
        ({"cuda_graph": "full_iteration"}, False),
    ),
)
def test_samples_are_not_packed_in_larger_micro_batches_or_graphs(
    *, changes: dict[str, Any], is_packed: bool
) -> None:
    model = example_model("qwen3-30b-a3b")
    stages = {"chunks": (1, 1), "pipeline_layout": (24, 24)}
    found = dict(overrides(model, goal_of("attention"), sample_decision(**stages, **changes)))
    assert ("dataset.packed_sequence_specs" not in found) is is_packed, changes


def test_megatron_bridge_finetunes_with_adapters_and_pretrains_without() -> None:
    plain = sample_verified(MIXTRAL, sample_decision(), emit=("megatron-bridge",))
    tuned = waived(changed(plain.plan, {"goal": goal_of("attention")}))
    pretrains, finetunes = (
        texts_of(emit("megatron-bridge", one))["train.py"] for one in (plain, tuned)
    )
    for program in (pretrains, finetunes):
        ast.parse(program)
    assert "LoRA" not in pretrains
    assert "config.peft = LoRA(" in finetunes
    assert finetunes.rstrip().endswith("finetune(config=config, forward_step_func=forward_step)")


@each_row(
    ("emit_to", "tune", "said"),
    [
        ("megatron-lm", {"method": "lora", "rank": 8}, "megatron-lm does not train by 'lora'"),
        ("torchtitan", {"method": "qlora", "rank": 8}, "torchtitan does not train by 'qlora'"),
        ("deepspeed", {"method": "qlora", "rank": 8}, "deepspeed does not train by 'qlora'"),
        (
            "deepspeed",
            {"method": "lora", "rank": 8, "dtype": "fp32"},
            "goal.tune.dtype: deepspeed keeps adapters in bf16, not fp32; leave it out",
        ),
        (
            "torchtitan",
            {"method": "lora", "rank": 8, "targets": "q_proj"},
            "fuses k_proj, q_proj, v_proj into one layer",
        ),
        ("megatron-bridge", {"method": "qlora", "rank": 8}, "does not train by 'qlora'"),
        (
            "megatron-bridge",
            {"method": "lora", "rank": 8, "targets": "q_proj"},
            "fuses k_proj, q_proj, v_proj into one layer",
        ),
    ],
)
def test_what_a_target_does_not_train_is_refused(
    emit_to: str, tune: Any, said: str, tmp_path: Path
) -> None:
    path = written(tmp_path, tune)
    text = path.read_text(encoding="utf-8").replace("transformers-peft", emit_to)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=said):
        plan_training(path)


@each_row(
    ("name", "targets", "parameters", "kernels"),
    (
        ("nemotron-3-nano", ("in_proj", "experts"), "mixer.experts.up_proj", "mamba_ssm"),
        ("kimi-linear-48b-a3b", ("all-linear",), "mlp.experts.gate_up_proj", "fla"),
    ),
)
def test_the_loop_gets_parameters_of_experts_and_packages_of_kernels(
    name: str, targets: Any, parameters: str, kernels: str
) -> None:
    model = example_model(name)
    stages = {"pipeline_layout": (model.num_layers,)}
    found = settings(model, goal_of(*targets), sample_decision(**REPLICAS | stages))
    assert found["kernels"] == ["causal_conv1d", kernels]
    last = parameters.rpartition(".")[0] + ".down_proj"
    assert found["adapters"]["target_parameters"] == [parameters, last]
    assert "experts" not in found["adapters"]["target_modules"]


@each_row(("name", "lacks"), (("kimi-linear-48b-a3b", True), ("deepseek-v3", False)))
def test_a_processor_has_no_kernels_of_linear_attention(*, name: str, lacks: bool) -> None:
    model = example_model(name)
    able = {
        "cuda": programs(("transformers-peft",)).launchable(model=model, precision="bf16"),
        "cpu": programs(("transformers-peft",)).launchable(
            model=model, precision="bf16", device_kind="cpu"
        ),
    }
    assert bool(features(model) & able["cpu"].unsupported) is lacks
    assert not features(model) & able["cuda"].unsupported


@each_row(
    ("model", "targets"),
    (
        ("deepseek-v2-lite", ["attention", "experts"]),
        ("kimi-linear-48b-a3b", ["attention"]),
        ("nemotron-3-nano", ["in_proj", "o_proj", "experts"]),
        ("qwen3-next-80b-a3b", ["attention"]),
    ),
)
def test_hybrids_and_latent_attention_are_planned_for_the_loop(
    tmp_path: Path, model: str, targets: Any
) -> None:
    path = written(tmp_path, {"method": "lora", "rank": 16, "targets": targets}, model=model)
    with path.open("a", encoding="utf-8") as file:
        file.write("search: {micro_batch_size: [1], zero_stage: [3]}\n")
    plan = plan_training(path, with_unlaunchable=False).plan
    files = texts_of(emit("transformers-peft", waived(plan)))
    assert json.loads(files["finetune.json"])["adapters"]["r"] == 16


def test_a_plan_of_adapters_fits_where_one_of_all_weights_needs_sharding(tmp_path: Path) -> None:
    plans = {}
    for name, tune in (("full", "full"), ("qlora", {"method": "qlora", "rank": 16})):
        path = written(tmp_path, tune, model="qwen3-30b-a3b")
        with path.open("a", encoding="utf-8") as file:
            file.write("search: {micro_batch_size: [1]}\n")
        plans[name] = plan_training(path, with_unlaunchable=False).plan
    full, tuned = plans["full"].decision, plans["qlora"].decision
    assert (present(full).zero_stage, present(tuned).zero_stage) == (3, 0)
    assert present(plans["qlora"].predicted).mfu_ratio is None
    assert json.loads(plans["qlora"].model_dump_json())["goal"]["tune"]["method"] == "qlora"
