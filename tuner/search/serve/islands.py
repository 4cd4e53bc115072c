"""Islands: pools of one vendor and one release, each behind a router of its own.

Where no connector exists between vendors, prefill and decode of each vendor are deployed side by
side, so that no pool idles: a router in front gives every island a fixed share of the requests. A
cluster of one vendor and release is one island; a cluster of several is solved twice, as one
deployment whose pairs may be of two vendors, and as islands, and the cheaper solution counts.

    share of an island    what it serves (the least of its roles) over what all of them serve

Not covered: an island beside a pair of two vendors that has a pool of the island.
"""

from collections.abc import Mapping, Sequence

from tuner.catalog.serve_rules.rules import is_disaggregated
from tuner.config.serve import Role
from tuner.search.serve.modes.mode import load_mode
from tuner.search.serve.simulation import InstanceGroup
from tuner.spec.serving.goal import Mode
from tuner.spec.serving.spec import ServeSpec


def island_layouts(spec: ServeSpec, mode: Mode) -> tuple[Mapping[str, str], ...]:
    """Return the islands of pools, by name, that are worth trying; empty: all behind one router.

    Aggregated instances of two releases are islands always: nothing passes between them.
    """
    titles = dict.fromkeys((release.vendor, release.title) for release in spec.releases.values())
    if len(titles) < 2 or not load_mode(mode).is_routed:
        return ({},)
    vendors = [vendor for vendor, _ in titles]
    by_pool = {
        pool: (
            release.vendor.value
            if vendors.count(release.vendor) == 1
            else f"{release.vendor}-{release.name}-{release.release}"
        )
        for pool, release in spec.releases.items()
    }
    return ({}, by_pool) if is_disaggregated(mode) else (by_pool,)


def island_shares(groups: Sequence[InstanceGroup]) -> dict[str, float]:
    """Return which share of the requests each island gets; empty where there is one."""
    names = tuple(dict.fromkeys(group.island for group in groups))
    if len(names) < 2:
        return {}
    served = {
        name: _served_per_s([group for group in groups if group.island == name]) for name in names
    }
    return {name: rate / sum(served.values()) for name, rate in served.items()}


def prefixes_kept(groups: Sequence[InstanceGroup], *, loses: bool) -> float:
    """Return the share of a session's requests that come where the one before was.

    The router in front of islands sends each request by weights, whatever its session.

    Args:
        groups: of all islands.
        loses: no router of an island looks for prefixes either.
    """
    shares = island_shares(groups)
    kept = 0.0
    for name in dict.fromkeys(group.island for group in groups):
        members = [group for group in groups if group.island == name]
        readers = sum(group.count for group in members if group.option.role is not Role.DECODE)
        kept += shares.get(name, 1.0) ** 2 / (readers if loses else 1)
    return kept


def capacity_per_s(groups: Sequence[InstanceGroup]) -> float:
    """Return the requests a second that all islands serve if none waits."""
    names = dict.fromkeys(group.island for group in groups)
    return sum(_served_per_s([group for group in groups if group.island == name]) for name in names)


def _served_per_s(groups: Sequence[InstanceGroup]) -> float:
    roles = dict.fromkeys(group.option.role for group in groups)
    return min(
        sum(group.rate_per_s for group in groups if group.option.role is role) for role in roles
    )
