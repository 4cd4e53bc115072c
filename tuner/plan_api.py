"""One way to plan whatever a spec asks for, and to write what came of it."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.paths import AnyPath, paths_of
from tuner.place_api import Placed, place
from tuner.place_folder import write_place_plan
from tuner.plan_folder import write_plan
from tuner.planner.progress import Watch, unwatched
from tuner.serve_api import Deployed, deploy
from tuner.serve_folder import write_serve_plan
from tuner.spec.kind import goal_kind
from tuner.train_api import Planned, plan_training

if TYPE_CHECKING:
    from tuner.plan import Plan

AnyPlanned = Planned | Deployed | Placed
"""A plan of any goal (`made.plan`), with the spec that it answers (`made.spec`)."""


def plan(
    spec_path: AnyPath,
    *,
    profiles: AnyPath | Sequence[AnyPath] = (),
    top: int = 5,
    time_limit_s: float = 60.0,
    method: str = "milp",
    calibrated: bool = True,
    with_unlaunchable: bool = True,
    processes: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    watch: Watch = unwatched,
) -> Planned | Any:
    """Plan what a spec describes: a training run, a deployment or a placement.

    Which of `AnyPlanned` comes back is the spec's choice, which no type checker reads: to it the
    plan is a training run's until `isinstance` says otherwise.

    What a goal does not know of the arguments changes nothing, as with `moetune plan`: `top`,
    `method`, `with_unlaunchable`, `processes` and `watch` are of training runs, `calibrated` of
    these and of placements. `plan_training`, `deploy` and `place` are the same for one goal each.

    Args:
        spec_path: the YAML file; its `goal.kind` decides.
        profiles: stored profiles, matched to pools by device.
        top: how many decisions to return at least.
        time_limit_s: for the searches.
        method: layout solver, see solvers/registry.py.
        calibrated: whether datasheets are corrected by the residuals that ship.
        with_unlaunchable: whether to ask what each feature that the targets lack would gain.
        processes: that may work at a time; beyond 1, this one is forked.
        clock: for the time limit and the reported solve time.
        watch: told about every stage of a search.

    Raises:
        SpecError: the spec is unusable, or asks for what this version cannot price.
        ProfileUnreadableError: a profile is missing or damaged.
        UnknownDeviceError: no description of a pool's device.
    """
    path, known = Path(spec_path), paths_of(profiles)
    kind = goal_kind(path)
    if kind == "serve":
        return deploy(path, profiles=known, time_limit_s=time_limit_s, clock=clock)
    if kind == "place":
        return place(
            path, profiles=known, time_limit_s=time_limit_s, calibrated=calibrated, clock=clock
        )
    return plan_training(
        path,
        profiles=known,
        top=top,
        time_limit_s=time_limit_s,
        method=method,
        calibrated=calibrated,
        with_unlaunchable=with_unlaunchable,
        processes=processes,
        clock=clock,
        watch=watch,
    )


def write(folder: AnyPath, made: AnyPlanned) -> "Plan | Any":
    """Write a plan of any goal with its launch files; return it with its files named.

    Raises:
        OutputError: the folder cannot be written.
    """
    if isinstance(made, Planned):
        return write_plan(folder, made.plan, spec=made.spec, profiles=made.profiles)
    if isinstance(made, Deployed):
        return write_serve_plan(folder, made.plan, spec=made.spec)
    return write_place_plan(folder, made.plan, spec=made.spec, maps=made.maps)
