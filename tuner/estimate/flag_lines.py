"""What to write into a launch to get from one configuration to another, line by line.

Each engine has one function that says every changeable knob in its own words; the lines to change
are those in which two configurations differ. A knob that falls away is a line to take out.
"""

from collections.abc import Callable, Mapping
from typing import Final

from profilers.steps.config import Recompute
from tuner.estimate.configuration import Configuration
from tuner.estimate.launch import Dispatcher, Engine, Graphs, LaunchSettings
from tuner.estimate.readers.megatron_flags import SHORTHANDS
from tuner.estimate.readers.pipeline_layout import layout_text

Settings = Mapping[str, str]
"""By flag or key: its value, empty for a switch."""


def flag_lines(
    launch: LaunchSettings, before: Configuration, after: Configuration
) -> tuple[str, ...]:
    """Return the lines to set and to take out."""
    say = _ENGINE[launch.engine]
    old, new = say(launch, before, before), say(launch, before, after)
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
        # Without the shorthand, everything that it stood for has to be said.
        changed |= {key for key in SHORTHANDS[short] if key in new and key not in stated}
        dropped = [key for key in dropped if key in stated or key not in SHORTHANDS[short]]
    return (
        *(write(key, value) for key, value in new.items() if key in changed),
        *(f"remove {key}" for key in (*dropped, *overruled)),
    )


def _megatron(launch: LaunchSettings, before: Configuration, own: Configuration) -> Settings:
    found = {
        "--tensor-model-parallel-size": str(own.tensor),
        "--pipeline-model-parallel-size": str(own.pipeline),
        "--context-parallel-size": str(own.context),
        "--expert-model-parallel-size": str(own.expert),
        "--micro-batch-size": str(own.micro_batch),
    }
    switches = {
        "--sequence-parallel": own.sequence_parallel,
        "--use-distributed-optimizer": own.zero_stage == 1,
        "--overlap-grad-reduce": own.overlap_gradients,
        "--overlap-param-gather": own.overlap_parameters,
        "--tp-comm-overlap": own.overlap_tensor,
        "--overlap-moe-expert-parallel-comm": own.a2a_overlap,
        "--moe-shared-expert-overlap": own.shared_expert_overlap,
    }
    found |= {flag: "" for flag, is_on in switches.items() if is_on}
    if own.ddp_bucket_size is not None:
        found["--ddp-bucket-size"] = str(own.ddp_bucket_size)
    if own.has_experts and (launch.expert_tensor or own.expert_tensor != own.tensor):
        # Left out, the engine takes that of the dense layers.
        found["--expert-tensor-parallel-size"] = str(own.expert_tensor)
    found |= _megatron_recompute(own)
    if own.dispatcher in (Dispatcher.DEEPEP, Dispatcher.HYBRIDEP):
        found["--moe-token-dispatcher-type"] = "flex"
        found["--moe-flex-dispatcher-backend"] = own.dispatcher.value
    else:
        found["--moe-token-dispatcher-type"] = own.dispatcher.value
    if own.graphs is not Graphs.NONE:
        is_full = own.graphs is Graphs.FULL
        found["--cuda-graph-impl"] = "full_iteration" if is_full else "transformer_engine"
    return found | _megatron_stages(launch, before, own)


def _megatron_recompute(own: Configuration) -> dict[str, str]:
    if own.recompute is Recompute.NONE:
        return {}
    if own.recompute is Recompute.SELECTIVE:
        return {
            "--recompute-granularity": "selective",
            "--recompute-modules": " ".join(own.recompute_modules),
        }
    per_stage = sum(stage.layers for stage in own.stages) / len(own.stages)
    is_whole = own.recompute_ratio >= 1.0
    some = max(1, round(own.recompute_ratio * per_stage))
    return {
        "--recompute-granularity": "full",
        "--recompute-method": "uniform" if is_whole else "block",
        "--recompute-num-layers": "1" if is_whole else str(some),
    }


def _megatron_stages(
    launch: LaunchSettings, before: Configuration, own: Configuration
) -> dict[str, str]:
    """Say how layers are cut: as the launch did while that holds, else as plainly as possible."""
    same = (own.stages, own.virtual_pipeline) == (before.stages, before.virtual_pipeline)
    if same:
        stated = {
            "layout": "layout",
            "layers_per_virtual_stage": "layers_per_virtual_stage",
            "virtual_pipeline": "virtual_pipeline",
            "first_stage_layers": "first_stage_layers",
            "last_stage_layers": "last_stage_layers",
        }
        found = {launch.name(name): "as it is" for name in stated if getattr(launch, name)}
        ends = {
            "--account-for-embedding-in-pipeline-split": launch.embedding_as_layers,
            "--account-for-loss-in-pipeline-split": launch.loss_as_layers,
        }
        return found | {flag: "" for flag, is_on in ends.items() if is_on}
    if len({stage.layers for stage in own.stages}) > 1:
        return {"--pipeline-model-parallel-layout": layout_text(own.stages)}
    if own.virtual_pipeline == 1:
        return {}
    if launch.virtual_pipeline:
        return {launch.name("virtual_pipeline"): str(own.virtual_pipeline)}
    return {launch.name("layers_per_virtual_stage"): str(own.stages[0].layers)}


