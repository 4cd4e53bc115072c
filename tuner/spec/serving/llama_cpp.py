"""Spec of a server of llama.cpp: one host, whose memory holds what its accelerator cannot."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from profilers.records import Record
from tuner.spec.cluster import Cluster
from tuner.spec.fields import Count, FilePath
from tuner.spec.serving.spec import Targets

CacheType = Literal["f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


class LlamaEngine(Record):
    """The engine."""

    name: Literal["llama.cpp"]
    """Always `llama.cpp`."""
    version: str = ""
    """Build such as `b11739`; empty: the described one."""


class LlamaTraffic(Record):
    """Requests of one size."""

    input_tokens: Annotated[Count, Field(le=10_000_000)]
    """Prompt tokens of a request."""
    output_tokens: Annotated[Count, Field(le=10_000_000)]
    """Tokens that a request generates."""
    concurrency: Annotated[Count, Field(le=256)] = 1
    """Requests that run at any time."""


class LlamaGoal(Record):
    """A server for a model that is larger than the accelerator."""

    kind: Literal["serve"]
    """Always `serve`."""
    engine: LlamaEngine
    traffic: LlamaTraffic
    max_model_len: Annotated[Count, Field(le=10_000_000)] | None = None
    """Most tokens of one request; absent: those of the traffic."""
    kv_cache_types: Annotated[tuple[CacheType, ...], Field(min_length=1)] = ("f16",)
    """Types of keys and values that a plan may choose; others change what the model answers."""

    @property
    def slot_tokens(self) -> int:
        """Tokens that a slot must hold."""
        return self.max_model_len or self.traffic.input_tokens + self.traffic.output_tokens

    @model_validator(mode="after")
    def _holds_a_request(self) -> "LlamaGoal":
        needed = self.traffic.input_tokens + self.traffic.output_tokens
        if self.slot_tokens < needed:
            raise ValueError(
                f"max_model_len {self.slot_tokens} holds no request of {needed} tokens"
            )
        return self


class LlamaSpecFile(Record):
    """The YAML file; paths are relative to it."""

    schema_version: Literal[1]
    """Version of this layout."""
    model: FilePath
    """A GGUF file, or the first of its shards."""
    cluster: Cluster
    goal: LlamaGoal
    emit: Targets = ()
    """Ignored but for `llama-server`, which is always written."""

    @model_validator(mode="after")
    def _is_one_host(self) -> "LlamaSpecFile":
        pool = self.cluster.pools[0]
        if len(self.cluster.pools) > 1 or pool.nodes > 1:
            raise ValueError("cluster.pools: llama.cpp is planned on one machine; name one pool")
        if pool.devices_per_node > 1:
            raise ValueError(
                f"cluster.pools.{pool.name}.devices_per_node {pool.devices_per_node}: one"
                " accelerator is planned; state 1"
            )
        host = pool.host
        if host is None or host.cores is None:
            raise ValueError(
                f"cluster.pools.{pool.name}.host: state memory and cores of the machine, and the"
                " bandwidth of its memory"
            )
        if host.bandwidth is None and host.read_rate is None:
            raise ValueError(
                f"cluster.pools.{pool.name}.host: state bandwidth, as rated, or the measured"
                " read_rate"
            )
        unknown = [name for name in self.emit if name != "llama-server"]
        if unknown:
            raise ValueError(f"emit: {unknown[0]!r}: llama.cpp has llama-server alone")
        return self


def is_llama_cpp(keys: object) -> bool:
    """Return whether a spec's keys name the engine, read before they are validated."""
    goal = keys.get("goal") if isinstance(keys, dict) else None
    engine = goal.get("engine") if isinstance(goal, dict) else None
    return isinstance(engine, dict) and engine.get("name") == "llama.cpp"
