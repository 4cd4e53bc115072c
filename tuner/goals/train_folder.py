"""The layout of a plan's folder, and how it is written and read.

    plan.json               the plan
    used/                   the spec, the model's config, the routing record, the link matrix of
                            pool N in `links-N.csv`, and the profile in
                            `profile/`; where several pools have one, each in `profiles/N/` with N
                            the pool's position in the spec, from 0
    launch/<target>/        files that start the job
    trials/NNNN.json        one record per launch; study.journal* is Optuna's
    verified.json           the results of the trials

Everything but `trials/` can be derived again from the other files.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from profilers.errors import ProfileUnwritableError
from profilers.files import TooLargeError, read_bounded
from profilers.imports.link_matrix import link_matrix_csv, read_link_matrix
from profilers.records import Profile, Record
from profilers.schema_version import refusal_of_newer
from profilers.sole_writer import sole_writer
from profilers.store import read_profile
from tuner.engines.writers import emit_all
from tuner.errors import OutputError, PlanUnreadableError
from tuner.output import write_directory, write_files
from tuner.paths import AnyPath
from tuner.plans.train import Plan, VerifiedPlan
from tuner.spec.files import LARGEST_FILE_BYTES
from tuner.spec.routing import routing_json
from tuner.spec.spec import Spec
from tuner.verify.records import TrialRecord, Verified
from tuner.verify.study.worker import WORKERS_SUFFIX

PLAN_NAME: Final = "plan.json"
VERIFIED_NAME: Final = "verified.json"
TRIALS_NAME: Final = "trials"
JOURNAL_NAME: Final = "study.journal"
STAGED_PREFIX: Final = ".moetune-"
"""Of the staging folder of a plan that replaces another."""

MAX_PLAN_BYTES: Final = 64 * 2**20
MAX_PROFILE_FILE_BYTES: Final = 256 * 2**20
"""The largest table that a profile may have."""

AnyPlan = TypeVar("AnyPlan", bound=Record)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFiles:
    """Files by path relative to the plan's folder, and which of them can be executed."""

    texts: Mapping[str, str]
    executable: frozenset[str]


def launch_files(verified: VerifiedPlan) -> LaunchFiles:
    """Emit every target of a plan."""
    texts, executable = {}, set()
    for target, files in emit_all(verified).items():
        for file in files:
            name = f"launch/{target}/{file.path}"
            texts[name] = file.text
            if file.executable:
                executable.add(name)
    return LaunchFiles(texts=texts, executable=frozenset(executable))


def write_plan(folder: AnyPath, plan: Plan, *, spec: Spec, profiles: Mapping[str, AnyPath]) -> Plan:
    """Write a new plan and everything that it used; return it with its files named.

    Args:
        folder: may hold an earlier plan, which is replaced.
        plan: what to write.
        spec: that it was made from.
        profiles: folders of the stored profiles that it used, by pool; none where it rests on
            datasheets.

    Raises:
        OutputError: the folder cannot be written.
    """
    folder = Path(folder)
    files: dict[str, str | bytes] = {f"used/{name}": data for name, data in _used(spec).items()}
    stored = {name: Path(profile) for name, profile in profiles.items()}
    for name, profile in _profile_folders(spec, stored).items():
        files |= {
            f"used/{name}/{file.name}": read_bounded(file, most_bytes=MAX_PROFILE_FILE_BYTES)
            for file in sorted(profile.iterdir())
            if file.is_file() and not file.name.startswith(".")
        }
    executable: frozenset[str] = frozenset()
    if plan.decision is not None:
        waived = VerifiedPlan.waive(plan, reason="no trial was launched yet; run moetune verify")
        emitted = launch_files(waived)
        files |= emitted.texts
        executable = emitted.executable
    plan = plan.model_copy(update={"files": (*sorted(files), PLAN_NAME)})
    # Last, so that a folder with a plan.json is complete.
    files[PLAN_NAME] = plan.model_dump_json(indent=2) + "\n"
    write_folder(folder, files, executable=executable)
    return plan