def _torchtitan(launch: LaunchSettings, before: Configuration, own: Configuration) -> Settings:
    parallelism = "parallelism."
    found = {
        f"{parallelism}tensor_parallel_degree": str(own.tensor),
        f"{parallelism}pipeline_parallel_degree": str(own.pipeline),
        f"{parallelism}context_parallel_degree": str(own.context),
        f"{parallelism}expert_parallel_degree": str(own.expert),
        f"{parallelism}expert_tensor_parallel_degree": str(own.expert_tensor),
        f"{parallelism}expert_parallel_comm_backend": '"deepep"'
        if own.dispatcher is Dispatcher.DEEPEP
        else '"standard"',
        f"{parallelism}enable_async_tensor_parallel": str(own.overlap_tensor).lower(),
        "activation_checkpoint.mode": _checkpoint_mode(own),
    }
    if _checkpoint_mode(own) == '"selective"':
        every = "op" if own.recompute_products else str(round(1.0 / own.recompute_ratio))
        found["activation_checkpoint.selective_ac_option"] = f'"{every}"'
    if launch.data is not None:
        found[f"{parallelism}data_parallel_shard_degree"] = str(own.data // own.replicas)
    local = own.micro_batch
    if own.pipeline > 1:
        local *= own.num_microbatches
        found[f"{parallelism}pipeline_parallel_microbatch_size"] = str(own.micro_batch)
        schedule = (
            "InterleavedZeroBubble"
            if own.zero_bubble
            else "1F1B"
            if own.virtual_pipeline == 1
            else "Interleaved1F1B"
        )
        found[f"{parallelism}pipeline_parallel_schedule"] = f'"{schedule}"'
    found["training.local_batch_size"] = str(local)
    found |= _torchtitan_stages(launch, before, own)
    if launch.global_batch is None and local * own.data != own.global_batch:
        found["training.global_batch_size"] = str(own.global_batch)
    return found


def _torchtitan_stages(
    launch: LaunchSettings, before: Configuration, own: Configuration
) -> dict[str, str]:
    """Say how layers are cut; up to two stages of a rank follow from the schedule."""
    if own.stages == before.stages:
        stated = (name for name in ("layout", "layers_per_virtual_stage") if getattr(launch, name))
        return {launch.name(name): "as it is" for name in stated}
    if own.virtual_pipeline <= 2:
        return {}
    total = sum(stage.layers for stage in own.stages) + sum(own.ends)
    return {launch.name("layers_per_virtual_stage"): str(-(-total // own.num_stages))}


def _checkpoint_mode(own: Configuration) -> str:
    if own.recompute is Recompute.NONE:
        return '"none"'
    return '"full"' if own.recompute_ratio >= 1.0 else '"selective"'


def _deepspeed(launch: LaunchSettings, before: Configuration, own: Configuration) -> Settings:
    found = {
        '"train_batch_size"': str(own.global_batch),
        '"train_micro_batch_size_per_gpu"': str(own.micro_batch),
        '"gradient_accumulation_steps"': str(own.num_microbatches),
        '"zero_optimization": {"stage"}': str(own.zero_stage),
        '"tensor_parallel": {"autotp_size"}': str(own.tensor),
        '"sequence_parallel_size"': str(own.context),
        '"expert_parallel": {"autoep_size"}': str(own.expert),
    }
    if own.recompute is not Recompute.NONE:
        found["activation checkpointing in the training script"] = "on"
    if launch.shard_ranks:
        found['"zero_optimization": {"mics_shard_size"}'] = str(own.shard_ranks)
    if own.overlap_gradients:
        found['"zero_optimization": {"overlap_comm"}'] = "true"
    return found


def _flag(key: str, value: str) -> str:
    if "|" in value or "(" in value:
        value = f'"{value}"'
    return f"{key} {value}".rstrip()


_ENGINE: Final[
    Mapping[Engine, Callable[[LaunchSettings, Configuration, Configuration], Settings]]
] = {
    Engine.MEGATRON: _megatron,
    Engine.TORCHTITAN: _torchtitan,
    Engine.DEEPSPEED: _deepspeed,
}
_FORM: Final[Mapping[Engine, Callable[[str, str], str]]] = {
    Engine.MEGATRON: _flag,
    Engine.TORCHTITAN: lambda key, value: f"{key} = {value}",
    Engine.DEEPSPEED: lambda key, value: (
        f"{key[:-1]}: {value}}}" if key.endswith("}") else f"{key}: {value}"
    ),
}
