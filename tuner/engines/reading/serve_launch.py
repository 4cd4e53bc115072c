"""A launch of a serving engine, independent of the engine's flag names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tuner.config.serve import Role
from tuner.costs.serve.cache_capacity import GIB
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.speculative import DraftMethod
from tuner.devices.datasheet import Generation
from tuner.engines.reading.serve_words import SortedFlags
from tuner.spec.cluster import Pool
from tuner.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The model and pool that the flags of a launch are checked against."""

    model: ModelSpec
    pool: Pool
    memory_bytes: float = 80 * GIB
    """Memory of a device, bytes; engines choose default batch sizes by it."""

    @property
    def generation(self) -> Generation | None:
        """Generation of the devices; None where the spec names none."""
        return None if self.pool.device is None else self.pool.sheet.generation


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceKnobs:
    """The knobs of an instance: its parallel degrees, batch and features."""

    degrees: InstanceDegrees
    running: int
    """Most sequences of one attention-data rank."""
    step_tokens: int
    """Most tokens of one step of one attention-data rank."""
    is_chunked: bool = True
    """Chunked prefill."""
    page_tokens: int | None = None
    """KV cache page size; None: the engine's own."""
    draft_tokens: int = 0
    """Tokens drafted for each decode step; 0: none."""
    two_batch_overlap: bool = False
    a2a_backend: str = "none"
    """All-to-all backend of the experts, by a plan's names."""
    graph_sequences: int | None = None
    """Sequences of the largest CUDA graph of a rank, 0 without any; None: as the engine does."""
    graphed_sequences: int | None = None
    """Sequences up to which every decode step of a rank has a graph; None: those of the largest."""
    streamed_tokens: float = 1.0
    """Tokens of a sequence that a process streams at once, over the ranks that it streams for."""
    has_whole_graphs: bool | None = None
    """Steps that only decode are one graph; None: as the engine does unasked."""
    exchanges_outputs: bool = False
    """Context ranks pass outputs in one all-to-all; without such ranks no matter."""
    aligns_prompts: bool | None = None
    """Attention-data ranks wait until all of them have prompts; None: as the engine is planned."""
    redundant_experts: int = 0
    """Redundant experts in every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLaunch:
    """One command that starts a server."""

    source: str
    """File, or `the command`."""
    engine: str
    role: Role
    setting: InstanceKnobs
    copies: int = 1
    """Identical independent instances behind the one command."""
    ffn_devices: int = 0
    """Devices of the FFN server of an attention server (AFD); 0: no disaggregation."""
    replicas: int = 1
    """Identical launches that the file states."""
    counterpart: "ServingLaunch | None" = None
    """The file's launch of the other role, where it starts prefill and decode instances."""
    draft_method: DraftMethod = DraftMethod.MTP
    """Method of drafting, where there are drafts."""
    connector: str = ""
    """KV connector by a plan's names, else the engine's own name; empty: not said."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the launch sets."""
    has_prefix_cache: bool = True
    follows_prefixes: bool = True
    """The router in front looks for prefixes; also where none is known."""
    finds_ranks: bool = False
    """The engine, or the router in front, looks for prefixes on every attention-data rank."""
    memory_ratio: float | None = None
    """Share of memory that the command gives the engine; None: the engine's own."""
    cache_bytes: int | None = None
    """KV cache bytes of a device, where the command states them; overrides the share."""
    most_cached_tokens: int | None = None
    """Cap on the cached tokens of a rank, where the command states one."""
    state_ratio: float | None = None
    """Memory of linear attention's states over that of pages, where the engine divides its cache;
    None: both take what requests need."""
    max_model_len: int | None = None
    shortens_length: bool = False
    """The engine takes the longest length that its cache holds."""
    is_text_only: bool = False
    """The engine leaves the vision tower out."""
    release: str = ""
    """Release of the engine by the tag of its container image; empty: not said."""
    quantization: str = ""
    """Quantization of the weights, by a spec's names; empty: the checkpoint's."""
    weight_bits: tuple[int, ...] = ()
    """Bits of expert weights by the command's quantization method; empty: any."""
    kv_cache_dtype: str = "bf16"
    host_bytes: Mapping[str, float] = field(default_factory=dict)
    """Host memory that the command takes, bytes a device, by the flag that asks for it."""
    host_cache_ratio: float = 0.0
    """Bytes of a KV cache on the host over those of the device's."""
    flags: SortedFlags = field(default=SortedFlags())
    """The flags, by their effect on the prediction."""
    notes: tuple[str, ...] = field(default=())

    @property
    def reader(self) -> "ServingLaunch":
        """The launch whose prefix caches count: the file's that reads prompts, else itself."""
        return (
            self.counterpart if self.role is Role.DECODE and self.counterpart is not None else self
        )
