"""Groups of options with equal KV transfers, the links between pools, and the routes over them.

Options of one role, pool, tensor degree and pipeline lay out their caches equally. Where two such
kinds reach the same others and move the same bytes to each, as GQA caches mostly do, they are one
group: the fewer groups, the more of their columns are dominated and dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from solvers.instances.problem import ColumnGroup, InstanceRole, Route, TransferLink
from tuner.config.serve import Role
from tuner.search.serve.kv_transfers import KvTransfers, nic_bytes_per_s
from tuner.search.serve.options import Option, ServingPool

Key = tuple[Role, str, int, int]
"""Role, pool, attention-tensor degree, pipeline stages."""
Others = tuple[tuple[Key, int], ...]
"""The keys that a key has a route to, and the bytes of a request."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvRoutes:
    """Groups, links and routes of a program."""

    groups: tuple[ColumnGroup, ...]
    group_of_key: dict[Key, int]
    links: tuple[TransferLink, ...]
    routes: tuple[Route, ...]

    def group(self, option: Option) -> int:
        """Return the group of an option."""
        return self.group_of_key[_key(option)]


def build_kv_routes(
    options: tuple[Option, ...],
    kv_transfers: KvTransfers,
    serving_pools: tuple[ServingPool, ...],
    *,
    islands: Mapping[str, str] = MappingProxyType({}),
) -> KvRoutes:
    """Group options and connect the groups.

    Args:
        options: of the roles of one mode.
        kv_transfers: paths and refusals of pairs of options.
        serving_pools: pools.
        islands: of pools, by name, where each has a router of its own.
    """
    kinds: dict[Key, Option] = {}
    for option in options:
        kinds.setdefault(_key(option), option)
    bytes_of = {
        (out, into): round(kv_transfers.moved(sender, receiver).whole)
        for out, sender in kinds.items()
        if sender.role is Role.PREFILL
        for into, receiver in kinds.items()
        if receiver.role is Role.DECODE
        and kv_transfers.reach(sender.serving_pool, receiver.serving_pool)
        if islands.get(out[1]) == islands.get(into[1])
        if not (kv_transfers.refuses and kv_transfers.refusals(sender, receiver))
    }
    members: dict[tuple[Role, str, Others], list[Key]] = {}
    for key in kinds:
        after = tuple((into, size) for (out, into), size in bytes_of.items() if out == key)
        before = tuple((out, size) for (out, into), size in bytes_of.items() if into == key)
        members.setdefault((*key[:2], (*after, *before)), []).append(key)
    group_of_key = {key: number for number, keys in enumerate(members.values()) for key in keys}
    links, number_of = _links(kv_transfers, serving_pools)
    routes = {
        (group_of_key[out], group_of_key[into]): Route(
            sender=group_of_key[out],
            receiver=group_of_key[into],
            request_bytes=float(size),
            links=(number_of[out[1], into[1]],),
        )
        for (out, into), size in bytes_of.items()
    }
    return KvRoutes(
        groups=tuple(_group(keys, islands) for keys in members.values()),
        group_of_key=group_of_key,
        links=links if routes else (),
        routes=tuple(routes.values()),
    )


def _key(option: Option) -> Key:
    degrees = option.degrees
    return option.role, option.serving_pool.pool.name, degrees.attention_tensor, degrees.pipeline


def _group(keys: list[Key], islands: Mapping[str, str]) -> ColumnGroup:
    role, pool, *_ = keys[0]
    degrees = "-".join(
        f"{tensor}pp{stages}" if stages > 1 else str(tensor) for _, _, tensor, stages in keys
    )
    names = tuple(dict.fromkeys(islands.values()))
    return ColumnGroup(
        name=f"{role.value}@{pool}/tp{degrees}",
        role=InstanceRole(role.value),
        island=names.index(islands[pool]) if islands else 0,
    )


def _links(
    kv_transfers: KvTransfers, serving_pools: tuple[ServingPool, ...]
) -> tuple[tuple[TransferLink, ...], dict[tuple[str, str], int]]:
    """Return links in both directions, and the number of each by its ends."""
    links: list[TransferLink] = []
    number: dict[tuple[str, str], int] = {}
    for serving_pool in serving_pools:
        number[serving_pool.pool.name, serving_pool.pool.name] = len(links)
        inside = kv_transfers.inside_bytes_per_s(serving_pool, serving_pool)
        rank_bytes_per_s = inside or nic_bytes_per_s(serving_pool)
        links.append(
            TransferLink(
                name=f"{'NICs' if inside is None else 'devices'} of {serving_pool.pool.name}",
                # Half of them send, half receive.
                bytes_per_s=0.5 * rank_bytes_per_s * serving_pool.pool.num_devices,
            )
        )
    for link in kv_transfers.spec.cluster.links:
        for sender, receiver in (link.between, link.between[::-1]):
            number[sender, receiver] = len(links)
            links.append(TransferLink(name=f"{sender} to {receiver}", bytes_per_s=link.bandwidth))
    return tuple(links), number
