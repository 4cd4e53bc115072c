"""Which prefill instances may hand over to which decode instances, what that moves and takes.

Two instances meet where their pools are one or have a link, and the engine's release and connector
accept both sides' layouts (tuner/spec/serving/kv_refusals.py). Bytes are those of the busiest ranks
and of all together (tuner/costs/kv_transfer.py). A rank sends and receives over its own card; a
link between pools is shared by all ranks of the request.

    seconds = latency + busiest bytes / rate of each stage, one after the other

since no described connector sends a layer before prefill has ended: save_kv_layer does nothing in
vllm 0.33.0 (kv_connector/v1/nixl/connector.py, mooncake/mooncake_connector.py), and sglang 0.5.23
sends a chunk once it is read (srt/disaggregation/prefill.py, send_kv_chunk), where plans for it
read prompts in one.

Caches go from device to device among one vendor's, else through the memory of both hosts, which
adds a stage at each end. Where pages or the cut of heads differ, or hosts lie between, the receiver
makes pages of its own: a stage at the rate that a profile of its device measured (`moetune profile
--suite kv`), and none where nobody did.

Not covered: instances of one node that could use their scale-up links instead of the cards; cards
that cannot reach device memory (consumer devices).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

from profilers.kv_transfer.shards import Degrees
from tuner.costs.kv_transfer import (
    CARD_RATIO,
    HAND_OVER_S,
    KvPath,
    RankBytes,
    conversion_bytes_per_s,
    rank_kv_bytes,
    whole_s,
)
from tuner.errors import OutsideProfileError
from tuner.planner.serve.options import Option, PoolSite
from tuner.spec.cluster import Link
from tuner.spec.serving.kv_connectors import CacheKind, Connector
from tuner.spec.serving.kv_pages import page_layout, page_tokens
from tuner.spec.serving.kv_refusals import HandOver, KvSide, refusals
from tuner.spec.serving.manifests.manifest import ServingCapabilities
from tuner.spec.serving.manifests.registry import releases_by_pool
from tuner.spec.serving.manifests.vendor_pairs import connector_between, vendor_refusals
from tuner.spec.serving.read import ServeSpec

Path = Literal["device", "host"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HandOvers:
    """What every pair of options is asked about."""

    spec: ServeSpec
    releases: Mapping[str, ServingCapabilities]
    """By pool."""
    tokens: int
    """Of the mean request whose bytes are known."""
    bytes_of: Mapping[tuple[Degrees, Degrees], RankBytes]
    """By degrees of prefill and decode."""
    between_pools: bool = False
    """Only instances of unlike pools meet."""

    def link(self, sender: PoolSite, receiver: PoolSite) -> Link | None:
        """Return the link between two pools."""
        ends = {sender.pool.name, receiver.pool.name}
        links = self.spec.cluster.links
        return next((link for link in links if set(link.between) == ends), None)

    def reach(self, sender: PoolSite, receiver: PoolSite) -> bool:
        """Whether anything joins the pools."""
        if sender.pool.name == receiver.pool.name:
            return not self.between_pools
        return self.link(sender, receiver) is not None

    def path_kind(self, sender: PoolSite, receiver: PoolSite) -> Path:
        """Whether caches go from device to device."""
        one, other = (site.machine.sheet.generation.vendor for site in (sender, receiver))
        return "device" if one is other else "host"

    def connector(self, sender: PoolSite, receiver: PoolSite) -> Connector:
        """Return who moves the pages between two pools."""
        return connector_between(*self.ends(sender, receiver))

    def ends(
        self, sender: PoolSite, receiver: PoolSite
    ) -> tuple[ServingCapabilities, ServingCapabilities]:
        """Return the releases of both pools."""
        return self.releases[sender.pool.name], self.releases[receiver.pool.name]

    def moved(self, sender: Option, receiver: Option) -> RankBytes:
        """Bytes of a mean request."""
        return self.bytes_of[kept_by(sender), kept_by(receiver)]

    def path(self, sender: Option, receiver: Option) -> KvPath:
        """Rates at which the busiest rank's bytes pass each stage."""
        moved = self.moved(sender, receiver)
        # The two ends move unlike bytes; each is slowed or sped up to those of the busiest.
        out, into = moved.busiest / moved.sent, moved.busiest / moved.received
        rates = [card_bytes_per_s(sender.site) * out, card_bytes_per_s(receiver.site) * into]
        link = self.link(sender.site, receiver.site)
        if link is not None:
            rates.append(link.bandwidth * moved.busiest / moved.whole)
        through_host = self.path_kind(sender.site, receiver.site) == "host"
        sheets = sender.site.machine.sheet, receiver.site.machine.sheet
        converted = self.converted_bytes_per_s(sender, receiver)
        return KvPath(
            network_bytes_per_s=min(rates),
            latency_s=HAND_OVER_S + (link.latency if link is not None else 0.0),
            device_to_host_bytes_per_s=sheets[0].host_bytes_per_s * out if through_host else None,
            host_to_device_bytes_per_s=sheets[1].host_bytes_per_s * into if through_host else None,
            conversion_bytes_per_s=None if converted is None else converted * into,
        )

    def converted_bytes_per_s(self, sender: Option, receiver: Option) -> float | None:
        """How fast the receiver's device makes pages of its own, of what it receives.

        None where the pages are alike, or where no profile of that device measured it: then it is
        not priced.
        """
        one, other = self.side(sender), self.side(receiver)
        table = receiver.site.conversions
        if one is None or other is None or table is None:
            return None
        is_latent = self.cache is CacheKind.LATENT
        is_cut_alike = is_latent or one.tensor == other.tensor
        is_direct = self.path_kind(sender.site, receiver.site) == "device"
        if one.page_tokens == other.page_tokens and is_cut_alike and is_direct:
            return None
        try:
            return conversion_bytes_per_s(
                table,
                self.spec.model,
                tokens=self.tokens,
                kind="latent" if is_latent else f"{one.layout}_{other.layout}",
                dtype=one.dtype,
                bytes_per_element=1.0 if one.dtype == "fp8" else 2.0,
                pages=(one.page_tokens, other.page_tokens),
                tensors=(one.tensor, other.tensor),
            )
        except OutsideProfileError:
            return None

    def seconds(self, sender: Option, receiver: Option) -> float:
        """Between the end of prefill and the arrival of a mean request's cache."""
        return whole_s(self.moved(sender, receiver).busiest, path=self.path(sender, receiver))

    def refusals(self, sender: Option, receiver: Option) -> tuple[str, ...]:
        """Say why the engine's release does not hand over between the two; empty: it does."""
        ends = self.ends(sender.site, receiver.site)
        connector = self.connector(sender.site, receiver.site)
        who = f"{ends[0].title} {connector}"
        generations = (
            sender.site.machine.sheet.generation,
            receiver.site.machine.sheet.generation,
        )
        broken = tuple(
            vendor_refusals(
                *ends,
                connector=connector,
                cache=self.cache,
                kv_cache_dtype=self.spec.goal.kv_cache_dtype,
                generations=generations,
            )
        )
        through_host = self.path_kind(sender.site, receiver.site) == "host"
        one, other = (self.side(option, through_host=through_host) for option in (sender, receiver))
        if broken or one is None or other is None:
            return tuple(f"{who}: {line}" for line in broken)
        attention, windowed = self.spec.model.attention, self.spec.model.windowed
        hand_over = HandOver(
            cache=self.cache,
            num_kv_heads=1 if self.cache is CacheKind.LATENT else attention.num_kv_heads,
            is_hybrid=any(windowed) and not all(windowed),
            prefill=one,
            decode=other,
        )
        return refusals(
            hand_over, engine=ends[0].name, release=ends[0].release, connector=connector
        )

    @property
    def cache(self) -> CacheKind:
        """What attention keeps."""
        is_latent = self.spec.model.attention.kind == "mla"
        return CacheKind.LATENT if is_latent else CacheKind.GROUPED

    def side(self, option: Option, *, through_host: bool = False) -> KvSide | None:
        """Return how an instance keeps its cache; None where its pages are not described."""
        dtype = self.spec.goal.kv_cache_dtype
        engine = self.releases[option.site.pool.name].name
        generation = option.site.machine.sheet.generation
        page = option.page_tokens or page_tokens(
            engine=engine, cache=self.cache, generation=generation, dtype=dtype
        )
        if page is None:
            return None
        return KvSide(
            tensor=option.degrees.attention_tensor,
            pipeline=option.degrees.pipeline,
            page_tokens=page,
            dtype=dtype,
            layout=page_layout(engine=engine, generation=generation),
            uses_host_buffer=through_host,
        )


def handovers_of(spec: ServeSpec, *, input_tokens: float, options: tuple[Option, ...]) -> HandOvers:
    """Count the bytes of every pair of degrees."""
    degrees = tuple(dict.fromkeys(kept_by(option) for option in options))
    tokens = max(1, round(input_tokens))
    return HandOvers(
        spec=spec,
        releases=releases_by_pool(spec.goal, spec.cluster.pools),
        tokens=tokens,
        bytes_of={
            (one, other): rank_kv_bytes(
                spec.model,
                prefill=one,
                decode=other,
                tokens=tokens,
                bytes_per_element=1.0 if spec.goal.kv_cache_dtype == "fp8" else 2.0,
            )
            for one, other in product(degrees, degrees)
        },
    )


def kept_by(option: Option) -> Degrees:
    """Return over which ranks an instance keeps its cache."""
    return Degrees(tensor=option.degrees.attention_tensor, pipeline=option.degrees.pipeline)


def card_bytes_per_s(site: PoolSite) -> float:
    """What hand-overs draw of the cards of one device in each direction."""
    pool = site.pool
    card = CARD_RATIO * (pool.nic or site.machine.sheet.scale_out_bytes_per_s)
    return card * pool.nics / pool.devices_per_node / pool.oversubscription
