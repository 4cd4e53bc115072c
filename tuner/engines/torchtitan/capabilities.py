"""torchtitan 0.3: PyTorch-native training of the models that it ships.

Read from the package torchtitan 0.3.0 (`config/configs.py`, `trainer.py`, `distributed/`,
`models/*/config_registry.py`):

- FSDP2 shards everything: stage 3 all-gathers parameters again for the backward pass, stage 2 keeps
  them, stage 1 does not exist. Without it (stage 0) replicas are outside the expert-parallel mesh,
  so expert parallelism has only the context and tensor ranks.
- Without a pipeline every micro-batch gathers, reduces and, over replicas, all-reduces: nothing
  tells FSDP2 to wait for the last micro-batch of a step.
- Expert parallelism uses ranks of data, context and tensor parallelism, and then experts are not
  split. Without it tensor ranks split every expert (`models/common/moe_sharding.py`, `enable_ep`),
  which is not planned.
- Its `selective` checkpointing keeps chosen operations inside a layer and has no counterpart among
  Megatron's modules, so only none and full can be planned.
- One CUDA graph of the whole step, never with a pipeline. With experts it needs HybridEP and a
  fixed capacity, which only its DeepSeek models support, so it is not planned for MoE layers.
- Its Qwen3.5 has the gated delta rule, gated attention and a gated shared expert, whose context
  parallelism it refuses (`models/qwen3_5/parallelize.py`). No model has Mamba-2, Kimi delta
  attention, sparse or chunked attention, layers that are a mixer or a network alone, or experts
  without weights.
- Text is one stream of tokens, cut into sequences, and masks keep its documents apart by positions
  that begin anew (`hf_datasets/text_datasets.py`; `models/common/attention.py`); not so the `sdpa`
  of processors.
- fp8 and MTP are part of a model's code there, not of the configuration.
- Zero-bubble schedules (`InterleavedZeroBubble`) need several stages per rank. `ZBVZeroBubble` and
  `DualPipeV` place stages in a V, where stage s is not on rank s % PP, and are not planned.

On processors, with torch 2.13.0: no pipeline, no context parallelism (the SDPA kernel of a CPU has
no sharding strategy there), no gated delta rule (its kernels are Triton's), and `alltoall` alone.
FlexAttention has no backward pass there, and FSDP2 of that torch does not take the parameters of
`spmd_types`: write.py names `sdpa` and `partial_dtensor` instead. TRAIN_FILE starts torchtitan with
a stand-in for the accelerator (examples/engines/torchtitan).

LoRA (`components/lora.py`) freezes every other parameter. FSDP2 keeps adapters and frozen weights
in `training.dtype`, shards both and gathers both in the type of the computation; only adapters have
gradients and moments. A profile of the reference step does not price that
(`frozen_in_compute_type`), so adapters are not planned on processors.

- Queries, keys and values have one adapter; gate and up have one each.
- Experts are no `Linear` and get none. Low ranks of latent attention (`wq_a`, `wkv_a`) are
  replicated over tensor ranks, which the adapter's sharding asserts against at every degree.
- Names are matched by their last part, so that Qwen3.5's vision tower would get adapters too.
- Frozen weights in 4 bits do not exist.

Checkpoints are kept on shared storage alone. `async_with_pinned_mem` (dcp.py of
`components/checkpointer`) copies them into pinned memory, shared with a process that writes them
and allocated once (`DefaultStager` of torch.distributed.checkpoint). A thread copies beside the
next step, which waits for it before the optimizer: at most for the copy at the link's speed. It
needs CUDA; no emitted file was started with it. They hold the whole model, frozen weights too, in
`training.dtype`, and the moments (`ModelWrapper` of `components/checkpointer/base.py`). Its fault
tolerance by replicas (torchft, `ft/`) ships a trainer of Llama 3 only, none of models with experts.
Distributed checkpoints of PyTorch are restored in another layout, but the data loader asserts as
many replicas as before (`components/dataloader.py`).

HSDP replicas (`data_parallel_replicate_degree` with `data_parallel_shard_degree`) are outside the
expert-parallel mesh, as in megatron-core.
"""

from dataclasses import replace
from typing import Final

