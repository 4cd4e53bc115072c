"""KV transfers that may connect prefill and decode instances, with bytes and seconds.

Two instances are connected where they share a pool or their pools have a link, and the engine's
release and connector accept both sides' layouts (tuner/catalog/serve_rules/kv_refusals.py). Bytes
are those of the most-loaded ranks and of all together (tuner/costs/serve/kv_transfer.py). A rank
sends and receives over its own NIC; a link between pools is shared by all ranks of the request.
Where both instances are on one machine and the connector has a path inside it (`node_links` of the
release), caches take the scale-up link, at the rate that the connector reaches, and no NIC: in a
cluster of one machine, and in cells (cells.py) of one machine or, stage by stage, of several,
unless files are emitted that start every instance in a container of its own.

    seconds = latency + bytes of the most-loaded rank / rate of each stage, one after the other

since no described connector sends a layer before prefill has ended: save_kv_layer does nothing in
vllm 0.33.0 (kv_connector/v1/nixl/connector.py, mooncake/mooncake_connector.py), and sglang 0.5.23
sends a chunk once it is read (srt/disaggregation/prefill.py, send_kv_chunk), where plans for it
prefill prompts in one chunk.

Caches go from device to device among one vendor's, else through the memory of both hosts, which
adds a stage at each end. Where page sizes or head splits differ, or hosts lie between, the receiver
converts pages: a stage at the rate that a profile of its device measured (`moetune profile
--suite kv`), and none where no profile did.

States of linear attention are part of the bytes, once for a request; a connector that cannot move
them refuses the pair.

Not covered: NICs without GPUDirect (consumer devices); scale-up links that join machines.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Final, Literal

from profilers.kv_transfer.shards import CacheDegrees
from tuner.catalog.serve_rules.autoscalers import AUTOSCALERS
from tuner.catalog.serve_rules.kv_cache import CacheKind, Connector, NodeLink
from tuner.catalog.serve_rules.kv_refusals import (
    KvSide,
    KvTransfer,
    has_different_caches,
    refusals,
    state_kind,
)
from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.catalog.serve_rules.steps import cache_kind
from tuner.catalog.serve_rules.vendor_pairs import connector_between, vendor_refusals
from tuner.costs.serve.kv_transfer import (
    KV_TRANSFER_LATENCY_S,
    NIC_RATIO,
    KvPath,
    RankBytes,
    conversion_bytes_per_s,
    rank_kv_bytes,
    whole_s,
)
from tuner.errors import OutsideProfileError
from tuner.search.serve.degrees import has_slow_links
from tuner.search.serve.options import Option, ServingPool
from tuner.spec.cluster import Link
from tuner.spec.serving.spec import ServeSpec

Path = Literal["device", "host"]
Side = tuple[str, int | None, CacheDegrees]
"""Pool of an instance, tokens of its pages and ranks that keep its cache."""
CONTAINER_PER_INSTANCE: Final = frozenset({"dynamo", *AUTOSCALERS})
"""Targets that start every instance in a container of its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvTransfers:
    """KV transfers between pairs of options: paths, seconds, refusals."""

    spec: ServeSpec
    releases: Mapping[str, ServingCapabilities]
    """Capabilities of the engine's release, by pool."""
    tokens: int
    """Tokens of the mean request whose bytes are known."""
    bytes_of: Mapping[tuple[str, CacheDegrees, CacheDegrees], RankBytes]
    """Bytes of that request by the pool that prefills and the degrees of prefill and decode."""
    between_pools: bool = False
    """Whether only instances of different pools are connected."""
    is_packed: bool = False
    """Whether connected instances share machines, in pools of several machines, too."""
    refuses: bool = True
    """Whether pairs that the engine's release refuses are left out."""
    environment: Mapping[str, str] | None = None
    """Variables of a launch that was read; None: those of emitted files."""
    named: str = ""
    """Connector of the launch that was read; empty: the release's first."""
    refused: dict[tuple[Side, Side], tuple[str, ...]] = field(default_factory=dict, init=False)
    """Refusals so far, by pool, page and degrees of prefill and decode."""

    def link(self, sender: ServingPool, receiver: ServingPool) -> Link | None:
        """Return the link between two pools."""
        names = {sender.pool.name, receiver.pool.name}
        links = self.spec.cluster.links
        return next((link for link in links if set(link.between) == names), None)

    def reach(self, sender: ServingPool, receiver: ServingPool) -> bool:
        """Return whether the pools are one, or linked."""
        if sender.pool.name == receiver.pool.name:
            return not self.between_pools
        return self.link(sender, receiver) is not None

    def path_kind(self, sender: ServingPool, receiver: ServingPool) -> Path:
        """Return whether caches go from device to device or through the hosts' memory."""
        sender_vendor, receiver_vendor = (
            serving_pool.machine.sheet.generation.vendor for serving_pool in (sender, receiver)
        )
        return "device" if sender_vendor is receiver_vendor else "host"

    def inside_bytes_per_s(self, sender: ServingPool, receiver: ServingPool) -> float | None:
        """Rate of one rank's transfers inside a machine; None where caches cross the NICs."""
        sheet, link = sender.machine.sheet, self.node_link(sender, receiver)
        has_nvlink = not has_slow_links(sheet, sender.pool)
        if link is None or not (has_nvlink or (link.takes_bus and sheet.has_peer_copies)):
            return None
        environment = link.environment if self.environment is None else self.environment
        rate = link.reached_bytes_per_s(environment, has_nvlink=has_nvlink)
        return None if rate is None else min(rate, sheet.scale_up_bytes_per_s)

    def node_link(self, sender: ServingPool, receiver: ServingPool) -> NodeLink | None:
        """Return how the connector moves caches inside the machine of both; None: it does not."""
        pool = sender.pool
        is_one = pool.nodes == len(self.spec.cluster.pools) == 1
        is_inside = pool.name == receiver.pool.name and (self.is_packed or is_one)
        has_containers = self.environment is None and not CONTAINER_PER_INSTANCE.isdisjoint(
            self.spec.emit
        )
        if not is_inside or has_containers or pool.domain < pool.devices_per_node:
            return None
        name = self.named or self.connector(sender, receiver).value
        return self.releases[pool.name].node_links.get(name)

    def connector(self, sender: ServingPool, receiver: ServingPool) -> Connector:
        """Return the connector between two pools."""
        return connector_between(*self.pool_releases(sender, receiver))

    def pool_releases(
        self, sender: ServingPool, receiver: ServingPool
    ) -> tuple[ServingCapabilities, ServingCapabilities]:
        """Return the releases of both pools."""
        return self.releases[sender.pool.name], self.releases[receiver.pool.name]

    def moved(self, sender: Option, receiver: Option) -> RankBytes:
        """Bytes of a mean request."""
        return self.bytes_of[sender.serving_pool.pool.name, kept_by(sender), kept_by(receiver)]

    def path(self, sender: Option, receiver: Option) -> KvPath:
        """Rates at which the most-loaded rank's bytes pass each stage."""
        moved = self.moved(sender, receiver)
        # Both ends move different byte counts; each rate is scaled to the most-loaded rank's bytes.
        out, into = moved.peak_rank / moved.sent, moved.peak_rank / moved.received
        inside = self.inside_bytes_per_s(sender.serving_pool, receiver.serving_pool)
        rates = [
            (inside or nic_bytes_per_s(sender.serving_pool)) * out,
            (inside or nic_bytes_per_s(receiver.serving_pool)) * into,
        ]
        link = self.link(sender.serving_pool, receiver.serving_pool)
        if link is not None:
            rates.append(link.bandwidth * moved.peak_rank / moved.whole)
        through_host = self.path_kind(sender.serving_pool, receiver.serving_pool) == "host"
        sheets = sender.serving_pool.machine.sheet, receiver.serving_pool.machine.sheet
        converted = self.converted_bytes_per_s(sender, receiver)
        return KvPath(
            network_bytes_per_s=min(rates),
            latency_s=KV_TRANSFER_LATENCY_S + (link.latency if link is not None else 0.0),
            device_to_host_bytes_per_s=sheets[0].host_bytes_per_s * out if through_host else None,
            host_to_device_bytes_per_s=sheets[1].host_bytes_per_s * into if through_host else None,
            conversion_bytes_per_s=None if converted is None else converted * into,
        )

    def converted_bytes_per_s(self, sender: Option, receiver: Option) -> float | None:
        """Rate at which the receiver's device converts pages.

        None where the pages are equal, or where no profile of that device measured it: then it is
        not priced.
        """
        sender_side, receiver_side = self.side(sender), self.side(receiver)
        table = receiver.serving_pool.conversions
        if sender_side is None or receiver_side is None or table is None:
            return None
        is_latent = self.cache is CacheKind.LATENT
        has_equal_heads = is_latent or sender_side.tensor == receiver_side.tensor
        is_direct = self.path_kind(sender.serving_pool, receiver.serving_pool) == "device"
        if sender_side.page_tokens == receiver_side.page_tokens and has_equal_heads and is_direct:
            return None
        try:
            return conversion_bytes_per_s(
                table,
                self.spec.model,
                tokens=self.tokens,
                kind="latent" if is_latent else f"{sender_side.layout}_{receiver_side.layout}",
                dtype=sender_side.dtype,
                bytes_per_element=1.0 if sender_side.dtype == "fp8" else 2.0,
                pages=(sender_side.page_tokens, receiver_side.page_tokens),
                tensors=(sender_side.tensor, receiver_side.tensor),
            )
        except OutsideProfileError:
            return None

    def seconds(self, sender: Option, receiver: Option) -> float:
        """Return the seconds from the end of prefill to the arrival of a mean request's cache."""
        return whole_s(self.moved(sender, receiver).peak_rank, path=self.path(sender, receiver))

    def refusals(self, sender: Option, receiver: Option) -> tuple[str, ...]:
        """Say why the engine's release refuses the transfer between the two; empty: it does not."""
        sender_key, receiver_key = (
            (option.serving_pool.pool.name, option.page_tokens, kept_by(option))
            for option in (sender, receiver)
        )
        if (sender_key, receiver_key) not in self.refused:
            self.refused[sender_key, receiver_key] = self._refusals(sender, receiver)
        return self.refused[sender_key, receiver_key]

    def _refusals(self, sender: Option, receiver: Option) -> tuple[str, ...]:
        releases = self.pool_releases(sender.serving_pool, receiver.serving_pool)
        connector = self.connector(sender.serving_pool, receiver.serving_pool)
        who = f"{releases[0].title} {connector}"
        generations = (
            sender.serving_pool.machine.sheet.generation,
            receiver.serving_pool.machine.sheet.generation,
        )
        broken = tuple(
            vendor_refusals(
                *releases,
                connector=connector,
                cache=self.cache,
                kv_cache_dtype=self.spec.goal.kv_cache_dtype,
                generations=generations,
            )
        )
        through_host = self.path_kind(sender.serving_pool, receiver.serving_pool) == "host"
        sender_side, receiver_side = (
            self.side(option, through_host=through_host) for option in (sender, receiver)
        )
        if broken or sender_side is None or receiver_side is None:
            return tuple(f"{who}: {line}" for line in broken)
        attention = self.spec.model.attention
        hand_over = KvTransfer(
            cache=self.cache,
            num_kv_heads=1 if self.cache is CacheKind.LATENT else attention.num_kv_heads,
            is_hybrid=has_different_caches(self.spec.model),
            states=state_kind(self.spec.model),
            prefill=sender_side,
            decode=receiver_side,
        )
        return refusals(hand_over, engine=releases[0], connector=connector)

    @property
    def cache(self) -> CacheKind:
        """Kind of KV cache."""
        return cache_kind(self.spec.model)

    def side(self, option: Option, *, through_host: bool = False) -> KvSide | None:
        """Return how an instance keeps its cache; None where its pages are not described."""
        dtype = self.spec.goal.kv_cache_dtype
        pages = self.releases[option.serving_pool.pool.name].pages
        generation = option.serving_pool.machine.sheet.generation
        page = option.page_tokens or pages.default(
            cache=self.cache, generation=generation, dtype=dtype
        )
        if page is None:
            return None
        return KvSide(
            tensor=option.degrees.attention_tensor,
            pipeline=option.degrees.pipeline,
            page_tokens=page,
            dtype=dtype,
            layout=pages.layout,
            uses_host_buffer=through_host,
        )


