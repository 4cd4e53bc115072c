"""Options in the words of a plan: what one kind of instance is launched as."""

from tuner.costs.serving.decoder import Formats
from tuner.costs.serving.engine import TRAITS
from tuner.planner.serve.options import Option
from tuner.serve_plan import Instances
from tuner.spec.serving.goal import ServeGoal


def instances_of(option: Option, *, count: int) -> Instances:
    """Return equal instances of one kind."""
    degrees = option.degrees
    traits = TRAITS[option.iteration.engine]
    has_experts = option.iteration.decoder.experts is not None
    return Instances(
        role=option.role,
        pool=option.site.pool.name,
        count=count,
        devices=option.devices,
        attention_tp=degrees.attention_tensor,
        attention_dp=degrees.attention_data,
        moe_tp=degrees.moe_tensor if has_experts else 1,
        ep=degrees.expert if has_experts else 1,
        pp=degrees.pipeline,
        max_batch=option.running,
        max_batched_tokens=traits.step_tokens,
        chunked_prefill=traits.batching.value == "chunked",
        a2a_backend="allgather" if degrees.attention_data > 1 else "none",
        kv_tokens=int(option.kv_tokens * degrees.attention_data),
    )


def formats_of_goal(goal: ServeGoal) -> Formats:
    """Return storage formats: everything quantised alike, but nvfp4 leaves attention in bf16."""
    own = goal.quantization
    attention = "bf16" if own == "nvfp4" else own
    return Formats(
        attention=attention, output=attention, ffn=own, experts=own, kv=goal.kv_cache_dtype
    )
