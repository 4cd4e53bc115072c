"""A deployment as named values: groups of instances, KV transfers, router."""

from collections.abc import Iterator

from tuner.config.serve import Instances, ServeDecision, ServeRouter
from tuner.config.serve_words import (
    describe_kv_transfer,
    group_degrees,
    group_steps,
    island_words,
    router_words,
)
from tuner.plans.serve import PlannedHits
from tuner.report.content import Cell, word
from tuner.spec.serving.routers import RouterPolicy
from tuner.units import format_counted, format_ratio


def group_text(group: Instances) -> str:
    """Describe a group of identical instances: degrees, and the batch of a step."""
    return (
        f"{group.count:,} x {format_counted(group.devices, 'device')} on {group.pool}:"
        f" {group_degrees(group)}; {', '.join(group_steps(group))}"
    )


def decision_facts(
    decision: ServeDecision, hits: PlannedHits | None = None
) -> Iterator[tuple[str, Cell]]:
    """Yield the groups of instances and what joins them.

    Args:
        decision: the deployment.
        hits: prompt tokens that are found in prefix caches, where that was planned.
    """
    for group in decision.instances:
        yield group.role.value, word(group_text(group))
    for transfer in decision.handovers:
        yield "KV transfer", word(describe_kv_transfer(transfer))
    if decision.router is not None:
        yield "router", word(_router_text(decision.router, hits))
    for words in island_words(decision):
        yield "islands", word(words)
    if decision.offload_above_tokens is not None:
        longest = f"prompts above {decision.offload_above_tokens:,} tokens"
        yield "remote pool", word(f"{longest} are prefilled there")


def _router_text(router: ServeRouter, hits: PlannedHits | None) -> str:
    """Say how requests are spread, and of prefixes what is found so and otherwise."""
    words = router_words(router).removeprefix("router: ")
    if hits is None:
        return words
    if router.policy is not RouterPolicy.CACHE_AWARE:
        return f"{words}; {format_ratio(hits.ratio)} of prompt tokens found in prefix caches"
    kinds = [("instance", hits.instances, hits.if_instances), ("rank", hits.ranks, hits.if_ranks)]
    if router.ranks is not None:
        kinds.reverse()
    (noun, count, _), (other_noun, other_count, otherwise) = kinds
    is_split = otherwise is not None and hits.ranks > hits.instances
    rest = (
        f"; {format_ratio(otherwise or 0.0)} if to {format_counted(other_count, other_noun)}"
        * is_split
    )
    hit_words = f"{format_ratio(hits.ratio)} of prompt tokens found{rest}"
    _, decode, decode_words = words.partition("; decode")
    return f"by prefix, to {format_counted(count, noun)} ({hit_words}){decode}{decode_words}"
