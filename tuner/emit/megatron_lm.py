"""Emits arguments for Megatron-LM's `pretrain_gpt.py`: `megatron_args.txt`, and `run.sh` around it.

Flags exist under these names in core_v0.16.1, core_v0.18.0 and core_v0.19.0 of
github.com/NVIDIA/Megatron-LM, except `--mlp-chunks-for-training`, which begins with 0.18 (MemFine's
chunks: one global count, recomputed chunk by chunk under `--recompute-modules moe`). Expert tensor
parallelism is always written, because the engine otherwise takes that of the dense layers.

Not covered: data, tokenizer, checkpoints, optimizer and learning rate, which are the user's; rope
scaling, partial rotary and routed scaling factors, which decide no time and no byte.
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import PurePosixPath

from profilers.steps.config import LayerKind, Recompute
from tuner.emit.evidence import statement
from tuner.emit.files import EmittedFile, comment
from tuner.emit.torchrun import ENVIRONMENT_NOTE, preamble
from tuner.launch.shape import launch_shape
from tuner.plan import TrainDecision, VerifiedPlan
from tuner.spec.capabilities import global_chunks, global_recompute
from tuner.spec.goal import Precision, TrainGoal
from tuner.spec.model import Attention, ModelSpec, Moe, QkNorm

Argument = tuple[str, ...]
"""A flag and its values."""

_YOURS = (
    "Not held here, because no plan depends on it: data, tokenizer, checkpoints, optimizer,",
    "learning rate, rope scaling, partial rotary, routed scaling factor. Add them after run.sh:",
    "  bash run.sh --data-path ... --tokenizer-type ... --train-iters ... --lr ...",
)


def emit(verified: VerifiedPlan) -> tuple[EmittedFile, ...]:
    """Return the argument file and a script that starts Megatron-LM with it."""
    plan = verified.plan
    said = (
        *statement(verified),
        f"The plan counts on a vocabulary of {plan.model.vocab_size}; the tokenizer decides.",
        "",
        *_YOURS,
    )
    lines = arguments(plan.model, plan.goal, verified.decision)
    return (
        EmittedFile(
            path=PurePosixPath("megatron_args.txt"),
            text=comment(said) + "".join(" ".join(line) + "\n" for line in lines),
        ),
        EmittedFile(
            path=PurePosixPath("run.sh"),
            text="#!/usr/bin/env bash\n"
            + comment(
                (
                    *said,
                    "",
                    *ENVIRONMENT_NOTE,
                    "  MEGATRON_LM              the folder of a Megatron-LM checkout; needed",
                )
            )
            + preamble(launch_shape(plan, verified.decision))
            + _start(),
            executable=True,
        ),
    )


def arguments(model: ModelSpec, goal: TrainGoal, decision: TrainDecision) -> tuple[Argument, ...]:
    """Return every argument that the plan decides, one flag with its values per entry.

    Raises:
        ValueError: stages differ in what is one setting for Megatron-LM.
    """
    found = (
        *_model(model, goal),
        *_attention(model.attention),
        *(_moe(model.moe, model) if model.moe and model.num_moe_layers else ()),
        *_degrees(decision),
        *_stages(decision),
        *_memory(model, decision),
        ("--seq-length", str(goal.sequence_length)),
        ("--micro-batch-size", str(decision.micro_batch_size)),
        ("--global-batch-size", str(goal.global_batch_size)),
        *((("--bf16",),) if goal.precision is Precision.BF16 else ()),
    )
    # run.sh splits at spaces and nothing else; no value may hold one.
    if any(word.split() != [word] for argument in found for word in argument):
        raise ValueError(f"an argument holds a space: {found}")
    return found


def _model(model: ModelSpec, goal: TrainGoal) -> Iterator[Argument]:
    yield ("--num-layers", str(model.num_layers))
    yield ("--hidden-size", str(model.hidden_size))
    expert_ffn_size = model.moe.expert_ffn_size if model.moe else 0
    yield ("--ffn-hidden-size", str(model.dense_ffn_size or expert_ffn_size))
    yield ("--swiglu",)
    yield ("--disable-bias-linear",)
    yield ("--normalization", "RMSNorm")
    yield ("--norm-epsilon", f"{model.norm_epsilon:g}")
    yield ("--position-embedding-type", "rope")
    yield ("--rotary-base", str(round(model.rope_theta)))
    yield ("--max-position-embeddings", str(max(model.max_position, goal.sequence_length)))
    # Megatron drops 10 % of the activations unless told otherwise.
    yield ("--hidden-dropout", "0.0")
    yield ("--attention-dropout", "0.0")
    if not model.tie_word_embeddings:
        yield ("--untie-embeddings-and-output-weights",)


def _attention(attention: Attention) -> Iterator[Argument]:
    yield ("--num-attention-heads", str(attention.num_heads))
    if attention.kind == "mla":
        yield ("--multi-latent-attention",)
        if attention.q_lora_rank:
            yield ("--q-lora-rank", str(attention.q_lora_rank))
        yield ("--kv-lora-rank", str(attention.kv_lora_rank))
        yield ("--qk-head-dim", str(attention.qk_nope_head_dim))
        yield ("--qk-pos-emb-head-dim", str(attention.qk_rope_head_dim))
        yield ("--v-head-dim", str(attention.v_head_dim))
        # The norms of the compressed queries and keys are part of latent attention.
        yield ("--qk-layernorm",)
        return
    yield ("--kv-channels", str(attention.head_dim))
    if attention.num_kv_heads != attention.num_heads:
        yield ("--group-query-attention",)
        yield ("--num-query-groups", str(attention.num_kv_heads))
    if attention.qkv_bias:
        yield ("--add-qkv-bias",)
    if attention.qk_norm is QkNorm.HEAD:
        yield ("--qk-layernorm",)


def _moe(moe: Moe, model: ModelSpec) -> Iterator[Argument]:
    yield ("--num-experts", str(moe.num_experts))
    yield ("--moe-ffn-hidden-size", str(moe.expert_ffn_size))
    yield ("--moe-router-topk", str(moe.top_k))
    yield ("--moe-router-score-function", moe.scoring)
    # Top-1 after normalisation is always one; the engine asks for the raw probability instead.
    if moe.scoring == "softmax" and (not moe.normalise_top_k or moe.top_k == 1):
        yield ("--moe-router-pre-softmax",)
    if moe.score_correction_bias:
        yield ("--moe-router-enable-expert-bias",)
    if moe.groups_per_token < moe.num_groups:
        yield ("--moe-router-num-groups", str(moe.num_groups))
        yield ("--moe-router-group-topk", str(moe.groups_per_token))
    if moe.shared_ffn_size:
        yield ("--moe-shared-expert-intermediate-size", str(moe.shared_ffn_size))
        if moe.shared_expert_gate:
            yield ("--moe-shared-expert-gate",)
    if model.num_moe_layers < model.num_layers:
        yield ("--moe-layer-freq", _layer_pattern(model.layers))
    yield ("--moe-grouped-gemm",)
    yield ("--moe-token-dispatcher-type", "alltoall")


def _degrees(decision: TrainDecision) -> Iterator[Argument]:
    yield ("--tensor-model-parallel-size", str(decision.tensor_model_parallel_size))
    yield ("--pipeline-model-parallel-size", str(decision.pipeline_model_parallel_size))
    yield ("--context-parallel-size", str(decision.context_parallel_size))
    yield ("--expert-model-parallel-size", str(decision.expert_model_parallel_size))
    yield ("--expert-tensor-parallel-size", str(decision.expert_tensor_parallel_size))
    if decision.sequence_parallel and decision.tensor_model_parallel_size > 1:
        yield ("--sequence-parallel",)


def _stages(decision: TrainDecision) -> Iterator[Argument]:
    if decision.mtp_num_layers:
        yield ("--mtp-num-layers", str(decision.mtp_num_layers))
    if decision.pipeline_model_parallel_size == 1:
        return
    if len(set(decision.pipeline_layout)) > 1:
        yield ("--pipeline-model-parallel-layout", _pipeline_layout(decision))
    elif decision.virtual_pipeline_model_parallel_size > 1:
        virtual = decision.virtual_pipeline_model_parallel_size
        yield ("--num-virtual-stages-per-pipeline-rank", str(virtual))


def _memory(model: ModelSpec, decision: TrainDecision) -> Iterator[Argument]:
    if decision.zero_stage == 1:
        yield ("--use-distributed-optimizer",)
    recompute, chunks = global_recompute(model, decision), global_chunks(model, decision)
    if recompute is None or chunks is None:
        raise ValueError("recompute and chunks are global in Megatron-LM, but the stages differ")
    if recompute is Recompute.FULL:
        yield ("--recompute-granularity", "full")
        yield ("--recompute-method", "uniform")
        yield ("--recompute-num-layers", "1")
    elif recompute is Recompute.SELECTIVE:
        yield ("--recompute-granularity", "selective")
        yield ("--recompute-modules", *(decision.recompute_modules or ("moe",)))
    if chunks > 1:
        yield ("--mlp-chunks-for-training", str(chunks))


def _layer_pattern(layers: tuple[LayerKind, ...]) -> str:
    """Return Megatron's pattern of MoE layers, e.g. `([0]*3+[1]*58)`."""
    runs = (f"[{int(kind is LayerKind.MOE)}]*{len(tuple(run))}" for kind, run in groupby(layers))
    return f"({'+'.join(runs)})"


def _pipeline_layout(decision: TrainDecision) -> str:
    """Return Megatron's layout, e.g. `Et*3|t*4|t*4|t*3L`: embedding, layers, loss by stage."""
    stages = [_repeat("t", count) for count in decision.pipeline_layout]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}{_repeat('m', decision.mtp_num_layers)}L"
    return "|".join(stages)


def _repeat(letter: str, count: int) -> str:
    return f"{letter}*{count}" if count > 1 else letter * count


def _start() -> str:
    return """\
# Megatron-LM's overlap of communication and computation counts on one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
: "${MEGATRON_LM:?must name the folder of a Megatron-LM checkout}"
mapfile -t ARGUMENTS < <(grep -v '^#' megatron_args.txt | tr ' ' '\\n')

exec "${LAUNCHER[@]}" "$MEGATRON_LM/pretrain_gpt.py" "${ARGUMENTS[@]}" "$@"
"""
