"""Launches of Transformers' Trainer, LLaMA-Factory and TRL end in the engine that they start."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.config import Recompute
from tests.expect import refused
from tests.rows import each_row
from tests.tuner.estimate.conftest import predict
from tuner.engines.peft.read import read
from tuner.engines.reading.launch import LaunchSettings, TrainingEngine
from tuner.errors import SpecError
from tuner.estimate.estimate import estimate
from tuner.estimate.registry import read_launch
from tuner.spec.spec import Spec
from tuner.spec.tune import Adapters

MakeSpec = Callable[..., Spec]
AUTO = json.dumps(
    {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
)
FACTORY = """
model_name_or_path: m
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/z3.json
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
"""
FSDP = """
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_activation_checkpointing: true}
"""


def launch(command: str, **files: str) -> LaunchSettings:
    named = {name.replace("_", "."): text for name, text in files.items()}
    return read(command, source="run.sh", beside=named.get)


def batch(settings: LaunchSettings) -> tuple[int | None, int, int | None]:
    return settings.devices, settings.micro_batch, settings.accumulation


def test_the_command_holds_what_auto_stands_for() -> None:
    command = (
        "torchrun --nnodes 4 --nproc_per_node 8 train.py --deepspeed zero.json --bf16 True "
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --model_max_length 8192 "
        "--gradient_checkpointing True"
    )
    settings = launch(command, zero_json=AUTO)
    assert settings.engine is TrainingEngine.DEEPSPEED
    assert batch(settings) == (32, 1, 4)
    assert (settings.sequence, settings.precision, settings.zero_stage) == (8192, "bf16", 3)
    assert settings.recompute is Recompute.FULL
    assert "gradient_clipping = 'auto'" in settings.ignored
    # The Trainer's defaults, and its words for a batch that the file contradicts.
    assert batch(launch("python train.py --deepspeed zero.json", zero_json=AUTO)) == (1, 8, 1)
    stated = json.dumps(json.loads(AUTO) | {"train_micro_batch_size_per_gpu": 4})
    with pytest.raises(SpecError, match="4 is not per_device_train_batch_size 1 of the command"):
        launch(command, zero_json=stated)


def test_a_goal_decides_the_precision_of_a_file_alone(spec_of: MakeSpec, tmp_path: Path) -> None:
    numbers = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    config = {k: v for k, v in json.loads(AUTO).items() if "batch" not in k} | numbers
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(config))
    for precision in ("bf16", "fp32"):
        spec = spec_of("llama-3.1-8b", nodes=1, precision=precision)
        assert predict(spec, read_launch(str(path))).precision == precision


def test_llama_factory_yaml_with_overrides_and_the_json_beside_it(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(FACTORY)
    (tmp_path / "z3.json").write_text(AUTO)
    script = tmp_path / "run.sh"
    script.write_text(
        "FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=8 llamafactory-cli train train.yaml "
        "per_device_train_batch_size=2"
    )
    settings = read_launch(str(script))
    assert settings.engine is TrainingEngine.DEEPSPEED
    assert batch(settings) == (16, 2, 2)
    # Recomputation is on unless it is disabled.
    assert (settings.sequence, settings.recompute) == (4096, Recompute.FULL)
    assert (settings.tune, settings.has_transformers_loss) == ("full", True)
    assert settings.name("micro_batch") == "per_device_train_batch_size:"
    assert batch(read_launch(str(tmp_path / "train.yaml"))) == (None, 1, 2)
    (tmp_path / "z3.json").unlink()
    with pytest.raises(SpecError, match=r"which DeepSpeed reads, is not here: put z3\.json beside"):
        read_launch(str(script))


def test_adapters_of_a_launch_count(spec_of: MakeSpec) -> None:
    command = "llamafactory-cli train --stage sft --template t --lora_target q_proj,v_proj --bf16"
    settings = launch(f"CUDA_VISIBLE_DEVICES=0,1,2,3 {command}")
    assert settings.engine is TrainingEngine.TRANSFORMERS
    assert batch(settings) == (4, 8, 1)
    assert settings.tune == Adapters(method="lora", rank=8, targets=("q_proj", "v_proj"))
    spec = spec_of("llama-3.1-8b", nodes=1)
    tuned = predict(spec, settings)
    assert tuned.fits
    whole = f"{command} --finetuning_type full --gradient_accumulation_steps 2"
    full = predict(spec, launch(f"CUDA_VISIBLE_DEVICES=0,1,2,3 {whole}"))
    # fp32 parameters, gradients and moments: 16 bytes of each of 8.03e9 parameters.
    state = full.memory[0].weight_bytes + full.memory[0].gradient_bytes
    assert state + full.memory[0].optimizer_bytes == pytest.approx(16 * 8.03e9, rel=0.01)
    assert tuned.peak_memory_bytes < full.peak_memory_bytes / 3
    with pytest.raises(SpecError, match=r"targets: .* has no 'experts'"):
        predict(spec, launch(command.replace("q_proj,v_proj", "experts")))


@each_row(
    ("flags", "each"),
    (
        ("--torch_dtype bfloat16", 8),
        ("--torch_dtype auto", 8),
        ("--torch_dtype bfloat16 --bf16", 16),
        ("--torch_dtype bfloat16 --optim paged_adamw_8bit", 6),
        ("--bf16 --optim adamw_bnb_8bit", 10),
        ("--bf16 --optim paged_adamw_32bit", 16),
        ("", 16),
    ),
)
def test_state_has_the_type_of_the_weights_without_mixed_precision(
    spec_of: MakeSpec, flags: str, each: int
) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1)
    fsdp = f"torchrun --nproc_per_node 8 train.py --fsdp full_shard{_BATCHES}"
    settings = launch(f"{fsdp} {flags}")
    assert settings.precision == ("bf16" if flags else "fp32")
    rank = predict(spec, settings).memory[0]
    state = rank.weight_bytes + rank.gradient_bytes + rank.optimizer_bytes
    assert state == pytest.approx(each * 8.03e9 / 8, rel=0.01), flags


def test_8_bit_moments_are_refused_where_deepspeeds_file_decides() -> None:
    command = f"llamafactory-cli train --stage sft --deepspeed zero.json{_BATCHES}"
    with pytest.raises(SpecError, match=r"optim 'adamw_8bit' is not priced under DeepSpeed"):
        launch(f"{command} --optim adamw_8bit", zero_json="{}")


def test_no_change_of_adapters_is_advised_that_their_engine_lacks(spec_of: MakeSpec) -> None:
    # AutoEP finds no MoE layer behind PEFT's wrapper.
    batch = "--per_device_train_batch_size 1 --gradient_accumulation_steps 8"
    command = f"llamafactory-cli train --stage sft --deepspeed zero.json --bf16 {batch}"
    spec = spec_of("qwen3-30b-a3b", nodes=1)
    result = estimate(spec, launch(f"NPROC_PER_NODE=8 {command}", zero_json=AUTO))
    assert result.changes
    assert all("expert_parallel" not in line for one in result.changes for line in one.lines)


def test_trl_under_fsdp_and_deepspeed(spec_of: MakeSpec) -> None:
    command = "accelerate launch --config_file fsdp.yaml sft.py --dataset_name d --max_length 2048"
    settings = launch(command, fsdp_yaml=FSDP)
    assert settings.engine is TrainingEngine.TRANSFORMERS
    assert batch(settings) == (16, 8, 1)
    assert settings.devices_per_node == 8
    assert (settings.sequence, settings.zero_stage, settings.precision) == (2048, 3, "bf16")
    assert settings.recompute is Recompute.FULL
    twice = launch(f"{command} --gradient_accumulation_steps 2", fsdp_yaml=FSDP)
    memory = predict(spec_of("llama-3.1-8b", nodes=2), twice).memory[0]
    state = memory.weight_bytes + memory.gradient_bytes + memory.optimizer_bytes
    assert state == pytest.approx(8.03e9, rel=0.01)
    zero = launch("trl sft --accelerate_config zero2 --num_processes 4 --use_peft --lora_r 32")
    assert (zero.engine, zero.zero_stage) == (TrainingEngine.DEEPSPEED, 2)
    assert batch(zero) == (4, 8, 1)
    assert not zero.ignored
    assert (settings.name("sequence"), settings.ignored) == (
        "--max_length",
        ("dataset_name = 'd'",),
    )
    assert zero.tune == Adapters(method="lora", rank=32, targets=("q_proj", "v_proj"))
    # Offload and batch of accelerate's own flags.
    flags = "--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu --num_processes 8"
    own = launch(f"accelerate launch {flags} run_sft.py config.yaml", config_yaml="bf16: true")
    assert (own.zero_stage, own.optimizer_offload_ratio, own.devices) == (3, 1.0, 8)


@each_row(
    ("flags", "devices"),
    {
        "--num_nodes 2 --num_gpus 8": (16, 8),
        "--include localhost:0,1,2": (3, 3),
        "--include a:0,1@b:0,1": (4, 2),
        "--hostfile hostfile": (16, 8),
        "--num_gpus 4": (4, 4),
        "--num_nodes $NODES --num_gpus 8": (None, None),
    }.items(),
)
def test_devices_of_deepspeeds_launcher(flags: str, devices: Any) -> None:
    rest = "train.py --deepspeed zero.json --per_device_train_batch_size 1"
    hosts = "# two nodes\nworker-1 slots=8\nworker-2 slots=8\n"
    settings = launch(f"deepspeed {flags} {rest}", zero_json=AUTO, hostfile=hosts)
    assert (settings.devices, settings.devices_per_node) == devices, flags


def test_a_program_of_its_own_says_experts_and_recomputation_beside_its_json() -> None:
    config = (
        '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}'
    )
    command = (
        "deepspeed --num_gpus 8 my_moe.py --deepspeed --deepspeed_config ds.json "
        "--ep-world-size 8 --checkpoint-activations"
    )
    settings = launch(command, ds_json=config)
    assert (settings.expert, settings.recompute) == (8, Recompute.FULL)
    assert settings.name("expert") == "--ep_world_size"
    auto = config.replace("64", '"auto"').replace(": 1,", ': "auto",')
    with pytest.raises(SpecError, match="'auto' is filled in by Transformers' Trainer"):
        launch(command, ds_json=auto)


@each_row(
    ("command", "part"),
    [
        (
            "llamafactory-cli export x.yaml",
            "LLaMA-Factory's llamafactory-cli 'export' is not priced",
        ),
        (
            "llamafactory-cli train train.yaml",
            "which LLaMA-Factory reads, is not here: put train.yaml",
        ),
        (
            "USE_MCA=1 llamafactory-cli train --stage sft",
            "its MCoreAdapter trains with Megatron-LM",
        ),
        ("lmf train --stage dpo", "stage 'dpo' is not priced"),
        ("lmf train --finetuning_type freeze", "finetuning_type 'freeze' is not priced; full and"),
        ("lmf train --finetuning_type oft", "finetuning_type 'oft' is not priced"),
        (
            "lmf train --optim adafactor",
            "optim 'adafactor' is not priced: its state is not that of AdamW",
        ),
        ("lmf train --quantization_bit 8", "frozen weights in 4 bits are, under replicas"),
        ("lmf train --model_name_or_path m-AWQ", "with AWQ is not priced"),
        ("lmf train --lora_target c_attn", "'c_attn' is no module that adapters are priced for"),
        ("trl grpo --accelerate_config zero3", "TRL's trl 'grpo' is not priced"),
        (
            "python dpo.py --per_device_train_batch_size 1",
            "'dpo.py' is not priced, supervised",
        ),
        ("accelerate launch --num_processes 8 trl sft --bf16", "names no --config_file"),
        ("trl sft --max_length 8", "names no --accelerate_config"),
        ("torchrun train.py --fsdp hybrid_shard", "FSDP's 'hybrid_shard' is not priced"),
        (
            "torchrun train.py --fsdp 'full_shard offload'",
            "keeps parameters and optimizer state in",
        ),
        ("torchrun train.py --per_device_train_batch_size 1 --use_lora", "add --lora_r"),
        ("torchrun train.py --per_device_train_batch_size 0", "is outside 1.."),
        ("bash other.sh", "starts no program of Transformers' Trainer"),
    ],
)
def test_refuses_in_one_line_what_is_not_priced(command: str, part: str) -> None:
    with refused(SpecError, part):
        launch(command)


@each_row(
    ("line", "part"),
    {
        "parallelism_config: {parallelism_config_cp_size: 2}": "context and sequence parallelism",
        "distributed_type: MEGATRON_LM": "'MEGATRON_LM' is not read",
    }.items(),
)
def test_parallelism_and_types_of_accelerate_are_refused_by_name(line: str, part: str) -> None:
    config = FSDP if "parallelism" in line else ""
    with pytest.raises(SpecError, match=part):
        launch(
            "accelerate launch --config_file a.yaml sft.py --config s.yaml",
            **{"a_yaml": config + line, "s_yaml": "bf16: true"},
        )


def test_4_bits_are_priced_on_replicas_alone(spec_of: MakeSpec) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1)
    command = "torchrun --nproc_per_node 8 train.py --use_peft --lora_r 8 --load_in_4bit --bf16"
    replicas = predict(spec, launch(f"{command} --per_device_train_batch_size 1"))
    assert replicas.memory[0].weight_bytes < 8e9
    with pytest.raises(SpecError, match=r"4 bits \(qlora\) are priced on replicas"):
        predict(spec, launch(f"{command} --fsdp full_shard"))


_KEYS = [
    "stage",
    "finetuning_type",
    "deepspeed",
    "fsdp",
    "fsdp_config",
    "accelerate_config",
    "config_file",
    "bf16",
    "fp16",
    "cutoff_len",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "lora_target",
    "lora_rank",
    "flash_attn",
    "optim",
    "quantization_bit",
    "pure_bf16",
    "model_name_or_path",
    "ray_num_workers",
    "use_dora",
    *("tuner_type", "torch_dtype", "target_modules", "max_length", "quant_bits", "ENV", "packing"),
]
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from(["full", "lora", "full_shard", "zero2", "auto", "q_proj", "all", "sft"]),
    st.lists(st.integers() | st.text(max_size=4), max_size=2),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


_COMMANDS = ("trl sft --config a.json", "llamafactory-cli train a.json", "swift sft a.json")


@given(st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=8), st.sampled_from(_COMMANDS))
@settings(max_examples=90)
def test_any_arguments_give_settings_or_one_line(values: dict[str, Any], command: str) -> None:
    text = json.dumps({"model_name_or_path": "m", "cutoff_len": 8} | values)
    said = ""
    try:
        assert launch(command, a_json=text).micro_batch >= 1
    except SpecError as error:
        said = str(error)
    assert "\n" not in said


def test_frozen_weights_are_of_the_type_that_they_are_loaded_in() -> None:
    # huggingface/peft, docs/source/accelerate/fsdp.md: 72 to 80 GB of 8 H100 with 70B in fp32.
    adapted = " --lora_r 8 --lora_target_modules all-linear --bf16 True"
    script = f"torchrun --nproc_per_node 8 train.py{_BATCH} --use_peft_lora True{adapted}"
    command = f"trl sft --accelerate_config multi_gpu --model_name_or_path m{_BATCH}{adapted}"
    command += " --use_peft"
    for text, stated, stored in (
        (script, "", 2),
        (script, " --dtype float32", 4),
        (command, "", 4),
        (command, " --dtype bfloat16", 2),
    ):
        launch = read(text + stated, source="run.sh")
        assert launch.stored_bytes == stored, text + stated
        is_said = any("loaded in 16 bits" in note for note in launch.notes)
        assert is_said is (text == script and not stated)


_BATCH = " --per_device_train_batch_size 1 --gradient_accumulation_steps 1"
_BATCHES = " --per_device_train_batch_size 1 --gradient_accumulation_steps 2"
