"""Launches of Transformers' Trainer, LLaMA-Factory, TRL and ms-swift as `LaunchSettings`.

They end in DeepSpeed (tuner/engines/deepspeed/read.py) or in Transformers on replicas or FSDP,
whose state is that of transformers 5.24.0, accelerate 1.15.0 and llamafactory 0.9.5:

- Trained parameters are fp32 under mixed precision: LLaMA-Factory casts them (model/adapter.py,
  `cast_trainable_params_to_fp32`) unless `pure_bf16` is set, FSDP's are cast by Accelerate
  (accelerator.py, `prepare_model`; utils/fsdp_utils.py, `fsdp2_prepare_model`). FSDP gathers them
  in bf16, replicas compute under autocast.
- Frozen parameters keep the type that they were loaded in: bf16 in LLaMA-Factory, `--dtype` in TRL,
  which is float32 unless it is stated. Without mixed precision, so do the trained ones, their
  moments and what is computed.
- bitsandbytes' 8-bit AdamW has two bytes of moments a parameter; its paged forms count as on the
  device, which they leave where it is full.
- ms-swift 4.6.0 loads `--torch_dtype`, bf16 here unless it is stated, and trains all weights in it
  (swift/pipelines/train/tuner.py); adapters are fp32, or `--lora_dtype` (swift/tuners/peft.py).

Not covered: optimizers other than AdamW, reference models and rewards (DPO, PPO), KTransformers,
Unsloth, vision towers, packing (every sequence counts as full).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from profilers.steps.config import Recompute
from tuner.engines.deepspeed.read import ProgramArguments
from tuner.engines.deepspeed.read import read as read_deepspeed
from tuner.engines.peft.accelerate import NAMING, Distribution, distribution
from tuner.engines.peft.arguments import (
    FACTORY,
    OWN_LOOP,
    SWIFT,
    TRAINER,
    TRL,
    TrainerProgram,
    program_values,
    trainer_command,
)
from tuner.engines.peft.swift import obstacles
from tuner.engines.reading.arguments import launched_devices
from tuner.engines.reading.launch import PACKED, LaunchSettings, TrainingEngine
from tuner.engines.reading.options_file import Beside
from tuner.engines.reading.sections import Sections
from tuner.engines.reading.shell_words import shell_text
from tuner.engines.reading.variables import read_variables
from tuner.errors import SpecError
from tuner.spec.files import shown_value
from tuner.spec.tune import ADAPTER_TARGETS, FULL, GROUPS, Adapters

_PRECISIONS: Final = ("bf16", "fp16")
_FROZEN: Final = "the language model is frozen in it"
_WHOLE: Final = "modules that are trained whole beside adapters are not"
_OTHER_STATE: Final = "its state is not that of AdamW, which is"
_CORE: Final = (
    "its MCoreAdapter trains with Megatron-LM: give the same degrees and batch as Megatron-LM's "
    "flags"
)
_UNPRICED: Final[Mapping[str, str]] = {
    "use_mca": _CORE,
    "tensor_model_parallel_size": _CORE,
    "expert_model_parallel_size": _CORE,
    "use_kt": "KTransformers computes experts on the host",
    "use_unsloth": "Unsloth replaces Transformers' layers",
    "use_hyper_parallel": "HyperParallel shards the model its own way",
    "use_galore": _OTHER_STATE,
    "use_apollo": _OTHER_STATE,
    "use_badam": _OTHER_STATE,
    "use_muon": _OTHER_STATE,
    "use_adam_mini": _OTHER_STATE,
    "use_llama_pro": "it trains added layers alone",
    "use_asft_loss": "a reference model takes part in it",
    "freeze_backbone": _FROZEN,
    "freeze_llm": _FROZEN,
    "freeze_language_model": _FROZEN,
    "tune_mm_mlp_adapter": _FROZEN,
    "use_dora": "LoRA is",
    "mixture_of_depths": "it drops tokens in some layers",
    "fp8": "bf16 is",
    "load_in_8bit": "frozen weights in 8 bits are not",
    "additional_target": _WHOLE,
    "lora_modules_to_save": _WHOLE,
    "use_v1": "give the YAML of LLaMA-Factory without it",
    "parallelism_config": "tensor, context and sequence parallelism of Accelerate are not",
}
"""Arguments, or variables in capitals, that change bytes or seconds by factors, and why."""
_SWIFT_BATCH: Final = 16
"""Sequences of a step that ms-swift aims at (swift/trainers/arguments.py)."""
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
_ADAMW: Final = (
    *(None, "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"),
    *("paged_adamw", "paged_adamw_32bit"),
)
_ADAMW_8BIT: Final = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
_LOW: Final[Mapping[str, Literal["bf16", "fp16"]]] = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "auto": "bf16",
}
"""Types of weights of 16 bits, as programs spell them; `auto` is that of the checkpoint."""
_ADAPTING: Final = (
    *("use_lora", "use_peft", "use_peft_lora", "lora_enable"),
    *("lora", "q_lora", "use_qlora"),
)
_IN_4_BITS: Final = ("load_in_4bit", "use_4bit_quantization", "q_lora", "use_qlora")
_QUANTISED: Final = re.compile(r"gptq|awq|aqlm|bnb-4bit|(?<![a-z])int[48]", re.IGNORECASE)
"""Part of the name of a model whose weights are quantised."""


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
    program, values = program_values(command, beside, source=source)
    env = values.pop("ENV", None) if program is SWIFT else None
    stated = {str(name): str(env[name]) for name in env} if isinstance(env, dict) else {}
    variables = {**stated, **(environment or {}), **shell.environment}
    given = Sections(values, source=source, defaults=program.defaults)
    own_obstacles = obstacles(given) if program is SWIFT else ()
    for said, why in (*own_obstacles, *_obstacles(given, variables, program)):
        raise SpecError(f"{source}: {program.name} with {said} is not priced: {why}")
    shared = distribution(
        command,
        values,
        beside=beside,
        environment=variables,
        devices=launched_devices(command.launcher, shell.scheduler),
        source=source,
    )
    for name in NAMING:
        given.value(name)
    launch = (_deepspeed if shared.deepspeed else _transformers)(given, program, shared)
    given.check_spelling()
    typed = any(word.startswith("--") for word in command.rest)
    return launch.model_copy(
        update={
            "source": source,
            "environment": read_variables(variables),
            "understood": (*launch.understood, *given.read),
            "ignored": (*launch.ignored, *given.left),
            "spelled": {**launch.spelled, **_spelled(given, program, typed=typed)},
            "notes": (
                f"{program.name} starts {launch.engine.value}",
                *launch.notes,
                *_notes(given, program, launch),
            ),
        }
    )


def _spelled(given: Sections, program: TrainerProgram, *, typed: bool) -> dict[str, str]:
    """Return how the launch spells what a change may set: a flag, or a key of YAML."""
    if program is OWN_LOOP:
        return {}
    disables = "disable_" if program is FACTORY else ""
    names = _BATCH_NAMES | {
        "recompute": f"{disables}gradient_checkpointing",
        "sequence": _length(given, program) or program.sequence[0],
        "precision": "bf16",
        "zero_stage": "fsdp",
    }
    return {field: f"--{name}" if typed else f"{name}:" for field, name in names.items()}


def _obstacles(
    given: Sections, variables: Mapping[str, str], program: TrainerProgram
) -> Iterator[tuple[str, str]]:
    """Yield what is not priced, and why."""
    for name, why in _UNPRICED.items():
        if given.value(name) not in (None, False, ""):
            yield name, why
        if variables.get(name.upper(), "0").lower() in ("1", "true", "y"):
            yield name.upper(), why
    if program is FACTORY:
        if given.value("do_predict") and not given.value("do_train"):
            yield "do_predict alone", "it trains nothing"
        if (stage := given.value("stage")) not in ("sft", "pt"):
            yield f"stage {shown_value(stage)}", "only the trained model may take part; sft and pt"
    if (optimizer := given.value("optim")) not in (*_ADAMW, *_ADAMW_8BIT):
        yield f"optim {shown_value(optimizer)}", _OTHER_STATE
    model = "model" if program is SWIFT else "model_name_or_path"
    if named := _QUANTISED.search(str(given.value(model) or "")):
        yield named[0], "frozen weights of that type are not; those of the plain model are"
    if given.value("quantization_bit") not in (None, 4):
        yield "quantization_bit", "frozen weights in 4 bits are, under replicas"


def _notes(given: Sections, program: TrainerProgram, launch: LaunchSettings) -> Iterator[str]:
    tune, loaded = launch.tune, given.value("torch_dtype") or given.value("dtype")
    if program is TRAINER:
        yield "the script's model is taken to be Transformers' own, trained by AdamW"
    if _has_liger(given):
        yield "of Liger's kernels the loss alone is priced; the others take less memory"
    if _is_packed(given, program):
        yield PACKED
    casts = launch.engine is TrainingEngine.DEEPSPEED
    if isinstance(tune, Adapters) and program is TRAINER and not (casts or loaded):
        yield (
            "frozen weights are taken to be loaded in 16 bits: where the script loads fp32,"
            " Transformers' default before release 5, they take twice as much; say --dtype float32"
        )
    if isinstance(tune, Adapters) and "all-linear" in tune.targets:
        yield (
            "all linear layers: adapters of experts are priced, too, which Transformers 5 stacks"
            " and leaves out where no other network has their names (Qwen3-MoE): then name the"
            " target modules"
        )


def _is_packed(given: Sections, program: TrainerProgram) -> bool:
    """Return whether samples are joined to sequences; LLaMA-Factory does so in pretraining."""
    stated = [given.value(name) for name in ("packing", "neat_packing")]
    joins = program is FACTORY and given.value("stage") == "pt" and stated[0] is None
    return joins or True in stated


def _packing(given: Sections, program: TrainerProgram) -> str:
    """Name the rule by which documents are packed and kept apart.

    TRL's `bfd` does so under flash attention alone, its `wrapped` never (1.10.0,
    trainer/sft_trainer.py); LLaMA-Factory's `neat_packing` does (0.9.6).
    """
    if program is FACTORY:
        return "knapsack" if given.value("neat_packing") is True else ""
    is_apart = program is TRL and given.value("packing") is True
    is_apart = is_apart and given.value("packing_strategy") in (
        *(None, "bfd", "bfd_split", "bfd-requeue"),
    )
    is_apart = is_apart and "flash" in str(given.value("attn_implementation"))
    return "best_fit_decreasing" if is_apart else ""


_LIGER_LOGIT_BYTES: Final = 0.25
"""Liger-Kernel multiplies by the head and takes the loss of one chunk of tokens at a time, cut into
vocabulary over hidden size, 20 to 60 (ops/fused_linear_cross_entropy.py of 0.5.10)."""


def _has_liger(given: Sections) -> bool:
    return any(given.is_on(name) for name in ("use_liger_kernel", "enable_liger_kernel"))


def _length(given: Sections, program: TrainerProgram) -> str | None:
    """Name the argument that holds the longest sequence."""
    return next((name for name in program.sequence if given.value(name) is not None), None)


def _common(given: Sections, program: TrainerProgram, shared: Distribution) -> dict[str, Any]:
    """Return fields of `LaunchSettings` that both engines read alike."""
    length = _length(given, program)
    kernels = [given.value(name) for name in ("flash_attn", "attn_implementation", "attn_impl")]
    return {
        "devices": shared.devices,
        "devices_per_node": shared.devices_per_node,
        "sequence": given.number(length, default=1) if length else None,
        "samples_vary": program is not OWN_LOOP and not _is_packed(given, program),
        "packing": _packing(given, program),
        "tune": _tune(given, program),
        "moments_bytes": 2 if given.value("optim") in _ADAMW_8BIT else None,
        "flash_attention": not any(kernel in ("disabled", "eager") for kernel in kernels),
        "logit_bytes": _LIGER_LOGIT_BYTES if _has_liger(given) else 0.0,
    }


def _deepspeed(given: Sections, program: TrainerProgram, shared: Distribution) -> LaunchSettings:
    text, name = shared.deepspeed or ("", "")
    if program is OWN_LOOP:
        arguments = _own_arguments(given)
    else:
        arguments = ProgramArguments(
            is_trainer=True,
            **_batch(given, program, shared),
            precision=_precision(given, program, shared),
            recompute=_recomputes(given, program, shared),
            spelled=_BATCH_NAMES,
        )
    update = _common(given, program, shared)
    if update["moments_bytes"]:
        raise SpecError(
            f"{given.source}: optim {shown_value(given.value('optim'))} is not priced under"
            " DeepSpeed, whose JSON may name another; replicas and FSDP are"
        )
    update["has_transformers_loss"] = arguments.is_trainer
    launch = read_deepspeed(text, source=name, arguments=arguments)
    update["understood"] = tuple(f"{name}: {said}" for said in launch.understood)
    return launch.model_copy(update=update)


def _batch(given: Sections, program: TrainerProgram, shared: Distribution) -> dict[str, int]:
    """Return the micro-batch and how many of them one replica sums up.

    Raises:
        SpecError: ms-swift derives it from devices that the launch does not state.
    """
    sizes = {
        "micro_batch": given.number(_BATCH_NAMES["micro_batch"], default=8),
        "accumulation": given.number(_BATCH_NAMES["accumulation"], default=1),
    }
    if program is SWIFT and given.value(_BATCH_NAMES["accumulation"]) is None:
        if shared.devices is None:
            raise SpecError(
                f"{given.source}: the devices decide gradient_accumulation_steps of ms-swift "
                f"({_SWIFT_BATCH} over batch and devices): set NPROC_PER_NODE, or state it"
            )
        sizes["accumulation"] = -(-_SWIFT_BATCH // (sizes["micro_batch"] * shared.devices))
    return sizes


def _own_arguments(given: Sections) -> ProgramArguments:
    """Return what is commonly called the same in programs with a loop of their own."""
    experts = [name for name in _EXPERTS if given.value(name) is not None]
    recomputed = [name for name in _CHECKPOINTING if given.value(name) is not None]
    spelled = {"expert": experts, "recompute": recomputed}
    return ProgramArguments(
        expert=given.number(experts[0], default=1) if experts else None,
        recompute=given.is_on(recomputed[0]) if recomputed else None,
        spelled={field: f"--{names[0]}" for field, names in spelled.items() if names},
    )


def _transformers(given: Sections, program: TrainerProgram, shared: Distribution) -> LaunchSettings:
    """Return the launch of replicas or FSDP."""
    common, precision = _common(given, program, shared), _precision(given, program, shared)
    is_mixed = bool(_mixed_precision(given, program, shared))
    is_low = given.is_on("pure_bf16")
    loaded = given.value("torch_dtype") or given.value("dtype")
    # Where the goal says what is trained it may be adapters, which PEFT keeps in fp32.
    is_full = common["tune"] == FULL or (common["tune"] is None and loaded in _LOW and not is_mixed)
    if is_full:
        # FSDP casts what is trained under mixed precision; scripts load fp32 unless they say so.
        is_low |= loaded in _LOW and not (shared.zero_stage and is_mixed)
    else:
        is_low |= loaded not in ("float32", "fp32")
    stored: Literal[2, 4] = 2 if is_low and precision != "fp32" else 4
    if is_full and stored == 2 and shared.zero_stage:
        common |= {"master_bytes": 2, "moments_bytes": common["moments_bytes"] or 4}
    return LaunchSettings(
        engine=TrainingEngine.TRANSFORMERS,
        source=given.source,
        **common,
        **_batch(given, program, shared),
        precision=precision,
        stored_bytes=stored,
        gradient_bytes=stored if is_full else 4,
        zero_stage=shared.zero_stage,
        recompute=Recompute.FULL if _recomputes(given, program, shared) else Recompute.NONE,
        expert_tensor=1,
    )


def _precision(
    given: Sections, program: TrainerProgram, shared: Distribution
) -> Literal["bf16", "fp16", "fp32"]:
    mixed = _mixed_precision(given, program, shared)
    if mixed:
        return mixed
    return _LOW.get(str(given.value("torch_dtype") or given.value("dtype")), "fp32")


def _mixed_precision(
    given: Sections, program: TrainerProgram, shared: Distribution
) -> Literal["bf16", "fp16", ""]:
    """Return the type of mixed precision; empty: everything has the type of the weights."""
    # What ms-swift is not told follows from its type: bf16, or fp16 for the two others.
    default_type = _PRECISIONS[given.value("torch_dtype") != "bfloat16"] if program is SWIFT else ""
    on = [name for name in _PRECISIONS if given.is_on(name, default=name == default_type)]
    if len(on) == 2:
        raise SpecError(f"{given.source}: bf16 and fp16: choose one")
    if not on and shared.mixed_precision in _PRECISIONS:
        on = [shared.mixed_precision]
    # TRL turns bf16 on unless fp16 is.
    is_default = program is TRL and not on and given.value("bf16") is None
    if given.is_on("pure_bf16") or is_default or on == ["bf16"]:
        return "bf16"
    return "fp16" if on else ""


def _recomputes(given: Sections, program: TrainerProgram, shared: Distribution) -> bool:
    if program is FACTORY:
        return not given.is_on("disable_gradient_checkpointing")
    return shared.recompute or given.is_on("gradient_checkpointing")


def _tune(given: Sections, program: TrainerProgram) -> Adapters | str | None:
    """Return which weights are trained; None: those of the goal."""
    if program is FACTORY:
        kind = given.word("finetuning_type", default="lora")
        if kind not in ("lora", FULL):
            raise SpecError(
                f"{given.source}: finetuning_type {shown_value(kind)} is not priced; full and "
                "lora are"
            )
        return FULL if kind == FULL else _adapters(given, targets="lora_target")
    if program is SWIFT:
        kind = given.value("train_type") or given.value("tuner_type")
        return FULL if kind == FULL else _adapters(given, targets="target_modules")
    if any(given.value(name) is True for name in _ADAPTING):
        return _adapters(given, targets="lora_target_modules")
    return FULL if program is TRL else None


def _adapters(given: Sections, *, targets: str) -> Adapters:
    rank = "lora_rank" if given.value("lora_rank") is not None else "lora_r"
    if given.value(rank) is None:
        raise SpecError(
            f"{given.source}: trains adapters whose rank the script decides: add --{rank}"
        )
    named = given.value(targets) or ["q_proj", "v_proj"]
    joined = " ".join(map(str, named)) if isinstance(named, list) else str(named)
    words = [word for word in re.split(r"[,\s]+", joined) if word]
    for word in words:
        if word not in ("all", *ADAPTER_TARGETS, *GROUPS):
            raise SpecError(
                f"{given.source}: {targets} {shown_value(word)} is no module that adapters are "
                f"priced for; they are all, {', '.join(ADAPTER_TARGETS)}"
            )
    bits = [given.value(name) for name in ("quantization_bit", "quant_bits")]
    is_quantised = 4 in bits or any(given.value(name) is True for name in _IN_4_BITS)
    return Adapters(
        method="qlora" if is_quantised else "lora",
        rank=given.number(rank, default=8),
        targets=tuple("all-linear" if word == "all" else word for word in words),
        dtype="bf16" if given.value("lora_dtype") == "bfloat16" else None,
    )
