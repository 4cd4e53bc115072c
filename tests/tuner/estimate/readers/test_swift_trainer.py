"""`swift sft` and `swift pt` end in the engine that they start, with ms-swift's own defaults."""

import json
from pathlib import Path

import pytest

from profilers.steps.config import Recompute
from tests.rows import Failures, each_row
from tuner.engines.reading.launch import PACKED, LaunchSettings, TrainingEngine
from tuner.errors import SpecError
from tuner.estimate.registry import read_launch
from tuner.spec.tune import FULL, Adapters

BARE = "NPROC_PER_NODE=8 swift sft --model m --dataset 'a#500' --max_length 4096"


def read(flags: str, *, command: str = BARE) -> LaunchSettings:
    return read_launch(f"{command} {flags}")


def adapters(launch: LaunchSettings) -> Adapters:
    assert isinstance(launch.tune, Adapters)
    return launch.tune


def test_each_name_of_deepspeed_and_fsdp_is_its_file(failures: Failures) -> None:
    rows = {
        "--deepspeed zero0": (0, 0.0),
        "--deepspeed zero1": (1, 0.0),
        "--deepspeed zero2": (2, 0.0),
        "--deepspeed zero3": (3, 0.0),
        "--deepspeed zero2_offload": (2, 1.0),
        "--deepspeed zero3_offload": (3, 1.0),
        "--fsdp fsdp2": (3, 0.0),
        "": (0, 0.0),
    }
    for flags, expected in rows.items():
        for tuner in ("--tuner_type lora", "--train_type full"):
            with failures.of(f"{flags} {tuner}"):
                launch = read(f"{flags} {tuner}")
                is_deepspeed = launch.engine is TrainingEngine.DEEPSPEED
                assert is_deepspeed == flags.startswith("--deepspeed")
                assert (launch.zero_stage, launch.optimizer_offload_ratio) == expected
                assert not launch.overlap_grad_reduce
                assert (launch.devices, launch.micro_batch, launch.accumulation) == (8, 1, 2)
                assert (launch.sequence, launch.precision) == (4096, "bf16")
                assert launch.recompute is Recompute.FULL
                assert (launch.tune == FULL) == ("full" in tuner)


def test_what_is_not_stated_is_as_in_the_release() -> None:
    launch = read("")
    assert adapters(launch) == Adapters(method="lora", rank=8, targets=("all-linear",))
    assert (launch.stored_bytes, launch.understood.count("max_length = 4096")) == (2, 1)
    assert any("Transformers 5" in note for note in launch.notes)
    # 16 sequences a step, as near as the devices come.
    sizes = [
        read(f"--per_device_train_batch_size {batch}").accumulation for batch in (1, 2, 3, 100)
    ]
    assert sizes == [2, 1, 1, 1]
    assert read("", command=f"NNODES=2 {BARE}").accumulation == 1
    assert read("--gradient_checkpointing false").recompute is Recompute.NONE
    assert read("--tuner_type full").stored_bytes == 2
    assert read("--tuner_type full --torch_dtype float32").precision == "fp16"
    assert read("--torch_dtype float32 --fp16 false").precision == "fp32"
    assert not read("--attn_impl eager").flash_attention
    quantised = adapters(read("--quant_method bnb --quant_bits 4 --lora_dtype bfloat16"))
    assert (quantised.method, quantised.dtype) == ("qlora", "bf16")
    named = adapters(read("--target_modules q_proj v_proj --lora_rank 16"))
    assert (named.rank, named.targets) == (16, ("q_proj", "v_proj"))


