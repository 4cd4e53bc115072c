"""The lines of a launch that differ between two configurations.

Each engine has one function that writes every changeable knob as its flags; the lines to change are
those that differ. A knob that is no longer set is a line to remove.
"""

from collections.abc import Callable, Mapping
from typing import Final

from profilers.steps.config import Recompute
from tuner.engines.megatron_lm.flags import ON_OFF, SHARDING, SHORTHANDS, SPELLED
from tuner.engines.ms_swift.flags import own_flag
from tuner.engines.reading.launch import Graphs, LaunchSettings, TokenDispatcher, TrainingEngine
from tuner.engines.reading.pipeline_layout import layout_text
from tuner.estimate.configuration import Configuration
from tuner.estimate.knobs import BF16_BYTES

Settings = Mapping[str, str]
"""Values by flag or key; empty for a switch."""


def flag_lines(
    launch: LaunchSettings, before: Configuration, after: Configuration
) -> tuple[str, ...]:
    """Return the lines to set and to remove."""
    settings_of = _ENGINE[launch.engine]
    old, new = settings_of(launch, before, before), settings_of(launch, before, after)
    write = _FORM[launch.engine]
    stated = {words.split()[0] for words in launch.understood if words}
    changed = {key for key, value in new.items() if old.get(key) != value}
    dropped = [key for key in old if key not in new]
    overruled = [
        short
        for short, keys in SHORTHANDS.items()
        if short in stated and (changed | set(dropped)) & set(keys)
    ]
    for short in overruled:
        # Without the shorthand, everything that it stood for has to be written.
        changed |= {key for key in SHORTHANDS[short] if key in new and key not in stated}
    if launch.engine is not TrainingEngine.DEEPSPEED:
        # A default that is no longer used is in no line. JSON is understood by other names.
        dropped = [key for key in dropped if key in stated]
    written = (write(key, value) for key, value in new.items() if key in changed)
    return (
        *(line for line in written if line not in launch.understood),
        *(f"remove {key}" for key in (*dropped, *overruled)),
    )


