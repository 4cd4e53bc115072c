"""The input of a reference training step (StepConfig) and its report (StepReport).

Both are JSON files: the launcher writes `step.json`, every rank reads it, rank 0 writes the report.

Ranks follow Megatron's order, tensor fastest, then data, then pipeline:

    rank = pipeline_rank * (data * tensor) + data_rank * tensor + tensor_rank

Inside a pipeline stage the expert-parallel groups are blocks of `expert` consecutive ranks
(parallel folding: expert may exceed data), and data * tensor / expert such blocks hold the same
experts. Expert tensor parallelism is 1.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from profilers.records import Record, Seconds

Count = Annotated[int, Field(ge=1, le=2**31)]
"""A whole number of things, at least one."""
Size = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""Bytes, or a whole number of things."""


class LayerKind(StrEnum):
    """Kind of block after attention in a layer."""

    DENSE = "dense"
    """A SwiGLU feed-forward network."""
    MOE = "moe"
    """A router, routed SwiGLU experts and, where configured, a shared expert."""
    NONE = "none"
    """Nothing: the layer is a token mixer alone. The reference step does not train it."""


class Recompute(StrEnum):
    """Activations that the backward pass computes again instead of keeping them."""

    NONE = "none"
    """Nothing; every activation is kept."""
    SELECTIVE = "selective"
    """Dispatch, experts and combine, chunk by chunk (MemFine)."""
    FULL = "full"
    """The whole layer; inside it the experts chunk by chunk when there is more than one chunk."""


class Dispatcher(StrEnum):
    """All-to-all by which token copies reach their experts' ranks and come back."""

    FLAT = "flat"
    """One all-to-all over the expert group, one row for every copy."""
    HIERARCHICAL = "hierarchical"
    """One row for every node that a token needs; it is copied inside the node (HierMoE)."""


class TransformerShape(Record):
    """The transformer to train: GQA attention, SwiGLU, RMS norms, rotary positions, no biases."""

    hidden_size: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    vocab_size: Count
    layers: Annotated[tuple[LayerKind, ...], Field(min_length=1)]
    dense_ffn_size: Size = 0
    num_experts: Size = 0
    top_k: Size = 0
    moe_ffn_size: Size = 0
    """Width of one routed expert."""
    shared_ffn_size: Size = 0
    """Width of the shared expert; 0 means none."""
    tie_embeddings: bool = False
    norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-5
    rope_theta: Annotated[float, Field(gt=0.0)] = 10_000.0

    @model_validator(mode="after")
    def _consistent(self) -> "TransformerShape":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} % num_kv_heads {self.num_kv_heads} != 0")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for rotary positions")
        if LayerKind.DENSE in self.layers and not self.dense_ffn_size:
            raise ValueError("dense layers need dense_ffn_size")
        if LayerKind.MOE in self.layers:
            if not (self.num_experts and self.moe_ffn_size):
                raise ValueError("moe layers need num_experts and moe_ffn_size")
            if not 1 <= self.top_k <= self.num_experts:
                raise ValueError(f"top_k {self.top_k} is not in 1..{self.num_experts}")
        return self


