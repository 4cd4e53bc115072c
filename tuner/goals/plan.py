"""Plans a spec of any goal, and writes the plan."""

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from tuner.goals.place_plan import Placed
from tuner.goals.registry import goal_of, kind_or_first, load_goal
from tuner.goals.serve_plan import Deployed
from tuner.goals.train_plan import Planned, plan_training
from tuner.paths import AnyPath
from tuner.spec.kind import goal_kind

if TYPE_CHECKING:
    from tuner.plans.train import Plan
    from tuner.prices.lookups import WantedSizes

AnyPlanned = Planned | Deployed | Placed
"""A plan of any goal (`made.plan`), with its spec (`made.spec`)."""

Arguments = ParamSpec("Arguments")


def _with_arguments_of(
    source: Callable[Arguments, Planned],
) -> Callable[[Callable[..., AnyPlanned]], Callable[Arguments, Planned | Any]]:
    """Give a function the signature of another, for type checkers, `help` and callers."""

    def given(function: Callable[..., AnyPlanned]) -> Callable[Arguments, Planned | Any]:
        function.__signature__ = signature(source)  # type: ignore[attr-defined]  # read by inspect
        return function

    return given


@_with_arguments_of(plan_training)
def plan(spec_path: AnyPath, **options: Any) -> AnyPlanned:
    """Plan what a spec describes: a training run, a deployment or a placement.

    The spec decides which type of `AnyPlanned` is returned; a type checker takes it for a training
    plan until `isinstance` narrows it.

    The arguments are those of `plan_training`, described there. Arguments that a goal does not have
    are ignored, as by `moetune plan`: `top`, `method`, `with_unlaunchable`, `processes` and `watch`
    are for training runs, `calibrated` for these and placements. `plan_training`, `deploy` and
    `place` are the same for one goal each.

    Args:
        spec_path: the YAML file; its `goal.kind` decides.
        options: the other arguments of `plan_training`.

    Raises:
        SpecError: the spec is unusable, or asks for what this version cannot price.
        ProfileUnreadableError: a profile is missing or damaged.
        UnknownDeviceError: no description of a pool's device.
    """
    # An argument that does not exist is an error whatever the goal.
    signature(plan_training).bind(spec_path, **options)
    planner = load_goal(kind_or_first(goal_kind(Path(spec_path)))).plan
    known = signature(planner).parameters
    made: AnyPlanned = planner(
        spec_path, **{name: value for name, value in options.items() if name in known}
    )
    return made


def wanted_sizes(spec_path: AnyPath) -> "WantedSizes":
    """List the kernels whose prices planning a spec looks up, for `moetune profile --for`.

    Raises:
        SpecError: the spec is unusable, or asks for what this version cannot price.
    """
    spec_path = Path(spec_path)
    return load_goal(kind_or_first(goal_kind(spec_path))).wanted_sizes(spec_path)


def write(folder: AnyPath, made: AnyPlanned) -> "Plan | Any":
    """Write a plan of any goal with its launch files; return it with its files named.

    Raises:
        OutputError: the folder cannot be written.
    """
    return goal_of(made.plan).write(folder, made)
