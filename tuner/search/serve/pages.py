"""Page sizes of KV caches that every pool's kernels and every connector between pools allow.

A page stays the engine's own where linked pools have one size. Else each of
those pools is given the smallest size that the kernels of all of them take, since connectors ask
for equal pages, or for prefill's to divide decode's. Pools without a link keep their own, and
so do those of vendors between which no connector exists.

Source: sizes by cache and device are in kv.py of every engine's folder.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from tuner.catalog.serve_rules.steps import cache_kind
from tuner.catalog.serve_rules.vendor_pairs import connector_between, vendor_refusals
from tuner.search.serve.options import ServingPool
from tuner.spec.cluster import Link
from tuner.spec.serving.spec import ServeSpec

PAGES: Final = tuple(1 << power for power in range(8))
"""Tokens: 1 to 128."""


def page_by_pool(spec: ServeSpec, serving_pools: Sequence[ServingPool]) -> Mapping[str, int]:
    """Return the pages that are not the engine's own, by pool."""
    linked_names = {
        name for link in spec.cluster.links if _is_connected(spec, link) for name in link.between
    }
    linked = [
        serving_pool for serving_pool in serving_pools if serving_pool.pool.name in linked_names
    ]
    usual_pages = {
        serving_pool.pool.name: _usual_page(spec, serving_pool) for serving_pool in linked
    }
    if None in usual_pages.values() or len(set(usual_pages.values())) < 2:
        return {}
    page = next(
        (
            size
            for size in PAGES
            if all(_allows(spec, serving_pool, size) for serving_pool in linked)
        ),
        None,
    )
    if page is None:
        return {}
    return {name: page for name, usual in usual_pages.items() if usual != page}


def _is_connected(spec: ServeSpec, link: Link) -> bool:
    """Return whether a connector exists between both ends' vendors and releases, either way."""
    releases = [spec.releases[name] for name in link.between]
    return any(
        not any(
            vendor_refusals(
                sender,
                receiver,
                connector=connector_between(sender, receiver),
                cache=cache_kind(spec.model),
                kv_cache_dtype=spec.goal.kv_cache_dtype,
                generations=None,
            )
        )
        for sender, receiver in (releases, releases[::-1])
    )


def _usual_page(spec: ServeSpec, serving_pool: ServingPool) -> int | None:
    return spec.releases[serving_pool.pool.name].pages.default(
        cache=cache_kind(spec.model),
        generation=serving_pool.machine.sheet.generation,
        dtype=spec.goal.kv_cache_dtype,
    )


def _allows(spec: ServeSpec, serving_pool: ServingPool, page: int) -> bool:
    legal = spec.releases[serving_pool.pool.name].pages.legal(
        cache=cache_kind(spec.model),
        generation=serving_pool.machine.sheet.generation,
        dtype=spec.goal.kv_cache_dtype,
    )
    return legal is not None and legal.holds(page)