class Parallelism(Record):
    """Degrees of parallelism and how the data-parallel state is sharded."""

    tensor: Count = 1
    pipeline: Count = 1
    virtual_pipeline: Count = 1
    """Model chunks per pipeline rank; above 1 the schedule is interleaved 1F1B."""
    data: Count = 1
    expert: Count = 1
    zero_stage: Literal[0, 1, 3] = 0
    """0: gradients all-reduced. 1: gradients reduce-scattered once a step, optimizer sharded,
    parameters gathered once a step. 3: parameters sharded too, gathered layer by layer."""
    dispatcher: Dispatcher = Dispatcher.FLAT
    ranks_per_node: Count | None = None
    """Consecutive ranks that share a node; absent means as torchrun started them."""

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.tensor * self.pipeline * self.data

    @model_validator(mode="after")
    def _consistent(self) -> "Parallelism":
        inside = self.tensor * self.data
        if inside % self.expert:
            raise ValueError(f"expert {self.expert} does not divide tensor * data = {inside}")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError("virtual_pipeline above 1 needs pipeline above 1")
        if self.zero_stage == 3 and self.pipeline > 1:
            raise ValueError("zero_stage 3 needs pipeline 1")
        if self.ranks_per_node is not None and not self.spans_nodes_evenly(self.ranks_per_node):
            raise ValueError(
                f"dispatcher hierarchical needs ranks_per_node {self.ranks_per_node} to divide"
                f" expert {self.expert}, or to be a multiple of it"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave the younger fields out where they say nothing: older releases refuse them."""
        fields: dict[str, Any] = write(self)
        if self.dispatcher is Dispatcher.FLAT:
            fields.pop("dispatcher", None)
        if self.ranks_per_node is None:
            fields.pop("ranks_per_node", None)
        return fields

    def spans_nodes_evenly(self, ranks_per_node: int) -> bool:
        """Return whether node boundaries cut expert groups as the dispatcher needs it."""
        return (
            self.dispatcher is Dispatcher.FLAT
            or self.expert % ranks_per_node == 0
            or ranks_per_node % self.expert == 0
        )


class Stage(Record):
    """One model chunk of the pipeline, in execution order."""

    num_layers: Size
    recompute: Recompute = Recompute.NONE
    chunks: Count = 1
    """MemFine chunks of every MoE layer of the stage; ignored when `max_chunk_tokens` is set."""
    max_chunk_tokens: Annotated[int, Field(ge=1)] | None = None
    """MemFine's s'_max: the received token copies one rank can hold at once. When set, every MoE
    layer picks at run time the smallest power of two of chunks that keeps each rank of the
    expert group under it, at most `max_chunks`."""
    max_chunks: Count = 8

    @model_validator(mode="after")
    def _consistent(self) -> "Stage":
        if self.recompute is Recompute.NONE and (self.chunks > 1 or self.max_chunk_tokens):
            raise ValueError("chunks need recompute: selective or full")
        return self


class TokenRouting(Record):
    """Choice of experts by the tokens."""

    mode: Literal["learned", "forced"] = "learned"
    """`forced` reproduces `load_ratio` exactly (up to rounding, per sequence)."""
    load_ratio: tuple[tuple[float, ...], ...] = ()
    """[MoE layers][experts]: share of the token copies; rows sum to 1. Empty means uniform."""
    balancing: Literal["none", "aux_loss", "loss_free"] = "aux_loss"
    """Sequence-wise auxiliary loss, or DeepSeek-V3's bias updated once a step."""
    coefficient: Annotated[float, Field(ge=0.0)] = 1e-2
    """Weight of the auxiliary loss, or step of the bias."""


class Adapters(Record):
    """Low-rank adapters beside frozen weights: y = x W^T + (alpha / rank) (x A^T) B^T."""

    rank: Count
    alpha: Annotated[float, Field(gt=0.0)]
    targets: Annotated[
        tuple[
            Literal[
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
                "experts",
            ],
            ...,
        ],
        Field(min_length=1),
    ]
    """Matrices of attention, of dense and shared networks, and of stacked experts: those have one
    adapter for gate and up together, and one for down."""

    @property
    def scale(self) -> float:
        """Return the factor on an adapter's output."""
        return self.alpha / self.rank


class StepConfig(Record):
    """Everything a rank needs to run the reference step."""

    schema_version: Literal[1] = 1
    # 1: first release.
    model: TransformerShape
    parallelism: Parallelism
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    """`pipeline * virtual_pipeline` entries in execution order; rank p runs stages p, p + P, ..."""
    sequence_length: Count
    global_batch_size: Count
    """Sequences per optimizer step."""
    micro_batch_size: Count
    microbatches: tuple[Count, ...] | None = None
    """Micro-batches of each data rank and step; absent: as many for each. A rank with fewer than
    the others runs empty ones beside their last, so that collectives match."""
    precision: Literal["fp32", "bf16", "fp64"] = "bf16"
    """Type of compute; parameters, gradients and optimizer state are kept in fp32, with fp64 in
    fp64."""
    routing: TokenRouting = TokenRouting()
    learning_rate: Annotated[float, Field(ge=0.0)] = 1e-3
    steps: Count = 8
    """Timed steps."""
    warmup_steps: Size = 2
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    adapters: Adapters | None = None
    """Trained adapters; absent: all weights are trained. Frozen weights are kept in the type of
    `precision`, adapters and their optimizer state in fp32."""
    memory_limit_bytes: Annotated[int, Field(ge=1)] | None = None
    """Bytes of each rank for model and step (profilers/steps/limit.py); absent: no limit."""

    @property
    def microbatches_by_rank(self) -> tuple[int, ...]:
        """Micro-batches of each data rank and step."""
        data = self.parallelism.data
        per_rank = self.global_batch_size // (self.micro_batch_size * data)
        return self.microbatches or (per_rank,) * data

    def sequences_of(self, data_rank: int) -> range:
        """Return which sequences of the global batch a data rank takes: a contiguous block."""
        counts, size = self.microbatches_by_rank, self.micro_batch_size
        first = sum(counts[:data_rank])
        return range(first * size, (first + counts[data_rank]) * size)

    @model_validator(mode="before")
    @classmethod
    def _refuse_checkpoints(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("checkpoints") is not None:
            raise ValueError(
                "checkpoints: the reference step saves none any more; remove the key, and train"
                " with an engine's launch files where a run has to go on"
            )
        return fields

    @model_validator(mode="after")
    def _consistent(self) -> "StepConfig":
        degrees = self.parallelism
        expected = degrees.pipeline * degrees.virtual_pipeline
        if len(self.stages) != expected:
            raise ValueError(f"{len(self.stages)} stages, pipeline * virtual is {expected}")
        total = sum(stage.num_layers for stage in self.stages)
        if total != len(self.model.layers):
            raise ValueError(f"stages hold {total} layers, the model has {len(self.model.layers)}")
        self._check_microbatches()
        if self.sequence_length % degrees.tensor:
            raise ValueError("sequence_length must be divisible by tensor (sequence parallelism)")
        if self.model.num_heads % degrees.tensor or self.model.num_kv_heads % degrees.tensor:
            raise ValueError("tensor must divide num_heads and num_kv_heads")
        if self.model.num_experts and self.model.num_experts % degrees.expert:
            raise ValueError(f"expert must divide num_experts {self.model.num_experts}")
        moe_layers = sum(kind is LayerKind.MOE for kind in self.model.layers)
        loads = self.routing.load_ratio
        if loads and (
            len(loads) != moe_layers or any(len(row) != self.model.num_experts for row in loads)
        ):
            raise ValueError(f"load_ratio must be [{moe_layers}][{self.model.num_experts}]")
        if self.adapters is not None and (degrees.tensor > 1 or degrees.pipeline > 1):
            raise ValueError("adapters need tensor 1 and pipeline 1")
        return self

    def _check_microbatches(self) -> None:
        degrees, size = self.parallelism, self.micro_batch_size
        counts = self.microbatches
        if counts is None:
            if self.global_batch_size % (size * degrees.data):
                raise ValueError(
                    f"global_batch_size {self.global_batch_size} % {size * degrees.data} != 0"
                )
        elif len(counts) != degrees.data or sum(counts) * size != self.global_batch_size:
            raise ValueError(
                f"microbatches {counts} must be a count for each of {degrees.data} data ranks,"
                f" with {self.global_batch_size / size:g} (global_batch_size / micro_batch_size)"
                " together"
            )
        counts = self.microbatches_by_rank
        if degrees.virtual_pipeline > 1 and any(count % degrees.pipeline for count in counts):
            raise ValueError("interleaved 1F1B needs num_microbatches divisible by pipeline")
        if degrees.pipeline == 1 or len(set(counts)) == 1:
            return
        if degrees.virtual_pipeline > 1:
            raise ValueError("microbatches that differ need virtual_pipeline 1")
        # Pipelines run no empty micro-batches: experts then wait for tokens that never come.
        of_rank = [counts[rank // degrees.tensor] for rank in range(degrees.tensor * degrees.data)]
        for first in range(0, len(of_rank), degrees.expert):
            group = of_rank[first : first + degrees.expert]
            if len(set(group)) > 1:
                raise ValueError(
                    f"with pipeline {degrees.pipeline}, the ranks of an expert group need as many"
                    f" microbatches each, not {group}"
                )

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave the younger fields out where they say nothing: older releases refuse them."""
        fields: dict[str, Any] = write(self)
        for name in ("adapters", "memory_limit_bytes", "microbatches"):
            if getattr(self, name) is None:
                fields.pop(name, None)
        return fields


class RankMemory(Record):
    """Bytes held by one rank."""

    rank: int
    parameters: Size
    """Parameter bytes the rank owns at rest (its shards)."""
    gradients: Size
    """Largest gradient bytes during a step."""
    optimizer: Size
    """AdamW moments."""
    activations: Size
    """Largest live sum of distinct storages saved for backward; parameters are not counted."""
    allocator_peak: Size | None = None
    """Peak of the device allocator; on a CPU only where memory was limited, absent otherwise."""


class StepReport(Record):
    """Report of rank 0 when all steps are done."""

    schema_version: Literal[1] = 1
    # 1: first release.
    device: str
    libraries: dict[str, str]
    step_s: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    """Wall time of each timed step, the slowest rank's."""
    losses: tuple[float, ...]
    """Global mean cross-entropy of each timed step, before its update."""
    tokens_per_step: int
    memory: tuple[RankMemory, ...]
    """One entry per rank."""
    loads: tuple[tuple[tuple[int, ...], ...], ...]
    """[timed steps][MoE layers][experts]: token copies of the global batch."""
    chunks_used: tuple[tuple[int, ...], ...]
    """[timed steps][MoE layers]: largest chunk count used in the step."""
    inter_node_bytes: tuple[Size, ...] = ()
    """[timed steps]: bytes that dispatch and combine, forward and backward, sent from one node to
    another, all ranks together: rows, gates and expert ids, but not the counts that announce them.
    Empty in reports of older releases."""
