"""Estimates as functions: what the command line calls and a notebook can call too.

Readers of launch files are imported by those who ask for them only.
"""

from collections.abc import Sequence
from pathlib import Path

from tuner.estimate.records import Estimate
from tuner.estimate.serving.records import ServingEstimate
from tuner.paths import AnyPath, paths_of
from tuner.serve_api import site_of
from tuner.spec.read import read_spec
from tuner.spec.serving.read import read_serve_spec
from tuner.train_api import measured_profile


def estimate(
    spec_path: AnyPath,
    *,
    launch: str,
    format_name: str | None = None,
    profiles: AnyPath | Sequence[AnyPath] = (),
    calibrated: bool = True,
) -> Estimate:
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
    profiles = paths_of(profiles)
    from tuner.estimate.estimate import estimate as estimate_launch
    from tuner.estimate.estimate import shipped_residuals
    from tuner.estimate.registry import read_launch

    asked = read_spec(spec_path)
    return estimate_launch(
        asked,
        read_launch(launch, format_name=format_name),
        residuals=shipped_residuals() if calibrated else None,
        measured=measured_profile(asked, profiles, calibrated=calibrated),
    )


def estimate_serving(
    spec_path: AnyPath,
    *,
    launch: str,
    format_name: str | None = None,
    profiles: AnyPath | Sequence[AnyPath] = (),
    pool: str | None = None,
    instances: int | None = None,
    role: str | None = None,
) -> ServingEstimate:
    """Price a launch of a serving engine under the traffic of a spec.

    Args:
        spec_path: the YAML file: model, cluster, traffic and targets.
        launch: a launch file, or the command itself.
        format_name: the engine's; None: by the command.
        profiles: stored profiles, or folders of tables, matched to the pool by device.
        pool: that the launch runs on; None: the only one.
        instances: equal launches that share the traffic; None: as many as the file asks for.
        role: of the group that is meant, or its name, where a file starts several.

    Raises:
        SpecError: the spec or the launch is unusable.
        UnknownDeviceError: no description of the pool's device.
    """
    spec_path = Path(spec_path)
    profiles = paths_of(profiles)
    from tuner.estimate.serving.estimate import estimate_serving as estimate_server
    from tuner.estimate.serving.estimate import pool_named, surroundings
    from tuner.estimate.serving.registry import read_serving_launch

    asked = read_serve_spec(spec_path)
    named = pool_named(asked, pool)
    read = read_serving_launch(
        launch,
        surroundings(asked, named),
        engine=asked.goal.engine_on(named.name).name,
        format_name=format_name,
        role=role,
    )
    return estimate_server(
        asked, read, site=site_of(named, profiles), instances=instances or read.replicas
    )