def test_processes_are_those_of_the_variables_or_of_the_launcher(failures: Failures) -> None:
    rows = {
        "CUDA_VISIBLE_DEVICES=0 swift sft --model m": 1,
        "CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 swift pt --model m": 2,
        "NNODES=4 NODE_RANK=0 NPROC_PER_NODE=8 swift sft --model m": 32,
        "torchrun --nnodes 2 --nproc_per_node 4 swift/cli/sft.py --model m": 8,
        "torchrun --nproc_per_node 4 -m swift.cli.sft --model m": 4,
        "swift export --model m && NPROC_PER_NODE=2 swift sft --model m": 2,
    }
    for command, devices in rows.items():
        with failures.of(command):
            launch = read_launch(command)
            assert (launch.devices, launch.accumulation) == (devices, -(-16 // devices))
    assert read_launch("swift sft --model m --gradient_accumulation_steps 2").devices is None


def test_scripts_and_files_of_settings_are_read(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "n=4\nswift export --model m --quant_bits 4\n"
        "NPROC_PER_NODE=$n swift sft --model m --fsdp own.json \\\n"
        "    --gradient_accumulation_steps $(expr 64 / $n / 2)\nswift infer --adapters out\n"
    )
    own = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"reshard_after_forward": False}}
    (tmp_path / "own.json").write_text(json.dumps(own))
    launch = read_launch(str(script))
    assert (launch.devices, launch.accumulation, launch.zero_stage) == (4, 8, 2)
    own["fsdp_config"]["activation_cpu_offload"] = True  # type: ignore[index]
    (tmp_path / "own.json").write_text(json.dumps(own))
    with pytest.raises(SpecError, match="activation_cpu_offload is not priced"):
        read_launch(str(script))
    file = tmp_path / "sft.yaml"
    file.write_text(
        "model: m\ntuner_type: full\nmax_length: 2048\ndeepspeed: zero3\n"
        "per_device_train_batch_size: 4\nENV:\n  NPROC_PER_NODE: 2\n"
    )
    script.write_text("swift sft sft.yaml --per_device_train_batch_size 2\n")
    sizes = [(one.devices, one.micro_batch) for one in map(read_launch, (str(file), str(script)))]
    assert sizes == [(2, 4), (2, 2)]


def test_what_has_no_price_is_refused_by_name(failures: Failures) -> None:
    rows = {
        "--tuner_type adalora": "tuner_type 'adalora' is not priced: full and lora are",
        "--sequence_parallel_size 4": "sequence_parallel_size 4 is not priced",
        "--task_type embedding": "a head over the vocabulary is",
        "--quant_method hqq --quant_bits 4": "quant_method 'hqq' is not priced",
        "--quant_method bnb --quant_bits 8": "quant_bits 8 is not priced",
        "--freeze_parameters_ratio 0.5": "trains a part of the weights",
        "--optimizer muon": "its state is not that of AdamW",
        "--experts_impl eager": "experts as grouped GEMMs are",
        "--deepspeed zero5": "'zero5', which DeepSpeed reads, is not here",
        "--perdevice_train_batch_size 2": "did you mean per_device_train_batch_size",
    }
    commands = {f"{BARE} {flags}": part for flags, part in rows.items()} | {
        "swift sft --model m": "set NPROC_PER_NODE, or state it",
        "CUDA_VISIBLE_DEVICES=0,1 swift sft --model m": "whose device_map is not priced",
        "swift rlhf --rlhf_type dpo --model m": "estimate the same flags as swift sft",
        "swift infer --model m": "does not train",
    }
    for command, part in commands.items():
        with failures.of(command), pytest.raises(SpecError) as refusal:
            read_launch(command)
        with failures.of(part):
            assert part in str(refusal.value)


@each_row(
    "command",
    (
        "NPROC_PER_NODE=8 swift sft --model m --packing true --tuner_type full",
        "trl sft --accelerate_config zero3 --model_name_or_path m --packing true",
    ),
)
def test_samples_that_share_a_sequence_are_said_to_attend_to_less(command: str) -> None:
    assert PACKED in read_launch(command).notes, command
    assert PACKED not in read_launch(command.replace("packing true", "packing false")).notes


@each_row("flags", ("--deepspeed zero3", "--fsdp fsdp2"))
def test_the_fused_loss_of_liger_keeps_a_chunk_of_logits(flags: str) -> None:
    assert read(f"{flags} --use_liger_kernel true").logit_bytes == 0.25
    assert read(flags).logit_bytes == 0.0
