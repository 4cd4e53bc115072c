"""Megatron-LM: what its programs and megatron-core accept, by release.

Read from the argument parsers, `validate_args` and `TransformerConfig` of the tags core_v0.16.1,
core_v0.17.1, core_v0.18.0 and core_v0.19.0 of github.com/NVIDIA/Megatron-LM:

- `--mlp-chunks-for-training` (MemFine chunks) exists from core 0.18 on. The chunks of a MoE layer
  are recomputed one by one only under `--recompute-modules moe`; inside full recomputation they
  save nothing. Recomputation and the chunk count are global, so stages cannot differ in them.
  Chunks divide a rank's sequence (`torch.chunk`), whatever its router decides: expert ranks have
  the same number of all-to-alls as long as their sequences have the same length. Seen with EP 2 and
  4 chunks: 64 and 32 tokens train, 64 and 5 tokens (three chunks) wait for each other for ever.
- `--overlap-moe-expert-parallel-comm` needs an interleaved pipeline if there is one, no full
  recomputation, an all-to-all or flex dispatcher and one MTP layer at most; from core 0.17 on it
  also refuses to recompute `moe`, which is applied to 0.16 as well.
- ZeRO stages 2 and 3 are Megatron-FSDP, which no public recipe combines with a pipeline.
- `--num-distributed-optimizer-instances` replicates the sharded state (HSDP), for the distributed
  optimizer and for Megatron-FSDP.
- A full-iteration CUDA graph with MoE layers needs HybridEP, which pads the tokens of each expert
  rank to a fixed capacity, from core 0.18 on.
- Hybrids (`pretrain_hybrid.py`; `pretrain_mamba.py` up to 0.17) have no schedule for overlapped
  expert communication (`build_schedule_plan`), no offloading in Mamba-2 layers, and under ZeRO 3
  Megatron-FSDP gathers them all at once (its unit is `TransformerLayer`, and `MambaLayer` is none).
  0.16 has no interleaved pipeline, uneven stages or MTP layers for them, and neither 0.16 nor 0.17
  reads `--recompute-granularity full` there (megatron/core/ssm/mamba_block.py).
- The gated delta rule and sparse attention are `--experimental-attention-variant`s of
  `pretrain_gpt.py`. The former has context parallelism from 0.18 on, and delayed weight gradients,
  which overlapped expert communication calls, from 0.17 on. Sparse attention is refused by the
  layers of 0.16 and 0.17, and has context parallelism, over all-gathers alone, from 0.19 on; its
  kernels (`--dsa-kernel-backend`) begin with 0.19, too. Neither has offloading.
- No release has Kimi delta attention, attention inside chunks (Llama-4), or compressors and
  hyper-connections (DeepSeek-V4; the main branch after core_v0.19.0 has the latter in
  megatron/core/transformer/hyper_connection.py).
- No release has experts without weights, or experts that join a layer later (LongCat-Flash).
- Checkpoints on hosts (`--non-persistent-ckpt-type local`) need CUDA and the package
  nvidia-resiliency-ext. Tensors of Megatron-FSDP are no part of its format, and its replicas are
  broadcast from devices, so that an optimizer offloaded to host memory has none.
- Distributed checkpoints are restored in any layout. Those of the distributed optimizer (ZeRO 1)
  are only with `--dist-ckpt-optim-fully-reshardable` (docs/api-guide/core/dist_checkpointing.md),
  with which `save_checkpoint` of every release refuses checkpoints on hosts; and expert
  parallelism makes an optimizer of its own for experts (`ChainedOptimizer`), which a layout without
  it does not read. Both seen with 0.19 (examples/engines/megatron_lm). Megatron-FSDP's
  (ZeRO 2 and 3) are DTensors, restored over another FSDP layout, too
  (docs/user-guide/hybrid-model-migration.md).
- `--exit-duration-in-mins` is looked at after every step, after the checkpoints that are due then:
  any rank beyond it makes all save, unless that step was saved (to hosts counts, too), finish what
  is written in the background, and end with 0. Evaluation looks at it after every batch. Minutes
  count from the start of the first process, and a restart inside the processes does not reset them.
  `--exit-signal-handler` is not written: torchrun sends SIGTERM to the process groups of its ranks,
  and the processes that write checkpoints are in them.
- The padded experts of a full-iteration CUDA graph are gated ones.
- One switch enables all biases, the router's included; a second one only those of queries, keys and
  values.

Not covered: torch's own FSDP2 under Megatron (no expert parallelism), hybrid context parallelism.
"""

