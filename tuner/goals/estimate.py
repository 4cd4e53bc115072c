"""Estimates as functions, for the command line and for notebooks.

What a goal needs is imported on use: neither waits for the other's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tuner.errors import SpecError
from tuner.paths import AnyPath, to_paths

if TYPE_CHECKING:
    from tuner.engines.reading.serve_launch import ServingLaunch
    from tuner.estimate.records import Estimate
    from tuner.estimate.rl.records import RlEstimate
    from tuner.estimate.serving.records import ServingEstimate

LONGEST_LOG: Final = 256 * 2**20
"""Largest log of a run."""


def estimate(
    spec_path: AnyPath,
    *,
    launch: str,
    format_name: str | None = None,
    profiles: AnyPath | Sequence[AnyPath] = (),
    calibrated: bool = True,
) -> "Estimate":
    """Price a launch of a training engine.

    Args:
        spec_path: the YAML file: model, cluster and what the launch leaves open.
        launch: a launch file, or the command itself.
        format_name: of the file, see `moetune estimate --help`; None: by its ending.
        profiles: stored profiles of accelerators; without one the datasheet.
        calibrated: whether datasheets are corrected by the residuals that ship.

    Raises:
        SpecError: the spec or the launch is unusable.
        ProfileUnreadableError: a profile is missing or damaged.
    """
    spec_path = Path(spec_path)
    profiles = to_paths(profiles)
    from tuner.estimate.estimate import estimate as estimate_launch
    from tuner.estimate.estimate import shipped_residuals
    from tuner.estimate.registry import read_launch
    from tuner.goals.train_plan import measured_profile
    from tuner.goals.train_spec import read_spec

    spec = read_spec(spec_path)
    with _other_goal_refused(launch, kind="train"):
        settings = read_launch(launch, format_name=format_name)
    return estimate_launch(
        spec,
        settings,
        residuals=shipped_residuals() if calibrated else None,
        measured=measured_profile(spec, profiles, calibrated=calibrated),
    )


@contextmanager
def _other_goal_refused(launch: str, *, kind: str) -> Iterator[None]:
    """Say of a launch that cannot be read that it is of the other kind of goal, where it is."""
    from tuner.estimate.serving.registry import other_goal

    try:
        yield
    except SpecError as error:
        with suppress(SpecError):
            error.args = (other_goal(launch, kind=kind) or str(error),)
        raise


def estimate_serving(
    spec_path: AnyPath,
    *,
    launch: str,
    format_name: str | None = None,
    profiles: AnyPath | Sequence[AnyPath] = (),
    pool: str | None = None,
    instances: int | None = None,
    role: str | None = None,
) -> "ServingEstimate":
    """Price a launch of a serving engine under the traffic of a spec.

    Args:
        spec_path: the YAML file: model, cluster, traffic and targets.
        launch: a launch file, or the command itself.
        format_name: the engine's; None: by the command.
        profiles: stored profiles, or folders of tables, matched to the pool by device.
        pool: that the launch runs on; None: the only one.
        instances: equal launches that share the traffic; None: the replicas of the file.
        role: of the group that is meant, or its name, where a file starts several; None: the
            only one, or one of prefill and one of decode, whose estimate is the first one's
            `other`.

    Raises:
        SpecError: the spec or the launch is unusable.
        UnknownDeviceError: no description of the pool's device.
    """
    spec_path = Path(spec_path)
    profiles = to_paths(profiles)
    from tuner.estimate.serving.estimate import estimate_serving as estimate_server
    from tuner.estimate.serving.estimate import pool_named, surroundings
    from tuner.estimate.serving.registry import read_serving_launch
    from tuner.goals.serve_plan import price_serving_pool
    from tuner.goals.serve_spec import read_serve_spec
    from tuner.spec.serving.goal import Engine

    spec = read_serve_spec(spec_path, any_release=True)
    named_pool = pool_named(spec, pool)
    with _other_goal_refused(launch, kind="serve"):
        parsed_launch = read_serving_launch(
            launch,
            surroundings(spec, named_pool),
            engine=spec.goal.engine_on(named_pool.name).name,
            format_name=format_name,
            role=role,
        )
    launched_goal = spec.goal
    if spec.goal.engine_on(named_pool.name).name != parsed_launch.engine:
        launched = Engine.model_validate({"name": parsed_launch.engine})
        launched_goal = spec.goal.model_copy(update={"engine": launched, "engines": {}})
    serving_pool = price_serving_pool(named_pool, profiles, goal=launched_goal)

    def priced(half: "ServingLaunch") -> "ServingEstimate":
        return estimate_server(
            spec,
            half,
            serving_pool=serving_pool,
            instances=instances or half.replicas,
            release=half.release or spec.release,
        )

    partner = parsed_launch.counterpart
    if role is not None or partner is None:
        return priced(parsed_launch)
    if instances is not None:
        raise SpecError(f"--instances {instances}: of which half? name it with --role")
    second = priced(replace(partner, counterpart=replace(parsed_launch, counterpart=None)))
    return priced(parsed_launch).model_copy(update={"other": second})


def estimate_rl(
    spec_path: AnyPath, *, launch: str, log: AnyPath | None = None, calibrated: bool = True
) -> "RlEstimate":
    """Price a launch of reinforcement learning.

    Args:
        spec_path: the YAML file: model, cluster and lengths.
        launch: a launch file, or the command itself.
        log: of a run of it, with phase timers; None: there is none.
        calibrated: whether datasheets are corrected by the residuals that ship.

    Raises:
        SpecError: the spec, the launch or the log is unusable.
    """
    spec_path = Path(spec_path)
    from tuner.costs.rl.residuals import PLAIN, SHIPPED
    from tuner.estimate.rl.estimate import estimate_step
    from tuner.estimate.rl.registry import read_rl_launch
    from tuner.estimate.rl.setup import build_inputs
    from tuner.estimate.rl.timers import read_timers
    from tuner.spec.files import read_small_text, shown_path
    from tuner.spec.huggingface.read import read_model
    from tuner.spec.rl import RlSpecFile
    from tuner.spec.spec_file import read_spec_keys, validate_spec

    file = validate_spec(read_spec_keys(spec_path), spec_path, RlSpecFile)
    inputs = build_inputs(
        file.goal,
        file.cluster,
        read_model(file.model),
        residuals=SHIPPED if calibrated else PLAIN,
        calibrated=calibrated,
    )
    measured, steps = None, 0
    if log is not None:
        text = read_small_text(Path(log), what="log", most_bytes=LONGEST_LOG)
        measured, steps = read_timers(text, source=shown_path(Path(log)))
    return estimate_step(inputs, read_rl_launch(launch), measured=measured, timed_steps=steps)
