"""A plan's decision as the configuration of the reference training step.

Verification launches what this function returns, and the reference emitter writes it, so that what
was measured is what is delivered. Routing is forced to the loads that the plan was priced with.
"""

from typing import Any

from profilers.steps.config import (
    Adapters,
    Dispatcher,
    Parallelism,
    Recompute,
    Stage,
    StepConfig,
    TokenRouting,
    TransformerShape,
)
from tuner.config.train import TrainDecision
from tuner.engines.launchers.shape import launch_shape
from tuner.plans.train import Plan, VerifiedPlan
from tuner.spec.model import ModelSpec
from tuner.spec.tune import adapted


def step_config(
    plan: Plan, decision: TrainDecision, *, steps: int, warmup_steps: int
) -> StepConfig:
    """Return the configuration of every rank of the reference step.

    Raises:
        ValueError: the reference step cannot run the decision; `refusals` says why beforehand.
    """
    if decision.zero_stage == 2:
        raise ValueError("the reference step has no zero_stage 2")
    counts = decision.microbatches_by_replica(plan.goal.global_batch_size)
    return StepConfig(
        model=model_shape(plan.model),
        parallelism=Parallelism(
            tensor=decision.tensor_model_parallel_size,
            pipeline=decision.pipeline_model_parallel_size,
            virtual_pipeline=decision.virtual_pipeline_model_parallel_size,
            data=decision.data_parallel_size,
            expert=decision.expert_model_parallel_size,
            zero_stage=decision.zero_stage,
            **_dispatch(plan, decision),
        ),
        stages=tuple(
            Stage(
                num_layers=layers,
                recompute=recompute,
                # Without recomputation there is nothing to chunk; the type refuses the pair.
                chunks=1 if recompute is Recompute.NONE else chunks,
            )
            for layers, recompute, chunks in zip(
                decision.pipeline_layout, decision.stage_recompute, decision.chunks, strict=True
            )
        ),
        sequence_length=plan.goal.sequence_length,
        global_batch_size=plan.goal.global_batch_size,
        micro_batch_size=decision.micro_batch_size,
        microbatches=counts if len(set(counts)) > 1 else None,
        precision=plan.goal.precision.value,
        routing=TokenRouting(mode="forced", load_ratio=plan.load_ratio, balancing="none"),
        steps=steps,
        warmup_steps=warmup_steps,
        adapters=_adapters(plan),
        device=launch_shape(plan, decision).device_kind,
    )


def _adapters(plan: Plan) -> Adapters | None:
    tune = plan.goal.adapters
    if tune is None:
        return None
    return Adapters.model_validate(
        {"rank": tune.rank, "alpha": tune.effective_alpha, "targets": adapted(tune, plan.model)}
    )


def _dispatch(plan: Plan, decision: TrainDecision) -> dict[str, Any]:
    if decision.dispatcher != "hierarchical":
        return {}
    (pool,) = plan.cluster.pools
    return {"dispatcher": Dispatcher.HIERARCHICAL, "ranks_per_node": pool.devices_per_node}


def training_config(verified: VerifiedPlan, *, steps: int, warmup_steps: int) -> StepConfig:
    """Return the configuration of a real run: routing is learned, not forced to the planned loads.

    MoE layers that are recomputed choose their chunks at run time then, from the token copies that
    the plan has memory for (MemFine's s'_max). Where there is memory for none, the planned chunks
    stay.

    Raises:
        ValueError: the reference step cannot run the decision.
    """
    fixed = step_config(verified.plan, verified.decision, steps=steps, warmup_steps=warmup_steps)
    stages = tuple(
        stage.model_copy(update={"max_chunk_tokens": predicted.max_chunk_tokens or None})
        for stage, predicted in zip(fixed.stages, verified.predicted.stages, strict=True)
    )
    return fixed.model_copy(update={"stages": stages, "routing": TokenRouting(mode="learned")})


def model_shape(model: ModelSpec) -> TransformerShape:
    """Return the model as the reference step builds it."""
    moe = model.moe
    return TransformerShape(
        hidden_size=model.hidden_size,
        num_heads=model.attention.num_heads,
        num_kv_heads=model.attention.num_kv_heads,
        head_dim=model.attention.head_dim,
        vocab_size=model.vocab_size,
        layers=model.layers,
        dense_ffn_size=model.dense_ffn_size,
        num_experts=moe.num_experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        moe_ffn_size=moe.expert_ffn_size if moe else 0,
        shared_ffn_size=moe.shared_ffn_size if moe else 0,
        tie_embeddings=model.tie_word_embeddings,
        norm_epsilon=model.norm_epsilon,
        rope_theta=model.rope_theta,
    )
