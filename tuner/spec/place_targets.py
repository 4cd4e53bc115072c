"""What each engine can take of a placement, and how far the nearest legal question lies.

Every engine that writes one flat row a layer reads slot p as one of rank p // (slots / ranks), so
ranks must hold equally many. Read from SGLang 0.5.23, vLLM 0.33.0, vllm-ascend 182b75e,
TensorRT-LLM's ep_load_balancer examples, deepseek-ai/EPLB d52c72d and Megatron Core d98e8a6.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceTarget:
    """What one engine can take."""

    name: str
    all_layers: bool = False
    """Its file has a row for every decoder layer, so their number must be known."""
    every_moe_layer: bool = False
    """It counts MoE layers, so that all of them must have been recorded."""
    replicas: bool = True
    """An expert may stand in several slots."""
    twins: bool = True
    """An expert may stand twice on one rank."""


PLACE_TARGETS: Final[Mapping[str, PlaceTarget]] = {
    target.name: target
    for target in (
        PlaceTarget(name="sglang", all_layers=True),
        PlaceTarget(name="trtllm"),
        PlaceTarget(name="vllm", every_moe_layer=True),
        PlaceTarget(name="vllm-ascend", every_moe_layer=True, twins=False),
        PlaceTarget(name="eplb"),
        PlaceTarget(name="megatron", replicas=False),
    )
}
"""By the name users type."""


def shape_refusals(
    target: PlaceTarget, *, slots_per_rank: Sequence[int], num_experts: int, num_layers: int | None
) -> tuple[str, ...]:
    """Return what keeps the engine from taking any placement of this shape, a line each.

    Args:
        target: of `PLACE_TARGETS`.
        slots_per_rank: of every rank.
        num_experts: logical experts of a layer.
        num_layers: decoder layers of the model, None where nobody says.
    """
    refused = []
    ranks, slots = len(slots_per_rank), sum(slots_per_rank)
    if len(set(slots_per_rank)) > 1:
        refused.append(
            f"{target.name}: ranks hold {min(slots_per_rank)} to {max(slots_per_rank)} slots, the"
            f" engine gives every rank as many; nearest: {_nearest(ranks, slots, num_experts)}"
        )
    if not target.replicas and slots != num_experts:
        refused.append(
            f"{target.name}: {slots} slots for {num_experts} experts, the engine keeps one copy of"
            f" an expert; nearest: redundant_experts 0 on {_dividing(num_experts, ranks)} ranks"
        )
    if target.all_layers and num_layers is None:
        refused.append(
            f"{target.name}: its file has a row for every decoder layer, and the recordings neither"
            " say how many there are nor begin with layer 0 and have no gap; name `model` in the"
            " spec"
        )
    return tuple(refused)


def table_refusals(
    target: PlaceTarget,
    *,
    physical_to_logical: Sequence[Sequence[int]],
    layer_ids: Sequence[int],
    slots_per_rank: Sequence[int],
) -> tuple[str, ...]:
    """Return what keeps the engine from taking this very table: the first place of each kind."""
    if target.twins:
        return ()
    ends = [0]
    for slots in slots_per_rank:
        ends.append(ends[-1] + slots)
    for layer, row in zip(layer_ids, physical_to_logical, strict=True):
        for rank, (first, end) in enumerate(pairwise(ends)):
            held = row[first:end]
            twin = next((expert for expert in held if held.count(expert) > 1), None)
            if twin is not None:
                return (
                    f"{target.name}: layer {layer} holds expert {twin} twice on rank {rank}, the"
                    " engine can address it once; give it fewer redundant_experts, or emit for"
                    " another engine",
                )
    return ()


def _nearest(ranks: int, slots: int, num_experts: int) -> str:
    """Name the equal slots just below and above, as far as they hold every expert."""
    below = slots // ranks
    legal = [each for each in (below, below + 1) if each * ranks >= num_experts]
    return " or ".join(
        f"slots_per_rank {each} (redundant_experts {each * ranks - num_experts})" for each in legal
    )


def _dividing(num_experts: int, ranks: int) -> int:
    """Return the number of ranks nearest to `ranks` that divides the experts; ties: the fewer."""
    divisors = (each for each in range(1, num_experts + 1) if num_experts % each == 0)
    return min(divisors, key=lambda each: (abs(each - ranks), each))