from dataclasses import replace
from typing import Final

from profilers.steps.config import Recompute
from tuner.catalog.manifest import Capabilities, Conditions, restricted
from tuner.catalog.place_rules import PlaceTarget
from tuner.catalog.saved_bytes import MIXED_PRECISION, SINGLE_COPY, SavedBytes
from tuner.catalog.target import LaunchFormat, Target
from tuner.config.train import TrainDecision
from tuner.engines.megatron_lm.mixers import HYBRIDS
from tuner.spec.features import DEEPSEEK_V4, LONGCAT, ModelFeature, features
from tuner.spec.model import ModelSpec
from tuner.spec.tune import Adapters

_NOT_FULL: Final = frozenset({Recompute.NONE, Recompute.SELECTIVE})

_NOT_WHOLE: Final = frozenset({"none", "partial"})
_OVERLAP: Final = Conditions(
    needs_experts=True,
    needs_virtual_pipeline=True,
    dispatchers=frozenset({"alltoall", "deepep", "hybridep"}),
    recompute=_NOT_FULL,
    excludes=frozenset({"moe"}),
    largest_mtp=1,
)

_EVERY_RELEASE: Final = (
    restricted(ModelFeature.UNGATED_FFN, full_graph_dispatchers=frozenset())
    | restricted(
        *HYBRIDS,
        a2a_overlap=None,
        activation_offload=None,
        zero_stages=frozenset({0, 1, 2}),
    )
    | restricted(ModelFeature.GATED_DELTA, activation_offload=None)
)
WITH_0_17: Final = (
    _EVERY_RELEASE
    | restricted(*HYBRIDS, recompute=_NOT_FULL)
    | restricted(ModelFeature.GATED_DELTA, context_parallel=False)
)
"""Restrictions of core 0.17."""

