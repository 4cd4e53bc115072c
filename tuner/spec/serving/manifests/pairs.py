"""What prefill and decode instances of one deployment must share so that KV caches pass.

Every prefill instance of an island may meet every decode instance of it, because routers choose
them apart. Rules of pages, types, tensor and pipeline degrees are those of the connector
(kv_refusals.py), rules between vendors and releases those of vendor_pairs.py.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Final

from tuner.devices.datasheet import Generation
from tuner.spec.model import ModelSpec
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.kv_connectors import CacheKind, Connector
from tuner.spec.serving.kv_pages import LAYOUT, page_layout, page_tokens
from tuner.spec.serving.kv_refusals import HandOver, KvSide, refusals
from tuner.spec.serving.manifests.manifest import ServingCapabilities
from tuner.spec.serving.manifests.protocols import RECEIVERS, Deployment, Group, Transfer
from tuner.spec.serving.manifests.steps import cache_kind
from tuner.spec.serving.manifests.vendor_pairs import vendor_refusals

_CONNECTORS: Final = frozenset(connector.value for connector in Connector)


def pair_refusals(
    engine: ServingCapabilities,
    decision: Deployment,
    *,
    model: ModelSpec,
    goal: ServeGoal,
    generations: Mapping[str, Generation],
    releases: Mapping[str, ServingCapabilities],
) -> Iterator[str]:
    """Yield what keeps instances of one island from handing caches over to each other."""
    senders = [group for group in decision.instances if group.role == "prefill"]
    receivers = [group for group in decision.instances if group.role in RECEIVERS]
    yield from _drafting(receivers)
    yield from _one_shape(engine, decision, releases=releases)
    for sender, receiver in product(senders, receivers):
        if sender.island != receiver.island:
            continue
        handover = _handover(decision, sender, receiver)
        if handover is None or handover.connector not in _CONNECTORS:
            continue
        ends = (releases.get(sender.pool, engine), releases.get(receiver.pool, engine))
        if ends[0] is ends[1] and handover.connector not in ends[0].connectors:
            continue  # The rule of handovers says so.
        lines = _lines(
            (sender, receiver),
            ends,
            handover,
            model=model,
            goal=goal,
            generations=generations,
        )
        for line in lines:
            yield f"{sender.pool} to {receiver.pool}: {line}"


def _handover(decision: Deployment, sender: Group, receiver: Group) -> Transfer | None:
    """Return how a pair hands over; of decisions that do not say it for every pair, the first."""
    own = (
        one
        for one in decision.handovers
        if (one.from_pool, one.to_pool) == (sender.pool, receiver.pool)
    )
    return next(own, next(iter(decision.handovers), None))


def _lines(
    groups: tuple[Group, Group],
    ends: tuple[ServingCapabilities, ServingCapabilities],
    handover: Transfer,
    *,
    model: ModelSpec,
    goal: ServeGoal,
    generations: Mapping[str, Generation],
) -> Iterator[str]:
    cache, connector = cache_kind(model), Connector(handover.connector)
    known = [generations.get(group.pool) for group in groups]
    both = None if known[0] is None or known[1] is None else (known[0], known[1])
    broken = tuple(
        vendor_refusals(
            *ends,
            connector=connector,
            cache=cache,
            kv_cache_dtype=goal.kv_cache_dtype,
            generations=both,
        )
    )
    yield from broken
    one, other = (
        _side(own, group, cache=cache, goal=goal, generations=generations, path=handover.path)
        for own, group in zip(ends, groups, strict=True)
    )
    if broken or one is None or other is None:
        return
    found = HandOver(
        cache=cache,
        num_kv_heads=1 if cache is CacheKind.LATENT else model.attention.num_kv_heads,
        is_hybrid=any(model.windowed) and not all(model.windowed),
        prefill=one,
        decode=other,
    )
    for line in refusals(found, engine=ends[0].name, release=ends[0].release, connector=connector):
        yield line.partition(": ")[2]


def _one_shape(
    engine: ServingCapabilities,
    decision: Deployment,
    *,
    releases: Mapping[str, ServingCapabilities],
) -> Iterator[str]:
    """vllm-ascend's connector is told one pair of degrees for each side, at start."""
    shapes: dict[tuple[str, str], set[tuple[int, int, int]]] = {}
    for group in decision.instances:
        own = releases.get(group.pool, engine)
        if own.name == "vllm" and "ascend" in own.connectors:
            degrees = group.attention_tp, group.attention_dp, group.pp
            shapes.setdefault((group.role, group.island), set()).add(degrees)
    for (role, _), found in shapes.items():
        if role in ("prefill", "decode") and len(found) > 1:
            yield (
                f"{len(found)} kinds of {role} instances: the connector of vllm-ascend is told one"
                " pair of degrees for each side; give them one"
            )


def _drafting(receivers: list[Group]) -> Iterator[str]:
    drafts = sorted({group.draft_tokens for group in receivers})
    if len(drafts) > 1:
        yield (
            f"decode groups draft {' and '.join(map(str, drafts))} tokens: prefill hands the draft"
            " layer's cache over to all or none; give all of them one number"
        )


def _side(
    engine: ServingCapabilities,
    group: Group,
    *,
    cache: CacheKind,
    goal: ServeGoal,
    generations: Mapping[str, Generation],
    path: str,
) -> KvSide | None:
    if engine.name not in LAYOUT:
        return None
    page, generation = group.page_size, generations.get(group.pool)
    if page is None and generation is not None:
        page = page_tokens(
            engine=engine.name, cache=cache, generation=generation, dtype=goal.kv_cache_dtype
        )
    if page is None:
        return None
    return KvSide(
        tensor=group.attention_tp,
        pipeline=group.pp,
        page_tokens=page,
        dtype=goal.kv_cache_dtype,
        layout=(
            LAYOUT[engine.name]
            if generation is None
            else page_layout(engine=engine.name, generation=generation)
        ),
        uses_host_buffer=path == "host",
    )
