"""Megatron-SWIFT's commands, files of settings and defaults, as settings."""

import time
from pathlib import Path
from typing import Any

import pytest

from profilers.steps.config import Recompute
from tests.expect import refused
from tests.rows import each_row
from tuner.engines.ms_swift.read import read_yaml
from tuner.engines.reading.launch import PACKED, TokenDispatcher, TrainingEngine
from tuner.errors import SpecError
from tuner.estimate.registry import read_launch
from tuner.spec.tune import Adapters

BARE = "NPROC_PER_NODE=8 megatron sft --model org/model --dataset data.jsonl --max_length 4096"


def test_defaults_are_its_own() -> None:
    launch = read_launch(BARE)
    assert launch.engine is TrainingEngine.MS_SWIFT
    assert (launch.devices, launch.devices_per_node, launch.sequence) == (8, 8, 4096)
    assert (launch.precision, launch.gradient_bytes, launch.zero_stage) == ("bf16", 4, 1)
    assert (launch.micro_batch, launch.global_batch, launch.expert_tensor) == (1, 16, 1)
    assert launch.dispatcher is TokenDispatcher.ALLTOALL
    assert (launch.recompute, launch.recompute_modules) == (Recompute.SELECTIVE, ("core_attn",))
    assert not launch.dropout
    assert launch.flash_attention
    assert launch.tune == "full"
    # Two fp32 tensors and gradients in bf16 of the fused cross entropy that torch.compile writes.
    assert launch.logit_bytes == 10.0


def test_every_way_of_starting_it_is_recognised() -> None:
    flags = "--model m --tensor_model_parallel_size 4 --micro_batch_size 2"
    wrong = []
    for command in (
        f"NNODES=2 NPROC_PER_NODE=8 megatron sft {flags}",
        f"export NNODES=2\nexport NPROC_PER_NODE=8\nmegatron pt {flags}",
        f"torchrun --nnodes 2 --nproc_per_node 8 swift/cli/_megatron/sft.py {flags}",
        f"torchrun --nnodes=2 --nproc-per-node=8 -m swift.cli._megatron.sft {flags}",
        f"NNODES=2 NPROC_PER_NODE=8 python -m swift.cli._megatron.main sft {flags}",
        "export ASCEND_RT_VISIBLE_DEVICES=0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n"
        f"NPROC_PER_NODE=16 megatron sft {flags}",
        f"NNODES=2 NPROC_PER_NODE=8 megatron sft {flags.replace('_', '-')}",
    ):
        launch = read_launch(command)
        got = (launch.engine, launch.devices, launch.tensor, launch.micro_batch)
        if got != (TrainingEngine.MS_SWIFT, 16, 4, 2):
            wrong.append((command, got))
    assert not wrong


def test_nodes_adapters_and_logits_are_read_in_its_words() -> None:
    assert read_launch(f"NNODES=$WORLD_SIZE {BARE}").devices is None
    assert read_launch(BARE.removeprefix("NPROC_PER_NODE=8 ")).devices is None
    for flags in ("--train_type lora", "--tuner_type lora", "--adapters folder"):
        launch = read_launch(f"{BARE} {flags} --lora_rank 16 --lora_alpha 64")
        assert launch.tune == Adapters(
            method="lora", rank=16, alpha=64.0, targets=("all-linear",), dtype="bf16"
        )
    assert "--train_type: say --tuner_type" in read_launch(f"{BARE} --train_type full").deprecated
    sizes = [
        read_launch(f"{BARE} {flags}").logit_bytes
        for flags in ("--cross_entropy_fusion_impl te", "--cross_entropy_loss_fusion false")
    ]
    assert sizes == [2.0, 6.0]


