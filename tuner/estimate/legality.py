"""Rules that a configuration must keep to be launched; each is one line with the nearest way out.

Rules of arithmetic hold for every engine; those of Megatron-LM are what its argument parser and
`TransformerConfig` (core_v0.16.1 to core_v0.19.0) refuse, those of torchtitan what its
`ParallelDims` and those of DeepSpeed what its configuration (release 0.18) refuse. The first broken
rule of a launch is its error; a change that breaks any is not proposed.

Not covered: rules about data, checkpoints, optimizers, versions of libraries.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from profilers.steps.config import LayerKind, Recompute
from tuner.estimate.configuration import Configuration
from tuner.estimate.launch import Dispatcher, Engine, Graphs
from tuner.estimate.nearest import nearest_common_divisor, nearest_divisor, nearest_multiple
from tuner.spec.model import ModelSpec

Name = Callable[[str], str]
"""How the launch spells a field."""


def broken_rules(own: Configuration, model: ModelSpec, *, name: Name) -> Iterator[str]:
    """Yield what keeps the configuration from being launched."""
    yield from _tensor(own, model, name)
    yield from _sequence(own, name)
    yield from _experts(own, model, name)
    yield from _copies(own)
    yield from _schedule(own, name)
    yield from _recompute(own, model, name)
    yield from _ENGINE[own.engine](own, model, name)


def _tensor(own: Configuration, model: ModelSpec, name: Name) -> Iterator[str]:
    heads, groups = model.attention.num_heads, model.attention.num_kv_heads
    said = f"{name('tensor')} {own.tensor}"
    ranks = own.devices // (own.context * own.pipeline)
    if heads % own.tensor:
        yield (
            f"{said} does not divide the {heads} attention heads; the nearest that does is "
            f"{nearest_common_divisor(heads, ranks, own.tensor)}"
        )
    elif groups % own.tensor and own.tensor % groups:
        yield (
            f"{said} neither divides the {groups} key-value heads nor is a multiple of them; the "
            f"nearest that divides them is {nearest_common_divisor(groups, ranks, own.tensor)}"
        )
    widths = {
        "the feed-forward width": model.dense_ffn_size if LayerKind.DENSE in model.layers else 0,
        "the shared experts' width": model.moe.shared_ffn_size if model.moe else 0,
    }
    for what, width in widths.items():
        if width % own.tensor:
            yield (
                f"{said} does not divide {what} {width}; the nearest that does is "
                f"{nearest_common_divisor(width, ranks, own.tensor)}"
            )


def _sequence(own: Configuration, name: Name) -> Iterator[str]:
    # Causal attention is balanced by giving each rank a piece of both halves of the sequence.
    if own.context > 1 and own.sequence % (2 * own.context):
        half = own.sequence // 2 if own.sequence % 2 == 0 else 1
        ranks = own.devices // (own.tensor * own.pipeline)
        yield (
            f"{name('context')} {own.context} does not cut {name('sequence')} {own.sequence} into "
            f"2 * {own.context} equal pieces; the nearest degree that does is "
            f"{nearest_common_divisor(half, ranks, own.context)}"
        )
    elif own.sequence_parallel and own.sequence % (own.tensor * own.context):
        yield (
            f"{name('sequence')} {own.sequence} is not divisible by {name('tensor')} {own.tensor} "
            f"* {name('context')} {own.context}, as sequence parallelism needs; the nearest that "
            f"is: {nearest_multiple(own.sequence, own.tensor * own.context)}"
        )


def _experts(own: Configuration, model: ModelSpec, name: Name) -> Iterator[str]:
    said = f"{name('expert')} {own.expert}"
    if model.moe is None:
        if own.expert > 1:
            yield f"{said}: {model.name} has no experts; set it to 1"
        return
    experts, ranks = model.moe.num_experts, own.stage_ranks
    if own.expert > experts:
        yield f"{said} exceeds the {experts} experts of {model.name}; the most is {experts}"
    elif experts % own.expert:
        yield (
            f"{said} does not divide the {experts} experts of {model.name}; the nearest that does "
            f"is {nearest_common_divisor(experts, ranks, own.expert)}"
        )
    if model.moe.expert_ffn_size % own.expert_tensor:
        yield (
            f"{name('expert_tensor')} {own.expert_tensor} does not divide the experts' width "
            f"{model.moe.expert_ffn_size}; the nearest that does is "
            f"{nearest_divisor(model.moe.expert_ffn_size, own.expert_tensor)}"
        )
    elif ranks % (own.expert * own.expert_tensor):
        per_split = ranks // own.expert_tensor if ranks % own.expert_tensor == 0 else 1
        yield (
            f"{said} * {name('expert_tensor')} {own.expert_tensor} does not divide the {ranks} "
            f"devices of a pipeline stage; the nearest expert degree that does is "
            f"{nearest_common_divisor(per_split, experts, own.expert)}"
        )


def _copies(own: Configuration) -> Iterator[str]:
    """Copies of sharded state are whole: each holds every rank of data and expert parallelism."""
    if not own.shard_ranks:
        return
    shared = {"data": own.data, "expert data": own.expert_data}
    for what, ranks in shared.items():
        if ranks % own.replicas:
            yield (
                f"{own.replicas} copies of sharded state do not divide {what} parallelism {ranks}; "
                f"the nearest number that does is {nearest_divisor(ranks, own.replicas)}"
            )
            return


def _schedule(own: Configuration, name: Name) -> Iterator[str]:
    if own.virtual_pipeline > 1 and own.pipeline == 1:
        yield (
            f"{own.virtual_pipeline} model chunks per rank need {name('pipeline')} above 1; set it "
            "to 2 or leave interleaving out"
        )


def _recompute(own: Configuration, model: ModelSpec, name: Name) -> Iterator[str]:
    modules = own.recompute_modules
    if "mla_up_proj" in modules and model.attention.kind != "mla":
        yield f"{name('recompute_modules')} mla_up_proj: {model.name} has no latent attention"
    moe_modules = [part for part in modules if part in ("moe", "moe_act", "shared_experts")]
    if moe_modules and model.moe is None:
        yield f"{name('recompute_modules')} {moe_modules[0]}: {model.name} has no experts"


def _megatron(own: Configuration, model: ModelSpec, name: Name) -> Iterator[str]:
    if own.tensor > 1 and model.num_moe_layers and not own.sequence_parallel:
        yield (
            f"{name('tensor')} {own.tensor} with experts needs {name('sequence_parallel')}; add it"
        )
    if own.overlap_tensor and not own.sequence_parallel:
        yield (
            f"{name('overlap_tensor')} needs {name('sequence_parallel')} and {name('tensor')} "
            "above 1"
        )
    if own.overlap_parameters and own.zero_stage == 0:
        yield (
            f"{name('overlap_parameters')} needs {name('zero_stage')}; add it or leave the overlap "
            "out"
        )
    if own.overlap_parameters and not own.overlap_gradients and own.zero_stage < 3:
        yield f"{name('overlap_parameters')} needs {name('overlap_gradients')}; add it"
    if own.virtual_pipeline > 1:
        yield from _interleaving(own, name)
    if own.chunks > 1 and "moe" not in own.recompute_modules:
        yield (
            f"{name('chunks')} {own.chunks} saves memory only with {name('recompute_modules')} "
            "moe; add the module or leave the chunks out"
        )
    if own.shared_expert_overlap and own.dispatcher is Dispatcher.ALLGATHER:
        yield f"{name('shared_expert_overlap')} needs {name('dispatcher')} alltoall or flex"
    if own.a2a_overlap:
        yield from _megatron_overlap(own, name)
    yield from _megatron_recompute(own, name)


def _interleaving(own: Configuration, name: Name) -> Iterator[str]:
    """Micro-batches run through a chunk in groups; the last one may not be shorter than PP."""
    count, pipeline = own.num_microbatches, own.pipeline
    group = own.interleave_group or pipeline

    def fits(size: int) -> bool:
        return pipeline <= size <= count and not 0 < count % size < pipeline

    if fits(group):
        return
    nearest = nearest_multiple(count, pipeline)
    near = [size for size in range(pipeline, min(count, 4 * pipeline) + 1) if fits(size)]
    yield (
        f"{count} micro-batches do not fill groups of {group} over {name('pipeline')} {pipeline}, "
        f"as interleaving needs; set {name('global_batch')} "
        f"{nearest * own.micro_batch * own.data}"
        + (f" or {name('interleave_group')} {near[0]}" if near else "")
    )


def _megatron_overlap(own: Configuration, name: Name) -> Iterator[str]:
    said = name("a2a_overlap")
    if own.expert == 1:
        yield f"{said} needs {name('expert')} above 1"
    if own.pipeline > 1 and own.virtual_pipeline == 1:
        yield (
            f"{said} with {name('pipeline')} {own.pipeline} needs more than one model chunk per "
            f"rank; set {name('virtual_pipeline')} 2"
        )
    if own.dispatcher is Dispatcher.ALLGATHER:
        yield f"{said} needs {name('dispatcher')} alltoall or flex, not allgather"
    if own.recompute is Recompute.FULL:
        yield f"{said} excludes {name('recompute')} full; use selective modules without moe"
    if "moe" in own.recompute_modules:
        yield f"{said} excludes {name('recompute_modules')} moe; moe_act is possible"
    if own.shared_expert_overlap:
        yield f"{said} and {name('shared_expert_overlap')} exclude each other; keep one"
    if own.mtp_layers > 1:
        yield f"{said} allows one MTP layer, not {own.mtp_layers}"
    if own.precision == "fp32":
        yield f"{said} needs --bf16 or --fp16"


def _megatron_recompute(own: Configuration, name: Name) -> Iterator[str]:
    if "shared_experts" in own.recompute_modules and own.shared_expert_overlap:
        yield (
            f"{name('recompute_modules')} shared_experts and {name('shared_expert_overlap')} "
            "exclude each other; keep one"
        )
    if own.recompute is not Recompute.NONE and own.activation_offload_ratio:
        yield f"--cpu-offloading-num-layers excludes {name('recompute')}; keep one"
    delayed = own.precision == "fp8-delayed"
    for module in ("moe_act", "layernorm"):
        if delayed and module in own.recompute_modules:
            yield (
                f"{name('recompute_modules')} {module} is not possible with --fp8-recipe delayed; "
                "use tensorwise, mxfp8 or blockwise"
            )
    if own.graphs is Graphs.PARTIAL and own.recompute is Recompute.FULL:
        yield f"{name('recompute')} full needs {name('graphs')} full_iteration or none"


def _torchtitan(own: Configuration, model: ModelSpec, name: Name) -> Iterator[str]:
    total = model.num_layers + sum(own.ends)
    each = -(-total // own.num_stages)
    if (
        own.virtual_pipeline > 2
        and not own.is_explicit_layout
        and -(-total // each) != own.num_stages
    ):
        yield (
            f"{name('layers_per_virtual_stage')} cannot cut {total} layers into {own.num_stages} "
            f"stages; {each} make {-(-total // each)}"
        )
    if own.expert > 1 and own.expert_tensor not in (1, own.tensor):
        yield (
            f"{name('expert_tensor')} {own.expert_tensor} must be 1 or {name('tensor')} "
            f"{own.tensor}"
        )


def _deepspeed(own: Configuration, model: ModelSpec, name: Name) -> Iterator[str]:
    if own.expert > 1 and own.expert_tensor > 1:
        yield f"{name('expert_tensor')} {own.expert_tensor} must be 1"


_ENGINE: Final[Mapping[Engine, Callable[[Configuration, ModelSpec, Name], Iterator[str]]]] = {
    Engine.MEGATRON: _megatron,
    Engine.TORCHTITAN: _torchtitan,
    Engine.DEEPSPEED: _deepspeed,
}