from profilers.steps.config import Recompute
from tuner.catalog.manifest import DEFAULT_RANK_ORDER, Capabilities, restricted
from tuner.catalog.saved_bytes import SavedBytes
from tuner.catalog.target import LaunchFormat, Target
from tuner.spec.features import LONGCAT, NEW_MIXERS, ModelFeature
from tuner.spec.tune import ADAPTER_TARGETS, EXPERTS, QKV, Adapters

TORCHTITAN_0_3: Final = Capabilities(
    names=("torchtitan",),
    release="0.3",
    source="pypi.org/project/torchtitan/0.3.0",
    zero_stages=frozenset({0, 2, 3}),
    shard_ranks_zero_stages=frozenset({2, 3}),
    gradient_bytes=frozenset({4}),
    packing=frozenset({"wrapped"}),
    ddp_bucket_size=False,
    synchronizes_every_microbatch=True,
    # enable_cpu_offload also moves parameters and gradients, which is not priced.
    optimizer_offload_zero_stages=frozenset(),
    host_checkpoint_zero_stages=frozenset(),
    pinned_checkpoints=True,
    reshards_data_parallel=False,
    recompute=frozenset({Recompute.NONE, Recompute.FULL}),
    recompute_modules=frozenset(),
    recompute_num_layers=False,
    recompute_per_stage=False,
    largest_chunks=1,
    zero_bubble_needs_virtual_pipeline=True,
    tensor_beyond_kv_heads=False,
    rank_orders=frozenset({DEFAULT_RANK_ORDER}),
    expert_tensor_parallel=False,
    expert_folding_needs_sharding=True,
    moe_tensor_needs_experts=True,
    ragged_experts=True,
    dispatchers=frozenset({"alltoall", "deepep", "hybridep"}),
    cuda_graphs=frozenset({"none", "full_iteration"}),
    cuda_graphs_with_pipeline=frozenset({"none"}),
    full_graph_dispatchers=frozenset(),
    precisions=frozenset({"bf16", "fp32"}),
    adapters=frozenset({"lora"}),
    adapter_targets=frozenset(ADAPTER_TARGETS) - {EXPERTS, "q_a_proj", "kv_a_proj_with_mqa"},
    fused_layers=frozenset({QKV}),
    frozen_in_compute_type=False,
    adapter_limits=frozenset({("unsupported", frozenset({ModelFeature.GATED_DELTA}))}),
    mtp=False,
    tied_embeddings_with_pipeline=False,
    unsupported=frozenset(
        {
            ModelFeature.MLA_BIAS,
            ModelFeature.QK_NORM_FULL,
            ModelFeature.QK_NORM_UNWEIGHTED,
            ModelFeature.LATENT_EXPERTS,
            *(NEW_MIXERS - {ModelFeature.GATED_DELTA, ModelFeature.OUTPUT_GATE}),
            *LONGCAT,
            ModelFeature.UNGATED_FFN,
            ModelFeature.FFN_BIAS,
            ModelFeature.SOFTMAX_CORRECTION,
        }
    ),
    restrictions=restricted(ModelFeature.GATED_DELTA, context_parallel=False),
)

ON_PROCESSORS: Final = replace(
    TORCHTITAN_0_3,
    pipeline=False,
    context_parallel=False,
    packing=frozenset(),
    pinned_checkpoints=False,
    dispatchers=frozenset({"alltoall"}),
    cuda_graphs=frozenset({"none"}),
    unsupported=TORCHTITAN_0_3.unsupported | {ModelFeature.GATED_DELTA},
)


def saved_bytes(tune: Adapters | None, zero_stage: int, precision: str) -> SavedBytes:
    """Return bytes of a parameter: `training.dtype`, that of frozen ones and of moments, too."""
    parameter_bytes = 2.0 if tune is not None and tune.dtype == "bf16" else 4.0
    return SavedBytes(trained=3.0 * parameter_bytes, frozen=parameter_bytes)


TARGETS: Final = (
    Target(
        capabilities=TORCHTITAN_0_3,
        family="torchtitan",
        software="torch-fsdp",
        on_processors=ON_PROCESSORS,
        saved_bytes=saved_bytes,
    ),
)
FORMATS: Final = (
    LaunchFormat(name="torchtitan", reader="read_primus", recognised_by="trains_under_primus"),
    LaunchFormat(name="torchtitan", suffixes=(".toml",)),
)
METRICS: Final = "torchtitan"
