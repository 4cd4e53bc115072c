"""A planned placement of experts, served by the groups whose expert ranks it was planned for.

The file that an engine reads is the one that the placement's own emitter writes
(tuner/emit/placement/); its script and its options are left to the deployment's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from tuner.emit.files import EmittedFile
from tuner.emit.placement.registry import emit_placement
from tuner.emit.placement.sglang import sglang_mark
from tuner.emit.serving.shape import GroupShape, group_shapes, release_of
from tuner.errors import UnsuitedPlacementError
from tuner.place_plan import MadeFor, VerifiedPlacement
from tuner.serve_plan import Instances, VerifiedServing
from tuner.spec.place_targets import NO_BACKEND
from tuner.spec.serving.manifests.manifest import DEEPEP, ServingCapabilities
from tuner.spec.serving.manifests.rules import nodes_of

PLACEMENT_FILE: Final[Mapping[str, str]] = {
    "sglang": "init_expert_location.json",
    "vllm": "moetune_placement.py",
    "trtllm": "moe_load_balancer.yaml",
}
"""What each engine reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPlacement:
    """A placement and its files for one engine."""

    verified: VerifiedPlacement
    files: tuple[EmittedFile, ...]
    marks: tuple[MadeFor, ...] = ()
    """What the placement was planned for, of this engine; of others where it names this one not."""

    def suits(self, group: Instances) -> bool:
        """Say whether the group has the ranks and slots that the placement was planned for.

        A group that counts no copies of experts takes those of the placement.
        """
        own = self.verified.decision
        copies = group.redundant_experts in (0, own.redundant_experts)
        return group.moe_tp == 1 and group.ep == own.ranks and copies


def served(
    engine: str, placement: VerifiedPlacement | None, groups: Iterable[Instances]
) -> ServedPlacement | None:
    """Return the placement with its files, or nothing where none is asked for.

    Raises:
        UnsuitedPlacementError: the engine cannot take it, or no group has its number of expert
            ranks.
    """
    if placement is None:
        return None
    read = PurePosixPath(PLACEMENT_FILE[engine])
    files = tuple(file for file in emit_placement(engine, placement) if file.path == read)
    all_marks = placement.plan.made_for
    marks = tuple(mark for mark in all_marks if mark.engine == engine) or all_marks
    found = ServedPlacement(verified=placement, files=files, marks=marks)
    sizes = sorted({f"ep {group.ep} with {group.redundant_experts}" for group in groups})
    if not any(found.suits(group) for group in groups):
        raise UnsuitedPlacementError(
            f"the placement is for {placement.decision.ranks} expert ranks with"
            f" {placement.decision.redundant_experts} redundant experts, the instances have"
            f" {', '.join(sizes)}"
        )
    return found


def as_served(mark: MadeFor, shape: GroupShape, *, engine: ServingCapabilities) -> MadeFor:
    """Return what a placement would be planned for, to be served by the instances of a group.

    Nodes are those of one stage's expert ranks. SGLang's dispatch rule is the planned one where the
    instance has an all-to-all as planned, or none as planned, and `dynamic` elsewhere: without one
    the engine runs no other, and beside one it comes nearest to an even split.
    """
    group = shape.group
    served_here = mark.model_copy(
        update={
            "engine": engine.name,
            "release": engine.release if mark.release else "",
            "nodes": nodes_of(group.devices // group.pp, devices_per_node=shape.devices_per_node),
            "ep_size": group.ep,
        }
    )
    if engine.name != "sglang":
        return served_here.model_copy(update={"dispatch": "", "a2a_backend": ""})
    has_backend = group.a2a_backend in DEEPEP
    as_planned = has_backend == (mark.a2a_backend != NO_BACKEND)
    return served_here.model_copy(
        update={
            "dispatch": mark.dispatch if as_planned else "dynamic",
            "a2a_backend": "deepep" if has_backend else NO_BACKEND,
        }
    )


def placed_for(
    verified: VerifiedServing, placement: ServedPlacement | None, shape: GroupShape
) -> tuple[str, ...]:
    """Return what the placement that a group serves is tied to, a line for people.

    Instances that differ from what it was planned for are told apart from those that do not.
    """
    if placement is None or not placement.suits(shape.group):
        return ()
    lines, engine = [], release_of(verified, shape.group)
    for mark in placement.marks:
        # SGLang's script follows a mark of its own, also where the plan was for another engine.
        is_foreign = engine.name == "sglang" and mark.engine != engine.name
        followed = sglang_mark(placement.verified.plan) if is_foreign else mark
        here = as_served(followed, shape, engine=engine)
        if here == mark:
            lines.append(
                f"Experts stand as planned for {mark.words}: plan again when one of these changes."
            )
        else:
            lines.append(
                f"NOT AS PLANNED: experts stand as planned for {mark.words}, and these instances"
                f" run {here.words}: their ranks get other loads than the placement's plan says."
                " Plan the placement again for them."
            )
    return tuple(lines)


def placement_notes(
    verified: VerifiedServing, placement: ServedPlacement | None
) -> tuple[str, ...]:
    """Return the same of every group, for a file that starts them all."""
    return tuple(
        f"{shape.name}: {line}"
        for shape in group_shapes(verified)
        for line in placed_for(verified, placement, shape)
    )
