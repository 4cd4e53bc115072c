"""A manifest: what one release of a serving engine can launch, and its option names.

`options` are the names that emitted commands use; tests check them against the release's parser.
The other fields say which decisions the release can express; `refusals` (rules.py) describes what
it refuses. Groups of one decision are checked one by one.

Not covered: FP8 before Ada, attention backends chosen by the user, sizes that kernels do not
support (head widths, quantisation blocks).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tuner.catalog.serve_rules.afd import AfdCapabilities
from tuner.catalog.serve_rules.autoscalers import LoadMetrics
from tuner.catalog.serve_rules.kv_cache import (
    CacheKind,
    Connector,
    ConnectorRules,
    KvPages,
    NodeLink,
)
from tuner.catalog.serve_rules.models import ServedModels
from tuner.catalog.serve_rules.routers import NGINX, RouterCapabilities
from tuner.catalog.serve_rules.traits import EngineTraits
from tuner.devices.datasheet import Generation, Vendor

LARGEST_DISPATCH_TOKENS: Final = 1024
"""Most tokens that one rank may dispatch in one step of DeepEP's low-latency kernels, which end
each message with a tag of that value (`FINISHED_SUM_TAG`, deepseek-ai/DeepEP csrc/kernels; SGLang
asserts it in srt/layers/moe/token_dispatcher/deepep.py)."""

DEEPEP_HIDDEN_SIZES: Final = frozenset({2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192})
"""Hidden sizes that DeepEP's low-latency kernels are compiled for (vLLM 0.33.0,
model_executor/layers/fused_moe/prepare_finalize/deepep_ll.py)."""

DEEPEP_RANKS: Final = frozenset({2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160})
"""Expert ranks that DeepEP's normal kernels have settings for (deepseek-ai/DeepEP
deep_ep/buffer.py, `get_dispatch_config`)."""

UNITS: Final[Mapping[str, str]] = {
    "fp8": "fp8",
    "fp8_block": "fp8",
    "fp8_block_mxfp4": "fp8",
    "nvfp4": "fp4",
}
"""Type in a sheet's `flop_per_s` that multiplies such weights, by `goal.quantization`. MXFP4 and
int4 are absent: releases have kernels that dequantize them on all supported devices."""

DEEPEP: Final = frozenset({"deepep_normal", "deepep_low_latency"})

WITHOUT_NVLINK: Final = frozenset({Generation.ADA, Generation.BLACKWELL_RTX})
"""NVIDIA devices of the catalogue without NVLink; DeepEP needs NVLink inside a machine and RDMA
between machines (deepseek-ai/DeepEP, README, Requirements)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCapabilities:
    """Features that one release has."""

    traits: EngineTraits
    """The engine, whatever its release."""
    release: str
    source: str
    """Source of the facts."""
    options: frozenset[str]
    """Command-line options, or keys of its options file, that emitted files use."""
    environment: frozenset[str] = frozenset()
    """Environment variables that emitted files set."""
    image: str
    """Container of the release."""
    image_note: str = ""
    """Caveat about the container."""
    vendor: Vendor = Vendor.NVIDIA
    """Vendor of its devices; facts by vendor: vendors.py."""
    plugin: str = ""
    """Plugin for the vendor's devices, with its release; empty: none."""
    is_mpi_job: bool = False
    """An instance over several machines is an MPI job with one task per device."""
    whole_prompts_option: str = "--disable-chunked-prefill"
    """vLLM's option against chunked prefill."""
    portable_backends: Mapping[str, str] = field(default_factory=dict)
    """Attention backends that also exist on other vendors' devices, by kind of cache."""

    models: ServedModels = field(default=ServedModels())
    """Models that it runs."""
    modes: frozenset[str] = frozenset({"aggregated", "disaggregated"})
    quantization: Mapping[str, str] = field(default_factory=dict)
    """Value of the option by `goal.quantization`; empty: from the checkpoint."""
    weight_only_fallback: bool = False
    """Weights without matching tensor cores are dequantized on the fly (Marlin)."""
    kv_cache_dtype: Mapping[str, str] = field(default_factory=dict)
    """Value of the option by `goal.kv_cache_dtype`; empty: its default."""
    connectors: Mapping[str, str] = field(default_factory=dict)
    """The engine's name of each KV connector."""
    node_links: Mapping[str, NodeLink] = field(default_factory=dict)
    """Paths of connectors inside a machine; connectors without one use the NICs."""
    pages: KvPages = field(default=KvPages())
    """Pages of its KV cache."""
    transfers: tuple[ConnectorRules, ...] = ()
    """Rules of its connectors, in order of preference."""
    routers: tuple[RouterCapabilities, ...] = (NGINX,)
    """Routers in order of preference: the first one that has a policy is used."""
    host_path: bool = False
    """KV caches can pass through host memory."""

    a2a_backends: frozenset[str] = frozenset({"none", "allgather"}) | DEEPEP
    no_deepep_quantization: frozenset[str] = frozenset()
    """Values of `goal.quantization` whose experts do not take what DeepEP dispatches."""
    deepep_needs_attention_dp: bool = False
    """DeepEP needs attention data parallelism."""
    low_latency_takes_prefill: bool = False
    """Prefill uses the kernels of low-latency DeepEP too, so that their limit applies to every
    batch of an instance."""
    low_latency_leaves_prefill: bool = False
    """Prefill of an aggregated instance with low-latency DeepEP uses the normal kernels."""
    transferring_ranks_share_core: bool = False
    """The computing threads of all ranks of a machine move to the same few cores when there is a KV
    connector."""
    transfer_thread_polls: bool = False
    """A thread of each rank polls without a pause, on a core that computes, when there is a KV
    connector."""
    only_tensor_parallel: bool = False
    """An instance has tensor ranks only: no expert, data or pipeline parallelism."""
    both_attention_degrees: bool = True
    """attention_tp and attention_dp may both exceed 1."""
    both_expert_degrees: bool = True
    """moe_tp and ep may both exceed 1."""
    rank_dispatch: str = "in turn"
    """Rule by which an instance spreads requests over its attention-DP ranks, each with a prefix
    cache of its own, unless a router names the rank; no release looks for prefixes by default."""
    finds_ranks: bool = False
    """An option, which emitted files set where sessions have prefixes, gives a request to the
    attention-DP rank of its instance that holds its prefix."""
    data_parallel_rank_spans_nodes: bool = True
    """Attention-DP ranks may span machines."""
    whole_prompt_in_one_batch: bool = False
    """A batch must fit the longest request where prefill is not chunked."""
    batch_needs_tokens: bool = False
    """max_batched_tokens must fit a decode step of the whole batch, drafts included."""

    redundant_architectures: frozenset[str] = frozenset()
    """Models that support redundant experts; empty: none."""
    redundant_needs_attention_dp: bool = False
    """Redundant experts need attention data parallelism."""

    drafting: Mapping[str, str] = field(default_factory=dict)
    """Value of the option by `goal.speculative.method`."""
    drafting_pipeline_roles: frozenset[str] = frozenset()
    """Roles whose instances may draft across pipeline stages."""
    overlap_backends: frozenset[str] = frozenset()
    """All-to-all backends that two-batch overlap supports; empty: none."""
    overlap_needs_attention_dp: bool = False
    """Two-batch overlap needs attention data parallelism."""
    overlap_takes_context: bool = True
    """Two-batch overlap runs beside decode context parallelism."""
    a2a_architectures: frozenset[str] | None = None
    """Models whose expert layers support DeepEP and two-batch overlap; None: all with experts."""
    multiplexed_architectures: frozenset[str] = frozenset()
    """Models with layer-by-layer prefill beside decode on separate SMs."""
    has_a2a_option: bool = True
    """An option sets the all-to-all backend; otherwise the engine chooses it."""
    page_is_power_of_two: bool = False
    """Page sizes of the KV cache are powers of two."""
    chunk_needs_whole_pages: bool = False
    """Prefill chunks are whole pages."""
    load_metrics: LoadMetrics | None = None
    """Load that its emitted server exports; None: none that an autoscaler reads."""
    afd: AfdCapabilities | None = None
    """Attention-FFN disaggregation; None: not supported."""

    @property
    def name(self) -> str:
        """Name in `goal.engine.name`."""
        return self.traits.name

    @property
    def title(self) -> str:
        """Engine and release, with the plugin where there is one."""
        return f"{self.name} {self.release}" + (f" with {self.plugin}" if self.plugin else "")

    def connector_rules(self, connector: Connector, *, cache: CacheKind) -> ConnectorRules:
        """Return what a connector supports.

        Raises:
            ValueError: the release lacks the connector.
        """
        rows = {row.connector: row for row in self.transfers if row.cache is cache}
        if connector not in rows:
            known = sorted(supported.value for supported in rows)
            raise ValueError(
                f"{self.name} {self.release}: no connector {connector}; it has {known}"
            )
        return rows[connector]
