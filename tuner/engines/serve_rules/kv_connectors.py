"""KV transfers that connectors of engine releases support between different instances.

One row per connector and kind of cache, in kv.py of the engine's folder; what a row does not
restrict is allowed. The facts are from the releases' sources, at the place that the row names, and
are data only: the rules are in kv_refusals.py.

Not covered: state-space layers (Mamba, gated delta), decode context parallelism, encoder transfers;
connectors through a store (LMCache, Mooncake Store).
"""

from dataclasses import dataclass
from enum import StrEnum


class Connector(StrEnum):
    """KV connector."""

    NIXL = "nixl"
    """NVIDIA's transfer library; decode reads (vLLM), or prefill writes (SGLang)."""
    NIXL_PUSH = "nixl_push"
    """vLLM's variant in which prefill writes."""
    MOONCAKE = "mooncake"
    """Mooncake's transfer engine, point to point."""
    ASCEND = "ascend"
    """Between Huawei's devices: Mooncake's transport `ascend` (vllm-ascend), MemFabric (SGLang)."""


class CacheKind(StrEnum):
    """Kind of KV cache."""

    GROUPED = "grouped"
    """Keys and values, split over tensor ranks by heads (MHA, GQA, MQA)."""
    LATENT = "latent"
    """One latent per token, replicated on every tensor rank (MLA)."""


class PageRule(StrEnum):
    """Compatible page sizes of prefill and decode."""

    EQUAL = "equal"
    """The same on both sides."""
    PREFILL_DIVIDES = "prefill_divides"
    """Prefill's divides decode's."""


class PipelineRule(StrEnum):
    """Compatible pipeline degrees."""

    NONE = "none"
    """1 on both sides."""
    DECODE_ONE = "decode_one"
    """Any for prefill, 1 for decode."""
    EQUAL_OR_DECODE_ONE = "equal_or_decode_one"
    """The same, or 1 for decode."""
    ANY = "any"
    """Layers are matched by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorRules:
    """The rules of one connector."""

    connector: Connector
    cache: CacheKind
    pages: PageRule = PageRule.EQUAL
    pages_equal_if_hybrid: bool = False
    """Models with different caches per layer, such as sliding windows and full attention."""
    pages_equal_if_host_buffer: bool = False
    """Transfers through host memory."""
    pages_equal_if_prefill_wider: bool = False
    """Unequal pages with prefill's tensor degree above decode's."""
    sliceable_layouts: frozenset[str] = frozenset({"nhd", "hnd"})
    """Page layouts whose heads can be split or merged."""
    unsliceable_dtypes: frozenset[str] = frozenset()
    """Types whose scales are not stored with the heads."""
    wider_prefill_beyond_heads: bool = True
    """Prefill's tensor degree may exceed both decode's and the key-value heads."""
    wider_decode_beyond_heads: bool = True
    """Likewise decode's above prefill's."""
    wider_decode: bool = True
    """Decode's tensor degree may exceed prefill's."""
    wider_decode_if_hybrid: bool = True
    """Of hybrid models decode's tensor degree may exceed prefill's."""
    pipeline: PipelineRule = PipelineRule.ANY
    slicing_hybrid_with_pipeline: bool = True
    """Unequal tensor degrees of a hybrid model with a prefill pipeline."""
    one_shape: bool = False
    """It has one set of degrees per side, for all instances of an island."""
    source: str
    """Source of the facts."""
    note: str = ""
    """Note for the plan."""
