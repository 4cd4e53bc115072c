"""The goal `serve`: engine, traffic and SLO."""

from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from profilers.records import Record
from tuner.spec.fields import (
    Count,
    FilePath,
    Name,
    PositiveSeconds,
    Seconds,
    Share,
    SpecFolder,
    one_or_many,
)
from tuner.spec.goal import Routing
from tuner.spec.serving.traffic import Traffic
from tuner.units import format_s

SHAPE_RATE: Final = "1/s"
"""Placeholder rate of traffic whose rate is the objective."""


class Percentiles(Record):
    """Largest allowed time by percentile; absent ones are not limited."""

    mean: PositiveSeconds | None = None
    """Largest mean over all requests, seconds."""
    p50: PositiveSeconds | None = None
    """Largest median, seconds."""
    p90: PositiveSeconds | None = None
    """Largest 90th percentile, seconds."""
    p99: PositiveSeconds | None = None
    """Largest 99th percentile, seconds."""

    @model_validator(mode="after")
    def _limits_something(self, info: ValidationInfo) -> "Percentiles":
        # A plan stores an empty record; in a spec it is a mistake.
        if isinstance(info.context, SpecFolder) and self == Percentiles():
            raise ValueError("no target in it; write one like {p90: 2s}, or leave the key out")
        return self


class Slo(Record):
    """SLO targets of latency."""

    ttft: Percentiles = Percentiles()
    """Time to the first token."""
    tpot: Percentiles = Percentiles()
    """Time per output token after the first."""

    @property
    def is_stated(self) -> bool:
        """Whether any target is stated."""
        return self != Slo()


EngineName = Literal["sglang", "vllm", "trtllm"]
"""Serving engines, each a folder of `tuner/engines/`."""


class Engine(Record):
    """The serving engine."""

    name: EngineName
    """Name of the engine."""
    version: str = ""
    """Release of the engine; empty: the newest that is described, without plugins. `0.30.0+afd`:
    vLLM with afd-plugin, which launches attention-FFN disaggregation as an experiment. `moetune
    estimate` also takes releases that are not described, such as the one that runs today: its
    memory rules count."""


_Rate = Annotated[float, Field(ge=0.0, le=1.0)]


class Speculative(Record):
    """Speculative decoding (Leviathan et al., arXiv:2211.17192)."""

    method: Literal["mtp", "eagle"] = "mtp"
    """`mtp`: the model's multi-token-prediction layers; `eagle`: a separate draft layer."""
    draft_tokens: Annotated[Count, Field(le=16)]
    """Most draft tokens per step; a plan chooses how many."""
    acceptance: Annotated[
        tuple[_Rate, ...], Field(min_length=1, max_length=16), BeforeValidator(one_or_many)
    ]
    """Acceptance rate of a draft token, given that all before it were accepted: one for all, or a
    list by position, whose last holds for later ones too."""


Mode = Literal[
    "aggregated", "disaggregated", "attention_expert", "shared_device", "prefill_offload"
]
"""aggregated: prefill and decode on the same instances. disaggregated: on separate instances.
attention_expert: attention and experts of decode on separate devices, too (attention-FFN
disaggregation, AFD; Janus). shared_device: prefill and decode multiplexed on the SMs of the same
devices (semi-PD, Nexus). prefill_offload: only long prompts are prefilled on another pool
(Prefill-as-a-Service)."""


Quantization = Literal["bf16", "fp8", "fp8_block", "nvfp4", "mxfp4", "fp8_block_mxfp4", "int4"]
CacheType = Literal["bf16", "fp8"]


class ServedFormats(Record):
    """Formats of weights and cache whose quality is good enough."""

    quantization: Quantization
    """Type of the weights, as `goal.quantization`."""
    kv_cache_dtype: CacheType | None = None
    """Type of keys and values in the cache; absent: `auto` of the first pool's engine."""


START_UPS_S: Final = (1.0, 6.0 * 3600.0)
"""Shortest and longest start-up of an instance, or of a machine, that is believed."""


