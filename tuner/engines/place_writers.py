"""Every engine that takes a placement, and the function that runs its emitter.

An emitter is a pure function `emit(verified) -> tuple[EmittedFile, ...]`.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Final, Protocol, cast

from tuner.config.place import PlaceDecision
from tuner.engines.files import EmittedFile
from tuner.errors import UnknownTargetError, UnsuitedPlacementError
from tuner.plans.place import VerifiedPlacement
from tuner.spec.place_targets import PLACE_TARGETS, shape_refusals, table_refusals

PLACE_EMITTERS: Final[Mapping[str, str]] = {
    "sglang": "tuner.engines.sglang.placement:emit",
    "trtllm": "tuner.engines.trtllm.placement:emit",
    "vllm": "tuner.engines.vllm.placement:emit",
    "vllm-ascend": "tuner.engines.vllm_ascend.placement:emit",
    "eplb": "tuner.engines.eplb.placement:emit",
    "megatron": "tuner.engines.megatron_lm.placement:emit",
}


class PlaceEmitter(Protocol):
    """What a line of the table names."""

    def __call__(self, verified: VerifiedPlacement) -> tuple[EmittedFile, ...]: ...


def refusals(target: str, decision: PlaceDecision) -> tuple[str, ...]:
    """Return why the engine cannot take the placement, a line each; empty if it can.

    Raises:
        UnknownTargetError: no engine has this name.
    """
    if target not in PLACE_TARGETS:
        raise UnknownTargetError(
            f"{target!r} takes no placement; those that do are {', '.join(PLACE_TARGETS)}"
        )
    return (
        *shape_refusals(
            PLACE_TARGETS[target],
            slots_per_rank=decision.slots_per_rank,
            num_experts=decision.num_experts,
            num_layers=decision.num_layers,
        ),
        *table_refusals(
            PLACE_TARGETS[target],
            physical_to_logical=decision.physical_to_logical,
            layer_ids=decision.layer_ids,
            slots_per_rank=decision.slots_per_rank,
        ),
    )


def emit_placement(target: str, verified: VerifiedPlacement) -> tuple[EmittedFile, ...]:
    """Return the files of one engine, relative to its own folder.

    Raises:
        UnknownTargetError: no engine has this name.
        UnsuitedPlacementError: the engine cannot take it; the message has the nearest it can.
    """
    broken = refusals(target, verified.decision)
    if broken:
        raise UnsuitedPlacementError("; ".join(broken))
    module, _, name = PLACE_EMITTERS[target].partition(":")
    return cast(PlaceEmitter, getattr(import_module(module), name))(_marked_for(target, verified))


def _marked_for(target: str, verified: VerifiedPlacement) -> VerifiedPlacement:
    """Return the placement with the `made_for` entries of this engine only."""
    marks = tuple(mark for mark in verified.plan.made_for if mark.engine == target)
    plan = verified.plan.model_copy(update={"made_for": marks})
    return verified.model_copy(update={"plan": plan})
