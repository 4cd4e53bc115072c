"""`moetune plan` where the goal is to place experts."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.text import print_exact, print_text

if TYPE_CHECKING:
    from tuner.plans.place import PlacePlan


def plan_place(
    spec: Path,
    *,
    out: Path,
    profiles: Sequence[Path],
    time_limit_s: float,
    calibrated: bool,
    verbose: bool,
    as_json: bool,
) -> "PlacePlan":
    """Plan a placement, write it, print it and return it."""
    # Not from tuner.api, which imports all of the product: a second and more.
    from tuner.cli.place_text import place_text
    from tuner.cli.progress import planning_progress
    from tuner.goals.place import place
    from tuner.goals.place_folder import write_place_plan
    from tuner.search.progress import PlanningEvent

    with planning_progress(limit_s=time_limit_s) as watch:
        watch(
            PlanningEvent(
                stage="placing", text="reading recordings, solving, evaluating hold-out passes"
            )
        )
        made = place(spec, profiles=profiles, time_limit_s=time_limit_s, calibrated=calibrated)
    written = write_place_plan(out, made.plan, spec=made.spec, maps=made.maps)
    if as_json:
        print_exact(written.model_dump_json(indent=2))
    else:
        print_text(place_text(written, folder=out, verbose=verbose))
    return written