def write_folder(
    folder: Path, files: Mapping[str, str | bytes], *, executable: frozenset[str] = frozenset()
) -> None:
    """Write all files of a plan, `plan.json` last; an earlier plan in the folder is replaced.

    Raises:
        OutputError: the folder cannot be written.
    """
    if folder.is_dir():
        try:
            # Two writers would mix the launch files of one with the plan of the other.
            with sole_writer(folder, what="`moetune plan`"):
                _replace_plan(folder, files, executable=executable)
        except ProfileUnwritableError as error:
            raise OutputError(str(error)) from error
    elif folder.exists():
        raise OutputError(
            f"cannot write {str(folder)!r}: not a folder; choose another place with -o"
        )
    else:
        write_directory(folder, files, executable=executable)


def plan_kind(folder: Path) -> str | None:
    """Return `goal.kind` of the plan in a folder; None where it cannot be told.

    Raises:
        PlanUnreadableError: there is no plan, or it is too large or no JSON.
    """
    values = _raw_plan(folder)
    goal = values.get("goal")
    kind = goal.get("kind") if isinstance(goal, dict) else None
    return kind if isinstance(kind, str) else None


def _raw_plan(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads(_plan_bytes(folder))
    except (ValueError, RecursionError) as error:
        raise PlanUnreadableError(
            f"{folder / PLAN_NAME}: not the JSON of a plan; write it anew"
        ) from error
    return values if isinstance(values, dict) else {}


def read_plan(folder: Path) -> Plan:
    """Read `plan.json` of a plan's folder.

    Raises:
        PlanUnreadableError: it is missing or damaged.
    """
    return read_plan_as(folder, Plan)


def read_plan_as(folder: Path, kind: type[AnyPlan]) -> AnyPlan:
    """Read `plan.json` as one kind of plan.

    Raises:
        PlanUnreadableError: it is missing or damaged.
    """
    content = _plan_bytes(folder)
    known = kind.model_fields["schema_version"].default
    if refusal := refusal_of_newer(content, known=known):
        raise PlanUnreadableError(f"{folder / PLAN_NAME}: {refusal}")
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "file"
        file = folder / PLAN_NAME
        raise PlanUnreadableError(f"{file}: {field}: {first['msg']}; write it anew") from error


def _plan_bytes(folder: Path) -> bytes:
    file = folder / PLAN_NAME
    try:
        return read_bounded(file, most_bytes=MAX_PLAN_BYTES)
    except TooLargeError as error:
        raise PlanUnreadableError(f"{file}: larger than any plan; write it anew") from error
    except FileNotFoundError as error:
        raise PlanUnreadableError(
            f"{folder} holds no {PLAN_NAME}; write one with `moetune plan SPEC.yaml -o {folder}`"
        ) from error
    except OSError as error:
        raise PlanUnreadableError(f"{file}: {error.strerror}") from error


def read_verified(folder: Path) -> Verified | None:
    """Read `verified.json` of a training plan's folder; None where nothing was verified yet.

    Raises:
        PlanUnreadableError: it is damaged.
    """
    return read_verified_as(Verified, folder)


def read_verified_as(kind: type[AnyPlan], folder: Path) -> AnyPlan | None:
    """Read `verified.json` as the given type; None where there is none.

    Raises:
        PlanUnreadableError: it is damaged, or of another kind.
    """
    file = folder / VERIFIED_NAME
    try:
        return kind.model_validate_json(read_bounded(file, most_bytes=MAX_PLAN_BYTES))
    except FileNotFoundError:
        return None
    except TooLargeError as error:
        raise PlanUnreadableError(f"{file}: larger than any verification; verify again") from error
    except OSError as error:
        raise PlanUnreadableError(f"{file}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "file"
        raise PlanUnreadableError(f"{file}: {field}: {first['msg']}; verify again") from error


def read_used_profile(folder: Path) -> Profile:
    """Read the copy of the profile that the plan was made from.

    Raises:
        ProfileUnreadableError: it is missing or damaged.
    """
    return read_profile(folder / "used" / "profile")


def write_trial(folder: Path, record: TrialRecord, *, log: str = "") -> None:
    """Write one finished trial, and its log if given.

    Raises:
        OutputError: the folder cannot be written.
    """
    file = trial_file(folder, record.number).relative_to(folder)
    kept = file.with_suffix(".log")
    write_files(folder, {str(file): record.model_dump_json(indent=1) + "\n"})
    if log:
        write_files(folder, {str(kept): log})
    else:
        # Of a trial that had this number before.
        (folder / kept).unlink(missing_ok=True)


def trial_file(folder: Path, number: int) -> Path:
    """Return where the record of a trial is kept."""
    return folder / TRIALS_NAME / f"{number:04d}.json"


def write_verified(folder: Path, verified: Verified, *, launch: LaunchFiles | None) -> None:
    """Write the conclusion, and the launch files made from it.

    Raises:
        OutputError: the folder cannot be written.
    """
    files: dict[str, str] = dict(launch.texts) if launch else {}
    files[VERIFIED_NAME] = verified.model_dump_json(indent=2) + "\n"
    write_files(folder, files, executable=launch.executable if launch else frozenset())


def _used(spec: Spec) -> dict[str, bytes]:
    used = {
        "spec.yaml": read_bounded(spec.path, most_bytes=LARGEST_FILE_BYTES),
        "config.json": read_bounded(_config(spec), most_bytes=LARGEST_FILE_BYTES),
    }
    if spec.goal.routing is not None:
        used["routing.json"] = routing_json(spec.goal.routing.path)
    for number, pool in enumerate(spec.cluster.pools):
        if pool.link_matrix is not None:
            text = link_matrix_csv(read_link_matrix(pool.link_matrix))
            used[f"links-{number}.csv"] = text.encode()
    return used


def _profile_folders(spec: Spec, profiles: Mapping[str, Path]) -> dict[str, Path]:
    """Return where each profile is copied to; pool names may be invalid folder names."""
    if len(profiles) == 1:
        (only,) = profiles.values()
        return {"profile": only}
    return {
        f"profiles/{position}": profiles[pool.name]
        for position, pool in enumerate(spec.cluster.pools)
        if pool.name in profiles
    }


def _config(spec: Spec) -> Path:
    path = spec.model_path
    return path / "config.json" if path.is_dir() else path


def _replace_plan(
    folder: Path, files: Mapping[str, str | bytes], *, executable: frozenset[str]
) -> None:
    """Write a plan where another may exist.

    Everything is staged first, so that a full disk leaves the former plan intact. Then the old
    `plan.json` is removed first and the new one is moved last: files beside one belong to it.
    """
    stale = _former_files(folder) - files.keys()
    had_plan = (folder / PLAN_NAME).exists()
    staged = folder
    try:
        staged = Path(tempfile.mkdtemp(prefix=STAGED_PREFIX, dir=folder)) / "plan"
        write_directory(staged, files, executable=executable)
        (folder / PLAN_NAME).unlink(missing_ok=True)
        if had_plan:
            _forget_trials(folder)
        for name in sorted(stale):
            _remove(folder, name)
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (staged / name).replace(folder / name)
    except OSError as error:
        raise OutputError(
            f"cannot write {str(folder)!r}: {error.strerror}; choose another place with -o"
        ) from error
    finally:
        if staged != folder:
            shutil.rmtree(staged.parent, ignore_errors=True)


def _former_files(folder: Path) -> frozenset[str]:
    """Return the files of the existing plan; empty where it is unreadable."""
    try:
        names = _raw_plan(folder).get("files")
    except PlanUnreadableError:
        return frozenset()
    texts = (name for name in names if isinstance(name, str)) if isinstance(names, list) else ()
    inside = (name for name in texts if name.startswith(("launch/", "used/", "report/")))
    return frozenset(name for name in inside if ".." not in Path(name).parts)


def _remove(folder: Path, name: str) -> None:
    """Remove a file, and the folders that become empty."""
    (folder / name).unlink(missing_ok=True)
    for parent in Path(name).parents[:-1]:
        if (folder / parent).is_dir() and not any((folder / parent).iterdir()):
            (folder / parent).rmdir()


def _forget_trials(folder: Path) -> None:
    """Remove the trials of the former plan; a new plan starts without any.

    Only files that a verification writes are removed.
    """
    trials = folder / TRIALS_NAME
    numbered = "[0-9][0-9][0-9][0-9]"
    for pattern in (f"{numbered}.json", f"{numbered}.log", f"{JOURNAL_NAME}*"):
        for file in trials.glob(pattern):
            if not file.is_dir():
                file.unlink()
    # The running workers of the study, one file each.
    shutil.rmtree(trials / f"{JOURNAL_NAME}{WORKERS_SUFFIX}", ignore_errors=True)
    (folder / VERIFIED_NAME).unlink(missing_ok=True)
