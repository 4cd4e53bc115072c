"""Options in the words of a plan: what one kind of instance is launched as."""

from typing import Literal

from tuner.costs.serving.capacity import stated_ratio
from tuner.costs.serving.decoder import Formats
from tuner.costs.serving.engine import Exchange
from tuner.planner.serve.options import Option
from tuner.serve_plan import Instances
from tuner.spec.serving.goal import ServeGoal


def instances_of(option: Option, *, count: int, island: str = "") -> Instances:
    """Return equal instances of one kind."""
    degrees = option.degrees
    iteration = option.iteration
    has_experts = iteration.decoder.experts is not None
    return Instances(
        role=option.role,
        pool=option.site.pool.name,
        island=island,
        count=count,
        devices=option.devices,
        attention_tp=degrees.attention_tensor,
        attention_dp=degrees.attention_data,
        moe_tp=degrees.moe_tensor if has_experts else 1,
        ep=degrees.expert if has_experts else 1,
        pp=degrees.pipeline,
        max_batch=option.running,
        max_batched_tokens=option.step_tokens,
        chunked_prefill=option.is_chunked,
        a2a_backend=_exchange_of(option),
        kv_tokens=int(option.kv_tokens * degrees.attention_data),
        page_size=option.page_tokens,
        draft_tokens=0 if iteration.drafting is None else iteration.drafting.draft_tokens,
        two_batch_overlap=iteration.two_batch_overlap,
        prefill_share_ratio=option.prefill_share_ratio,
        memory_ratio=stated_ratio(
            iteration,
            memory_bytes=option.site.memory_bytes,
            step_tokens=option.step_tokens,
            running=option.running,
        ),
    )


def _exchange_of(
    option: Option,
) -> Literal["none", "allgather", "deepep_normal", "deepep_low_latency"]:
    if option.degrees.attention_data == 1:
        return "none"
    match option.iteration.exchange:
        case Exchange.NORMAL:
            return "deepep_normal"
        case Exchange.LOW_LATENCY:
            return "deepep_low_latency"
        case _:
            return "allgather"


def formats_of_goal(goal: ServeGoal) -> Formats:
    """Return storage formats: nvfp4 leaves attention in bf16, mxfp4 all but experts."""
    own = goal.quantization
    attention = "bf16" if own in ("nvfp4", "mxfp4") else own
    ffn = "bf16" if own == "mxfp4" else own
    return Formats(
        attention=attention, output=attention, ffn=ffn, experts=own, kv=goal.kv_cache_dtype
    )
