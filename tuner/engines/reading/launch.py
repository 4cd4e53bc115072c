"""The settings of a launch file or command, independent of its engine.

`LaunchSettings` is what a reader returns, with the engine's documented defaults filled in. What
depends on the model or the number of devices is filled in by tuner/estimate/configuration.py.
Settings that a message may name keep the spelling of their file (`spelled`).

Not covered: data, tokenizer, optimizer and learning rate, which affect neither time nor memory
here.
"""

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field

from profilers.records import Record
from profilers.steps.config import Recompute
from tuner.catalog.manifest import DEFAULT_RANK_ORDER
from tuner.spec.fields import Count
from tuner.spec.tune import Tune


class TrainingEngine(StrEnum):
    """Programs whose launches are read."""

    MEGATRON = "megatron"
    """Megatron-LM's programs, as arguments or YAML."""
    TORCHTITAN = "torchtitan"
    """torchtitan's TOML, up to its change to Python configs."""
    DEEPSPEED = "deepspeed"
    """DeepSpeed's JSON."""
    TRANSFORMERS = "transformers"
    """Transformers' Trainer on replicas or PyTorch's FSDP."""
    MS_SWIFT = "ms-swift"
    """Megatron-SWIFT, as arguments or YAML."""

    @property
    def is_megatron(self) -> bool:
        """The program runs on megatron-core."""
        return self in (TrainingEngine.MEGATRON, TrainingEngine.MS_SWIFT)


PACKED: Final = (
    "samples are packed: attention is priced as over one sample of the whole length; shorter ones"
    " attend to less, so that long sequences take less time than this"
)
"""Note on samples that share a sequence without attending to each other."""


class TokenDispatcher(StrEnum):
    """Method by which tokens reach their experts."""

    ALLGATHER = "allgather"
    """Every rank of the expert group gets every token."""
    ALLTOALL = "alltoall"
    """Each copy goes to its expert's rank."""
    DEEPEP = "deepep"
    """Each token goes once to every node that needs it."""
    HYBRIDEP = "hybridep"
    """Each token goes once to every scale-up domain, such as a rack, that needs it."""


class Graphs(StrEnum):
    """Scope of CUDA graphs."""

    NONE = "none"
    """Nothing; every kernel is launched by the host."""
    PARTIAL = "partial"
    """Parts of a layer, or layers."""
    FULL = "full_iteration"
    """A whole step."""


class StageContent(Record):
    """Contents of one pipeline stage."""

    layers: Annotated[int, Field(ge=0)] = 0
    """Transformer layers."""
    embedding: bool = False
    mtp_layers: Annotated[int, Field(ge=0)] = 0
    loss: bool = False


class StatedSize(Record):
    """A size of the model that the launch states itself."""

    size: str
    """Name of the size in tuner/estimate/stated_model.py, e.g. `num_layers`."""
    value: int | bool | tuple[int, ...]
    said: str
    """The size as the launch states it, e.g. `--num-layers 61`."""


Effect = Literal["memory", "time", "memory and time"]


class UnpricedSetting(Record):
    """A setting without a price that changes bytes or seconds by more than the bands allow for."""

    said: str
    """The setting as the launch says it."""
    changes: Effect
    """Part of the prediction that does not hold."""
    how: str
    """Effect of the setting, for the message."""


