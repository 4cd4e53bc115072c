"""Facts about a release's KV cache: its pages, and the transfers of its connectors.

Connectors: one row per connector and kind of cache, for transfers between different instances; what
a row does not restrict is allowed. Pages: explicit sizes are legal if the preferred attention
kernel supports them; valid for models whose layers all have one kind of cache. The facts are in
kv.py of every engine's folder, with the place in the sources; the rules are in kv_refusals.py.

States of linear attention are moved beside the cache, once for a request; a row names the kinds
whose states its connector moves.

Not covered: decode context parallelism, encoder transfers; pages of hybrids, which vLLM makes large
enough for a state and which differ between unequal tensor degrees; connectors through a store
(LMCache, Mooncake Store).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tuner.devices.datasheet import Generation
from tuner.spec.linear_attention import LinearName


class Connector(StrEnum):
    """KV connector."""

    NIXL = "nixl"
    """NVIDIA's transfer library; decode reads (vLLM), or prefill writes (SGLang)."""
    NIXL_PUSH = "nixl_push"
    """vLLM's variant in which prefill writes."""
    MOONCAKE = "mooncake"
    """Mooncake's transfer engine, point to point."""
    ASCEND = "ascend"
    """Mooncake's transport `ascend` (vllm-ascend) or MemFabric (SGLang), between Huawei's
    devices."""


class CacheKind(StrEnum):
    """Kind of KV cache."""

    GROUPED = "grouped"
    """Keys and values, split over tensor ranks by heads (MHA, GQA, MQA)."""
    LATENT = "latent"
    """One latent or shared key per token, replicated on every tensor rank (MLA, DeepSeek-V4)."""


class PipelineRule(StrEnum):
    """Compatible pipeline degrees."""

    NONE = "none"
    """Degree 1 on both sides."""
    DECODE_ONE = "decode_one"
    """Any degree for prefill, 1 for decode."""
    EQUAL_OR_DECODE_ONE = "equal_or_decode_one"
    """The same degree on both sides, or 1 for decode."""
    ANY = "any"
    """Any degrees: layers are matched by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorRules:
    """The rules of one connector."""

    connector: Connector
    cache: CacheKind
    prefill_pages_divide: bool = False
    """Prefill's page size may be a divisor of decode's; otherwise both are equal."""
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
    """Decode's tensor degree may exceed both prefill's and the key-value heads."""
    wider_decode: bool = True
    """Decode's tensor degree may exceed prefill's."""
    wider_decode_if_hybrid: bool = True
    """Decode's tensor degree may exceed prefill's for hybrid models."""
    pipeline: PipelineRule = PipelineRule.ANY
    slicing_hybrid_with_pipeline: bool = True
    """Unequal tensor degrees of a hybrid model with a prefill pipeline."""
    moved_states: frozenset[LinearName] = frozenset()
    """Kinds of linear attention whose states it moves; models with others are not disaggregated."""
    pipeline_with_states: bool = True
    """Instances of models with linear attention may be pipelines."""
    one_shape: bool = False
    """All instances of an island have one set of degrees per side."""
    source: str
    """Source of the facts."""
    note: str = ""
    """Note for the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """Path of a connector between devices of one machine without its NICs."""

    bytes_per_s: float
    """Rate that one rank's transfers reach where the link itself is no slower."""
    environment: Mapping[str, str]
    """Variables of both sides, as emitted files set them."""
    nvlink_needs_none: bool = False
    """Devices that NVLink joins use it without these variables."""
    takes_bus: bool = False
    """Devices with but a bus between them copy over it."""
    excludes_nics: bool = False
    """The variables leave the connector no other path, so that machines hold both sides."""
    fallback_bytes_per_s: float | None = None
    """Rate without the variables; None: that of the NICs."""
    source: str
    """Source of the facts."""

    def is_set(self, environment: Mapping[str, str]) -> bool:
        """Return whether a launch has these variables."""
        return all(
            environment.get(name, "").lower() in {value.lower(), *_TRUE.get(value, ())}
            for name, value in self.environment.items()
        )

    def reached_bytes_per_s(
        self, environment: Mapping[str, str], *, has_nvlink: bool
    ) -> float | None:
        """Return the rate of a launch with such variables; None: that of the NICs."""
        # UCX, FAQ: a list of transports, or ^ and those that are left out.
        transports = environment.get("UCX_TLS", "all")
        names = set(transports.removeprefix("^").split(","))
        if names.isdisjoint({"all", "cuda", "cuda_ipc"}) is not transports.startswith("^"):
            return None
        if self.is_set(environment) or (self.nvlink_needs_none and has_nvlink):
            return self.bytes_per_s
        return self.fallback_bytes_per_s


_TRUE = {"on": ("y", "yes", "1", "true"), "true": ("1", "on", "yes")}
"""Other spellings of a switch that is on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalPages:
    """Page sizes that a release's preferred kernels support."""

    multiple_of: int = 1
    among: tuple[int, ...] = ()
    """Page sizes that are legal, in tokens; empty: any that are multiples."""

    def __str__(self) -> str:
        """The rule, for people."""
        if self.among:
            return f"attention kernels take pages of {', '.join(map(str, self.among))} tokens"
        return f"attention kernels take pages of whole multiples of {self.multiple_of} tokens"

    def holds(self, page: int) -> bool:
        """Say whether pages of so many tokens are legal."""
        return page % self.multiple_of == 0 and (not self.among or page in self.among)


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultPage:
    """The page of some caches on some devices."""

    tokens: int
    legal: LegalPages
    """Sizes that may be stated instead."""
    cache: CacheKind | None = None
    """Kind of cache; None: every kind."""
    generation: Generation | None = None
    """Generation of the devices; None: every device that the release serves on."""
    dtype: str = ""
    """Type of the cache, bf16 or fp8; empty: both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPages:
    """The pages of a release."""

    layout: str = ""
    """nhd or hnd; not applicable to latent caches; empty: not known."""
    defaults: tuple[DefaultPage, ...] = ()
    """The first that fits counts."""
    legal_anywhere: LegalPages | None = None
    """Sizes that all its devices support; None: not known."""

    def default(self, *, cache: CacheKind, generation: Generation, dtype: str) -> int | None:
        """Return the tokens of a page; None if not known."""
        page = self._page(cache, generation, dtype)
        return None if page is None else page.tokens

    def legal(
        self, *, cache: CacheKind, generation: Generation | None, dtype: str
    ) -> LegalPages | None:
        """Return the legal page sizes; None if not known.

        Args:
            cache: kind of KV cache.
            generation: of the device; None if not known.
            dtype: of the cache, bf16 or fp8.
        """
        if generation is None:
            return self.legal_anywhere
        page = self._page(cache, generation, dtype)
        return None if page is None else page.legal

    def _page(self, cache: CacheKind, generation: Generation, dtype: str) -> DefaultPage | None:
        fits = (
            page
            for page in self.defaults
            if page.cache in (None, cache)
            and page.generation in (None, generation)
            and page.dtype in ("", dtype)
        )
        return next(fits, None)
