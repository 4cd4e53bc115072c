"""The folder of a plan, whatever its goal: how it is written, replaced and read.

    plan.json               the plan; written last, so that a folder with one is complete
    used/                   what it was made from
    launch/<target>/        files that start the job
    trials/NNNN.json        one record per launch; study.db is Optuna's
    verified.json           the results of the trials
    fewer-nodes/            of training plans: another folder of a plan, for one node less

What `used/` and `launch/` hold is the goal's (tuner/goals/*_folder.py).
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from pydantic import ValidationError

from profilers.errors import ProfileUnwritableError, first_problem
from profilers.files import TooLargeError, read_bounded
from profilers.records import Record
from profilers.schema_version import refusal_of_newer
from profilers.sole_writer import sole_writer
from tuner.errors import OutputError, PlanUnreadableError
from tuner.output import write_directory, write_files
from tuner.paths import AnyPath
from tuner.spec.cluster import Cluster
from tuner.spec.fields import SpecFolder
from tuner.spec.files import LARGEST_FILE_BYTES

PLAN_NAME: Final = "plan.json"
VERIFIED_NAME: Final = "verified.json"
TRIALS_NAME: Final = "trials"
FEWER_NODES: Final = "fewer-nodes"
STUDY_NAME: Final = "study.db"
FORMER_STUDY: Final = "study.journal"
"""Beginning of the names of a study's files in earlier releases; one of them is a folder."""
MOST_NAME_BYTES: Final = 255
OWN_FOLDERS: Final = ("launch", "used", "report", TRIALS_NAME, FEWER_NODES)
STAGED_PREFIX: Final = ".moetune-"
"""Prefix of the staging folder of a plan that replaces another."""
FORMER: Final = ("launch/", "used/", "report/", f"{FEWER_NODES}/")
"""Prefixes of the files of a former plan that a new one removes."""
STAGED_S: Final = 600.0
"""Age in seconds after which a staging folder is left over: longer than any plan takes to write."""

MAX_PLAN_BYTES: Final = 64 * 2**20
MAX_PROFILE_FILE_BYTES: Final = 256 * 2**20
"""Largest size of one table of a profile, bytes."""
MAX_RECORD_BYTES: Final = 16 * 2**20
"""Largest size of the record of one trial, bytes."""

AnyPlan = TypeVar("AnyPlan", bound=Record)
AnyRecord = TypeVar("AnyRecord", bound=Record)


def write_plan_folder(
    folder: Path,
    plan: AnyPlan,
    files: Mapping[str, str | bytes],
    *,
    executable: frozenset[str] = frozenset(),
) -> AnyPlan:
    """Write a plan and the files beside it; return it with its files named.

    An earlier plan in the folder is replaced.

    Args:
        folder: may hold an earlier plan.
        plan: of any goal.
        files: by path relative to the folder.
        executable: those of them that can be executed.

    Raises:
        OutputError: the folder cannot be written.
    """
    plan, every = plan_files(plan, files)
    write_folder(folder, every, executable=executable)
    return plan


def plan_files(
    plan: AnyPlan, files: Mapping[str, str | bytes]
) -> tuple[AnyPlan, dict[str, str | bytes]]:
    """Return a plan with its files named, and all files of its folder, `plan.json` last.

    Args:
        plan: of any goal.
        files: beside it, by path relative to the folder.
    """
    plan = plan.model_copy(update={"files": (*sorted(files), PLAN_NAME)})
    # Another command may be called from another folder.
    context = SpecFolder(folder=Path.cwd())
    # Last, so that a folder with a plan.json is complete.
    return plan, {**files, PLAN_NAME: plan.model_dump_json(indent=2, context=context) + "\n"}


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


def used_profiles(cluster: Cluster, profiles: Mapping[str, AnyPath]) -> dict[str, bytes]:
    """Read the stored profiles that pools were priced on, by where a plan's folder keeps them.

    A single one is `used/profile`; of several each is `used/profiles/N`, with N the position of its
    pool, because pool names may be invalid folder names.
    """
    files: dict[str, bytes] = {}
    for position, pool in enumerate(cluster.pools):
        if pool.name not in profiles:
            continue
        name = "profile" if len(profiles) == 1 else f"profiles/{position}"
        files |= {
            f"used/{name}/{file.name}": read_bounded(file, most_bytes=MAX_PROFILE_FILE_BYTES)
            for file in sorted(Path(profiles[pool.name]).iterdir())
            if file.is_file() and not file.name.startswith(".")
        }
    return files


