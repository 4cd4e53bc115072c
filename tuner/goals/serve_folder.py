"""Files beside `plan.json` in the folder of a deployment's plan.

used/spec.yaml, used/config.json    what was read
used/profile, used/profiles/N       the profiles that describe devices without a datasheet
used/placement.json                 the plan of the placement that is served, where the goal has one
launch/<target>/                    launchers and the benchmark job
trials/NNNN.json                    one record per launch (tuner/verify/deployments/records.py)
verified.json                       what the trials say
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from profilers.files import read_bounded
from tuner.engines.files import LaunchFiles, launch_files
from tuner.engines.serve_writers import emit_all_serving
from tuner.errors import OutputError, PlanUnreadableError
from tuner.output import write_files
from tuner.paths import AnyPath
from tuner.plans.folder import (
    MAX_PLAN_BYTES,
    PLAN_NAME,
    TRIALS_NAME,
    VERIFIED_NAME,
    former_files,
    linked_folder,
    model_config,
    read_plan_as,
    read_trials_as,
    used_profiles,
    write_plan_folder,
)
from tuner.plans.place import PlacePlan, VerifiedPlacement
from tuner.plans.serve import ServePlan, VerifiedServing
from tuner.spec.files import LARGEST_FILE_BYTES
from tuner.spec.serving.spec import ServeSpec
from tuner.verify.deployments.records import ServeTrialRecord, ServeVerified

WAIVED = "predicted only; nothing was launched"
UNJUDGED = "served as it was planned; its own verification is not part of this plan"
PLACEMENT_NAME: Final = "used/placement.json"


def write_serve_plan(
    folder: AnyPath,
    plan: ServePlan,
    *,
    spec: ServeSpec,
    profiles: Mapping[str, AnyPath] | None = None,
) -> ServePlan:
    """Write a deployment's plan and return it with its files named.

    Args:
        folder: may hold an earlier plan.
        plan: what to write.
        spec: that it was made from.
        profiles: folders of the stored profiles that describe devices, by pool.

    Raises:
        OutputError: the folder cannot be written.
        SpecError: a target cannot express the decision, or the placement.
        PlanUnreadableError: the placement's plan is damaged.
    """
    folder = Path(folder)
    files: dict[str, str | bytes] = {
        "used/spec.yaml": read_bounded(spec.path, most_bytes=LARGEST_FILE_BYTES),
        "used/config.json": model_config(spec.model_path),
        **used_profiles(spec.cluster, profiles or {}),
    }
    launch = LaunchFiles(contents={}, executable=frozenset())
    if plan.decision is not None and plan.predicted is not None:
        verified = VerifiedServing(
            plan=plan, decision=plan.decision, predicted=plan.predicted, waived=WAIVED
        )
        placement = _placement(spec)
        if placement is not None:
            files[PLACEMENT_NAME] = placement.plan.model_dump_json(indent=2) + "\n"
        launch = launch_files(emit_all_serving(verified, placement=placement))
    return write_plan_folder(
        folder, plan, {**files, **launch.contents}, executable=launch.executable
    )


def _placement(spec: ServeSpec) -> VerifiedPlacement | None:
    """Return the placement that the goal names, as it was planned."""
    path = spec.goal.placement
    if path is None:
        return None
    plan = read_plan_as(path if path.is_dir() else path.parent, PlacePlan)
    if plan.decision is None:
        raise PlanUnreadableError(f"{path}: the plan decides nothing; relax its goal")
    return VerifiedPlacement(plan=plan, decision=plan.decision, waived=UNJUDGED)


def read_serve_plan(folder: Path) -> ServePlan:
    """Read `plan.json` of a deployment.

    Raises:
        PlanUnreadableError: it is missing or damaged.
    """
    return read_plan_as(folder, ServePlan)


def read_used_placement(folder: Path) -> VerifiedPlacement | None:
    """Read the placement that a deployment's plan was made with; None where it has none.

    Raises:
        PlanUnreadableError: it is damaged.
    """
    file = folder / PLACEMENT_NAME
    try:
        plan = PlacePlan.model_validate_json(read_bounded(file, most_bytes=MAX_PLAN_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise PlanUnreadableError(f"{file}: unreadable; plan the deployment anew") from error
    if plan.decision is None:
        raise PlanUnreadableError(f"{file}: the plan decides nothing; plan the deployment anew")
    return VerifiedPlacement(plan=plan, decision=plan.decision, waived=UNJUDGED)


def read_serve_trials(folder: Path) -> tuple[ServeTrialRecord, ...]:
    """Read every finished launch of a deployment's plan, in order of their numbers.

    Raises:
        PlanUnreadableError: a file is damaged; it names the file and what to do.
    """
    return read_trials_as(ServeTrialRecord, folder / TRIALS_NAME)


def write_serve_verified(
    folder: Path,
    verified: ServeVerified,
    *,
    plan: ServePlan,
    launch: LaunchFiles | None,
) -> None:
    """Write what the launches say, and launch files that rest on it.

    Args:
        folder: of the plan.
        verified: the conclusion.
        plan: of the folder; its list of files is kept true.
        launch: files of the winner, in place of those that the plan lists; None where there is no
            winner, and the files stay as they are.

    Raises:
        OutputError: the folder cannot be written.
    """
    files: dict[str, str | bytes] = dict(launch.contents) if launch else {}
    former = former_files(folder) - files.keys() if launch else frozenset()
    gone = {
        file for file in former if file.startswith("launch/") and not linked_folder(folder, file)
    }
    named = (*sorted({*plan.files, *files} - gone - {PLAN_NAME}), PLAN_NAME)
    if launch and set(named) != set(plan.files):
        # All else stays as its release wrote it: the study of the trials knows the plan by it.
        content = json.loads(read_bounded(folder / PLAN_NAME, most_bytes=MAX_PLAN_BYTES))
        content["files"] = named
        files[PLAN_NAME] = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    files[VERIFIED_NAME] = verified.model_dump_json(indent=2) + "\n"
    write_files(folder, files, executable=launch.executable if launch else frozenset())
    for name in sorted(gone):
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"cannot remove {str(folder / name)!r}: {error.strerror}") from error
