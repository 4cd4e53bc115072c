"""A decision in a few words, and the differences between two of the same goal."""

from collections.abc import Iterator

from tuner.config.place import PlaceDecision
from tuner.config.serve import Instances, ServeDecision
from tuner.config.serve_words import (
    describe_kv_transfer,
    group_changes,
    island_words,
    router_words,
    short_group,
    short_serve,
)
from tuner.config.train import TrainDecision
from tuner.config.words import runs, short_decision, train_changes
from tuner.engines.placement.statement import spans

Decision = TrainDecision | ServeDecision | PlaceDecision


def words(decision: Decision) -> str:
    """Name a decision in one cell."""
    if isinstance(decision, TrainDecision):
        return short_decision(decision)
    if isinstance(decision, ServeDecision):
        return short_serve(decision)
    return placement_words(decision)


def differences(before: Decision, after: Decision) -> tuple[str, ...]:
    """Return the differences between two decisions of the same goal, e.g. `PP 2 -> 4`."""
    if isinstance(before, TrainDecision) and isinstance(after, TrainDecision):
        return train_changes(before, after)
    if isinstance(before, ServeDecision) and isinstance(after, ServeDecision):
        return tuple(_serving_changes(before, after))
    if isinstance(before, PlaceDecision) and isinstance(after, PlaceDecision):
        return _placement_changes(before, after)
    raise ValueError("decisions of two kinds have nothing in common")


def placement_words(decision: PlaceDecision) -> str:
    """Name a placement, e.g. `64 experts on 8 ranks x 9 slots, 8 a node, layers 1-26 of 27`.

    It does not list where experts are; `differences` counts what moved.
    """
    d = decision
    is_uniform = len(set(d.slots_per_rank)) == 1
    slots = str(d.slots_per_rank[0]) if is_uniform else runs(d.slots_per_rank)
    of = "" if d.num_layers is None else f" of {d.num_layers}"
    return (
        f"{d.num_experts} experts on {d.ranks} ranks x {slots} slots, {d.ranks_per_node} a node, "
        f"layers {spans(d.layer_ids)}{of}"
    )


def _serving_changes(before: ServeDecision, after: ServeDecision) -> Iterator[str]:
    """Yield changes of mode, of instances, and of what lies between them.

    Where one kind of instance of a role and pool became one other kind, only what differs between
    the two is named.
    """
    if before.mode != after.mode:
        yield f"{before.mode} -> {after.mode}"
    old, new = _kinds(before), _kinds(after)
    for kind in dict.fromkeys((*old, *new)):
        gone = [one for one in old.get(kind, ()) if one not in new.get(kind, ())]
        come = [one for one in new.get(kind, ()) if one not in old.get(kind, ())]
        if len(gone) == len(come) == 1:
            yield f"{' '.join(filter(None, kind))}: {', '.join(group_changes(gone[0], come[0]))}"
        else:
            yield from (f"without {short_group(one)}" for one in gone)
            yield from (f"with {short_group(one)}" for one in come)
    transfers, other_transfers = _transfers(before), _transfers(after)
    for pools in dict.fromkeys((*transfers, *other_transfers)):
        was, will_be = transfers.get(pools, "none"), other_transfers.get(pools, "none")
        if was != will_be:
            yield f"KV transfer {pools}: {was} -> {will_be}"
    links, other_links = _between(before), _between(after)
    yield from (f"without {one}" for one in links if one not in other_links)
    yield from (f"with {one}" for one in other_links if one not in links)


def _kinds(decision: ServeDecision) -> dict[tuple[str, ...], list[Instances]]:
    kinds: dict[tuple[str, ...], list[Instances]] = {}
    for one in decision.instances:
        kinds.setdefault((one.role.value, "on", one.pool, one.island), []).append(one)
    return kinds


def _transfers(decision: ServeDecision) -> dict[str, str]:
    """KV transfers in words, by the pools that they connect."""
    found: dict[str, str] = {}
    for one in decision.handovers:
        pools = f"{one.from_pool} to {one.to_pool}"
        words = describe_kv_transfer(one).removeprefix(pools).strip(" :")
        found[pools] = f"{found[pools]} and {words}" if pools in found else words
    return found


def _between(decision: ServeDecision) -> list[str]:
    above = decision.offload_above_tokens
    return [
        *([] if decision.router is None else [router_words(decision.router)]),
        *island_words(decision),
        *([] if above is None else [f"prompts above {above:,} tokens on the remote pool"]),
    ]


def _placement_changes(before: PlaceDecision, after: PlaceDecision) -> tuple[str, ...]:
    """Return how many slots hold another expert, where the shape is the same."""
    shapes = placement_words(before), placement_words(after)
    if shapes[0] != shapes[1]:
        return (f"{shapes[0]} -> {shapes[1]}",)
    moved = sum(
        old != new
        for one, other in zip(before.physical_to_logical, after.physical_to_logical, strict=True)
        for old, new in zip(one, other, strict=True)
    )
    return (f"{moved} slots hold another expert",) if moved else ()