def build_kv_transfers(
    spec: ServeSpec, *, input_tokens: float, options: tuple[Option, ...]
) -> KvTransfers:
    """Count the bytes of every pair of degrees, with states as the pool's release keeps them."""
    senders = dict.fromkeys((option.serving_pool.pool.name, kept_by(option)) for option in options)
    receivers = dict.fromkeys(degrees for _, degrees in senders)
    tokens = max(1, round(input_tokens))
    state_bytes = {
        pool: release.traits.memory_rule(release.release).states.element_bytes(
            spec.model.architecture
        )
        for pool, release in spec.releases.items()
    }
    return KvTransfers(
        spec=spec,
        releases=spec.releases,
        tokens=tokens,
        bytes_of={
            (pool, sender, receiver): rank_kv_bytes(
                spec.model,
                prefill=sender,
                decode=receiver,
                tokens=tokens,
                bytes_per_element=1.0 if spec.goal.kv_cache_dtype == "fp8" else 2.0,
                state_bytes=state_bytes[pool],
            )
            for (pool, sender), receiver in product(senders, receivers)
        },
    )


def kept_by(option: Option) -> CacheDegrees:
    """Return over which ranks an instance keeps its cache."""
    return CacheDegrees(tensor=option.degrees.attention_tensor, pipeline=option.degrees.pipeline)


def nic_bytes_per_s(serving_pool: ServingPool) -> float:
    """Bytes per second that KV transfers get from one device's share of the NICs, each way."""
    return NIC_RATIO * serving_pool.machine.sheet.scale_out_bytes_per_s
