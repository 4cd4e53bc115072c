"""A planned expert placement, served by the groups that have its number of expert ranks.

The engine's placement file is that of the placement's emitter (tuner/engines/placement/); script
and options are the deployment's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.catalog.serve_rules.rules import nodes_needed
from tuner.config.serve import Instances
from tuner.engines.files import EmittedFile
from tuner.engines.place_writers import emit_placement
from tuner.engines.registry import engine_file
from tuner.engines.serving.shape import GroupShape, group_release, group_shapes
from tuner.errors import UnsuitedPlacementError
from tuner.plans.place import MadeFor, VerifiedPlacement
from tuner.plans.serve import VerifiedServing


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPlacement:
    """A placement and its files for one engine."""

    verified: VerifiedPlacement
    files: tuple[EmittedFile, ...]

    def suits(self, group: Instances) -> bool:
        """Say whether the group has the ranks and slots that the placement was planned for.

        A group without redundant experts takes those of the placement.
        """
        planned = self.verified.decision
        copies = group.redundant_experts in (0, planned.redundant_experts)
        return group.moe_tp == 1 and group.ep == planned.ranks and copies


def served_placement_for(
    engine: str, placement: VerifiedPlacement | None, groups: Iterable[Instances]
) -> ServedPlacement | None:
    """Return the placement with its files, or nothing if none is requested.

    Raises:
        UnsuitedPlacementError: the engine cannot take it, or no group has its number of expert
            ranks.
    """
    if placement is None:
        return None
    emitted = emit_placement(engine, placement)
    read = PurePosixPath(engine_file(engine, "placement").SERVED_FILE)
    files = tuple(file for file in emitted if file.path == read)
    served_placement = ServedPlacement(verified=placement, files=files)
    sizes = sorted({f"ep {group.ep} with {group.redundant_experts}" for group in groups})
    if not any(served_placement.suits(group) for group in groups):
        raise UnsuitedPlacementError(
            f"the placement is for {placement.decision.ranks} expert ranks with"
            f" {placement.decision.redundant_experts} redundant experts, the instances have"
            f" {', '.join(sizes)}"
        )
    return served_placement


def served_mark(mark: MadeFor, shape: GroupShape, *, engine: ServingCapabilities) -> MadeFor:
    """Return the settings for which a placement of this group's instances would be planned.

    Nodes are those of one stage's expert ranks. The dispatch rule is that of the engine's
    `served_rule`; engines without one have a single rule.
    """
    group = shape.group
    served_here = mark.model_copy(
        update={
            "engine": engine.name,
            "release": engine.release if mark.release else "",
            "nodes": nodes_needed(
                group.devices // group.pp, devices_per_node=shape.devices_per_node
            ),
            "ep_size": group.ep,
        }
    )
    rule = getattr(engine_file(engine.name, "placement"), "served_rule", None)
    chosen = {"dispatch": "", "a2a_backend": ""} if rule is None else rule(mark, group)
    return served_here.model_copy(update=chosen)


def placement_lines(
    verified: VerifiedServing, placement: ServedPlacement | None, shape: GroupShape
) -> tuple[str, ...]:
    """Return a note on what a group's placement was planned for, and whether the group differs."""
    made_for = () if placement is None else placement.verified.plan.made_for
    if placement is None or not placement.suits(shape.group) or not made_for:
        return ()
    engine = group_release(verified, shape.group)
    mark = next(
        (candidate for candidate in made_for if candidate.engine == engine.name), made_for[0]
    )
    # A script uses its engine's settings, also where the plan was for another engine.
    own_mark = getattr(engine_file(engine.name, "placement"), "planned_mark", None)
    followed = mark if own_mark is None else own_mark(placement.verified.plan)
    here = served_mark(followed, shape, engine=engine)
    if here == mark:
        return (f"Experts are placed for {mark.words}: plan again when one of these changes.",)
    return (
        f"NOT AS PLANNED: experts are placed for {mark.words}, and these instances run"
        f" {here.words}: their rank loads differ from the placement's plan. Plan the placement"
        " again for them.",
    )


def placement_notes(
    verified: VerifiedServing, placement: ServedPlacement | None
) -> tuple[str, ...]:
    """Return the same of every group, for a file that starts them all."""
    return tuple(
        f"{shape.name}: {line}"
        for shape in group_shapes(verified)
        for line in placement_lines(verified, placement, shape)
    )