MEGATRON_0_18: Final = Capabilities(
    names=("megatron-lm",),
    release="core 0.18 and later",
    source="github.com/NVIDIA/Megatron-LM core_v0.18.0, core_v0.19.0",
    zero_stages_with_pipeline=frozenset({0, 1}),
    optimizer_offload_zero_stages=frozenset({1}),
    host_checkpoint_zero_stages=frozenset({0, 1}),
    in_process_restart_zero_stages=frozenset({0, 1}),
    saves_before_time_limit=True,
    reshard_zero_stages_with_host_copies=frozenset({0}),
    reshard_needs_expert_ranks=True,
    param_gather_needs_grad_reduce=True,
    recompute_per_stage=False,
    activation_offload=Conditions(recompute=_NOT_FULL, cuda_graphs=_NOT_WHOLE),
    chunks_per_stage=False,
    chunks_need=frozenset({Recompute.SELECTIVE}),
    chunks_need_modules=frozenset({"moe"}),
    schedules=frozenset({"1f1b", "interleaved"}),
    moe_needs_sequence_parallel=True,
    dispatchers=frozenset({"alltoall", "allgather", "deepep", "hybridep"}),
    a2a_overlap=_OVERLAP,
    full_graph_dispatchers=frozenset({"hybridep"}),
    partial_graph_recompute=_NOT_FULL,
    partial_graph_excludes=frozenset({"moe"}),
    # Without --bf16 the precision is fp32, which has no fused attention kernel.
    precisions=frozenset(
        {"bf16", "fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "mxfp8", "nvfp4"}
    ),
    delayed_scaling_excludes=frozenset({"moe_act", "layernorm"}),
    adapters=frozenset(),
    one_bias_switch_is_needed=True,
    unsupported=frozenset(
        {
            ModelFeature.MLA_BIAS,
            ModelFeature.QK_NORM_FULL,
            ModelFeature.CHUNKED_ATTENTION,
            ModelFeature.SHARED_INDEXERS,
            ModelFeature.MAMBA2_VARIANT,
            ModelFeature.KDA,
            ModelFeature.SIGMOID_UNNORMALISED,
            ModelFeature.SOFTMAX_CORRECTION,
            *DEEPSEEK_V4,
            *LONGCAT,
        }
    ),
    restrictions=_EVERY_RELEASE
    | restricted(ModelFeature.SPARSE_ATTENTION, activation_offload=None, context_parallel=False),
)

MEGATRON_0_19_CPU: Final = replace(
    MEGATRON_0_18,
    release="core 0.19 on processors",
    source="github.com/NVIDIA/Megatron-LM core_v0.19.0, started on two cores"
    " (examples/engines/megatron_lm)",
    context_parallel=False,
    optimizer_offload_zero_stages=frozenset(),
    host_checkpoint_zero_stages=frozenset(),
    in_process_restart_zero_stages=frozenset(),
    activation_offload=None,
    dispatchers=frozenset({"alltoall", "allgather"}),
    a2a_overlap=None,
    cuda_graphs=frozenset({"none"}),
    full_graph_dispatchers=frozenset(),
    precisions=frozenset({"bf16"}),
    unsupported=MEGATRON_0_18.unsupported
    | HYBRIDS
    | {
        ModelFeature.GATED_DELTA,
        ModelFeature.SPARSE_ATTENTION,
        ModelFeature.LATENT_EXPERTS,
    },
)
"""Layers of its own (`--transformer-impl local`), because Transformer Engine needs CUDA: attention
without context parallelism, experts one after the other, no fused kernels. The layers of hybrids,
experimental attention and latent experts are Transformer Engine's alone."""

MEGATRON_0_16: Final = replace(
    MEGATRON_0_18,
    names=("megatron-lm-0.16",),
    release="core 0.16 and 0.17",
    source="github.com/NVIDIA/Megatron-LM core_v0.16.1, core_v0.17.1",
    # `save_checkpoint` of core_v0.16.1 raises on Megatron-FSDP's fsdp_dtensor, the configuration of
    # Bridge v0.3.0 and v0.4.0 asserts torch_dist. Core 0.17 could, but has this target.
    background_checkpoint_zero_stages=frozenset({0, 1}),
    largest_chunks=1,
    a2a_overlap=replace(_OVERLAP, cuda_graphs=_NOT_WHOLE, mtp_needs_pipeline=True),
    full_graph_dispatchers=frozenset(),
    unsupported=MEGATRON_0_18.unsupported | {ModelFeature.SPARSE_ATTENTION},
    restrictions=WITH_0_17
    | restricted(
        *HYBRIDS, virtual_pipeline=False, uneven_layout=False, empty_stages=False, mtp=False
    )
    | restricted(ModelFeature.GATED_DELTA, a2a_overlap=None),
)


def saved_bytes(tune: Adapters | None, zero_stage: int, precision: str) -> SavedBytes:
    """Return bytes of a parameter: bf16 weights and the fp32 state, of Megatron-FSDP fp32 alone.

    The former is `sharded_state_dict` of core/optimizer/distrib_optimizer.py, the latter
    `_init_distributed_params` of megatron_fsdp/param_and_grad_buffer.py (core_v0.16.1, 0.18.0). Of
    adapters, which Bridge alone has, only these are saved; frozen weights in bf16 are read from the
    pretrained checkpoint at every start.
    """
    return replace(SINGLE_COPY if zero_stage in (2, 3) else MIXED_PRECISION, reread=2.0)


TARGETS: Final = (
    Target(
        capabilities=MEGATRON_0_18,
        on_processors=MEGATRON_0_19_CPU,
        family="nemo",
        software="megatron-2025",
        saved_bytes=saved_bytes,
    ),
    Target(
        capabilities=MEGATRON_0_16,
        family="nemo",
        software="megatron-2025",
        saved_bytes=saved_bytes,
        emitter="emit_0_16",
    ),
)
FORMATS: Final = (
    LaunchFormat(name="megatron", suffixes=(".yaml", ".yml"), reader="read_yaml"),
    LaunchFormat(name="megatron"),
)
METRICS: Final = "megatron"


def delays_weight_gradients(model: ModelSpec, decision: TrainDecision) -> bool:
    """Return whether weight gradients of an overlapped all-to-all are delayed, as it is priced."""
    return decision.a2a_overlap and not refuses_delayed_gradients(model, decision)


def refuses_delayed_gradients(model: ModelSpec, decision: TrainDecision) -> bool:
    """Return whether the engine cannot delay the weight gradients of an overlapped all-to-all.

    Graphs of attention with biases are refused beside it (`validate_args` of core_v0.17.1 on).
    """
    biases = {ModelFeature.QKV_BIAS, ModelFeature.OUTPUT_BIAS}
    return (
        decision.a2a_overlap and decision.cuda_graph == "partial" and bool(biases & features(model))
    )


PLACE_TARGET: Final = PlaceTarget(name="megatron", release="d98e8a6", replicas=False)