def test_a_file_of_settings_stands_for_its_flags(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(
        "ENV: {NPROC_PER_NODE: 4}\nmodel: m\ntuner_type: lora\nlora_rank: 4\n"
        "target_modules: [linear_qkv, linear_proj]\nmicro_batch_size: 2\n"
        "expert_model_parallel_size: 4\nmax_length: 2048\npacking: true\n"
    )
    (tmp_path / "run.sh").write_text("megatron sft sft.yaml --micro_batch_size 1\n")
    direct, started = (read_launch(str(tmp_path / name)) for name in ("sft.yaml", "run.sh"))
    assert (direct.micro_batch, started.micro_batch) == (2, 1)
    for launch in (direct, started):
        assert launch.engine is TrainingEngine.MS_SWIFT
        assert (launch.devices, launch.expert, launch.sequence) == (4, 4, 2048)
        assert isinstance(launch.tune, Adapters)
        assert launch.tune.rank == 4
        assert launch.tune.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
        assert PACKED in launch.notes
        assert not any("--packing" in note for note in launch.notes)


@each_row(
    ("flags", "zero", "grain"),
    (
        ("--use_distributed_optimizer false", 0, Recompute.SELECTIVE),
        ("--no_use_distributed_optimizer", 0, Recompute.SELECTIVE),
        ("--use-distributed-optimizer=True", 1, Recompute.SELECTIVE),
        ("--recompute_gran none", 1, Recompute.NONE),
        ("--optimizer muon", 0, Recompute.SELECTIVE),
        ("--optimizer dist_muon", 1, Recompute.SELECTIVE),
    ),
)
def test_switches_take_every_spelling(flags: str, zero: int, grain: Any) -> None:
    launch = read_launch(f"{BARE} {flags}")
    assert (launch.zero_stage, launch.recompute) == (zero, grain), (
        flags,
        launch.zero_stage,
        launch.recompute,
    )


def test_experts_and_optimizer_types_are_those_of_the_release() -> None:
    aware = "--use_precision_aware_optimizer true --exp_avg_dtype bf16 --exp_avg_sq_dtype fp8"
    capacity = "--moe_expert_capacity_factor 1.25 --moe_pad_expert_input_to_capacity true"
    launches = [read_launch(f"{BARE} {flags}") for flags in ("", aware, capacity)]
    assert not any(launch.sequential_experts for launch in launches)
    assert read_launch(f"{BARE} --moe_grouped_gemm false").sequential_experts
    assert [launch.moments_bytes for launch in launches] == [None, 3, None]
    assert [launch.expert_capacity for launch in launches] == [None, None, 1.25]
    assert launches[2].pads_to_capacity


def test_messages_are_in_its_own_words() -> None:
    launch = read_launch(f"{BARE} --megatron_extra_kwargs '{{\"moe_permute_fusion\": true}}'")
    said = launch.differing_settings
    assert said["apply_rope_fusion"] == "--apply_rope_fusion false"
    assert "moe_permute_fusion" not in said
    assert launch.name("expert_tensor") == "--expert_tensor_parallel_size"
    assert launch.name("virtual_pipeline") == "--virtual_pipeline_model_parallel_size"


@each_row(
    ("launch", "part"),
    [
        (f"{BARE} --tensor_model_paralel_size 2", "did you mean --tensor_model_parallel_size"),
        (f"{BARE} --recompute 1", "begins several flags of ms-swift 4.6"),
        (f"{BARE} --freeze_parameters_ratio 0.5", "has no price here"),
        (f"{BARE} --tuner_type lora --target_modules conv", "'conv' of ms-swift 4.6 has no price"),
        (f"{BARE} --tuner_type lora --modules_to_save lm", "leave it out to price the adapters"),
        (
            BARE.replace("sft", "rlhf --rlhf_type grpo"),
            "--rlhf_type grpo of ms-swift 4.6 generates or has a teacher",
        ),
        ("swift rlhf --model m --deepspeed zero3", "estimate the same flags as swift sft"),
        ("megatron export --model m", "export of ms-swift does not train"),
        ("megatron sft missing.yaml", "'missing.yaml' is not beside the launch"),
    ],
)
def test_what_is_not_read_is_refused_by_name(launch: str, part: str) -> None:
    with refused(SpecError, part):
        read_launch(launch)


def test_devices_of_a_file_are_numbers() -> None:
    for name in ("NNODES", "NPROC_PER_NODE"):
        for value in ("9" * 5000, "0", "-1", "two"):
            text = (
                f"tuner_type: full\nmax_length: 64\nmicro_batch_size: 1\nENV: {{{name}: '{value}'}}"
            )
            with pytest.raises(SpecError, match=f"x.yaml: ENV {name} .* is no number") as caught:
                read_yaml(text, source="x.yaml")
            assert len(str(caught.value)) < 300
    text = "tuner_type: full\nmicro_batch_size: 1\nENV: {NNODES: 2, NPROC_PER_NODE: 4}"
    assert read_yaml(text, source="x.yaml").devices == 8


def test_thousands_of_unknown_flags_take_no_time() -> None:
    unknown = " ".join(f"--x{number}" for number in range(12_000))
    for command in (f"{BARE} {unknown}", f"pretrain_gpt.py --micro-batch-size 1 {unknown}"):
        start = time.process_time()
        assert len(read_launch(command).ignored) >= 12_000
        assert time.process_time() - start < 10.0
