"""Groups of options that hand over alike, the links between pools, and the routes over them.

Options of one role, pool, tensor degree and pipeline keep their caches alike. Where two such kinds
may meet the same others and move the same bytes to each, as grouped caches mostly do, they are one
group: the fewer groups, the more of their columns are beaten by others and left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from solvers.instances.problem import Group, Link, Route
from solvers.instances.problem import Role as SolverRole
from tuner.planner.serve.kv_transfers import HandOvers, card_bytes_per_s
from tuner.planner.serve.options import Option, PoolSite
from tuner.serve_plan import Role

Key = tuple[Role, str, int, int]
"""Role, pool, attention-tensor degree, pipeline stages."""
Others = tuple[tuple[Key, int], ...]
"""Whom a key may meet, and the bytes of a request."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ways:
    """What requests may take."""

    groups: tuple[Group, ...]
    group_of_key: dict[Key, int]
    links: tuple[Link, ...]
    routes: tuple[Route, ...]

    def group(self, option: Option) -> int:
        """Return the group of an option."""
        return self.group_of_key[_key(option)]


def ways_of(
    options: tuple[Option, ...],
    hand_overs: HandOvers,
    sites: tuple[PoolSite, ...],
    *,
    may_refuse: bool,
    islands: Mapping[str, str] = MappingProxyType({}),
) -> Ways:
    """Group options and join the groups.

    Args:
        options: of the roles of one mode.
        hand_overs: what pairs of them are asked about.
        sites: pools.
        may_refuse: leave out what the engine's release refuses.
        islands: of pools, by name, where each stands behind a router of its own.
    """
    kinds: dict[Key, Option] = {}
    for option in options:
        kinds.setdefault(_key(option), option)
    bytes_of = {
        (out, into): round(hand_overs.moved(one, other).whole)
        for out, one in kinds.items()
        if one.role is Role.PREFILL
        for into, other in kinds.items()
        if other.role is Role.DECODE and hand_overs.reach(one.site, other.site)
        if islands.get(out[1]) == islands.get(into[1])
        if not (may_refuse and hand_overs.refusals(one, other))
    }
    members: dict[tuple[Role, str, Others], list[Key]] = {}
    for key in kinds:
        after = tuple((into, size) for (out, into), size in bytes_of.items() if out == key)
        before = tuple((out, size) for (out, into), size in bytes_of.items() if into == key)
        members.setdefault((*key[:2], (*after, *before)), []).append(key)
    group_of_key = {key: number for number, keys in enumerate(members.values()) for key in keys}
    links, number_of = _links(hand_overs, sites)
    routes = {
        (group_of_key[out], group_of_key[into]): Route(
            sender=group_of_key[out],
            receiver=group_of_key[into],
            request_bytes=float(size),
            links=(number_of[out[1], into[1]],),
        )
        for (out, into), size in bytes_of.items()
    }
    return Ways(
        groups=tuple(_group(keys, islands) for keys in members.values()),
        group_of_key=group_of_key,
        links=links if routes else (),
        routes=tuple(routes.values()),
    )


def _key(option: Option) -> Key:
    degrees = option.degrees
    return option.role, option.site.pool.name, degrees.attention_tensor, degrees.pipeline


def _group(keys: list[Key], islands: Mapping[str, str]) -> Group:
    role, pool, *_ = keys[0]
    degrees = "-".join(
        f"{tensor}pp{stages}" if stages > 1 else str(tensor) for _, _, tensor, stages in keys
    )
    names = tuple(dict.fromkeys(islands.values()))
    return Group(
        name=f"{role.value}@{pool}/tp{degrees}",
        role=SolverRole(role.value),
        island=names.index(islands[pool]) if islands else 0,
    )


def _links(
    hand_overs: HandOvers, sites: tuple[PoolSite, ...]
) -> tuple[tuple[Link, ...], dict[tuple[str, str], int]]:
    """Return links in both directions, and the number of each by its ends."""
    links: list[Link] = []
    number: dict[tuple[str, str], int] = {}
    for site in sites:
        number[site.pool.name, site.pool.name] = len(links)
        links.append(Link(name=f"cards of {site.pool.name}", bytes_per_s=_cards_bytes_per_s(site)))
    for link in hand_overs.spec.cluster.links:
        for sender, receiver in (link.between, link.between[::-1]):
            number[sender, receiver] = len(links)
            links.append(Link(name=f"{sender} to {receiver}", bytes_per_s=link.bandwidth))
    return tuple(links), number


def _cards_bytes_per_s(site: PoolSite) -> float:
    """What all network cards of a pool send together; half of them send, half receive."""
    return 0.5 * card_bytes_per_s(site) * site.pool.num_devices
