"""Default page size and layout of the KV cache, by engine release.

    vllm 0.33.0     16 tokens, or the least page of the preferred MLA kernel where that is not a
                    multiple: FlashInfer's 32 on Blackwell, FlashMLA's 64 for fp8 on Hopper;
                    heads outermost in a page (required by its connectors)
    sglang 0.5.23   1 token, or 64 where TensorRT-LLM's kernels are the default, on Blackwell;
                    tokens outermost
    trtllm 1.3      32 tokens (tokens_per_block), or 64 for latent caches on Hopper, where FlashMLA
                    overrides the option; heads outermost

Explicit page sizes are legal if the preferred kernel supports them: multiples of vLLM's default,
because a page may have several kernel blocks (select_common_block_size); any with SGLang's kernels
before Blackwell, and on Blackwell 16 to 128 tokens for grouped, 32 or 64 for latent caches (the
release silently replaces others); TensorRT-LLM's two sizes, since its documents require a power of
two and name no others.

On AMD's devices vLLM and SGLang keep their defaults (vllm 0.33.0 v1/attention/backends/
triton_attn.py: multiples of 16; sglang 0.5.23 arg_groups/overrides.py). On Ascend both engines set
pages of 128 tokens (vllm-ascend 0.23.0 utils.py, refresh_block_size; sglang 0.5.23
hardware_backend/npu/utils.py), with tokens outermost.

Source: vllm 0.33.0: config/cache.py (DEFAULT_BLOCK_SIZE), platforms/cuda.py
(_get_backend_priorities), v1/attention/backends (get_supported_kernel_block_sizes), kv_connector/v1
(get_required_kvcache_layout). sglang 0.5.23: srt/arg_groups/overrides.py (_page_size_default,
_mla_backend_page_constraints), model_override_base.py (get_default_attn_backend), model_overrides.
github.com/NVIDIA/TensorRT-LLM: llmapi/llm_args.py (KvCacheConfig), _torch/model_config.py
(enable_flash_mla, for caches of 576 values), _torch/pyexecutor/py_executor_creator.py. Valid:
models whose layers all have one kind of cache. Not covered: fp8 caches of FlashAttention 4 and
heads of 256, whose kernels have other page sizes; AITER's kernels, which prefer 64 tokens and
support 16; vLLM on Ascend without prefix cache and chunked prefill, which uses other pages.
"""

from dataclasses import dataclass
from typing import Final

from tuner.devices.datasheet import Generation, Vendor
from tuner.spec.serving.kv_connectors import CacheKind

NVIDIA: Final = frozenset(one for one in Generation if one.vendor is Vendor.NVIDIA)
LAYOUT: Final = {"vllm": "hnd", "sglang": "nhd", "trtllm": "hnd"}
"""By engine; not applicable to latent caches."""
_ASCEND_PAGE: Final = 128
_VLLM_LEAST: Final = 16
"""Tokens: no attention kernel for NVIDIA devices supports smaller blocks."""


def page_tokens(*, engine: str, cache: CacheKind, generation: Generation, dtype: str) -> int | None:
    """Return the tokens of a page; None if not known."""
    if engine not in LAYOUT or (engine == "trtllm" and generation not in NVIDIA):
        return None
    if generation is Generation.ASCEND:
        return _ASCEND_PAGE
    on_blackwell = generation is Generation.BLACKWELL
    if engine == "trtllm":
        return 64 if cache is CacheKind.LATENT and generation is Generation.HOPPER else 32
    if engine == "sglang":
        return 64 if on_blackwell else 1
    if cache is CacheKind.LATENT and on_blackwell:
        return 32
    if cache is CacheKind.LATENT and generation is Generation.HOPPER and dtype == "fp8":
        return 64
    return 16


def page_layout(*, engine: str, generation: Generation) -> str:
    """Return the layout of a page: nhd or hnd."""
    return "nhd" if generation is Generation.ASCEND else LAYOUT[engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalPages:
    """Page sizes that a release's preferred kernels support."""

    multiple_of: int = 1
    among: tuple[int, ...] = ()
    """Empty: any that are multiples."""

    def __str__(self) -> str:
        """The rule, for people."""
        if self.among:
            return f"attention kernels take pages of {', '.join(map(str, self.among))} tokens"
        return f"attention kernels take pages of whole multiples of {self.multiple_of} tokens"

    def holds(self, page: int) -> bool:
        """Say whether pages of so many tokens are legal."""
        return page % self.multiple_of == 0 and (not self.among or page in self.among)


def legal_pages(
    *, engine: str, cache: CacheKind, generation: Generation | None, dtype: str
) -> LegalPages | None:
    """Return the legal page sizes; None if not known.

    Args:
        engine: of the kernels.
        cache: kind of KV cache.
        generation: of the device; None if not known: sizes that all support.
        dtype: of the cache, bf16 or fp8.
    """
    if engine == "vllm" and generation is None:
        return LegalPages(multiple_of=_VLLM_LEAST)
    if generation is None:
        return None
    default = page_tokens(engine=engine, cache=cache, generation=generation, dtype=dtype)
    if default is None:
        return None
    if generation is Generation.ASCEND:
        return LegalPages(among=(_ASCEND_PAGE,))
    if engine == "vllm":
        return LegalPages(multiple_of=default)
    if engine == "trtllm":
        return LegalPages(among=(64,) if default == 64 else (32, 64))
    if generation is not Generation.BLACKWELL:
        return LegalPages()
    return LegalPages(among=(32, 64) if cache is CacheKind.LATENT else (16, 32, 64, 128))