class Autoscaler(Record):
    """Limits of the autoscaler that `emit` names."""

    at_least: Count | None = None
    """Fewest instances of each role; absent: 2, or 1 where the plan has a single one."""
    start_up: Seconds | None = None
    """Time from the start of an instance until it takes requests; absent: as the profile's suite
    `engine` measured it."""
    node_provisioning: Seconds = 0.0
    """Time until a machine for a new instance is there; 0: it is kept."""
    kv_usage: Share | None = None
    """Share of the KV cache in use above which instances are added, too; refused where the planned
    instances never reach it."""

    @model_validator(mode="after")
    def _is_believable(self) -> "Autoscaler":
        low, high = START_UPS_S
        for name in ("start_up", "node_provisioning"):
            stated_s = getattr(self, name)
            if (stated_s and not low <= stated_s <= high) or (name, stated_s) == ("start_up", 0.0):
                raise ValueError(
                    f"{name} {format_s(stated_s)} is not between {format_s(low)} and"
                    f" {format_s(high)}; state what the engine's log or `moetune profile --suite"
                    " engine` shows"
                )
        return self


class ServeGoal(Record):
    """A deployment."""

    kind: Literal["serve"]
    """Always `serve`."""
    engine: Engine
    engines: dict[Name, Engine] = Field(default_factory=dict)
    """Engines or releases of pools that differ from `engine`, by the pool's name. Prefill and
    decode of a deployment transfer KV caches only within one engine; different engines are separate
    islands."""
    traffic: Traffic
    slo: Slo = Slo()
    quantization: Quantization = "bf16"
    """Type of the weights; mxfp4: experts only, the rest in bf16, as gpt-oss is published, or in
    block-scaled fp8, as DeepSeek-V4 is; int4: experts only, as Kimi-K2.5 is."""
    kv_cache_dtype: CacheType = "bf16"
    """Type of keys and values in the cache; absent: `auto` of the first pool's engine."""
    formats: Annotated[tuple[ServedFormats, ...], Field(max_length=8)] = ()
    """Formats whose quality is good enough, in the order of preference: the plan takes the first of
    those that serve best. Empty: `quantization` and `kv_cache_dtype`."""
    max_model_len: Count | None = None
    """Most tokens of one request; absent: the model's limit."""
    objective: Literal["goodput", "cost", "devices", "rate"] = "goodput"
    """Objective: `goodput`, the most good requests per second and device; `cost`, the least money
    per hour; `devices`, the fewest devices; `rate`, the most requests per second that the pools
    serve within the SLO (DistServe, arXiv:2401.09670), which needs no rate of the traffic."""
    modes: Annotated[tuple[Mode, ...], Field(min_length=1)] = get_args(Mode)
    """Serving modes to compare."""
    speculative: Speculative | None = None
    """Speculative decoding, used where it pays off."""
    routing: Routing | None = None
    """Recorded expert loads; absent: those of the kernel tables, as the plan notes."""
    spare_ratio: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    """Capacity headroom, as a share of the traffic's needs."""
    autoscaler: Autoscaler | None = None
    """Limits of the autoscaler that `emit` names; absent: the defaults of each."""
    placement: FilePath | None = None
    """Expert placement plan for the recorded routing, emitted with the deployment."""

    def engine_on(self, pool: str) -> Engine:
        """Return the engine that serves on a pool."""
        return self.engines.get(pool, self.engine)

    @model_validator(mode="before")
    @classmethod
    def _shape_needs_no_rate(cls, data: Any) -> Any:
        """Set the placeholder rate where only the shape of the traffic matters."""
        traffic = data.get("traffic") if isinstance(data, dict) else None
        if not isinstance(traffic, dict) or data.get("objective") != "rate":
            return data
        is_replayed = "trace" in traffic and "arrival" not in traffic
        if is_replayed or any(name in traffic for name in ("concurrency", "rate")):
            return data
        return data | {"traffic": traffic | {"rate": SHAPE_RATE}}

    @model_validator(mode="after")
    def _formats_are_stated_once(self) -> "ServeGoal":
        stated = {"quantization", "kv_cache_dtype"} & self.model_fields_set
        if self.formats and stated:
            raise ValueError(f"'formats' states {min(stated)}, too; leave one of them out")
        return self

    @model_validator(mode="after")
    def _rate_is_of_an_open_load(self) -> "ServeGoal":
        if self.objective == "rate" and self.traffic.is_closed_loop:
            raise ValueError(
                "objective 'rate' maximises the requests per second, and 'concurrency' is a"
                " closed loop; leave 'concurrency' out, or choose goodput, cost or devices"
            )
        if self.objective == "rate" and self.traffic.requests is not None:
            raise ValueError("objective 'rate' is that of a long run; leave 'requests' out")
        return self
