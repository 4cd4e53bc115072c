"""A training configuration as a plan decides it and a launch has it."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from profilers.records import Record
from profilers.steps.config import Count, Recompute, Size
from tuner.config.microbatches import most_microbatches, spanned_replicas, split_microbatches


class TrainDecision(Record):
    """One launchable training configuration.

    World = TP * CP * DP * PP = ETP * EP * EDP * PP (Megatron's parallel folding).
    """

    tensor_model_parallel_size: Count
    pipeline_model_parallel_size: Count
    virtual_pipeline_model_parallel_size: Count
    context_parallel_size: Count
    data_parallel_size: Count
    expert_model_parallel_size: Count
    expert_tensor_parallel_size: Count
    expert_data_parallel_size: Count
    sequence_parallel: bool
    micro_batch_size: Count
    zero_stage: Literal[0, 1, 2, 3]
    shard_ranks: Count | None = None
    """HSDP: data and context ranks that share one copy of the sharded state; None: all of them."""
    dispatcher: Literal["alltoall", "allgather", "deepep", "hybridep", "hierarchical"] = "alltoall"
    """Token dispatcher between expert-parallel ranks."""
    a2a_overlap: bool = False
    """Dispatch and combine of one micro-batch overlap another's compute."""
    recompute: Recompute
    """Strongest level of recomputation on any stage; see `stage_recompute`."""
    recompute_modules: tuple[str, ...] = ()
    """Modules that selective recomputation covers, by Megatron's names, e.g. `moe`."""
    recompute_num_layers: Count | None = None
    """Layers of every stage that full recomputation covers; None: all."""
    stage_recompute: Annotated[tuple[Recompute, ...], Field(min_length=1)]
    """Level of recomputation of each stage, in execution order."""
    chunks: Annotated[tuple[Count, ...], Field(min_length=1)]
    """Number of MemFine chunks of the MoE layers of each stage, in execution order."""
    pipeline_layout: Annotated[tuple[Size, ...], Field(min_length=1)]
    """Transformer layers of each stage in execution order; stage s runs on pipeline rank s % PP."""
    mtp_num_layers: Size = 0
    fp8_recipe: str = ""
    """Precision with 8-bit or 4-bit GEMMs, by its name in tuner/spec/goal.py, e.g. `mxfp8`; empty
    for bf16."""
    schedule: Literal["1f1b", "interleaved", "zero_bubble"] | None = None
    """Order of passes in the pipeline; None: interleaved where virtual, otherwise 1F1B."""
    rank_order: str = "tp-cp-ep-dp-pp"
    """Order of the groups from neighbouring to distant ranks; decides which groups lie inside a
    scale-up domain."""
    cuda_graph: Literal["none", "partial", "full_iteration"] = "none"
    overlap_grad_reduce: bool = False
    """Gradient reduction overlaps the backward pass."""
    ddp_bucket_size: Count | None = None
    """Parameters of one bucket of overlapped gradient reduction; None: the engine's own size."""
    overlap_param_gather: bool = False
    """The parameter all-gather of the sharded optimizer overlaps the forward pass."""
    gradient_bytes: Literal[2, 4] = 4
    """Bytes of the main gradient of a parameter."""
    optimizer_offload: bool = False
    """The optimizer state lives in host memory."""
    activation_offload: bool = False
    """Saved activations live in host memory."""
    ends_as_layers: bool = False
    """Embedding and loss were counted as layers when the stages were balanced."""

    @property
    def num_devices(self) -> int:
        """Devices that the decision needs."""
        return (
            self.tensor_model_parallel_size
            * self.context_parallel_size
            * self.data_parallel_size
            * self.pipeline_model_parallel_size
        )

    @property
    def num_stages(self) -> int:
        """Pipeline stages, counting every model chunk of interleaving."""
        return self.pipeline_model_parallel_size * self.virtual_pipeline_model_parallel_size

    @property
    def num_state_copies(self) -> int:
        """Copies of the sharded training state; 1 unless `shard_ranks` says otherwise."""
        shared = self.data_parallel_size * self.context_parallel_size
        return max(1, shared // (self.shard_ranks or shared))

    def num_microbatches(self, global_batch_size: int) -> int:
        """Micro-batches of the most-loaded pipeline in a step; others may have one less."""
        return int(
            most_microbatches(
                global_batch_size, micro_batch=self.micro_batch_size, data=self.data_parallel_size
            )
        )

    def microbatches_by_replica(self, global_batch_size: int) -> tuple[int, ...]:
        """Micro-batches of each data-parallel replica in one optimizer step."""
        ranks = self.tensor_model_parallel_size * self.context_parallel_size
        group = self.expert_tensor_parallel_size * self.expert_model_parallel_size
        has_pipeline = self.pipeline_model_parallel_size > 1
        return split_microbatches(
            global_batch_size // self.micro_batch_size,
            replicas=self.data_parallel_size,
            equal=int(spanned_replicas(ranks=ranks, group=group)) if has_pipeline else 1,
        )

    @model_validator(mode="after")
    def _consistent(self) -> "TrainDecision":
        per_stage = {len(self.stage_recompute), len(self.chunks), len(self.pipeline_layout)}
        if per_stage != {self.num_stages}:
            raise ValueError(f"{self.num_stages} stages, but lists of {sorted(per_stage)} entries")
        experts = (
            self.expert_tensor_parallel_size
            * self.expert_model_parallel_size
            * self.expert_data_parallel_size
            * self.pipeline_model_parallel_size
        )
        if experts != self.num_devices:
            raise ValueError(f"ETP*EP*EDP*PP = {experts}, TP*CP*DP*PP = {self.num_devices}")
        shared = self.data_parallel_size * self.context_parallel_size
        copies = self.num_state_copies
        if shared != copies * (self.shard_ranks or shared):
            raise ValueError(
                f"shard_ranks {self.shard_ranks} does not divide data_parallel_size *"
                f" context_parallel_size = {shared}"
            )
        if self.data_parallel_size % copies or self.expert_data_parallel_size % copies:
            raise ValueError(
                f"shard_ranks {self.shard_ranks} makes {copies} copies, which do not divide"
                f" data_parallel_size {self.data_parallel_size} and expert_data_parallel_size"
                f" {self.expert_data_parallel_size}"
            )
        return self
