"""A deployment's configuration: instances, how they are joined, how requests reach them."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from profilers.records import Record, Seconds
from profilers.steps.config import Count, Size
from tuner.spec.serving.goal import Mode
from tuner.spec.serving.routers import RouterPolicy


class Role(StrEnum):
    """Work of an instance."""

    AGGREGATED = "aggregated"
    """Prefill and decode of the requests it gets."""
    PREFILL = "prefill"
    """Prefill of prompts, whose KV cache it sends."""
    DECODE = "decode"
    """Decode, everything after the first token."""
    ATTENTION = "attention"
    """Attention of AFD decode, which holds the KV caches."""
    EXPERT = "expert"
    """The FFN server of an attention instance: what follows attention in AFD decode."""


class Instances(Record):
    """Equal engine processes: one role on one pool with one parallel strategy."""

    role: Role
    pool: str
    island: str = ""
    """Name of the island: its instances transfer KV caches among themselves, behind a router of
    their own; empty: the deployment is one island."""
    count: Count
    """Number of instances."""
    devices: Count
    """Devices of one instance."""
    attention_tp: Count = 1
    attention_dp: Count = 1
    moe_tp: Count = 1
    ep: Count = 1
    pp: Count = 1
    stage_machines: Count = 1
    """Machines over which the pipeline's stages are spread, as many on each, beside those of other
    instances; 1: an instance is on the fewest machines that hold it."""
    dcp: Count = 1
    """Tensor ranks of attention that share the positions of a KV cache (decode context
    parallelism)."""
    max_batch: Count
    """Most running requests of one attention-DP rank."""
    max_batched_tokens: Count
    """Most tokens of one step of one attention-DP rank."""
    chunked_prefill: bool = False
    a2a_backend: Literal["none", "allgather", "deepep_normal", "deepep_low_latency"] = "none"
    kv_tokens: Size = 0
    """Tokens of KV cache that one instance holds."""
    page_size: Count | None = None
    """Tokens of one page of KV cache; None: the engine's default."""
    draft_tokens: Size = 0
    """Tokens drafted for each decode step (speculative decoding); 0: none."""
    two_batch_overlap: bool = False
    """Half of a batch computes during the other half's all-to-all."""
    redundant_experts: Size = 0
    """Copies of experts in every MoE layer beyond one of each, over all expert ranks."""
    prefill_share_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of a device's SMs for prefill, where prefill and decode share devices."""
    memory_ratio: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of free memory that the launch gives weights and cache; None: the engine's own."""

    @model_validator(mode="after")
    def _consistent(self) -> "Instances":
        attention = self.attention_tp * self.attention_dp * self.pp
        experts = self.moe_tp * self.ep * self.pp
        if self.devices != attention:
            raise ValueError(
                f"attention_tp * attention_dp * pp = {attention}, devices {self.devices}"
            )
        if experts not in (self.pp, self.devices):
            raise ValueError(f"moe_tp * ep * pp = {experts}, devices {self.devices}")
        if self.pp % self.stage_machines:
            raise ValueError(
                f"pp {self.pp} stages on {self.stage_machines} machines, as many on each"
            )
        return self


class PlannedKvTransfer(Record):
    """Transfer of KV caches from prefill to decode instances."""

    from_pool: str
    to_pool: str
    connector: Literal["nixl", "mooncake", "ascend", "none"]
    path: Literal["device", "host"]
    link: Literal["network", "scale_up"] = "network"
    """Link between both devices: NICs, or the links inside the machines that hold both
    instances."""
    request_bytes: Size
    """Bytes of KV cache that a mean request moves; where several ranks keep the same keys, all
    their copies."""
    seconds: Seconds
    """Seconds from the end of prefill to the arrival of the KV cache, of a mean request."""


class ServeRouter(Record):
    """Spread of requests over instances; tuner/spec/serving/routers.py describes policies."""

    policy: RouterPolicy
    """Policy for aggregated or prefill instances."""
    decode_policy: RouterPolicy | None = None
    """Policy for decode instances; None: there are none."""
    cache_threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Share of a prompt above which its prefix decides, in a cache-aware policy; None: the router's
    own."""
    ranks: Count | None = None
    """Attention-data ranks of each aggregated or prefill instance, among all of which the policy
    chooses; None: it chooses among instances."""


class Island(Record):
    """Instances that transfer KV caches among themselves, behind a router of their own."""

    name: Annotated[str, Field(min_length=1)]
    share_ratio: Annotated[float, Field(gt=0.0, le=1.0)]
    """Share of all requests that a router in front gives the island."""


class ServeDecision(Record):
    """Launchable configuration of a deployment."""

    mode: Mode
    instances: Annotated[tuple[Instances, ...], Field(min_length=1)]
    handovers: tuple[PlannedKvTransfer, ...] = ()
    offload_above_tokens: Count | None = None
    """Tokens to compute above which a prompt is prefilled on the remote pool."""
    router: ServeRouter | None = None
    """Choice of an instance for each request; None: one instance of each role, or a plan from
    before routers were planned."""
    islands: tuple[Island, ...] = ()
    """Islands, each behind a router of its own; empty with a single router."""

    @model_validator(mode="after")
    def _islands_agree(self) -> "ServeDecision":
        named = {group.island for group in self.instances}
        known = {island.name for island in self.islands} or {""}
        if named != known:
            raise ValueError(
                f"instances are of the islands {sorted(named)}, islands names {sorted(known)}"
            )
        return self

    @property
    def num_devices(self) -> int:
        """Devices that the decision asks for."""
        return sum(group.count * group.devices for group in self.instances)
