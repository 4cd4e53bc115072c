"""Why a KV cache cannot be handed over: one line per broken rule, with the way out.

Beside what a connector's row says (kv_connectors.py), three things hold for every one of them: both
sides keep the same type, because none converts; one tensor degree is a multiple of the other,
because ranks are paired by integer division; and each side lays heads out as its engine does, so
that unlike layouts never meet.

What is refused here can still be done by the reference path (profilers/kv_transfer), at the price
that a profile measured; no engine launches it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tuner.spec.serving.kv_connectors import (
    CacheKind,
    Connector,
    ConnectorRules,
    PageRule,
    PipelineRule,
    connector_rules,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSide:
    """How one instance keeps its cache."""

    tensor: int
    """Attention-tensor-parallel degree of one data-parallel rank."""
    pipeline: int = 1
    page_tokens: int
    dtype: str
    """In the engine's words without its variants: bf16, fp8, nvfp4, ..."""
    layout: str
    """nhd or hnd; without meaning for a latent cache."""
    uses_host_buffer: bool = False
    """Pages go through host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """What is to be handed over."""

    cache: CacheKind
    num_kv_heads: int
    """Of the model; 1 for a latent cache."""
    is_hybrid: bool = False
    """Layers keep unlike caches: sliding windows beside full attention."""
    prefill: KvSide
    decode: KvSide

    @property
    def wider(self) -> str:
        """Which side has the larger tensor degree; empty where they are equal."""
        if self.prefill.tensor == self.decode.tensor:
            return ""
        return "prefill" if self.prefill.tensor > self.decode.tensor else "decode"

    @property
    def slices_heads(self) -> bool:
        """Whether a rank's heads of one side are not those of one rank of the other."""
        held = {min(side.tensor, self.num_kv_heads) for side in (self.prefill, self.decode)}
        return self.cache is CacheKind.GROUPED and len(held) > 1


def refusals(
    hand_over: HandOver, *, engine: str, connector: Connector, release: str = ""
) -> tuple[str, ...]:
    """Say why the connector refuses, one line per broken rule; empty where it can.

    Raises:
        SpecError: nothing is known of that engine, release or connector.
    """
    rules = connector_rules(
        engine=engine, release=release, connector=connector, cache=hand_over.cache
    )
    who = f"{engine} {rules.release} {connector}"
    return tuple(
        f"{who}: {line}"
        for check in (_types, _pages, _tensors, _layouts, _pipelines)
        for line in check(rules, hand_over)
    )


def _types(rules: ConnectorRules, hand_over: HandOver) -> Iterator[str]:
    one, other = hand_over.prefill.dtype, hand_over.decode.dtype
    if one != other:
        yield f"KV types {one} and {other} differ; give both sides one"
    elif hand_over.slices_heads and one in rules.unsliceable_dtypes:
        yield f"heads of a {one} cache cannot be cut; give both sides one tensor degree"


def _pages(rules: ConnectorRules, hand_over: HandOver) -> Iterator[str]:
    one, other = hand_over.prefill.page_tokens, hand_over.decode.page_tokens
    if one == other:
        return
    pages = f"page sizes {one} (prefill) and {other} (decode)"
    through_host = hand_over.prefill.uses_host_buffer or hand_over.decode.uses_host_buffer
    if rules.pages is PageRule.EQUAL:
        yield f"{pages} differ; give both sides one"
    elif other % one:
        yield f"{pages}: prefill's must divide decode's"
    elif hand_over.is_hybrid and rules.pages_equal_if_hybrid:
        yield f"{pages} differ, which a model of unlike layers forbids; give both sides one"
    elif through_host and rules.pages_equal_if_host_buffer:
        yield f"{pages} differ, which a host buffer forbids; give both sides one"
    elif hand_over.wider == "prefill" and rules.pages_equal_if_prefill_wider:
        yield f"{pages} differ, which a wider prefill forbids; give both sides one"


def _tensors(rules: ConnectorRules, hand_over: HandOver) -> Iterator[str]:
    one, other, wider = hand_over.prefill.tensor, hand_over.decode.tensor, hand_over.wider
    degrees = f"tensor degrees {one} (prefill) and {other} (decode)"
    if max(one, other) % min(one, other):
        yield f"{degrees}: one must be a multiple of the other"
    beyond_heads = hand_over.cache is CacheKind.GROUPED and max(one, other) > hand_over.num_kv_heads
    heads = f"{hand_over.num_kv_heads} key-value heads"
    if wider == "prefill" and beyond_heads and not rules.wider_prefill_beyond_heads:
        yield f"{degrees}: the wider prefill exceeds {heads}; give prefill at most that"
    if wider == "decode" and beyond_heads and not rules.wider_decode_beyond_heads:
        yield f"{degrees}: the wider decode exceeds {heads}; give decode at most that"
    if wider == "decode" and not rules.wider_decode:
        yield f"{degrees}: prefill's must be decode's at least"
    if wider == "decode" and hand_over.is_hybrid and not rules.wider_decode_if_hybrid:
        yield f"{degrees}: a model of unlike layers needs decode's to be prefill's at most"


def _layouts(rules: ConnectorRules, hand_over: HandOver) -> Iterator[str]:
    if hand_over.cache is CacheKind.LATENT:
        return
    one, other = hand_over.prefill.layout, hand_over.decode.layout
    allowed = " or ".join(sorted(rules.sliceable_layouts))
    if one != other:
        yield f"page layouts {one} and {other} differ; give both sides {allowed}"
    elif hand_over.slices_heads and one not in rules.sliceable_layouts:
        yield f"heads cannot be cut from {one} pages; use {allowed}, or one tensor degree"


def _pipelines(rules: ConnectorRules, hand_over: HandOver) -> Iterator[str]:
    one, other = hand_over.prefill.pipeline, hand_over.decode.pipeline
    degrees = f"pipeline degrees {one} (prefill) and {other} (decode)"
    if rules.pipeline is PipelineRule.NONE and (one, other) != (1, 1):
        yield f"{degrees}: both must be 1"
    if rules.pipeline is PipelineRule.DECODE_ONE and other != 1:
        yield f"{degrees}: decode's must be 1"
    if rules.pipeline is PipelineRule.EQUAL_OR_DECODE_ONE and other not in (1, one):
        yield f"{degrees}: decode's must be 1 or prefill's"
    cut = hand_over.is_hybrid and hand_over.slices_heads and one > 1
    if cut and not rules.slicing_hybrid_with_pipeline:
        yield f"{degrees}: a model of unlike layers needs one tensor degree, or no pipeline"
