"""Options in the words of a plan: what one kind of instance is launched as."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

from tuner.config.serve import Instances, Role
from tuner.costs.serve.capacity import stated_ratio
from tuner.costs.serve.decoder import Formats
from tuner.costs.serve.engine import A2aBackend
from tuner.costs.serve.remote_ffn import RemoteFfnIteration
from tuner.search.serve.options import Option
from tuner.spec.model import ModelSpec
from tuner.spec.serving.goal import ServeGoal


def to_instances(option: Option, *, count: int, island: str = "") -> tuple[Instances, ...]:
    """Return the instance groups of a count of options: an AFD unit is one of each role."""
    iteration = option.iteration
    if not isinstance(iteration, RemoteFfnIteration):
        return (to_instance_group(option, count=count, island=island),)
    ffn = replace(
        option,
        role=Role.EXPERT,
        degrees=iteration.ffn.degrees,
        iteration=replace(iteration.ffn, two_batch_overlap=iteration.two_batch_overlap),
        kv_tokens=0.0,
        page_tokens=None,
    )
    return tuple(to_instance_group(server, count=count, island=island) for server in (option, ffn))


def to_instance_group(option: Option, *, count: int, island: str = "") -> Instances:
    """Return equal instances of one kind; of an AFD unit the attention servers."""
    degrees = option.degrees
    iteration = option.iteration
    is_afd_unit = isinstance(iteration, RemoteFfnIteration)
    has_experts = iteration.decoder.experts is not None and not is_afd_unit
    return Instances(
        role=Role.ATTENTION if is_afd_unit else option.role,
        pool=option.serving_pool.pool.name,
        island=island,
        count=count,
        devices=degrees.devices,
        attention_tp=degrees.attention_tensor,
        attention_dp=degrees.attention_data,
        moe_tp=degrees.moe_tensor if has_experts else 1,
        ep=degrees.expert if has_experts else 1,
        pp=degrees.pipeline,
        stage_machines=degrees.stage_machines,
        max_batch=option.running,
        max_batched_tokens=option.step_tokens,
        chunked_prefill=option.is_chunked,
        a2a_backend=_a2a_backend(option),
        kv_tokens=int(option.kv_tokens * degrees.attention_data),
        page_size=option.page_tokens,
        draft_tokens=0 if iteration.drafting is None else iteration.drafting.draft_tokens,
        two_batch_overlap=iteration.two_batch_overlap,
        redundant_experts=iteration.spare_experts,
        prefill_share_ratio=option.prefill_share_ratio,
        memory_ratio=stated_ratio(
            iteration,
            memory_bytes=option.serving_pool.memory_bytes,
            step_tokens=option.step_tokens,
            running=option.running,
        ),
    )


def _a2a_backend(
    option: Option,
) -> Literal["none", "allgather", "deepep_normal", "deepep_low_latency"]:
    if option.degrees.attention_data == 1 or isinstance(option.iteration, RemoteFfnIteration):
        return "none"
    match option.iteration.a2a_backend:
        case A2aBackend.NORMAL:
            return "deepep_normal"
        case A2aBackend.LOW_LATENCY:
            return "deepep_low_latency"
        case _:
            return "allgather"


def goal_formats(goal: ServeGoal, model: ModelSpec) -> Formats:
    """Return storage formats: nvfp4 leaves attention in bf16, mxfp4 and int4 all but experts.

    An nvfp4 checkpoint whose own list leaves attention out of its exceptions holds it in nvfp4.

    Released nvfp4 checkpoints of Nemotron-3 hold routed experts alone in nvfp4, shared ones and the
    projections of Mamba in fp8, those around the latent width in bf16 (NVIDIA/Model-Optimizer,
    modelopt_recipes/models/Nemotron-3-Super-120B-A12B/super-nvfp4.yaml, which mirrors the published
    `hf_quant_config.json`; NVIDIA-NeMo/Nemotron, docs/nemotron/ultra3/quantization.md).

    int4 without experts is AWQ's or GPTQ's, of all linear layers. Checkpoints of other types leave
    parts in bf16 as far as their `config.json` says.
    """
    quantization = goal.quantization
    attention, ffn, experts = _PARTS.get(quantization, (quantization, quantization, quantization))
    if quantization == "int4" and model.moe is None:
        attention = ffn = experts
    if quantization == model.released_weights == "nvfp4":
        attention = quantization
    is_mixed = (
        quantization == "nvfp4" and model.architecture in _FP8_MAMBA and model.moe is not None
    )
    ffn = "fp8" if is_mixed else ffn
    attention = "bf16" if "attention" in model.unquantized else attention
    ffn = "bf16" if "networks" in model.unquantized else ffn
    return Formats(
        attention=attention,
        output=attention,
        ffn=ffn,
        experts=experts,
        kv=goal.kv_cache_dtype,
        linear="fp8" if is_mixed else "",
        latent="bf16" if is_mixed else "",
        int4_bytes=model.int4_bytes,
    )


_FP8_MAMBA: Final = frozenset({"NemotronHForCausalLM"})
"""Classes whose nvfp4 checkpoints hold the projections of Mamba in fp8."""
_PARTS: Final[Mapping[str, tuple[str, str, str]]] = {
    "nvfp4": ("bf16", "nvfp4", "nvfp4"),
    "mxfp4": ("bf16", "bf16", "mxfp4"),
    "fp8_block_mxfp4": ("fp8_block", "fp8_block", "mxfp4"),
    "int4": ("bf16", "bf16", "int4_wo"),
}
"""Attention, networks and experts of a quantization whose parts differ."""
