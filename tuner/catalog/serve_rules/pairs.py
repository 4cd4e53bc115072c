"""Rules on KV transfers between prefill and decode instances of one deployment.

Every prefill instance of an island may serve every decode instance of it, because routers choose
them independently. Rules of pages, types, tensor and pipeline degrees are those of the connector
(kv_refusals.py), rules between vendors and releases those of vendor_pairs.py.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Final

from tuner.catalog.serve_rules.kv_cache import CacheKind, Connector
from tuner.catalog.serve_rules.kv_refusals import (
    KvSide,
    KvTransfer,
    has_different_caches,
    refusals,
    state_kind,
)
from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.catalog.serve_rules.steps import RECEIVERS, cache_kind
from tuner.catalog.serve_rules.vendor_pairs import vendor_refusals
from tuner.config.serve import (
    Instances,
    PlannedKvTransfer,
    ServeDecision,
)
from tuner.devices.datasheet import Generation
from tuner.spec.model import ModelSpec
from tuner.spec.serving.goal import ServeGoal

_CONNECTORS: Final = frozenset(connector.value for connector in Connector)


def pair_refusals(
    engine: ServingCapabilities,
    decision: ServeDecision,
    *,
    model: ModelSpec,
    goal: ServeGoal,
    generations: Mapping[str, Generation],
    releases: Mapping[str, ServingCapabilities],
) -> Iterator[str]:
    """Yield why instances of one island cannot transfer KV caches."""
    senders = [group for group in decision.instances if group.role == "prefill"]
    receivers = [group for group in decision.instances if group.role in RECEIVERS]
    yield from _drafting(receivers)
    yield from _one_shape(engine, decision, releases=releases)
    for sender, receiver in product(senders, receivers):
        if sender.island != receiver.island:
            continue
        transfer = _pair_transfer(decision, sender, receiver)
        if transfer is None or transfer.connector not in _CONNECTORS:
            continue
        sides = (releases.get(sender.pool, engine), releases.get(receiver.pool, engine))
        if sides[0] is sides[1] and transfer.connector not in sides[0].connectors:
            continue  # rules.py refuses this.
        lines = _lines(
            (sender, receiver),
            sides,
            transfer,
            model=model,
            goal=goal,
            generations=generations,
        )
        for line in lines:
            yield f"{sender.pool} to {receiver.pool}: {line}"


def _pair_transfer(
    decision: ServeDecision, sender: Instances, receiver: Instances
) -> PlannedKvTransfer | None:
    """Return the KV transfer of a pair, by default the decision's first one."""
    pair_transfers = (
        transfer
        for transfer in decision.handovers
        if (transfer.from_pool, transfer.to_pool) == (sender.pool, receiver.pool)
    )
    return next(pair_transfers, next(iter(decision.handovers), None))


def _lines(
    groups: tuple[Instances, Instances],
    sides: tuple[ServingCapabilities, ServingCapabilities],
    transfer: PlannedKvTransfer,
    *,
    model: ModelSpec,
    goal: ServeGoal,
    generations: Mapping[str, Generation],
) -> Iterator[str]:
    cache, connector = cache_kind(model), Connector(transfer.connector)
    known = [generations.get(group.pool) for group in groups]
    both = None if known[0] is None or known[1] is None else (known[0], known[1])
    broken = tuple(
        vendor_refusals(
            *sides,
            connector=connector,
            cache=cache,
            kv_cache_dtype=goal.kv_cache_dtype,
            generations=both,
        )
    )
    yield from broken
    prefill, decode = (
        _side(release, group, cache=cache, goal=goal, generations=generations, path=transfer.path)
        for release, group in zip(sides, groups, strict=True)
    )
    if broken or prefill is None or decode is None:
        return
    kv_transfer = KvTransfer(
        cache=cache,
        num_kv_heads=1 if cache is CacheKind.LATENT else model.attention.num_kv_heads,
        is_hybrid=has_different_caches(model),
        states=state_kind(model),
        prefill=prefill,
        decode=decode,
    )
    for line in refusals(kv_transfer, engine=sides[0], connector=connector):
        yield line.partition(": ")[2]


def _one_shape(
    engine: ServingCapabilities,
    decision: ServeDecision,
    *,
    releases: Mapping[str, ServingCapabilities],
) -> Iterator[str]:
    """Yield a line if a connector with one set of degrees per side gets more."""
    shapes: dict[tuple[str, str, str], set[tuple[int, int, int]]] = {}
    for group in decision.instances:
        release = releases.get(group.pool, engine)
        if any(row.one_shape for row in release.transfers):
            stack = release.plugin.partition(" ")[0] or release.name
            degrees = group.attention_tp, group.attention_dp, group.pp
            shapes.setdefault((group.role, group.island, stack), set()).add(degrees)
    for (role, _, stack), kinds in shapes.items():
        if role in ("prefill", "decode") and len(kinds) > 1:
            yield (
                f"{len(kinds)} kinds of {role} instances: the connector of {stack} has one"
                " set of degrees per side; give them one"
            )


def _drafting(receivers: list[Instances]) -> Iterator[str]:
    drafts = sorted({group.draft_tokens for group in receivers})
    if len(drafts) > 1:
        yield (
            f"decode groups draft {' and '.join(map(str, drafts))} tokens: prefill transfers the"
            " draft layer's cache to all or none; give all of them one number"
        )


def _side(
    engine: ServingCapabilities,
    group: Instances,
    *,
    cache: CacheKind,
    goal: ServeGoal,
    generations: Mapping[str, Generation],
    path: str,
) -> KvSide | None:
    page, generation = group.page_size, generations.get(group.pool)
    if page is None and generation is not None:
        page = engine.pages.default(cache=cache, generation=generation, dtype=goal.kv_cache_dtype)
    if page is None or not engine.pages.layout:
        return None
    return KvSide(
        tensor=group.attention_tp,
        pipeline=group.pp,
        page_tokens=page,
        dtype=goal.kv_cache_dtype,
        layout=engine.pages.layout,
        uses_host_buffer=path == "host",
    )