def name_used_profiles(pools: Sequence[dict[str, Any]], names: Collection[str], used: Path) -> None:
    """Point the pools of a planned spec at the copies of the profiles of those named."""
    for position, pool in enumerate(pools):
        profile = used / ("profile" if len(names) == 1 else f"profiles/{position}")
        if pool.get("name") in names and profile.is_dir():
            pool["profile"] = str(profile)


def model_config(path: Path) -> bytes:
    """Read the config.json that a spec names, itself or by its folder."""
    file = path / "config.json" if path.is_dir() else path
    return read_bounded(file, most_bytes=LARGEST_FILE_BYTES)


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
        raise PlanUnreadableError(
            f"{folder / PLAN_NAME}: {first_problem(error)}; write it anew"
        ) from error


def _plan_bytes(folder: Path) -> bytes:
    file = folder / PLAN_NAME
    if linked := next((name for name in OWN_FOLDERS if (folder / name).is_symlink()), None):
        raise PlanUnreadableError(
            f"{folder / linked} is a link, which no folder of a plan has: put the files there"
        )
    try:
        return read_bounded(file, most_bytes=MAX_PLAN_BYTES)
    except TooLargeError as error:
        raise PlanUnreadableError(f"{file}: larger than any plan; write it anew") from error
    except FileNotFoundError as error:
        raise PlanUnreadableError(
            f"{folder} holds no {PLAN_NAME}; write one with `moetune plan SPEC.yaml -o {folder}`"
        ) from error
    except NotADirectoryError as error:
        raise PlanUnreadableError(
            f"{folder}: a plan is a folder; name the one that `moetune plan -o` wrote"
        ) from error
    except OSError as error:
        raise PlanUnreadableError(f"{file}: {error.strerror}") from error


def read_verified_as(kind: type[AnyPlan], folder: Path) -> AnyPlan | None:
    """Read `verified.json` as the given type; None where there is none.

    Raises:
        PlanUnreadableError: it is damaged, or of another kind.
    """
    file = folder / VERIFIED_NAME
    if not file.exists():
        return None
    return _read_record(
        kind, file, most_bytes=MAX_PLAN_BYTES, what="verification", remedy="verify again"
    )


def _read_record(
    kind: type[AnyRecord], file: Path, *, most_bytes: int, what: str, remedy: str
) -> AnyRecord:
    try:
        return kind.model_validate_json(read_bounded(file, most_bytes=most_bytes))
    except TooLargeError as error:
        raise PlanUnreadableError(f"{file}: larger than any {what}; {remedy}") from error
    except ValidationError as error:
        raise PlanUnreadableError(f"{file}: {first_problem(error)}; {remedy}") from error
    except OSError as error:
        raise PlanUnreadableError(f"{file}: {error.strerror}") from error


def trial_file(folder: Path, number: int) -> Path:
    """Return where the record of a trial is kept."""
    return folder / TRIALS_NAME / f"{number:04d}.json"


class FinishedTrial(Protocol):
    """A record of one launch."""

    @property
    def number(self) -> int:
        """Number of the trial in its study."""

    def model_dump_json(self, *, indent: int) -> str:
        """Return the record as JSON."""


def write_trial(folder: Path, record: FinishedTrial, *, log: str = "") -> None:
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


def read_trials_as(kind: type[AnyRecord], trials: Path) -> tuple[AnyRecord, ...]:
    """Read every finished trial of a folder of trials, in order of their numbers.

    Raises:
        PlanUnreadableError: a file is damaged; it names the file and what to do.
    """
    if not trials.is_dir():
        return ()
    return tuple(
        _read_record(
            kind,
            file,
            most_bytes=MAX_RECORD_BYTES,
            what="trial record",
            remedy="delete it and go on with --resume",
        )
        for file in sorted(trials.glob("[0-9]*.json"))
    )