class LaunchSettings(Record):
    """One launch, as its reader understood it."""

    engine: TrainingEngine
    source: str
    """The file, or `the command`."""
    devices: Count | None = None
    """World size; absent where the launch leaves it to the scheduler."""
    devices_per_node: Count | None = None

    rank_order: str = DEFAULT_RANK_ORDER
    """Groups from neighbouring to distant ranks."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables that the launch sets and that legality depends on."""

    tensor: Count = 1
    context: Count = 1
    pipeline: Count = 1
    expert: Count = 1
    expert_tensor: Count | None = None
    """Degree of expert tensor parallelism; absent: that of the dense layers."""
    data: Count | None = None
    """Data-parallel degree; absent: the remaining devices."""
    replicas: Count = 1
    """HSDP, or several instances of the distributed optimizer: copies of the sharded state."""
    shard_ranks: Count | None = None
    """Alternative to `replicas`: ranks that share one copy."""
    virtual_pipeline: Count | None = None
    """Model chunks per pipeline rank."""
    layers_per_virtual_stage: Count | None = None
    """Alternative to `virtual_pipeline`."""
    interleave_group: Count | None = None
    """Micro-batches that an interleaved schedule runs through one chunk before the next."""
    layout: tuple[StageContent, ...] = ()
    """Every stage in execution order; empty: the engine divides the layers."""
    letters: tuple[str, ...] = ()
    """Every stage's layers as letters (tuner/engines/reading/hybrid_pattern.py); one entry: all
    layers, which the engine divides; empty: the launch has no letters."""
    mtp_letters: str = ""
    """Letters of one multi-token-prediction layer."""
    first_stage_layers: Count | None = None
    last_stage_layers: Count | None = None
    embedding_as_layers: Annotated[int, Field(ge=0)] = 0
    """Layers that the embedding counts for when the engine divides them."""
    loss_as_layers: Annotated[int, Field(ge=0)] = 0
    uneven_division: bool = False
    """The engine gives earlier stages one layer more where the division has a remainder."""
    zero_bubble: bool = False
    sequence_parallel: bool = False

    sequence: Count | None = None
    """Tokens of one sequence; absent: the spec's."""
    samples_vary: bool = False
    """A sequence is one sample, as long as it is, and `sequence` the longest that it may be."""
    packing: str = ""
    """Rule by which documents are packed into sequences that keep them apart
    (tuner/costs/train/packing.py); empty: none, or documents attend to each other."""
    micro_batch: Count = 1
    micro_batch_follows: bool = False
    """The micro-batch is not stated; it follows from batch, accumulation and devices."""
    global_batch: Count | None = None
    """Sequences of one step; absent: the spec's, or `accumulation` if that is set."""
    accumulation: Count | None = None
    """Micro-batches of one replica in one step."""
    flush: Count | None = None
    """Sequences of one replica between pipeline flushes; absent: those of a step."""

    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    precision_follows: bool = False
    """The launch leaves the precision open; the goal's counts."""
    fp8_recipe: str = ""
    """The engine's name of its 8-bit or 4-bit recipe; empty without such GEMMs."""
    opaque_gemm_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the layers whose GEMMs checkpointing by operation does not see."""
    gradient_bytes: Literal[2, 4] = 4
    master_bytes: Annotated[int, Field(ge=1, le=8)] | None = None
    """Bytes of the parameter that the optimizer updates; absent: as the engine usually has it."""
    moments_bytes: Annotated[int, Field(ge=1, le=8)] | None = None
    """Bytes of the optimizer's moments of a parameter together; absent: as the engine has them."""
    shards_optimizer: bool = True
    """The engine can shard the state of the optimizer that the launch names."""
    logit_bytes: Annotated[float, Field(ge=0.0)] = 0.0
    """Bytes of a logit at the head's backward pass; 0: as the engine's software."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    recompute: Recompute = Recompute.NONE
    recompute_modules: tuple[str, ...] = ()
    """Modules of selective recomputation, by Megatron's names."""
    recompute_method: Literal["", "uniform", "block"] = ""
    recompute_layers: Count | None = None
    """Method `uniform`: layers of one unit. `block`: layers that are recomputed of every stage,
    where the model chunks of interleaving are stages."""
    recompute_ratio: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Share of the layers that is recomputed, where an engine says it so."""
    recompute_by_op: bool = False
    """torchtitan's selective activation checkpointing by operation."""
    chunks: Count = 1
    """MemFine's `--mlp-chunks-for-training`."""
    dispatcher: TokenDispatcher = TokenDispatcher.ALLTOALL
    expert_capacity: Annotated[float, Field(gt=0.0)] | None = None
    """Copies that an expert takes at most, over those of balance; absent: all that are routed."""
    pads_to_capacity: bool = False
    """Every expert computes as many copies, padded where fewer are routed."""
    sequential_experts: bool = False
    """Local experts run one after the other rather than as grouped GEMMs."""
    a2a_overlap: bool = False
    shared_expert_overlap: bool = False
    overlap_grad_reduce: bool = False
    ddp_bucket_size: Count | None = None
    """Parameters of one bucket of gradients; absent: the engine's own size."""
    overlap_param_gather: bool = False
    overlap_tensor: bool = False
    cuda_graph: Graphs = Graphs.NONE
    compiled: frozenset[Literal["model", "loss"]] | None = None
    """Parts that torchtitan compiles, a loss in chunks included; absent: as its plans assume."""
    buffered_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of all copies that a rank could receive, which HybridEP's buffers hold without asking
    how many come; 0: it asks."""
    drops_exchanged: bool = False
    """Checkpointing by operation repeats the all-to-alls of experts."""
    flash_attention: bool = True
    dropout: bool = False
    optimizer_offload_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    parameter_offload: bool = False
    """Shards of parameters and of their gradients live in host memory (ZeRO 3)."""
    activation_offload_layers: Annotated[int, Field(ge=0)] = 0
    activation_offload: bool = False
    """Saved activations of every layer live in host memory, module by module."""
    mtp_layers: Annotated[int, Field(ge=0)] = 0
    save_interval: Count | None = None
    """Steps from one checkpoint to the next; absent: none is saved before the end."""
    saves_nowhere: bool = False
    """The launch names no folder, without which Megatron-LM saves nothing at any interval."""
    saves_in_background: bool = False
    """Training waits for the copy to host memory only."""
    saves_from_pinned_memory: bool = False
    """Checkpoints saved in the background are copied into pinned memory that is allocated once."""
    kept_checkpoints: Count | None = None
    """Newest checkpoints that are not removed; absent: all of them."""
    retain_interval: Count | None = None
    """Checkpoints of multiples of these steps are not removed either."""
    host_save_interval: Count | None = None
    """Steps from one checkpoint in the memory of nodes to the next; absent: none is."""
    host_copies: Annotated[int, Field(ge=1, le=1000)] = 1
    """Ranks that hold a rank's state, itself included."""
    replication_jump: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Ranks from one of them to the next; absent: a node."""
    restarts_in_process: bool = False
    """Training restarts inside its processes after failures that leave them."""
    tune: Tune | None = None
    """Weights that the launch trains; absent: those that the goal names."""
    reference_forwards: Annotated[int, Field(ge=0, le=3)] = 0
    """Forward passes without gradients of a micro-batch: of a frozen copy of the model, or of the
    model without its adapters, and for a KL estimate."""
    sequences_per_sample: Literal[1, 2] = 1
    """Sequences that a sample of the launch's batches is: a chosen and a rejected answer."""
    stored_bytes: Literal[2, 4] = 2
    """Type of the parameters that Transformers loads, where it computes in bf16 (autocast)."""
    has_transformers_loss: bool = False
    """The model is Transformers' own, whose loss casts logits to fp32."""
    balance: str = ""
    """The flag that balances tokens over experts, as the launch writes it; empty: none."""
    differing_settings: dict[str, str] = Field(default_factory=dict)
    """Flags of the launch for rows of tuner/engines/priced_settings.py whose value differs from the
    priced one, by name of the row."""

    unpriced: tuple[UnpricedSetting, ...] = ()
    """Other settings with which the prediction does not hold."""
    stated: tuple[StatedSize, ...] = ()
    spelled: dict[str, str] = Field(default_factory=dict)
    """Spelling of each field of this record in the launch, e.g. `tensor`: `--tensor-model-...`."""
    understood: tuple[str, ...] = ()
    """Settings that the price depends on, or that were compared with the model."""
    ignored: tuple[str, ...] = ()
    """Settings that change nothing in the price."""
    deprecated: tuple[str, ...] = ()
    """Deprecated settings, and their replacement."""
    notes: tuple[str, ...] = ()
    """Assumptions of the reader."""

    def name(self, field: str) -> str:
        """Return how the launch spells a field, or how its engine would."""
        return self.spelled.get(field, field.replace("_", " "))
