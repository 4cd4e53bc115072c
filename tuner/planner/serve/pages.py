"""Pages of KV caches that every pool's kernels and every connector between pools allow.

A page stays the engine's own where the pools that are joined by a link have one size. Else each of
those pools is given the smallest size that the kernels of all of them take, since connectors ask
for equal pages, or for prefill's to divide decode's. Pools that nothing joins keep their own, and
so do those of vendors between which no connector passes whatever the pages.

Source: sizes by engine, cache and device are those of tuner/spec/serving/kv_pages.py.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from tuner.planner.serve.options import PoolSite
from tuner.spec.cluster import Link
from tuner.spec.serving.kv_connectors import CacheKind
from tuner.spec.serving.kv_pages import legal_pages, page_tokens
from tuner.spec.serving.manifests.registry import release_on
from tuner.spec.serving.manifests.vendor_pairs import connector_between, vendor_refusals
from tuner.spec.serving.read import ServeSpec

PAGES: Final = tuple(1 << power for power in range(8))
"""Tokens: 1 to 128."""


def page_of_pool(spec: ServeSpec, sites: Sequence[PoolSite]) -> Mapping[str, int]:
    """Return the pages that are not the engine's own, by pool."""
    ends = {name for link in spec.cluster.links if _meet(spec, link) for name in link.between}
    joined = [site for site in sites if site.pool.name in ends]
    own = {site.pool.name: _own(spec, site) for site in joined}
    if None in own.values() or len(set(own.values())) < 2:
        return {}
    page = next((one for one in PAGES if all(_holds(spec, site, one) for site in joined)), None)
    if page is None:
        return {}
    return {name: page for name, usual in own.items() if usual != page}


def _meet(spec: ServeSpec, link: Link) -> bool:
    """Whether a connector passes between the vendors and releases at both ends, some way round."""
    pools = {pool.name: pool for pool in spec.cluster.pools}
    ends = [release_on(spec.goal, pools[name]) for name in link.between]
    return any(
        not any(
            vendor_refusals(
                one,
                other,
                connector=connector_between(one, other),
                cache=_cache(spec),
                kv_cache_dtype=spec.goal.kv_cache_dtype,
                generations=None,
            )
        )
        for one, other in (ends, ends[::-1])
    )


def _own(spec: ServeSpec, site: PoolSite) -> int | None:
    return page_tokens(
        engine=release_on(spec.goal, site.pool).name,
        cache=_cache(spec),
        generation=site.machine.sheet.generation,
        dtype=spec.goal.kv_cache_dtype,
    )


def _holds(spec: ServeSpec, site: PoolSite, page: int) -> bool:
    legal = legal_pages(
        engine=release_on(spec.goal, site.pool).name,
        cache=_cache(spec),
        generation=site.machine.sheet.generation,
        dtype=spec.goal.kv_cache_dtype,
    )
    return legal is not None and legal.holds(page)


def _cache(spec: ServeSpec) -> CacheKind:
    return CacheKind.LATENT if spec.model.attention.kind == "mla" else CacheKind.GROUPED