def _megatron(launch: LaunchSettings, before: Configuration, config: Configuration) -> Settings:
    settings = {
        "--tensor-model-parallel-size": str(config.tensor),
        "--pipeline-model-parallel-size": str(config.pipeline),
        "--context-parallel-size": str(config.context),
        "--expert-model-parallel-size": str(config.expert),
        "--micro-batch-size": str(config.micro_batch // config.sequences_per_sample),
    }
    switches = {
        "--sequence-parallel": config.sequence_parallel,
        "--use-distributed-optimizer": config.zero_stage > 0,
    } | {f"--{SPELLED[field]}": getattr(config, field) for field in ON_OFF}
    settings |= {flag: "" for flag, is_on in switches.items() if is_on}
    if config.ddp_bucket_size is not None:
        settings["--ddp-bucket-size"] = str(config.ddp_bucket_size)
    settings |= _megatron_state(launch, config)
    if config.has_experts and (launch.expert_tensor or config.expert_tensor != config.tensor):
        # Left out, the engine takes that of the dense layers.
        settings["--expert-tensor-parallel-size"] = str(config.expert_tensor)
    settings |= _megatron_recompute(config)
    if config.dispatcher in (TokenDispatcher.DEEPEP, TokenDispatcher.HYBRIDEP):
        settings["--moe-token-dispatcher-type"] = "flex"
        settings["--moe-flex-dispatcher-backend"] = config.dispatcher.value
    else:
        settings["--moe-token-dispatcher-type"] = config.dispatcher.value
    if config.cuda_graph is not Graphs.NONE:
        is_full = config.cuda_graph is Graphs.FULL
        settings["--cuda-graph-impl"] = "full_iteration" if is_full else "transformer_engine"
    return settings | _megatron_stages(launch, before, config)


_FRACTION: Final = "--optimizer-offload-fraction"


def _megatron_state(launch: LaunchSettings, config: Configuration) -> dict[str, str]:
    """Write how the training state is kept, as tuner/engines/megatron_lm/write.py does."""
    settings = {} if config.precision == "fp32" else {f"--{config.precision}": ""}
    if config.gradient_bytes == BF16_BYTES:
        settings["--grad-reduce-in-bf16"] = ""
    if config.zero_stage in SHARDING:
        settings["--use-megatron-fsdp"] = ""
        settings["--data-parallel-sharding-strategy"] = SHARDING[config.zero_stage]
        settings["--ckpt-format"] = "fsdp_dtensor"
    if config.replicas > 1:
        settings["--num-distributed-optimizer-instances"] = str(config.replicas)
    if config.optimizer_offload_ratio:
        settings["--optimizer-cpu-offload"] = ""
        if any(words.startswith(_FRACTION) for words in launch.understood):
            settings[_FRACTION] = f"{config.optimizer_offload_ratio:g}"
        # `validate_args` refuses the one without the other (core_v0.16.1 and later).
        settings["--use-precision-aware-optimizer"] = ""
    return settings


def _swift(launch: LaunchSettings, before: Configuration, config: Configuration) -> Settings:
    """Write Megatron-LM's settings as ms-swift has them: every switch has a value."""
    switches = ("--sequence-parallel", "--use-distributed-optimizer")
    theirs = dict.fromkeys((*switches, *(f"--{SPELLED[field]}" for field in ON_OFF)), "false")
    theirs |= {"--recompute-granularity": "none"} | dict(_megatron(launch, before, config))
    if theirs.pop("--moe-flex-dispatcher-backend", ""):
        theirs["--moe-enable-deepep"] = "true"
    return {own_flag(flag): value or "true" for flag, value in theirs.items()}


def _megatron_recompute(config: Configuration) -> dict[str, str]:
    if config.recompute is Recompute.NONE:
        return {}
    if config.recompute is Recompute.SELECTIVE:
        return {
            "--recompute-granularity": "selective",
            "--recompute-modules": " ".join(config.recompute_modules),
        }
    per_stage = sum(stage.layers for stage in config.stages) / len(config.stages)
    is_whole = config.recompute_ratio >= 1.0
    some = max(1, round(config.recompute_ratio * per_stage))
    return {
        "--recompute-granularity": "full",
        "--recompute-method": "uniform" if is_whole else "block",
        "--recompute-num-layers": "1" if is_whole else str(some),
    }


def _megatron_stages(
    launch: LaunchSettings, before: Configuration, config: Configuration
) -> dict[str, str]:
    """Write the layer division: as the launch did if it is unchanged, else in the simplest form."""
    same = (config.stages, config.virtual_pipeline) == (before.stages, before.virtual_pipeline)
    if same:
        stated = {
            "layout": "layout",
            "layers_per_virtual_stage": "layers_per_virtual_stage",
            "virtual_pipeline": "virtual_pipeline",
            "first_stage_layers": "first_stage_layers",
            "last_stage_layers": "last_stage_layers",
        }
        settings = {launch.name(name): "as it is" for name in stated if getattr(launch, name)}
        division_flags = {
            "--account-for-embedding-in-pipeline-split": launch.embedding_as_layers,
            "--account-for-loss-in-pipeline-split": launch.loss_as_layers,
        }
        return settings | {flag: "" for flag, is_on in division_flags.items() if is_on}
    if len({stage.layers for stage in config.stages}) > 1:
        return {"--pipeline-model-parallel-layout": layout_text(config.stages)}
    if config.virtual_pipeline == 1:
        return {}
    if launch.virtual_pipeline:
        return {launch.name("virtual_pipeline"): str(config.virtual_pipeline)}
    return {launch.name("layers_per_virtual_stage"): str(config.stages[0].layers)}


_RESHARDING: Final = {2: "never", 3: "always"}
"""torchtitan's policy of gathering parameters again, by what it makes of sharded state."""


def _torchtitan(launch: LaunchSettings, before: Configuration, config: Configuration) -> Settings:
    parallelism = "parallelism."
    settings = {
        f"{parallelism}tensor_parallel_degree": str(config.tensor),
        f"{parallelism}pipeline_parallel_degree": str(config.pipeline),
        f"{parallelism}context_parallel_degree": str(config.context),
        f"{parallelism}expert_parallel_degree": str(config.expert),
        f"{parallelism}expert_tensor_parallel_degree": str(config.expert_tensor),
        f"{parallelism}expert_parallel_comm_backend": '"deepep"'
        if config.dispatcher is TokenDispatcher.DEEPEP
        else '"standard"',
        f"{parallelism}enable_async_tensor_parallel": str(config.overlap_tensor).lower(),
        "activation_checkpoint.mode": _checkpoint_mode(config),
    }
    if _checkpoint_mode(config) == '"selective"':
        every = "op" if config.recompute_by_op else str(round(1.0 / config.recompute_ratio))
        settings["activation_checkpoint.selective_ac_option"] = f'"{every}"'
    if launch.data is not None:
        shard = config.data // config.replicas
        # A degree of 1 turns sharding off, also that of a single rank's memory.
        settings[f"{parallelism}data_parallel_shard_degree"] = str(
            shard if shard > 1 or not config.zero_stage else -1
        )
    settings[f"{parallelism}data_parallel_replicate_degree"] = str(config.replicas)
    if config.zero_stage:
        usual = 3 if config.pipeline == 1 else 2
        policy = "default" if config.zero_stage == usual else _RESHARDING[config.zero_stage]
        settings[f"{parallelism}fsdp_reshard_after_forward"] = f'"{policy}"'
    plain = "float32" if config.precision == "fp32" else "bfloat16"
    settings["training.mixed_precision_param"] = f'"{plain}"'
    local = config.micro_batch
    if config.pipeline > 1:
        local *= config.num_microbatches
        settings[f"{parallelism}pipeline_parallel_microbatch_size"] = str(config.micro_batch)
        schedule = (
            "InterleavedZeroBubble"
            if config.zero_bubble
            else "1F1B"
            if config.virtual_pipeline == 1
            else "Interleaved1F1B"
        )
        settings[f"{parallelism}pipeline_parallel_schedule"] = f'"{schedule}"'
    settings["training.local_batch_size"] = str(local)
    settings |= _torchtitan_stages(launch, before, config)
    if launch.global_batch is None and local * config.data != config.global_batch:
        settings["training.global_batch_size"] = str(config.global_batch)
    return settings


def _torchtitan_stages(
    launch: LaunchSettings, before: Configuration, config: Configuration
) -> dict[str, str]:
    """Write the layer division; up to two stages per rank follow from the schedule."""
    if config.stages == before.stages:
        stated = (name for name in ("layout", "layers_per_virtual_stage") if getattr(launch, name))
        return {launch.name(name): "as it is" for name in stated}
    if config.virtual_pipeline <= 2:
        return {}
    total = sum(stage.layers for stage in config.stages) + sum(config.embedding_loss_layers)
    return {launch.name("layers_per_virtual_stage"): str(-(-total // config.num_stages))}


def _checkpoint_mode(config: Configuration) -> str:
    if config.recompute is Recompute.NONE:
        return '"none"'
    return '"full"' if config.recompute_ratio >= 1.0 else '"selective"'


def _deepspeed(launch: LaunchSettings, before: Configuration, config: Configuration) -> Settings:
    """Write keys of the JSON, and what the program's command says in that command's words."""
    zero = '"zero_optimization": '
    batch = {
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.num_microbatches,
    }
    settings = {}
    rate: object = 1e-4
    if launch.name("micro_batch") not in batch:
        settings, rate = _trainer_batch(launch, config), '"auto"'
        # The Trainer stops where numbers of the JSON are not its own.
        said = [words.split(" = ")[0] for words in launch.understood]
        batch = {
            key: value
            for key, value in batch.items()
            if any(words.endswith(f": {key}") for words in said)
        }
    settings |= {f'"{key}"': str(value) for key, value in batch.items()}
    settings |= {
        f'{zero}{{"stage"}}': str(config.zero_stage),
        '"tensor_parallel": {"autotp_size"}': str(config.tensor),
        '"sequence_parallel_size"': str(config.context),
    }
    settings |= _deepspeed_recompute(launch, config)
    if launch.name("expert").startswith("--"):
        settings[launch.name("expert")] = str(config.expert)
    elif config.expert > 1:
        backend = "deepep" if config.dispatcher is TokenDispatcher.DEEPEP else "comm"
        settings['"expert_parallel"'] = (
            f'{{"enabled": true, "autoep_size": {config.expert}, "comm_backend": "{backend}"}}'
        )
    else:
        settings['"expert_parallel"'] = '{"enabled": false}'
    has_optimizer = any(words.startswith("optimizer.") for words in launch.ignored)
    if max(config.expert, before.expert) > 1 and not has_optimizer:
        # AutoEP creates the optimizer, with parameter groups of its own.
        settings['"optimizer"'] = f'{{"type": "AdamW", "params": {{"lr": {rate}}}}}'
    if launch.shard_ranks:
        settings[f'{zero}{{"mics_shard_size"}}'] = str(config.ranks_per_copy)
    if config.overlap_grad_reduce:
        settings[f'{zero}{{"overlap_comm"}}'] = "true"
    if config.optimizer_offload_ratio:
        settings['"zero_optimization": {"offload_optimizer": {"device"}}'] = '"cpu"'
    if config.precision == "bf16" and "precision" not in launch.spelled:
        settings['"bf16": {"enabled"}'] = "true"
    if config.precision != "fp32":
        settings['"data_types": {"grad_accum_dtype"}'] = (
            '"fp32"' if config.gradient_bytes == 4 else f'"{config.precision}"'
        )
    return settings


def _deepspeed_recompute(launch: LaunchSettings, config: Configuration) -> Settings:
    if launch.name("recompute") != "activation_checkpointing":
        return _trainer_recompute(launch, config)
    is_on = config.recompute is not Recompute.NONE
    settings = {}
    if config.pipeline > 1:
        settings['"pipeline": {"activation_checkpoint_interval"}'] = str(int(is_on))
    if is_on:
        settings['"activation_checkpointing"'] = "{}  # and turn it on in the training script"
    return settings


def _transformers(launch: LaunchSettings, before: Configuration, config: Configuration) -> Settings:
    # Layers are wrapped by default (transformers 5.24.0, training_args.py).
    sharded = {launch.name("zero_stage"): "full_shard"} if config.zero_stage == 3 else {}
    return {**_trainer_batch(launch, config), **_trainer_recompute(launch, config), **sharded}


def _trainer_batch(launch: LaunchSettings, config: Configuration) -> dict[str, str]:
    return {
        launch.name("micro_batch"): str(config.micro_batch),
        launch.name("accumulation"): str(config.num_microbatches),
        **({launch.name("precision"): "true"} if config.precision == "bf16" else {}),
    }


def _trainer_recompute(launch: LaunchSettings, config: Configuration) -> dict[str, str]:
    name = launch.name("recompute")
    is_on = config.recompute is not Recompute.NONE
    return {name: str(is_on != ("disable" in name)).lower()}


def _flag(key: str, value: str) -> str:
    if "|" in value or "(" in value:
        value = f'"{value}"'
    return f"{key} {value}".rstrip()


def _json_or_flag(key: str, value: str) -> str:
    """Write a key of the JSON, or what a command or YAML says."""
    if not key.startswith('"'):
        return f"{key} {value}"
    return f"{key.rstrip('}')}: {value}{'}' * key.count('}')}"


_ENGINE: Final[
    Mapping[TrainingEngine, Callable[[LaunchSettings, Configuration, Configuration], Settings]]
] = {
    TrainingEngine.MEGATRON: _megatron,
    TrainingEngine.MS_SWIFT: _swift,
    TrainingEngine.TORCHTITAN: _torchtitan,
    TrainingEngine.DEEPSPEED: _deepspeed,
    TrainingEngine.TRANSFORMERS: _transformers,
}
_FORM: Final[Mapping[TrainingEngine, Callable[[str, str], str]]] = {
    TrainingEngine.MEGATRON: _flag,
    TrainingEngine.MS_SWIFT: _flag,
    TrainingEngine.TORCHTITAN: lambda key, value: f"{key} = {value}",
    TrainingEngine.DEEPSPEED: _json_or_flag,
    TrainingEngine.TRANSFORMERS: lambda key, value: f"{key} {value}",
}
