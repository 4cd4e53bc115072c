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
from tuner.errors import UnsuitedPlacementError
from tuner.place_plan import MadeFor, VerifiedPlacement
from tuner.serve_plan import Instances

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
    """What the placement was planned for, of this engine."""

    def suits(self, group: Instances) -> bool:
        """Say whether the group has the ranks that the placement was planned for."""
        return group.moe_tp == 1 and group.ep == self.verified.decision.ranks


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
    marks = tuple(mark for mark in placement.plan.made_for if mark.engine == engine)
    found = ServedPlacement(verified=placement, files=files, marks=marks)
    sizes = sorted({group.ep for group in groups})
    if not any(found.suits(group) for group in groups):
        raise UnsuitedPlacementError(
            f"the placement is for {placement.decision.ranks} expert ranks, the instances have"
            f" ep {', '.join(map(str, sizes))}"
        )
    return found


def placed_for(placement: ServedPlacement | None, group: Instances) -> tuple[str, ...]:
    """Return what the placement that a group serves is tied to, a line for people."""
    if placement is None or not placement.suits(group):
        return ()
    return tuple(
        f"Experts stand as planned for {mark.words}: plan again when one of these changes."
        for mark in placement.marks
    )
