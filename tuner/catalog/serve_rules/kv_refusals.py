"""Reasons why a KV cache cannot be transferred: a line per broken rule, with the way out.

In addition to a connector's rules (kv_cache.py), three rules apply to all: both sides have the
same type, because none converts; one tensor degree is a multiple of the other, because ranks are
paired by integer division; and each side has its engine's page layout, so that both are equal.

The reference path (profilers/kv_transfer) also does what is refused here, at the measured cost; no
engine launches it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from profilers.steps.config import LayerKind
from tuner.catalog.serve_rules.kv_cache import (
    CacheKind,
    Connector,
    ConnectorRules,
    PipelineRule,
)
from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.spec.linear_attention import LinearName
from tuner.spec.model import Mixer, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSide:
    """The KV cache of one side."""

    tensor: int
    """Attention-tensor-parallel degree of one data-parallel rank."""
    pipeline: int = 1
    page_tokens: int
    dtype: str
    """Type of the cache without an engine's variants: bf16, fp8, nvfp4, ..."""
    layout: str
    """nhd or hnd; not applicable to latent caches."""
    uses_host_buffer: bool = False
    """Pages go through host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransfer:
    """A KV transfer between a prefill and a decode instance."""

    cache: CacheKind
    num_kv_heads: int
    """Key-value heads of the model; 1 for a latent cache."""
    is_hybrid: bool = False
    """Layers have different caches: windows, states and full attention."""
    states: LinearName | None = None
    """Linear attention whose states move, too; None: there is none."""
    prefill: KvSide
    decode: KvSide

    @property
    def wider(self) -> str:
        """The side with the larger tensor degree; empty if they are equal."""
        if self.prefill.tensor == self.decode.tensor:
            return ""
        return "prefill" if self.prefill.tensor > self.decode.tensor else "decode"

    @property
    def slices_heads(self) -> bool:
        """The heads of a rank on one side are spread over ranks of the other."""
        head_shards = {min(side.tensor, self.num_kv_heads) for side in (self.prefill, self.decode)}
        return self.cache is CacheKind.GROUPED and len(head_shards) > 1


def has_different_caches(model: ModelSpec) -> bool:
    """Say whether layers keep different things of the past: all, a window, entries, or a state."""
    kept = {
        layer._replace(network=LayerKind.NONE)
        for layer in model.each_layer
        if layer.mixer is not Mixer.NONE
    }
    return len(kept) > 1


def state_kind(model: ModelSpec) -> LinearName | None:
    """Return the linear attention whose states move with a request; None without any."""
    return None if model.linear is None else model.linear.kind


def refusals(
    transfer: KvTransfer, *, engine: ServingCapabilities, connector: Connector
) -> tuple[str, ...]:
    """Say why the connector refuses, one line per broken rule; empty if it can.

    Raises:
        ValueError: the release lacks the connector.
    """
    rules = engine.connector_rules(connector, cache=transfer.cache)
    who = f"{engine.name} {engine.release} {connector}"
    return tuple(
        f"{who}: {line}"
        for check in (_states, _types, _pages, _tensors, _layouts, _pipelines)
        for line in check(rules, transfer)
    )


def _states(rules: ConnectorRules, transfer: KvTransfer) -> Iterator[str]:
    if transfer.states is None:
        return
    if transfer.states not in rules.moved_states:
        yield f"the states of {transfer.states} layers cannot be moved; plan aggregated instances"
    stages = max(transfer.prefill.pipeline, transfer.decode.pipeline)
    if stages > 1 and not rules.pipeline_with_states:
        yield f"states cannot be moved between pipelines; give both sides 1 stage, not {stages}"


def _types(rules: ConnectorRules, transfer: KvTransfer) -> Iterator[str]:
    prefill, decode = transfer.prefill.dtype, transfer.decode.dtype
    if prefill != decode:
        yield f"KV types {prefill} and {decode} differ; give both sides one"
    elif transfer.slices_heads and prefill in rules.unsliceable_dtypes:
        yield f"heads of a {prefill} cache cannot be split; give both sides one tensor degree"


def _pages(rules: ConnectorRules, transfer: KvTransfer) -> Iterator[str]:
    prefill, decode = transfer.prefill.page_tokens, transfer.decode.page_tokens
    if prefill == decode:
        return
    pages = f"page sizes {prefill} (prefill) and {decode} (decode)"
    through_host = transfer.prefill.uses_host_buffer or transfer.decode.uses_host_buffer
    if not rules.prefill_pages_divide:
        yield f"{pages} differ; give both sides one"
    elif decode % prefill:
        yield f"{pages}: prefill's must divide decode's"
    elif transfer.is_hybrid and rules.pages_equal_if_hybrid:
        yield f"{pages} differ, which a hybrid model forbids; give both sides one"
    elif through_host and rules.pages_equal_if_host_buffer:
        yield f"{pages} differ, which a host buffer forbids; give both sides one"
    elif transfer.wider == "prefill" and rules.pages_equal_if_prefill_wider:
        yield f"{pages} differ, which a wider prefill forbids; give both sides one"


def _tensors(rules: ConnectorRules, transfer: KvTransfer) -> Iterator[str]:
    prefill, decode, wider = transfer.prefill.tensor, transfer.decode.tensor, transfer.wider
    degrees = f"tensor degrees {prefill} (prefill) and {decode} (decode)"
    if max(prefill, decode) % min(prefill, decode):
        yield f"{degrees}: one must be a multiple of the other"
    beyond_heads = (
        transfer.cache is CacheKind.GROUPED and max(prefill, decode) > transfer.num_kv_heads
    )
    heads = f"{transfer.num_kv_heads} key-value heads"
    if wider == "prefill" and beyond_heads and not rules.wider_prefill_beyond_heads:
        yield f"{degrees}: the wider prefill exceeds {heads}; give prefill at most that"
    if wider == "decode" and beyond_heads and not rules.wider_decode_beyond_heads:
        yield f"{degrees}: the wider decode exceeds {heads}; give decode at most that"
    if wider == "decode" and not rules.wider_decode:
        yield f"{degrees}: prefill's must be decode's at least"
    if wider == "decode" and transfer.is_hybrid and not rules.wider_decode_if_hybrid:
        yield f"{degrees}: a hybrid model needs decode's to be prefill's at most"


def _layouts(rules: ConnectorRules, transfer: KvTransfer) -> Iterator[str]:
    if transfer.cache is CacheKind.LATENT:
        return
    prefill, decode = transfer.prefill.layout, transfer.decode.layout
    allowed = " or ".join(sorted(rules.sliceable_layouts))
    if prefill != decode:
        yield f"page layouts {prefill} and {decode} differ; give both sides {allowed}"
    elif transfer.slices_heads and prefill not in rules.sliceable_layouts:
        yield f"heads cannot be split in {prefill} pages; use {allowed}, or one tensor degree"


def _pipelines(rules: ConnectorRules, transfer: KvTransfer) -> Iterator[str]:
    prefill, decode = transfer.prefill.pipeline, transfer.decode.pipeline
    degrees = f"pipeline degrees {prefill} (prefill) and {decode} (decode)"
    if rules.pipeline is PipelineRule.NONE and (prefill, decode) != (1, 1):
        yield f"{degrees}: both must be 1"
    if rules.pipeline is PipelineRule.DECODE_ONE and decode != 1:
        yield f"{degrees}: decode's must be 1"
    if rules.pipeline is PipelineRule.EQUAL_OR_DECODE_ONE and decode not in (1, prefill):
        yield f"{degrees}: decode's must be 1 or prefill's"
    cut = transfer.is_hybrid and transfer.slices_heads and prefill > 1
    if cut and not rules.slicing_hybrid_with_pipeline:
        yield f"{degrees}: a hybrid model needs one tensor degree, or no pipeline"
