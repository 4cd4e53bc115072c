"""DeepSpeed 0.19: ZeRO, AutoTP and AutoEP around a model in the user's code.

Read from the package deepspeed 0.19.8 (`runtime/config.py`, `runtime/pipe/engine.py`,
`module_inject/auto_ep_config.py`, `auto_ep_folding.py`):

- ZeRO stages 2 and 3 refuse a pipeline, which is a `PipelineModule` of the user's code with equal
  stages and the 1F1B schedule.
- Without ZeRO gradients have the type of the parameters (`_do_optimizer_sanity_check` of
  `runtime/engine.py`): fp32 gradients of bf16 parameters need stage 1, even on one replica.
- AutoTP splits GEMMs, not the sequence, and not under a pipeline; with experts it needs AutoEP, and
  then no state may be offloaded to host memory.
- AutoEP distributes experts over any of a stage's ranks and never splits one; it dispatches tokens
  by all-to-all or DeepEP. It cannot convert a pipeline; `deepspeed.moe.layer.MoE`, which pipelines
  use, has all-to-all only (`moe/sharded_moe.py`).
- DeepSeek-V4 is a class of transformers that AutoTP's patterns do not fit (its output projection is
  in groups, its key is one for all heads), and AutoEP's layers (`module_inject/auto_ep_layer.py`)
  take no token ids, which its first routers need: replicas and ZeRO alone.
- LongCat-Flash is the code beside its checkpoint (transformers 5.17 to 5.24 build gate and up
  projections for experts without weights, too, 741B parameters instead of 561B). AutoEP's layers
  score as many experts as they hold (`module_inject/auto_ep_layer.py`), and layers that a shortcut
  joins are no sequence of a `PipelineModule`: replicas and ZeRO alone.
- Recomputation is turned on in the model's code, for whole layers.
- A checkpoint is restored in another layout once `checkpoint/ds_to_universal.py` has converted it
  and the configuration has `load_universal`, not by itself.

`save_checkpoint` writes the module in its own type beside the fp32 state of what is trained; stage
3 writes placeholders for the module, and from stage 2 on frozen weights by themselves, unless it is
called with `exclude_frozen_parameters` (`_save_checkpoint`, `_get_zero_frozen_param_attributes`).

Adapters are PEFT's, attached before `deepspeed.initialize`, which casts them to bf16 with the
model; ZeRO then has fp32 masters of them alone, and stage 3 partitions frozen weights too. Started
with peft 0.21.2 on one and two ranks of a CPU, stages 0 to 3, adapters of attention and of experts.
What does not run:

- AutoEP names modules of the bare model and finds no MoE layer behind PEFT's `base_model.model`
  ("no MoE layers detected"). AutoTP replaces parameters that the optimizer was given ("KeyError:
  Parameter"). A `PipelineModule` is no model of Transformers.
- Adapters of experts alone under stage 3, unless the model's inputs need gradients ("size of tensor
  a (0) must match").

Two more ran and are not planned, because they are priced for the loop of `transformers-peft` alone:
adapters of experts, whose merged weights PEFT keeps unsharded, and frozen weights in 4 bits
(bitsandbytes 0.50.2, stages 1 and 3), which are dequantised.

Not covered: Ulysses sequence parallelism, ZenFlow, ZeRO++, MiCS and parameter offload.
"""

from dataclasses import replace
from typing import Final

from profilers.steps.config import Recompute
from tuner.catalog.manifest import DEFAULT_RANK_ORDER, Capabilities, restricted
from tuner.catalog.saved_bytes import SINGLE_COPY, SavedBytes
from tuner.catalog.target import LaunchFormat, Target
from tuner.engines.peft.lora import NETWORKS_BECOME_EXPERTS, WITHOUT_OUT_PROJ
from tuner.spec.features import LONGCAT, ModelFeature
from tuner.spec.tune import ADAPTER_TARGETS, EXPERTS, Adapters

DEEPSPEED_0_19: Final = Capabilities(
    names=("deepspeed",),
    release="0.19",
    source="pypi.org/project/deepspeed/0.19.8",
    zero_stages_with_pipeline=frozenset({0, 1}),
    unsharded_gradient_bytes=frozenset({2}),
    shard_ranks_zero_stages=frozenset(),
    optimizer_offload_zero_stages=frozenset({1, 2, 3}),
    distributed_checkpoints=False,
    host_checkpoint_zero_stages=frozenset(),
    background_checkpoint_zero_stages=frozenset(),
    reshards=False,
    reshard_converters=frozenset({"ds_to_universal.py"}),
    ddp_bucket_size=False,
    recompute=frozenset({Recompute.NONE, Recompute.FULL}),
    recompute_modules=frozenset(),
    recompute_num_layers=False,
    recompute_per_stage=False,
    largest_chunks=1,
    schedules=frozenset({"1f1b"}),
    virtual_pipeline=False,
    context_parallel=False,
    uneven_layout=False,
    empty_stages=False,
    tensor_with_pipeline=False,
    tensor_beyond_kv_heads=False,
    sequence_parallel=False,
    rank_orders=frozenset({DEFAULT_RANK_ORDER}),
    expert_tensor_parallel=False,
    moe_tensor_needs_experts=True,
    moe_offload_needs_one_tensor_rank=True,
    dispatchers=frozenset({"alltoall", "deepep"}),
    dispatchers_with_pipeline=frozenset({"alltoall"}),
    cuda_graphs=frozenset({"none"}),
    precisions=frozenset({"bf16", "fp32"}),
    adapters=frozenset({"lora"}),
    adapter_targets=frozenset(ADAPTER_TARGETS) - {EXPERTS},
    networks_become_experts=NETWORKS_BECOME_EXPERTS,
    adapter_dtypes=frozenset({"bf16"}),
    adapter_limits=frozenset(
        {("pipeline", False), ("tensor_parallel", False), ("expert_parallel", False)}
    ),
    mtp=False,
    tied_embeddings_with_pipeline=False,
    restrictions=restricted(
        ModelFeature.COMPRESSED_ATTENTION,
        *sorted(LONGCAT),
        tensor_parallel=False,
        expert_parallel=False,
        pipeline=False,
    )
    | WITHOUT_OUT_PROJ,
)


def saved_bytes(tune: Adapters | None, zero_stage: int, precision: str) -> SavedBytes:
    """Return bytes of a parameter: the module's weights, and master and moments in fp32.

    Stage 3 saves no module, stage 2 frozen weights twice. In fp32 stages 1 and 2 still save a
    master beside the module (16 bytes), and without ZeRO the module is its own. Seen at every stage
    of both precisions with 13.5M parameters on two ranks of a CPU, adapters aside.
    """
    weight = 4.0 if precision == "fp32" else 2.0
    frozen = 2.0 * weight if zero_stage == 2 else weight
    if zero_stage == 3 or (zero_stage == 0 and precision == "fp32"):
        return replace(SINGLE_COPY, frozen=frozen)
    return SavedBytes(trained=weight + SINGLE_COPY.trained, frozen=frozen)


TARGETS: Final = (
    Target(
        capabilities=DEEPSPEED_0_19,
        family="llm-foundry",
        memory_family="deepspeed",
        software="torch-fsdp",
        runs_same_layers=False,
        saved_bytes=saved_bytes,
    ),
)
FORMATS: Final = (LaunchFormat(name="deepspeed", suffixes=(".json",)),)
METRICS: Final = "deepspeed"
