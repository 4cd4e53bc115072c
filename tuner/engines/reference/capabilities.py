"""The reference training step that ships with moetune (profilers/steps/).

It saves nothing: where a spec states failures, the forecast is that of a program which saves as
PyTorch's distributed checkpoints do, and restores any layout.
"""

from dataclasses import replace
from typing import Final

from tuner.catalog.manifest import DEFAULT_RANK_ORDER, Capabilities
from tuner.catalog.saved_bytes import SINGLE_COPY, SavedBytes
from tuner.catalog.target import Target
from tuner.spec.features import ModelFeature
from tuner.spec.tune import Adapters

REFERENCE: Final = Capabilities(
    names=("reference",),
    zero_stages=frozenset({0, 1, 3}),
    zero_stages_with_pipeline=frozenset({0, 1}),
    shard_ranks_zero_stages=frozenset(),
    gradient_bytes=frozenset({4}),
    optimizer_offload_zero_stages=frozenset(),
    host_checkpoint_zero_stages=frozenset(),
    saves_during_run=False,
    overlap_grad_reduce=False,
    ddp_bucket_size=False,
    overlap_param_gather=False,
    recompute_modules=frozenset({"moe"}),
    recompute_num_layers=False,
    schedules=frozenset({"1f1b", "interleaved"}),
    # `microbatches` of profilers/steps/config.py; gradients are weighted by tokens.
    unequal_microbatches=True,
    context_parallel=False,
    tensor_beyond_kv_heads=False,
    sequence_parallel_optional=False,
    moe_needs_sequence_parallel=True,
    rank_orders=frozenset({DEFAULT_RANK_ORDER}),
    expert_tensor_parallel=False,
    dispatchers=frozenset({"alltoall", "hierarchical"}),
    cuda_graphs=frozenset({"none"}),
    precisions=frozenset({"bf16", "fp32"}),
    adapters=frozenset({"lora"}),
    adapter_dtypes=frozenset({"fp32"}),
    # Hierarchical dispatch is priced for training all weights alone.
    adapter_limits=frozenset(
        {
            ("tensor_parallel", False),
            ("pipeline", False),
            ("dispatchers", frozenset({"alltoall"})),
        }
    ),
    mtp=False,
    tied_embeddings_with_pipeline=False,
    unsupported=frozenset(ModelFeature),
)

TORCHRUN: Final = replace(REFERENCE, names=("torchrun",))
"""Capabilities of the reference program under its launcher's name."""


def saved_bytes(tune: Adapters | None, zero_stage: int, precision: str) -> SavedBytes:
    """Return bytes of a parameter; frozen ones are drawn from the seed again and not saved."""
    return SINGLE_COPY


TARGETS: Final = tuple(
    Target(
        capabilities=capabilities,
        family="torchtitan",
        software="torch-fsdp",
        runs_same_layers=False,
        saved_bytes=saved_bytes,
    )
    for capabilities in (REFERENCE, TORCHRUN)
)
