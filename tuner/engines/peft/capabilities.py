"""Transformers 5 and PEFT 0.21: a training loop around a model of the Hub.

Read from the packages transformers 5.17.0 and 5.24.0, peft 0.21.2 and bitsandbytes 0.50.2. The loop
that the emitted files start is examples/finetuning/finetune.py:

- One device, replicas (stage 0) or FSDP2 over all of them (stage 3); no tensor, pipeline, context
  or expert parallelism.
- Gradients are averaged after the backward pass of a step's last micro-batch; at stage 3 FSDP2
  reduces them in every one.
- All layers are checkpointed, or none.
- 4-bit weights (`qlora`) are not sharded: FSDP2 does not take bitsandbytes' parameters.
- The loop restores a checkpoint on as many devices as wrote it.
- Weights are bf16, the forward pass without autocast; adapters are fp32 unless `tune.dtype` says
  bf16, and all weights are trained with bf16 moments.
- Linear attention needs the kernels of causal-conv1d and of flash-linear-attention or mamba_ssm:
  without them Transformers runs PyTorch's operations ("much slower"), and the loop stops on a GPU.
  Processors have none of them.

With transformers 5.24.0 and peft 0.21.2, tiny models of these families took three steps of LoRA on
one rank and on two under FSDP2 of a CPU, and trained as many parameters as the plan counts:
DeepSeek V2, V3 and V3.2, Kimi-K2, GLM-4.5 and -5, Qwen3-Next, Qwen3.5, Kimi Linear, Nemotron-3 with
and without latent experts, gpt-oss. What is not planned:

- sparse attention (V3.2, GLM-5) computes all pairs and masks them, and attention sinks (gpt-oss)
  have no fused kernel (`_supports_sdpa`): neither is priced;
- LongCat-Flash has weights for its zero-computation experts, which PEFT adapts too (110,080
  parameters instead of 93,696), and which fail in the forward pass.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from profilers.steps.config import Recompute
from tuner.catalog.manifest import DEFAULT_RANK_ORDER, Capabilities
from tuner.catalog.saved_bytes import SavedBytes
from tuner.catalog.target import LaunchFormat, Target
from tuner.engines.peft.lora import NETWORKS_BECOME_EXPERTS, WITHOUT_OUT_PROJ
from tuner.spec.features import DEEPSEEK_V4, LONGCAT, ModelFeature
from tuner.spec.tune import Adapters

NOT_PLANNED: Final[Mapping[ModelFeature, str]] = {
    **dict.fromkeys(
        (*DEEPSEEK_V4, ModelFeature.CHUNKED_ATTENTION),
        "memory and kernels of its layers in Transformers are not modelled",
    ),
    **dict.fromkeys(LONGCAT, "adapters of zero-computation experts fail in the forward pass"),
    ModelFeature.SPARSE_ATTENTION: (
        "Transformers computes attention over all pairs and masks it, which is not priced"
    ),
    ModelFeature.SINKS: "Transformers has no fused kernel for its attention, which is not priced",
}
"""Features of models, and why they are not planned."""

PEFT_0_21: Final = Capabilities(
    names=("transformers-peft",),
    release="Transformers 5, PEFT 0.21",
    source="pypi.org/project/peft/0.21.2",
    zero_stages=frozenset({0, 3}),
    quantised_zero_stages=frozenset({0}),
    shard_ranks_zero_stages=frozenset(),
    gradient_bytes=frozenset({2, 4}),
    optimizer_offload_zero_stages=frozenset(),
    distributed_checkpoints=False,
    host_checkpoint_zero_stages=frozenset(),
    background_checkpoint_zero_stages=frozenset(),
    reshards=False,
    overlap_grad_reduce=False,
    ddp_bucket_size=False,
    overlap_param_gather=False,
    recompute=frozenset({Recompute.NONE, Recompute.FULL}),
    recompute_modules=frozenset(),
    recompute_num_layers=False,
    recompute_per_stage=False,
    largest_chunks=1,
    saves_during_run=False,
    schedules=frozenset({"1f1b"}),
    pipeline=False,
    virtual_pipeline=False,
    tensor_parallel=False,
    context_parallel=False,
    expert_parallel=False,
    expert_tensor_parallel=False,
    sequence_parallel=False,
    rank_orders=frozenset({DEFAULT_RANK_ORDER}),
    dispatchers=frozenset({"alltoall"}),
    cuda_graphs=frozenset({"none"}),
    precisions=frozenset({"bf16"}),
    mtp=False,
    restrictions=WITHOUT_OUT_PROJ,
    networks_become_experts=NETWORKS_BECOME_EXPERTS,
    unsupported=frozenset(NOT_PLANNED),
    unsupported_reasons=frozenset(NOT_PLANNED.items()),
)

_NEED_KERNELS: Final = frozenset({ModelFeature.MAMBA2, ModelFeature.GATED_DELTA, ModelFeature.KDA})

ON_PROCESSORS: Final = replace(
    PEFT_0_21,
    unsupported=PEFT_0_21.unsupported | _NEED_KERNELS,
    unsupported_reasons=PEFT_0_21.unsupported_reasons
    | {(feature, "its kernels need a GPU") for feature in _NEED_KERNELS},
)


def saved_bytes(tune: Adapters | None, zero_stage: int, precision: str) -> SavedBytes:
    """Return bytes of a parameter, thrice its own type; frozen ones are loaded at every start."""
    parameter_bytes = 2.0 if tune is None or tune.dtype == "bf16" else 4.0
    return SavedBytes(trained=3.0 * parameter_bytes, reread=2.0)


TARGETS: Final = (
    Target(
        capabilities=PEFT_0_21,
        family="transformers",
        software="transformers",
        runs_same_layers=False,
        on_processors=ON_PROCESSORS,
        saved_bytes=saved_bytes,
    ),
)
FORMATS: Final = (LaunchFormat(name="trainer"),)
METRICS: Final = "peft"
