"""SGLang's KV cache: its pages, and the transfers that its connectors support.

Pages have 1 token, or 64 where TensorRT-LLM's kernels are the default, on Blackwell; tokens are
outermost. Before Blackwell its kernels take any size, on Blackwell 16 to 128 tokens for grouped, 32
or 64 for latent caches (the release silently replaces others). AMD's devices have the same defaults
(arg_groups/overrides.py). On Ascend pages have 128 tokens (hardware_backend/npu/utils.py).

Source: 0.5.23, srt/arg_groups/overrides.py (_page_size_default, _mla_backend_page_constraints),
model_override_base.py (get_default_attn_backend), model_overrides.
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
    layout="nhd",
    defaults=(
        DefaultPage(
            tokens=64,
            legal=LegalPages(among=(32, 64)),
            cache=CacheKind.LATENT,
            generation=Generation.BLACKWELL,
        ),
        DefaultPage(
            tokens=64,
            legal=LegalPages(among=(16, 32, 64, 128)),
            generation=Generation.BLACKWELL,
        ),
        DefaultPage(tokens=1, legal=LegalPages()),
    ),
)
ASCEND_PAGES: Final = KvPages(
    layout="nhd", defaults=(DefaultPage(tokens=128, legal=LegalPages(among=(128,))),)
)

_SOURCE: Final = (
    "sglang 0.5.23: srt/disaggregation/common/conn.py (try_ensure_parallel_info,"
    " _resolve_rank_mapping)"
)

_MOVED: Final = {
    Connector.MOONCAKE: frozenset(LinearName),
    Connector.NIXL: frozenset(LinearName),
    Connector.ASCEND: frozenset[LinearName](),
}
"""srt/disaggregation/{mooncake,nixl}/conn.py, `_send_mamba_state` and `_send_mamba_state_slice`;
ascend/conn.py has kinds of state of its own, none of linear attention."""

TRANSFERS: Final = tuple(
    row
    for connector in (Connector.MOONCAKE, Connector.NIXL, Connector.ASCEND)
    for row in (
        ConnectorRules(
            connector=connector,
            cache=CacheKind.GROUPED,
            sliceable_layouts=frozenset({"nhd"}),
            unsliceable_dtypes=frozenset({"mxfp8"}),
            pipeline=PipelineRule.EQUAL_OR_DECODE_ONE,
            slicing_hybrid_with_pipeline=False,
            moved_states=_MOVED[connector],
            source=f"{_SOURCE}; srt/disaggregation/{connector}/conn.py (send_kvcache_slice)",
            note="sglang warns that unequal tensor degrees are slow unless the model has MLA",
        ),
        ConnectorRules(
            connector=connector,
            cache=CacheKind.LATENT,
            pipeline=PipelineRule.EQUAL_OR_DECODE_ONE,
            moved_states=_MOVED[connector],
            source=_SOURCE,
        ),
    )
)

NODE_LINKS: Final = {
    "mooncake": NodeLink(
        bytes_per_s=49e9,
        environment={
            "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "INTRA_NODE_NVLINK",
            "MC_INTRANODE_NVLINK": "true",
        },
        excludes_nics=True,
        source="sglang 0.5.23: srt/disaggregation/mooncake/utils.py, sgl-project/sglang pull"
        " requests 17866 and 23329; no figure is published, NIXL's of vllm is taken",
    ),
    "nixl": NodeLink(
        bytes_per_s=49e9,
        environment={},
        nvlink_needs_none=True,
        takes_bus=True,
        source="srt/disaggregation/nixl/conn.py writes, as vLLM's connector that pushes",
    ),
}
