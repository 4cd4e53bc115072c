"""Writes a placement for an engine.

An emitter is a pure function `emit(verified) -> tuple[EmittedFile, ...]`.
"""

from typing import Protocol

from tuner.catalog.place_rules import shape_refusals, table_refusals
from tuner.config.place import PlaceDecision
from tuner.engines.files import EmittedFile
from tuner.engines.placement.targets import PLACE_FOLDERS, PLACE_TARGETS
from tuner.engines.registry import engine_file
from tuner.errors import UnknownTargetError, UnsuitedPlacementError
from tuner.plans.place import VerifiedPlacement


class PlaceEmitter(Protocol):
    """`emit` of an engine's placement.py."""

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
    emit: PlaceEmitter = engine_file(PLACE_FOLDERS[target], "placement").emit
    return emit(_marked_for(target, verified))


def _marked_for(target: str, verified: VerifiedPlacement) -> VerifiedPlacement:
    """Return the placement with the `made_for` entries of this engine only."""
    marks = tuple(mark for mark in verified.plan.made_for if mark.engine == target)
    plan = verified.plan.model_copy(update={"made_for": marks})
    return verified.model_copy(update={"plan": plan})
