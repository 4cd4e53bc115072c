"""Rules of a launchable configuration; a broken one is one line with the nearest legal value.

Rules of arithmetic hold for every engine; those of Megatron-LM are what its argument parser and
`TransformerConfig` (core_v0.16.1 to core_v0.19.0) refuse, those of torchtitan what its
`ParallelDims` and those of DeepSpeed what its configuration (release 0.18) refuse. The first broken
rule of a launch is its error; a change that breaks any is not proposed.

Not covered: rules about data, checkpoints, optimizers, versions of libraries.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from profilers.steps.config import LayerKind, Recompute
from tuner.engines.reading.launch import Graphs, TokenDispatcher, TrainingEngine
from tuner.engines.reading.nearest import nearest_common_divisor, nearest_divisor, nearest_multiple
from tuner.estimate.configuration import Configuration
from tuner.spec.linear_attention import splits_heads
from tuner.spec.model import ModelSpec

Name = Callable[[str], str]
"""Function that spells a field as the launch does."""


def broken_rules(config: Configuration, model: ModelSpec, *, name: Name) -> Iterator[str]:
    """Yield the rules that the configuration breaks."""
    yield from _tensor(config, model, name)
    yield from _sequence(config, name)
    yield from _experts(config, model, name)
    yield from _copies(config)
    yield from _schedule(config, name)
    yield from _recompute(config, model, name)
    yield from _ENGINE[config.engine](config, model, name)


def _tensor(config: Configuration, model: ModelSpec, name: Name) -> Iterator[str]:
    heads, groups = model.attention.num_heads, model.attention.num_kv_heads
    said = f"{name('tensor')} {config.tensor}"
    ranks = config.devices // (config.context * config.pipeline)
    if heads % config.tensor:
        yield (
            f"{said} does not divide the {heads} attention heads; the nearest that does is "
            f"{nearest_common_divisor(heads, ranks, config.tensor)}"
        )
    elif groups % config.tensor and config.tensor % groups:
        yield (
            f"{said} neither divides the {groups} key-value heads nor is a multiple of them; the "
            f"nearest that divides them is {nearest_common_divisor(groups, ranks, config.tensor)}"
        )
    linear = model.linear
    if linear is not None and not splits_heads(
        linear, tensor=config.tensor, context=config.context
    ):
        keys = linear.num_key_heads
        yield (
            f"{said} * {name('context')} {config.context} does not divide the {keys} key heads of "
            f"{model.name}'s linear attention; the nearest {name('tensor')} that does alone is "
            f"{nearest_common_divisor(keys, ranks, config.tensor)}"
        )
    widths = {
        "the feed-forward width": model.dense_ffn_size if LayerKind.DENSE in model.layers else 0,
        "the shared experts' width": model.moe.shared_ffn_size if model.moe else 0,
    }
    for what, width in widths.items():
        if width % config.tensor:
            yield (
                f"{said} does not divide {what} {width}; the nearest that does is "
                f"{nearest_common_divisor(width, ranks, config.tensor)}"
            )


def _sequence(config: Configuration, name: Name) -> Iterator[str]:
    # Causal attention is balanced by giving each rank a piece of both halves of the sequence.
    if config.context > 1 and config.sequence % (2 * config.context):
        half = config.sequence // 2 if config.sequence % 2 == 0 else 1
        ranks = config.devices // (config.tensor * config.pipeline)
        yield (
            f"{name('context')} {config.context} does not cut {name('sequence')} {config.sequence} "
            "into "
            f"2 * {config.context} equal pieces; the nearest degree that does is "
            f"{nearest_common_divisor(half, ranks, config.context)}"
        )
    elif config.sequence_parallel and config.sequence % (config.tensor * config.context):
        yield (
            f"{name('sequence')} {config.sequence} is not divisible by {name('tensor')} "
            f"{config.tensor} "
            f"* {name('context')} {config.context}, as sequence parallelism needs; the nearest "
            "that "
            f"is: {nearest_multiple(config.sequence, config.tensor * config.context)}"
        )


def _experts(config: Configuration, model: ModelSpec, name: Name) -> Iterator[str]:
    said = f"{name('expert')} {config.expert}"
    if model.moe is None:
        if config.expert > 1:
            yield f"{said}: {model.name} has no experts; set it to 1"
        return
    experts, ranks = model.moe.num_experts, config.stage_ranks
    if config.expert > experts:
        yield f"{said} exceeds the {experts} experts of {model.name}; the most is {experts}"
    elif experts % config.expert:
        yield (
            f"{said} does not divide the {experts} experts of {model.name}; the nearest that does "
            f"is {nearest_common_divisor(experts, ranks, config.expert)}"
        )
    if model.moe.expert_ffn_size % config.expert_tensor:
        yield (
            f"{name('expert_tensor')} {config.expert_tensor} does not divide the experts' width "
            f"{model.moe.expert_ffn_size}; the nearest that does is "
            f"{nearest_divisor(model.moe.expert_ffn_size, config.expert_tensor)}"
        )
    elif ranks % (config.expert * config.expert_tensor):
        per_split = ranks // config.expert_tensor if ranks % config.expert_tensor == 0 else 1
        yield (
            f"{said} * {name('expert_tensor')} {config.expert_tensor} does not divide the {ranks} "
            f"devices of a pipeline stage; the nearest expert degree that does is "
            f"{nearest_common_divisor(per_split, experts, config.expert)}"
        )


def _copies(config: Configuration) -> Iterator[str]:
    """Copies of sharded state are whole: each holds every rank of data and expert parallelism."""
    if not config.ranks_per_copy:
        return
    shared = {"data": config.data, "expert data": config.expert_data}
    for what, ranks in shared.items():
        if ranks % config.replicas:
            yield (
                f"{config.replicas} copies of sharded state do not divide {what} parallelism "
                f"{ranks}; "
                f"the nearest number that does is {nearest_divisor(ranks, config.replicas)}"
            )
            return


def _schedule(config: Configuration, name: Name) -> Iterator[str]:
    if config.virtual_pipeline > 1 and config.pipeline == 1:
        yield (
            f"{config.virtual_pipeline} model chunks per rank need {name('pipeline')} above 1; set "
            "it "
            "to 2 or leave interleaving out"
        )


def _recompute(config: Configuration, model: ModelSpec, name: Name) -> Iterator[str]:
    modules = config.recompute_modules
    if "mla_up_proj" in modules and model.attention.kind != "mla":
        yield f"{name('recompute_modules')} mla_up_proj: {model.name} has no latent attention"
    moe_modules = [part for part in modules if part in ("moe", "moe_act", "shared_experts")]
    if moe_modules and model.moe is None:
        yield f"{name('recompute_modules')} {moe_modules[0]}: {model.name} has no experts"


def _megatron(config: Configuration, model: ModelSpec, name: Name) -> Iterator[str]:
    if config.tensor > 1 and model.num_moe_layers and not config.sequence_parallel:
        yield (
            f"{name('tensor')} {config.tensor} with experts needs {name('sequence_parallel')}; add "
            "it"
        )
    if config.overlap_tensor and not config.sequence_parallel:
        yield (
            f"{name('overlap_tensor')} needs {name('sequence_parallel')} and {name('tensor')} "
            "above 1"
        )
    if config.overlap_param_gather and config.zero_stage == 0:
        yield (
            f"{name('overlap_param_gather')} needs {name('zero_stage')}; add it or leave the "
            "overlap out"
        )
    if config.overlap_param_gather and not config.overlap_grad_reduce and config.zero_stage < 3:
        yield f"{name('overlap_param_gather')} needs {name('overlap_grad_reduce')}; add it"
    if config.sequential_experts and "moe_act" in config.recompute_modules:
        yield f"{name('recompute_modules')} moe_act needs --moe-grouped-gemm; add it"
    if config.virtual_pipeline > 1:
        yield from _interleaving(config, name)
    if config.chunks > 1 and "moe" not in config.recompute_modules:
        yield (
            f"{name('chunks')} {config.chunks} saves memory only with {name('recompute_modules')} "
            "moe; add the module or leave the chunks out"
        )
    if config.shared_expert_overlap and config.dispatcher is TokenDispatcher.ALLGATHER:
        yield f"{name('shared_expert_overlap')} needs {name('dispatcher')} alltoall or flex"
    if config.a2a_overlap:
        yield from _megatron_overlap(config, name)
    yield from _megatron_recompute(config, name)


def _interleaving(config: Configuration, name: Name) -> Iterator[str]:
    """Micro-batches run through a chunk in groups; the last one may not be shorter than PP."""
    count, pipeline = config.num_microbatches, config.pipeline
    group = config.interleave_group or pipeline

    def fits(size: int) -> bool:
        return pipeline <= size <= count and not 0 < count % size < pipeline

    if fits(group):
        return
    nearest = nearest_multiple(count, pipeline)
    near = [size for size in range(pipeline, min(count, 4 * pipeline) + 1) if fits(size)]
    yield (
        f"{count} micro-batches do not fill groups of {group} over {name('pipeline')} {pipeline}, "
        f"as interleaving needs; set {name('global_batch')} "
        f"{nearest * config.micro_batch * config.data}"
        + (f" or {name('interleave_group')} {near[0]}" if near else "")
    )


def _megatron_overlap(config: Configuration, name: Name) -> Iterator[str]:
    said = name("a2a_overlap")
    if config.expert == 1:
        yield f"{said} needs {name('expert')} above 1"
    if config.pipeline > 1 and config.virtual_pipeline == 1:
        yield (
            f"{said} with {name('pipeline')} {config.pipeline} needs more than one model chunk per "
            f"rank; set {name('virtual_pipeline')} 2"
        )
    if config.dispatcher is TokenDispatcher.ALLGATHER:
        yield f"{said} needs {name('dispatcher')} alltoall or flex, not allgather"
    if config.recompute is Recompute.FULL:
        yield f"{said} excludes {name('recompute')} full; use selective modules without moe"
    if "moe" in config.recompute_modules:
        yield f"{said} excludes {name('recompute_modules')} moe; moe_act is possible"
    if config.shared_expert_overlap:
        yield f"{said} and {name('shared_expert_overlap')} exclude each other; keep one"
    if config.mtp_layers > 1:
        yield f"{said} allows one MTP layer, not {config.mtp_layers}"
    if config.priced_precision == "fp32":
        yield f"{said} needs --bf16 or --fp16"


def _megatron_recompute(config: Configuration, name: Name) -> Iterator[str]:
    if "shared_experts" in config.recompute_modules and config.shared_expert_overlap:
        yield (
            f"{name('recompute_modules')} shared_experts and {name('shared_expert_overlap')} "
            "exclude each other; keep one"
        )
    if config.recompute is not Recompute.NONE and config.activation_offload_ratio:
        yield f"--cpu-offloading-num-layers excludes {name('recompute')}; keep one"
    delayed = config.priced_precision == "fp8-delayed"
    for module in ("moe_act", "layernorm"):
        if delayed and module in config.recompute_modules:
            yield (
                f"{name('recompute_modules')} {module} is not possible with --fp8-recipe delayed; "
                "use tensorwise, mxfp8 or blockwise"
            )
    if config.cuda_graph is Graphs.PARTIAL and config.recompute is Recompute.FULL:
        yield f"{name('recompute')} full needs {name('cuda_graph')} full_iteration or none"


def _torchtitan(config: Configuration, model: ModelSpec, name: Name) -> Iterator[str]:
    total = model.num_layers + sum(config.embedding_loss_layers)
    stage_layers = -(-total // config.num_stages)
    if (
        config.virtual_pipeline > 2
        and not config.is_explicit_layout
        and -(-total // stage_layers) != config.num_stages
    ):
        yield (
            f"{name('layers_per_virtual_stage')} cannot cut {total} layers into "
            f"{config.num_stages} "
            f"stages; {stage_layers} make {-(-total // stage_layers)}"
        )
    if config.expert > 1 and config.expert_tensor not in (1, config.tensor):
        yield (
            f"{name('expert_tensor')} {config.expert_tensor} must be 1 or {name('tensor')} "
            f"{config.tensor}"
        )


def _deepspeed(config: Configuration, model: ModelSpec, name: Name) -> Iterator[str]:
    if config.expert > 1 and config.expert_tensor > 1:
        yield f"{name('expert_tensor')} {config.expert_tensor} must be 1"


_ENGINE: Final[
    Mapping[TrainingEngine, Callable[[Configuration, ModelSpec, Name], Iterator[str]]]
] = {
    TrainingEngine.MEGATRON: _megatron,
    TrainingEngine.MS_SWIFT: _megatron,
    TrainingEngine.TORCHTITAN: _torchtitan,
    TrainingEngine.DEEPSPEED: _deepspeed,
    TrainingEngine.TRANSFORMERS: lambda config, model, name: iter(()),
}