def _replace_plan(
    folder: Path, files: Mapping[str, str | bytes], *, executable: frozenset[str]
) -> None:
    """Write a plan where another may exist.

    Everything is staged first, so that a full disk leaves the former plan intact. Then the old
    `plan.json` is removed first and the new one is moved last: files beside one belong to it, and
    a folder without one was left by a writer that was killed.
    """
    for unfinished in folder.glob(f"{STAGED_PREFIX}*"):
        # Of a writer that was killed. Where a file system has no locks, another may be at work.
        if time.time() - unfinished.stat().st_mtime > STAGED_S:
            shutil.rmtree(unfinished, ignore_errors=True)
    stale = former_files(folder) - files.keys()
    if (folder / PLAN_NAME).exists():
        stale |= _trial_files(folder) | {
            f"{FEWER_NODES}/{name}" for name in _trial_files(folder / FEWER_NODES)
        }
    staged = folder
    try:
        _require_own(folder, (*stale, *files))
        staged = Path(tempfile.mkdtemp(prefix=STAGED_PREFIX, dir=folder)) / "plan"
        write_directory(staged, files, executable=executable)
        _swap(folder, staged, stale=stale, names=tuple(files))
        for name in sorted(stale):
            _remove_empty(folder, name)
    except OSError as error:
        raise OutputError(
            f"cannot write {str(folder)!r}: {error.strerror}; choose another place with -o"
        ) from error
    finally:
        if staged != folder:
            shutil.rmtree(staged.parent, ignore_errors=True)


def _require_own(folder: Path, names: Iterable[str]) -> None:
    """Refuse to write where a link leads elsewhere, or where others have put a folder.

    Raises:
        OutputError: such a place; nothing has been written.
    """
    for name in names:
        place = folder / name
        if linked := linked_folder(folder, name):
            reason = f"{str(linked)!r} is a link"
        elif place.is_dir() and not place.is_symlink() and not place.name.startswith(FORMER_STUDY):
            reason = f"{str(place)!r} is a folder"
        else:
            continue
        raise OutputError(f"cannot write {str(folder)!r}: {reason}; choose another place with -o")


def linked_folder(folder: Path, name: str) -> Path | None:
    """Return the first folder on the way to a file of a plan that is a link; None where none is."""
    inside = (folder / parent for parent in reversed(Path(name).parents[:-1]))
    return next((parent for parent in inside if parent.is_symlink()), None)


def _swap(folder: Path, staged: Path, *, stale: Iterable[str], names: Sequence[str]) -> None:
    """Put the staged files where the former ones were; put those back on any failure.

    `plan.json` goes first and comes last, so that one that is there belongs to its files.
    """
    aside = staged.parent / "former"
    gone: list[str] = []
    placed: list[str] = []
    try:
        for name in (PLAN_NAME, *stale, *names):
            if (folder / name).is_symlink() or (folder / name).exists():
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).replace(aside / name)
                gone.append(name)
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (staged / name).replace(folder / name)
            placed.append(name)
    except BaseException:
        for name in placed:
            (folder / name).unlink()
        for name in reversed(gone):
            (aside / name).replace(folder / name)
        raise


def former_files(folder: Path) -> frozenset[str]:
    """Return the files of the existing plan; empty where it is unreadable."""
    try:
        names = _raw_plan(folder).get("files")
    except PlanUnreadableError:
        return frozenset()
    texts = (name for name in names if isinstance(name, str)) if isinstance(names, list) else ()
    inside = (name for name in texts if name.startswith(FORMER) and name.isprintable())
    return frozenset(name for name in inside if _is_plain(name) and not (folder / name).is_dir())


def _is_plain(name: str) -> bool:
    parts = Path(name).parts
    return ".." not in parts and max(map(len, map(os.fsencode, parts))) <= MOST_NAME_BYTES


def _remove_empty(folder: Path, name: str) -> None:
    """Remove the folders that become empty without a file."""
    for parent in Path(name).parents[:-1]:
        if (folder / parent).is_dir() and not any((folder / parent).iterdir()):
            (folder / parent).rmdir()


def _trial_files(folder: Path) -> frozenset[str]:
    """Return what a verification has written beside a plan; a new one starts without."""
    numbered = "[0-9][0-9][0-9][0-9]"
    patterns = (f"{numbered}.json", f"{numbered}.log", f"{STUDY_NAME}*", f"{FORMER_STUDY}*")
    matches = (file for pattern in patterns for file in (folder / TRIALS_NAME).glob(pattern))
    files = (file for file in matches if file.name.startswith(FORMER_STUDY) or not file.is_dir())
    return frozenset(str(file.relative_to(folder)) for file in files) | {VERIFIED_NAME}
