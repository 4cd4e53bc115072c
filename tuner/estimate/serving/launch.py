"""A launch of a serving engine in the words of a plan, whatever its flags were called."""

from dataclasses import dataclass, field

from tuner.costs.serving.cache_capacity import GIB
from tuner.costs.serving.engine import Degrees, Engine
from tuner.costs.serving.speculative import Method
from tuner.estimate.serving.words import SortedFlags
from tuner.serve_plan import Role
from tuner.spec.cluster import Pool
from tuner.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the flags of a launch are held against."""

    model: ModelSpec
    pool: Pool
    memory_bytes: float = 80 * GIB
    """Of a device; engines choose batches by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What may be changed: how an instance is split, and how many sequences it runs."""

    degrees: Degrees
    running: int
    """Sequences of one attention-data rank at most."""
    step_tokens: int
    """Tokens of one step of one attention-data rank at most."""
    is_chunked: bool = True
    """Prompts are parted to fill it."""
    page_tokens: int | None = None
    """Of a page of cache; None: the engine's own."""
    draft_tokens: int = 0
    """Drafted ahead for each step."""
    two_batch_overlap: bool = False
    a2a_backend: str = "none"
    """Between the experts of data ranks, in a plan's words."""
    graph_sequences: int | None = None
    """Of the largest CUDA graph of a rank, 0 without any; None: as the engine does."""
    redundant_experts: int = 0
    """Second copies of experts in every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLaunch:
    """One command that starts a server."""

    source: str
    """File, or `the command`."""
    engine: Engine
    role: Role
    setting: Setting
    copies: int = 1
    """Equal instances behind the one command that share nothing but its port."""
    ffn_devices: int = 0
    """Of the FFN server that an attention server sends to; 0: it has its networks itself."""
    replicas: int = 1
    """Equal launches that the file itself asks for."""
    draft_method: Method = Method.MTP
    """Of drafts, where there are any."""
    has_prefix_cache: bool = True
    memory_ratio: float | None = None
    """Share of memory that the command gives the engine; None: the engine's own."""
    cache_bytes: int | None = None
    """Of a device's cache, where the command states it: the share counts no more then."""
    most_cached_tokens: int | None = None
    """Of a rank, where the command caps its cache."""
    max_model_len: int | None = None
    quantization: str = ""
    """Of the weights, in the words of a spec; empty: what the checkpoint has."""
    kv_cache_dtype: str = "bf16"
    flags: SortedFlags = field(default=SortedFlags())
    """By what they are to the prediction."""
    notes: tuple[str, ...] = field(default=())
