"""A decision in a few words, and the differences between two of the same goal."""

from collections.abc import Iterator

from tuner.emit.placement.statement import spans
from tuner.place_plan import PlaceDecision
from tuner.plan import TrainDecision
from tuner.serve_plan import ServeDecision
from tuner.serve_words import (
    describe_kv_transfer,
    island_words,
    router_words,
    short_group,
    short_serve,
)
from tuner.train_words import runs, short_decision, train_changes

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
    """Yield changes of mode, and removed and added instances and KV transfers."""
    if before.mode != after.mode:
        yield f"{before.mode} -> {after.mode}"
    old, new = _parts(before), _parts(after)
    yield from (f"without {one}" for one in old if one not in new)
    yield from (f"with {one}" for one in new if one not in old)


def _parts(decision: ServeDecision) -> list[str]:
    above = decision.offload_above_tokens
    return [
        *(short_group(one) for one in decision.instances),
        *(describe_kv_transfer(one) for one in decision.handovers),
        *([] if decision.router is None else [router_words(decision.router)]),
        *island_words(decision),
        *([] if above is None else [f"prompts above {above} tokens on the remote pool"]),
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
