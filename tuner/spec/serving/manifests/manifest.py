"""A manifest: what one release of a serving engine can launch, by which option names.

`options` are the names that emitted commands use; they are held against the release's own parser.
The other fields say which decisions the release expresses; `refusals` (rules.py) words what it
refuses. Several groups of one decision are judged one by one.

Not covered: FP8 before Ada, attention backends that a user picks, sizes that a kernel's shape rules
out (head widths, quantisation blocks).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tuner.devices.datasheet import Generation, Vendor
from tuner.spec.serving.manifests.afd import AfdCapabilities

LARGEST_DISPATCH_TOKENS: Final = 1024
"""Tokens that one rank may dispatch in one step of DeepEP's low-latency kernels, which end each
message with a tag of that value (`FINISHED_SUM_TAG`, deepseek-ai/DeepEP csrc/kernels; SGLang
asserts it in srt/layers/moe/token_dispatcher/deepep.py)."""

DEEPEP_HIDDEN_SIZES: Final = frozenset({2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192})
"""Widths that DeepEP's low-latency kernels are compiled for (vLLM 0.33.0,
model_executor/layers/fused_moe/prepare_finalize/deepep_ll.py)."""

DEEPEP_RANKS: Final = frozenset({2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160})
"""Expert ranks that DeepEP's kernels for many tokens have settings for (deepseek-ai/DeepEP
deep_ep/buffer.py, `get_dispatch_config`)."""

_FP8: Final = frozenset({Generation.ADA, Generation.HOPPER, Generation.BLACKWELL})
HAVE_UNITS: Final[Mapping[str, frozenset[Generation]]] = {
    "fp8": _FP8,
    "fp8_block": _FP8,
    "nvfp4": frozenset({Generation.BLACKWELL}),
}
"""NVIDIA devices that multiply such weights as they are, by `goal.quantization` (NVIDIA Ada, Hopper
and Blackwell architecture documents; hardware table of TensorRT-LLM's support matrix). MXFP4 is
absent: releases have kernels that unpack it for what they serve it on."""

DEEPEP: Final = frozenset({"deepep_normal", "deepep_low_latency"})

WITHOUT_NVLINK: Final = frozenset({Generation.ADA})
"""NVIDIA devices of the catalogue that reach each other over PCIe alone; DeepEP wants NVLink inside
a machine and RDMA between machines (deepseek-ai/DeepEP, README, Requirements)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCapabilities:
    """What one release can launch."""

    name: str
    """Of the engine, as `goal.engine.name` has it."""
    release: str
    source: str
    """Where the facts were read."""
    options: frozenset[str]
    """Command-line names, or keys of its options file, that emitted files use."""
    environment: frozenset[str] = frozenset()
    """Variables that emitted files set for it."""
    image: str
    """Container of the release."""
    image_note: str = ""
    """What is not known of the container."""
    vendor: Vendor = Vendor.NVIDIA
    """Whose devices it serves on; facts by vendor: vendors.py."""
    plugin: str = ""
    """What adds the vendor's devices to the engine, with its release; empty: the engine itself."""
    whole_prompts_option: str = "--disable-chunked-prefill"
    """How vLLM is kept from cutting prompts."""
    portable_backends: Mapping[str, str] = field(default_factory=dict)
    """Attention backends that exist on other vendors' devices too, by kind of cache."""

    modes: frozenset[str] = frozenset({"aggregated", "disaggregated"})
    quantization: Mapping[str, str] = field(default_factory=dict)
    """Value of the option by `goal.quantization`; empty: the checkpoint says it alone."""
    weight_only_fallback: bool = False
    """Weights of a type that a device has no units for are unpacked as they are read (Marlin)."""
    kv_cache_dtype: Mapping[str, str] = field(default_factory=dict)
    """Value of the option by `goal.kv_cache_dtype`; empty: its default."""
    connectors: Mapping[str, str] = field(default_factory=dict)
    """The engine's name of each KV connector."""
    host_path: bool = False
    """KV caches can pass through host memory."""

    a2a_backends: frozenset[str] = frozenset({"none", "allgather"}) | DEEPEP
    deepep_needs_attention_dp: bool = False
    """DeepEP runs only where attention is data parallel."""
    low_latency_takes_prefill: bool = False
    """Under low-latency DeepEP prompts go through the same kernels, so that their cap holds for
    every batch of an instance."""
    low_latency_leaves_prefill: bool = False
    """Under low-latency DeepEP prompts of an aggregated instance go through the normal kernels."""
    both_attention_degrees: bool = True
    """attention_tp and attention_dp may both exceed 1."""
    both_expert_degrees: bool = True
    """moe_tp and ep may both exceed 1."""
    data_parallel_rank_spans_nodes: bool = True
    """One of several attention-DP ranks may span machines."""
    whole_prompt_in_one_batch: bool = False
    """Without chunked prefill a batch must hold the longest request."""
    batch_needs_tokens: bool = False
    """max_batched_tokens must hold a step of the whole batch, drafts included."""

    redundant_architectures: frozenset[str] = frozenset()
    """Models whose experts may have copies; empty: none."""
    redundant_needs_attention_dp: bool = False
    """Copies of experts exist only where attention is data parallel."""

    drafting: Mapping[str, str] = field(default_factory=dict)
    """Value of the option by `goal.speculative.method`."""
    drafting_pipeline_roles: frozenset[str] = frozenset()
    """Roles whose instances may draft across pipeline stages."""
    overlap_backends: frozenset[str] = frozenset()
    """All-to-all backends whose exchange hides behind the other half of a batch; empty: none."""
    overlap_needs_attention_dp: bool = False
    """Two-batch overlap runs only where attention is data parallel."""
    exchange_architectures: frozenset[str] | None = None
    """Models whose expert layers know DeepEP and two-batch overlap; None: all with experts."""
    shared_device_architectures: frozenset[str] = frozenset()
    """Models whose prompts run layer by layer beside decode, on multiprocessors of their own."""
    exchange_option: bool = True
    """The all-to-all backend is named by an option; else the engine chooses it."""
    page_is_power_of_two: bool = False
    """Pages of a KV cache hold a power of two of tokens."""
    chunk_needs_whole_pages: bool = False
    """A chunk of a prompt ends where a page does."""
    afd: AfdCapabilities | None = None
    """What puts attention and experts on servers of their own; None: nothing does."""

    @property
    def title(self) -> str:
        """Engine and release, with the plugin where there is one."""
        return f"{self.name} {self.release}" + (f" with {self.plugin}" if self.plugin else "")
