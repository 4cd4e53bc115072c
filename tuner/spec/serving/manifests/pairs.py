"""What prefill and decode instances of one deployment must share so that KV caches pass.

Every prefill instance may meet every decode instance, because routers choose them apart. Rules of
pages, types, tensor and pipeline degrees are those of the connector (kv_refusals.py).
"""

from collections.abc import Iterator, Mapping
from itertools import product

from tuner.devices.datasheet import Generation
from tuner.spec.model import ModelSpec
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.kv_connectors import CacheKind, Connector
from tuner.spec.serving.kv_pages import LAYOUT, page_tokens
from tuner.spec.serving.kv_refusals import HandOver, KvSide, refusals
from tuner.spec.serving.manifests.asked import RECEIVERS, Deployment, Group
from tuner.spec.serving.manifests.manifest import ServingCapabilities
from tuner.spec.serving.manifests.steps import cache_kind


def pair_refusals(
    engine: ServingCapabilities,
    decision: Deployment,
    *,
    model: ModelSpec,
    goal: ServeGoal,
    generations: Mapping[str, Generation],
) -> Iterator[str]:
    """Yield what keeps instances from handing caches over to each other."""
    senders = [group for group in decision.instances if group.role == "prefill"]
    receivers = [group for group in decision.instances if group.role in RECEIVERS]
    yield from _drafting(receivers)
    handover = next(iter(decision.handovers), None)
    if handover is None or engine.name not in LAYOUT or handover.connector not in engine.connectors:
        return
    cache = cache_kind(model)
    hybrid = any(model.windowed) and not all(model.windowed)
    for sender, receiver in product(senders, receivers):
        sides = [
            _side(
                engine, group, cache=cache, goal=goal, generations=generations, path=handover.path
            )
            for group in (sender, receiver)
        ]
        one, other = sides
        if one is None or other is None:
            continue
        found = HandOver(
            cache=cache,
            num_kv_heads=1 if cache is CacheKind.LATENT else model.attention.num_kv_heads,
            is_hybrid=hybrid,
            prefill=one,
            decode=other,
        )
        lines = refusals(
            found,
            engine=engine.name,
            release=engine.release,
            connector=Connector(handover.connector),
        )
        for line in lines:
            yield f"{sender.pool} to {receiver.pool}: {line.partition(': ')[2]}"


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
    page = group.page_size
    if page is None and group.pool in generations:
        page = page_tokens(
            engine=engine.name,
            cache=cache,
            generation=generations[group.pool],
            dtype=goal.kv_cache_dtype,
        )
    if page is None:
        return None
    return KvSide(
        tensor=group.attention_tp,
        pipeline=group.pp,
        page_tokens=page,
        dtype=goal.kv_cache_dtype,
        layout=LAYOUT[engine.name],
        uses_host_buffer=path == "host",
    )
