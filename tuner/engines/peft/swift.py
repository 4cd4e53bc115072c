"""Facts of ms-swift: the files that its names stand for, and arguments that are not priced.

Read from the wheel ms-swift 4.6.0 (swift/config, swift/arguments, swift/utils/env.py); the files
are those of 3.5.0 (swift/llm/ds_config), too.
"""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from tuner.engines.peft.arguments import TrainerCommand, found_text
from tuner.engines.reading.options_file import Beside
from tuner.engines.reading.sections import Sections
from tuner.errors import SpecError
from tuner.spec.files import shown_value
from tuner.spec.tune import FULL
from tuner.spec.yaml_text import parse_yaml
from tuner.units import parse_whole

AUTO_BATCH: Final[Mapping[str, Any]] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
}
"""Settings that DeepSpeed's file leaves to the Trainer."""
_HOST: Final = {"device": "cpu"}
_ZERO: Final[Mapping[str, Mapping[str, Any]]] = {
    **{f"zero{stage}": {"stage": stage} for stage in range(4)},
    "zero2_offload": {"stage": 2, "offload_optimizer": _HOST},
    "zero3_offload": {"stage": 3, "offload_optimizer": _HOST, "offload_param": _HOST},
}
"""Files of ms-swift by the name that --deepspeed takes; all have `overlap_comm` off."""
_FSDP: Final = {"fsdp_config": {"reshard_after_forward": True, "activation_checkpointing": True}}
"""Settings that `--fsdp fsdp2` stands for."""
_PARTLY: Final = (
    *("freeze_parameters", "freeze_parameters_regex", "freeze_parameters_ratio"),
    *("trainable_parameters", "trainable_parameters_regex", "lisa_activated_layers"),
)
_PRICED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "tuner_type": (("lora", FULL), "full and lora are"),
    "train_type": ((None, "lora", FULL), "full and lora are"),
    "tuner_backend": ((None, "peft"), "peft is"),
    "task_type": ((None, "causal_lm"), "a head over the vocabulary is"),
    "quant_method": ((None, "bnb"), "frozen weights in 4 bits of bnb are, under replicas"),
    "quant_bits": ((None, 4), "frozen weights in 4 bits are, under replicas"),
    "sequence_parallel_size": ((None, 1), "every device computes whole sequences"),
    "deepspeed_autotp_size": ((None, 1), "write tensor_parallel.autotp_size in DeepSpeed's file"),
    "zero_hpz_partition_size": ((None, 1), "a second copy of the parameters in every group is not"),
    "optimizer": ((None,), "its state is not that of AdamW, which is"),
    **dict.fromkeys(_PARTLY, ((None, 0, "0.0"), "it trains a part of the weights")),
    "experts_impl": ((None, "grouped_mm"), "experts as grouped GEMMs are"),
    "freeze_vit": ((None, True), "vision towers are not"),
    "freeze_aligner": ((None, True), "vision towers are not"),
    "target_regex": ((None,), "name the matrices with target_modules"),
    "target_parameters": ((None,), "name the matrices with target_modules"),
    "lora_bias": ((None,), "biases that are trained beside adapters are not"),
    "modules_to_save": ((None,), "modules that are trained whole beside adapters are not"),
    "adapters": ((None,), "their files hold rank and targets: give --lora_rank, --target_modules"),
    "device_map": ((None,), "every device has all layers"),
    "use_ray": ((None, False), "Ray places its processes: give NPROC_PER_NODE and NNODES"),
}
"""Arguments of ms-swift, the values that are priced, and what is to be said of others."""


def obstacles(given: Sections) -> Iterator[tuple[str, str]]:
    """Yield arguments that are not priced, and why."""
    for name, (priced, why) in _PRICED.items():
        if (value := given.value(name)) not in (*priced, []):
            yield f"{name} {shown_value(value)}", why


def with_own_files(values: Mapping[str, Any], beside: Beside, source: str) -> dict[str, Any]:
    """Return the arguments with what ms-swift's names of --deepspeed and --fsdp stand for."""
    filled, sharded = dict(values), values.get("fsdp")
    if zero := _ZERO.get(str(values.get("deepspeed"))):
        filled["deepspeed"] = {**AUTO_BATCH, "zero_optimization": {**zero, "overlap_comm": False}}
    config: Any = _FSDP if sharded == "fsdp2" else None
    if isinstance(sharded, str) and sharded.endswith(".json"):
        text = found_text(sharded, beside, by="ms-swift", source=source)
        config = parse_yaml(text, source=PurePosixPath(sharded).name)
    if isinstance(config, dict):
        options = config.get("fsdp_config")
        if isinstance(options, dict) and options.get("activation_cpu_offload"):
            raise SpecError(f"{source}: activation_cpu_offload is not priced; leave it out")
        filled |= {"fsdp": "full_shard auto_wrap", "fsdp_config": {}, **config}
    return filled


def refuse_device_map(
    command: TrainerCommand, environment: Mapping[str, str], per_node: int | None, *, source: str
) -> None:
    """Refuse processes of ms-swift that divide a model's layers over several devices each."""
    said = environment.get("NPROC_PER_NODE")
    started = (parse_whole(said, digits=6) or None) if said else per_node if command.launcher else 1
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    is_open = "$" in "".join(visible) or environment.get("SWIFT_SINGLE_DEVICE_MODE") == "1"
    if started and len(visible) > started and not is_open:
        raise SpecError(
            f"{source}: ms-swift runs {started} process(es) over {len(visible)} devices, whose "
            "device_map is not priced: set NPROC_PER_NODE to the devices of a node"
        )
