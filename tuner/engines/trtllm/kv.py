"""TensorRT-LLM's KV cache: its pages, and the transfers that its connectors support.

Pages have 32 tokens (tokens_per_block), or 64 for latent caches on Hopper, where FlashMLA overrides
the option; heads are outermost. Its documents require a power of two and name no other sizes.

Source: github.com/NVIDIA/TensorRT-LLM, llmapi/llm_args.py (KvCacheConfig), _torch/model_config.py
(enable_flash_mla, for caches of 576 values), _torch/pyexecutor/py_executor_creator.py. Transfers
were read on its main branch, because its release was not available.
"""

from typing import Final

from tuner.catalog.serve_rules.kv_cache import (
    CacheKind,
    Connector,
    ConnectorRules,
    DefaultPage,
    KvPages,
    LegalPages,
)
from tuner.devices.datasheet import Generation
from tuner.spec.linear_attention import LinearName

PAGES: Final = KvPages(
    layout="hnd",
    defaults=(
        DefaultPage(
            tokens=64,
            legal=LegalPages(among=(64,)),
            cache=CacheKind.LATENT,
            generation=Generation.HOPPER,
        ),
        DefaultPage(tokens=32, legal=LegalPages(among=(32, 64))),
    ),
)

_SOURCE: Final = (
    "trtllm 1.3.0rc27: cpp/tensorrt_llm/batch_manager/cacheFormatter.cpp and mlaCacheFormatter.cpp"
    " (inquireSupport), which serve every backend of the cache transceiver"
)

_MOVED: Final = {
    Connector.NIXL: frozenset({LinearName.MAMBA2, LinearName.GATED_DELTA}),
    Connector.MOONCAKE: frozenset[LinearName](),
}
"""docs/source/models/supported-models.md (disaggregated serving of NemotronHForCausalLM and
Qwen3_5MoeForCausalLM); pull requests 12150 and 14060: over NIXL in the transceiver's Python runtime
only, which cache_transceiver_config names."""

TRANSFERS: Final = tuple(
    ConnectorRules(
        connector=connector,
        cache=cache,
        sliceable_layouts=frozenset({"hnd"}),
        moved_states=_MOVED[connector],
        source=_SOURCE,
        note="read on the main branch, not in the release",
    )
    for connector in (Connector.NIXL, Connector.MOONCAKE)
    for cache in CacheKind
)
