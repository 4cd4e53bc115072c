"""Launches of Transformers' Trainer, LLaMA-Factory and TRL as `LaunchSettings`.

They end in DeepSpeed (tuner/engines/deepspeed/read.py) or in Transformers on replicas or FSDP,
whose state is that of transformers 5.24.0, accelerate 1.15.0 and llamafactory 0.9.5:

- Trained parameters are fp32 under mixed precision: LLaMA-Factory casts them (model/adapter.py,
  `cast_trainable_params_to_fp32`) unless `pure_bf16` is set, FSDP's are cast by Accelerate
  (accelerator.py, `prepare_model`; utils/fsdp_utils.py, `fsdp2_prepare_model`). FSDP gathers them
  in bf16, replicas compute under autocast.
- Frozen parameters keep the type that they were loaded in: bf16 in LLaMA-Factory, `--dtype` in TRL,
  which is float32 unless it is stated.

Not covered: optimizers other than AdamW, reference models and rewards (DPO, PPO), KTransformers,
Unsloth, vision towers, packing (every sequence counts as full).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from pydantic import ValidationError

from profilers.steps.config import Recompute
from tuner.engines.deepspeed.read import ProgramArguments
from tuner.engines.deepspeed.read import read as read_deepspeed
from tuner.engines.peft.accelerate import Distribution, distribution
from tuner.engines.peft.arguments import (
    FACTORY,
    OWN_LOOP,
    TRAINER,
    TRL,
    Beside,
    TrainerProgram,
    program_values,
    trainer_command,
)
from tuner.engines.reading.arguments import launched_devices
from tuner.engines.reading.launch import LaunchSettings, TrainingEngine
from tuner.engines.reading.sections import Sections
from tuner.engines.reading.shell_words import shell_text
from tuner.errors import SpecError
from tuner.spec.complaint import complaint
from tuner.spec.files import shown_value
from tuner.spec.tune import ADAPTER_TARGETS, FULL, GROUPS, Adapters

_PRECISIONS: Final = ("bf16", "fp16")
_UNPRICED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("use_mca", "tensor_model_parallel_size", "expert_model_parallel_size"),
        "its MCoreAdapter trains with Megatron-LM: give the same degrees and batch as "
        "Megatron-LM's flags",
    ),
    "use_kt": "KTransformers computes experts on the host",
    "use_unsloth": "Unsloth replaces Transformers' layers",
    "use_hyper_parallel": "HyperParallel shards the model its own way",
    "use_galore": "GaLore keeps other state than AdamW",
    "use_apollo": "APOLLO keeps other state than AdamW",
    "use_badam": "BAdam keeps other state than AdamW",
    "use_muon": "Muon keeps other state than AdamW",
    "use_adam_mini": "Adam-mini keeps other state than AdamW",
    "use_llama_pro": "LLaMA Pro trains added layers alone",
    "use_asft_loss": "a reference model takes part in it",
    "do_predict": "it trains nothing",
    "use_dora": "DoRA is not priced, LoRA is",
    "mixture_of_depths": "mixture of depths drops tokens in some layers",
    "fp8": "FP8 under the Trainer is not priced, bf16 is",
    "load_in_8bit": "frozen weights in 8 bits are not priced",
    "additional_target": "modules that are trained whole beside adapters are not priced",
    "lora_modules_to_save": "modules that are trained whole beside adapters are not priced",
    "adapter_folder": "folders of adapters are not priced",
    "dist_config": "files of LLaMA-Factory's v1 are not read: give those of its v0",
    "parallelism_config": "tensor, context and sequence parallelism of Accelerate are not priced",
}
"""Arguments that change bytes or seconds by factors: why the launch is not priced."""
_BATCH_NAMES: Final = {
    "micro_batch": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
}
_EXPERTS: Final = ("ep_world_size", "ep_size", "expert_parallel_size", "moe_ep_size")
_CHECKPOINTING: Final = (
    "gradient_checkpointing",
    "activation_checkpointing",
    "checkpoint_activations",
)
_ADAMW: Final = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
_QUANTISED: Final = re.compile(r"gptq|awq|aqlm|bnb-4bit|(?<![a-z])int[48]", re.IGNORECASE)
"""In the name of a model whose weights are quantised."""
_FULL_PRECISION: Final = ("float32", "fp32")


def read(
    text: str,
    *,
    source: str,
    environment: Mapping[str, str] | None = None,
    beside: Beside = lambda _: None,
) -> LaunchSettings:
    """Read a command that starts the Trainer, with the files that it names.

    Raises:
        SpecError: no such command, a missing file, or training that is not priced.
    """
    shell = shell_text(text, source=source, environment=environment)
    command = next(filter(None, map(trainer_command, shell.commands)), None)
    if command is None:
        raise SpecError(
            f"{source}: starts no program of Transformers' Trainer; name the script that holds "
            "llamafactory-cli train, trl sft, or --per_device_train_batch_size"
        )
    variables = {**(environment or {}), **shell.environment}
    program, values = program_values(command, beside, source=source)
    given = Sections(values, source=source)
    _refuse_unpriced(given, variables, program)
    shared = distribution(
        command,
        values,
        beside=beside,
        environment=variables,
        devices=launched_devices(command.launcher, shell.scheduler),
        source=source,
    )
    stated = ArgumentSettings(given, program, shared)
    launch = stated.with_deepspeed() if shared.deepspeed else stated.without_deepspeed()
    given.check_spelling()
    typed = any(word.startswith("--") for word in command.rest)
    return launch.model_copy(
        update={
            "understood": (*launch.understood, *given.read),
            "ignored": (*launch.ignored, *given.left),
            "spelled": {**launch.spelled, **_spelled(program, typed=typed)},
            "notes": (f"{program.name} starts {launch.engine.value}", *launch.notes),
        }
    )


def _spelled(program: TrainerProgram, *, typed: bool) -> dict[str, str]:
    """Return how the launch spells what a change may set: a flag, or a key of YAML."""
    if program is OWN_LOOP:
        return {}
    names = {
        **_BATCH_NAMES,
        "recompute": "disable_gradient_checkpointing"
        if program is FACTORY
        else "gradient_checkpointing",
        "sequence": program.sequence[0],
    }
    return {field: f"--{name}" if typed else f"{name}:" for field, name in names.items()}


def _refuse_unpriced(
    given: Sections, variables: Mapping[str, str], program: TrainerProgram
) -> None:
    def refuse(said: str, why: str) -> None:
        raise SpecError(f"{given.source}: {program.name} with {said} is not priced: {why}")

    for name, why in _UNPRICED.items():
        if given.value(name) not in (None, False, ""):
            refuse(name, why)
        if variables.get(name.upper(), "0").lower() in ("1", "true", "y"):
            refuse(name.upper(), why)
    if variables.get("USE_V1", "0") == "1":
        refuse("USE_V1", _UNPRICED["dist_config"])
    stage = given.value("stage")
    if program is FACTORY and stage not in ("sft", "pt"):
        refuse(f"stage {shown_value(stage)}", "more than the trained model takes part; sft and pt")
    optimizer = given.value("optim")
    if optimizer is not None and optimizer not in _ADAMW:
        refuse(f"optim {shown_value(optimizer)}", f"its state is not AdamW's; {_ADAMW[0]} is")
    if named := _QUANTISED.search(str(given.value("model_name_or_path") or "")):
        refuse(named[0], "frozen weights of that type are not; those of the plain model are")
    if given.value("quantization_bit") not in (None, 4):
        refuse("quantization_bit", "frozen weights in 4 bits are, under replicas")


class ArgumentSettings:
    """The arguments of one launch as fields of `LaunchSettings`."""

    def __init__(self, given: Sections, program: TrainerProgram, shared: Distribution) -> None:
        self._given, self._program, self._shared = given, program, shared
        self._micro_batch = given.number("per_device_train_batch_size", default=8)
        self._accumulation = given.number("gradient_accumulation_steps", default=1)
        self._common: dict[str, Any] = {
            "devices": shared.devices,
            "devices_per_node": shared.devices_per_node,
            "sequence": self._sequence(),
            "tune": self._tune(),
            "flash_attention": not {given.value("flash_attn"), given.value("attn_implementation")}
            & {"disabled", "eager"},
        }

    def with_deepspeed(self) -> LaunchSettings:
        """Return the launch where DeepSpeed shards the model."""
        text, name = self._shared.deepspeed or ("", "")
        arguments = self._own_arguments()
        if self._program is not OWN_LOOP:
            arguments = ProgramArguments(
                is_trainer=True,
                micro_batch=self._micro_batch,
                accumulation=self._accumulation,
                precision=self._precision(),
                recompute=self._recompute(),
                spelled=_BATCH_NAMES,
            )
        launch = read_deepspeed(text, source=name, arguments=arguments)
        return launch.model_copy(
            update={
                **self._common,
                "source": self._given.source,
                "has_transformers_loss": arguments.is_trainer and not self._has_liger(),
                "notes": (*launch.notes, *self._notes()),
            }
        )

    def _own_arguments(self) -> ProgramArguments:
        """Return what is commonly called the same in programs with a loop of their own."""
        experts = [name for name in _EXPERTS if self._given.value(name) is not None]
        recomputed = [name for name in _CHECKPOINTING if self._given.value(name) is not None]
        spelled = {"expert": experts, "recompute": recomputed}
        return ProgramArguments(
            expert=self._given.number(experts[0], default=1) if experts else None,
            recompute=self._given.is_on(recomputed[0]) if recomputed else None,
            spelled={field: f"--{names[0]}" for field, names in spelled.items() if names},
        )

    def without_deepspeed(self) -> LaunchSettings:
        """Return the launch of replicas or FSDP."""
        precision, stored = self._precision(), self._stored_bytes()
        is_full = self._common["tune"] == FULL
        return LaunchSettings(
            engine=TrainingEngine.TRANSFORMERS,
            source=self._given.source,
            **self._common,
            micro_batch=self._micro_batch,
            accumulation=self._accumulation,
            precision=precision,
            stored_bytes=stored,
            gradient_bytes=4 if not is_full or precision == "fp32" or stored == 4 else 2,
            zero_stage=self._shared.zero_stage,
            recompute=Recompute.FULL if self._recompute() else Recompute.NONE,
            expert_tensor=1,
            notes=tuple(self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        if self._program is TRAINER:
            yield "the script's model is taken to be Transformers' own, trained by AdamW"
        if self._has_liger():
            yield "Liger's kernels are not priced: they take less memory than those that are"

    def _has_liger(self) -> bool:
        names = ("use_liger_kernel", "enable_liger_kernel")
        return any(self._given.is_on(name) for name in names)

    def _sequence(self) -> int | None:
        for name in self._program.sequence:
            if self._given.value(name) is not None:
                return self._given.number(name, default=1)
        return None

    def _precision(self) -> Literal["bf16", "fp16", "fp32"]:
        on = [name for name in _PRECISIONS if self._given.is_on(name)]
        if len(on) == 2:
            raise SpecError(f"{self._given.source}: bf16 and fp16: choose one")
        if self._given.is_on("pure_bf16"):
            return "bf16"
        mixed = self._shared.mixed_precision
        if not on and mixed in _PRECISIONS:
            on = [mixed]
        if not on and self._program is TRL and self._given.value("bf16") is None:
            # TRL turns bf16 on unless fp16 is.
            on = ["bf16"]
        return "bf16" if on == ["bf16"] else "fp16" if on else "fp32"

    def _recompute(self) -> bool:
        if self._program is FACTORY:
            return not self._given.is_on("disable_gradient_checkpointing")
        return self._shared.recompute or self._given.is_on("gradient_checkpointing")

    def _stored_bytes(self) -> Literal[2, 4]:
        given, is_mixed = self._given, self._precision() != "fp32"
        if not is_mixed:
            return 4
        loaded = given.value("torch_dtype") or given.value("dtype")
        if self._common["tune"] == FULL:
            # FSDP casts what is trained; scripts load fp32 unless they say otherwise.
            casts = self._shared.zero_stage > 0 and not given.is_on("pure_bf16")
            is_low = given.is_on("pure_bf16") or loaded in ("bfloat16", "bf16", "auto")
            return 4 if casts or not is_low else 2
        return 4 if loaded in _FULL_PRECISION else 2

    def _tune(self) -> Adapters | str | None:
        """Return which weights are trained."""
        given = self._given
        if self._program is FACTORY:
            kind = given.word("finetuning_type", default="lora")
            if kind not in ("lora", "full"):
                raise SpecError(
                    f"{given.source}: finetuning_type {shown_value(kind)} is not priced; full and "
                    "lora are"
                )
            return FULL if kind == "full" else self._adapters("lora_rank", "lora_target")
        if self._program is TRL:
            return self._adapters() if given.is_on("use_peft") else FULL
        names = ("use_lora", "use_peft", "lora_enable", "lora", "q_lora", "use_qlora")
        if any(given.value(name) is True for name in names):
            return self._adapters()
        return None

    def _adapters(self, rank: str = "lora_r", targets: str = "lora_target_modules") -> Adapters:
        given = self._given
        rank = "lora_rank" if given.value("lora_rank") is not None else rank
        if given.value(rank) is None:
            raise SpecError(
                f"{given.source}: trains adapters whose rank the script decides: add --{rank}"
            )
        named = given.value(targets) or ["q_proj", "v_proj"]
        joined = " ".join(map(str, named)) if isinstance(named, list) else str(named)
        words = [word for word in re.split(r"[,\s]+", joined) if word]
        in_4_bits = ("load_in_4bit", "q_lora", "use_qlora")
        is_quantised = given.value("quantization_bit") == 4 or any(
            given.value(name) is True for name in in_4_bits
        )
        stated = {
            "method": "qlora" if is_quantised else "lora",
            "rank": given.number(rank, default=8),
            "targets": tuple(_target(word, given.source, targets) for word in words),
        }
        try:
            return Adapters.model_validate(stated)
        except ValidationError as error:
            raise SpecError(f"{given.source}: {complaint(error, model=Adapters)}") from error


def _target(word: str, source: str, flag: str) -> str:
    if word in ("all", "all-linear"):
        return "all-linear"
    if word not in (*ADAPTER_TARGETS, *GROUPS):
        raise SpecError(
            f"{source}: {flag} {shown_value(word)} is no module that adapters are priced for; "
            f"they are all, {', '.join(ADAPTER_TARGETS)}"
        )
    return word
