"""KV transfers that connectors of engine releases support between different instances.

One row per release, connector and kind of cache; what a row does not restrict is allowed. The facts
are from the releases' sources, at the place that the row names, and are data only: the rules are in
kv_refusals.py.

TensorRT-LLM's were read on its main branch, because its release was not available.

Not covered: state-space layers (Mamba, gated delta), decode context parallelism, encoder transfers;
connectors through a store (LMCache, Mooncake Store).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tuner.errors import SpecError


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

    engine: str
    release: str
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
    source: str
    """Source of the facts."""
    note: str = ""
    """Note for the plan."""


_NIXL_033: Final = (
    "vllm 0.33.0: docs/features/nixl_connector_compatibility.md;"
    " kv_connector/v1/nixl/base_worker.py (_validate_remote_agent_handshake)"
)
_MOONCAKE_033: Final = (
    "vllm 0.33.0: kv_connector/v1/mooncake/mooncake_connector.py (_get_tp_ratio,"
    " _validate_asymmetric_region_lengths, _validate_head_resharding_layout)"
)
_NIXL_030: Final = (
    "vllm 0.30.0+afd: kv_connector/v1/nixl/base_worker.py (_validate_remote_agent_handshake); the"
    " rest is from the documents of 0.33.0"
)
_SGLANG_0523: Final = (
    "sglang 0.5.23: srt/disaggregation/common/conn.py (try_ensure_parallel_info,"
    " _resolve_rank_mapping)"
)
_TRTLLM_13: Final = (
    "trtllm 1.3.0rc27: cpp/tensorrt_llm/batch_manager/cacheFormatter.cpp and mlaCacheFormatter.cpp"
    " (inquireSupport), which serve every backend of the cache transceiver"
)
_ASCEND_023: Final = (
    "vllm 0.23.0: vllm-ascend 0.23.0, distributed/kv_transfer/kv_p2p/mooncake_connector.py"
    " (MooncakeConnectorWorker.__init__, _get_prefill_decode_size)"
)
_SLOW_SLICES: Final = "sglang warns that unequal tensor degrees are slow unless the model has MLA"

TABLE: Final = (
    *(
        row
        for release, source in (("0.33.0", _NIXL_033), ("0.30.0+afd", _NIXL_030))
        for row in (
            ConnectorRules(
                engine="vllm",
                release=release,
                connector=Connector.NIXL,
                cache=CacheKind.GROUPED,
                pages=PageRule.PREFILL_DIVIDES,
                pages_equal_if_hybrid=True,
                pages_equal_if_host_buffer=True,
                pages_equal_if_prefill_wider=True,
                sliceable_layouts=frozenset({"hnd"}),
                unsliceable_dtypes=frozenset({"nvfp4"}),
                wider_prefill_beyond_heads=False,
                pipeline=PipelineRule.NONE,
                source=source,
            ),
            ConnectorRules(
                engine="vllm",
                release=release,
                connector=Connector.NIXL,
                cache=CacheKind.LATENT,
                pages=PageRule.PREFILL_DIVIDES,
                pages_equal_if_hybrid=True,
                pages_equal_if_host_buffer=True,
                pipeline=PipelineRule.NONE,
                source=source,
            ),
        )
    ),
    ConnectorRules(
        engine="vllm",
        release="0.33.0",
        connector=Connector.NIXL_PUSH,
        cache=CacheKind.GROUPED,
        sliceable_layouts=frozenset({"hnd"}),
        unsliceable_dtypes=frozenset({"nvfp4"}),
        wider_decode_beyond_heads=False,
        wider_decode_if_hybrid=False,
        pipeline=PipelineRule.DECODE_ONE,
        source=_NIXL_033,
        note="unequal page sizes are documented for reads only, so they are refused here",
    ),
    ConnectorRules(
        engine="vllm",
        release="0.33.0",
        connector=Connector.NIXL_PUSH,
        cache=CacheKind.LATENT,
        pipeline=PipelineRule.DECODE_ONE,
        source=_NIXL_033,
        note="unequal page sizes are documented for reads only, so they are refused here",
    ),
    ConnectorRules(
        engine="vllm",
        release="0.33.0",
        connector=Connector.MOONCAKE,
        cache=CacheKind.GROUPED,
        sliceable_layouts=frozenset({"hnd"}),
        unsliceable_dtypes=frozenset({"nvfp4"}),
        source=_MOONCAKE_033,
        note="the connector sets the head-major layout itself",
    ),
    ConnectorRules(
        engine="vllm",
        release="0.33.0",
        connector=Connector.MOONCAKE,
        cache=CacheKind.LATENT,
        source=_MOONCAKE_033,
    ),
    *(
        ConnectorRules(
            engine="vllm",
            release="0.23.0",
            connector=Connector.ASCEND,
            cache=cache,
            wider_decode=False,
            pipeline=PipelineRule.DECODE_ONE,
            source=_ASCEND_023,
        )
        for cache in CacheKind
    ),
    *(
        ConnectorRules(
            engine="sglang",
            release="0.5.23",
            connector=connector,
            cache=CacheKind.GROUPED,
            sliceable_layouts=frozenset({"nhd"}),
            unsliceable_dtypes=frozenset({"mxfp8"}),
            pipeline=PipelineRule.EQUAL_OR_DECODE_ONE,
            slicing_hybrid_with_pipeline=False,
            source=f"{_SGLANG_0523}; srt/disaggregation/{connector}/conn.py (send_kvcache_slice)",
            note=_SLOW_SLICES,
        )
        for connector in (Connector.MOONCAKE, Connector.NIXL, Connector.ASCEND)
    ),
    *(
        ConnectorRules(
            engine="trtllm",
            release="1.3.0rc27",
            connector=connector,
            cache=cache,
            sliceable_layouts=frozenset({"hnd"}),
            source=_TRTLLM_13,
            note="read on the main branch, not in the release",
        )
        for connector in (Connector.NIXL, Connector.MOONCAKE)
        for cache in CacheKind
    ),
    *(
        ConnectorRules(
            engine="sglang",
            release="0.5.23",
            connector=connector,
            cache=CacheKind.LATENT,
            pipeline=PipelineRule.EQUAL_OR_DECODE_ONE,
            source=_SGLANG_0523,
        )
        for connector in (Connector.MOONCAKE, Connector.NIXL, Connector.ASCEND)
    ),
)


def connector_rules(
    *, engine: str, release: str, connector: Connector, cache: CacheKind
) -> ConnectorRules:
    """Return the rules; an empty release means the one described here.

    Raises:
        SpecError: nothing is known of that engine, release or connector.
    """
    rows = [row for row in TABLE if row.engine == engine and row.cache is cache]
    if not rows:
        known = sorted({row.engine for row in TABLE})
        raise SpecError(f"engine {engine!r}: no KV connector is described; known: {known}")
    matching = [row for row in rows if release in ("", row.release)]
    if not matching:
        known = sorted({row.release for row in rows})
        raise SpecError(f"{engine} {release}: its KV connectors are not described; known: {known}")
    for row in matching:
        if row.connector is connector:
            return row
    known = sorted({row.connector.value for row in matching})
    raise SpecError(f"{engine} {matching[0].release}: no connector {connector}; it has {known}")
