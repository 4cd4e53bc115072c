"""The Optuna study of a plan: where it is stored, and joining it.

    trials/study.db              shared by all who see the folder; or a database instead
    trials/NNNN.json             the trial records

The study's name holds the plan's hash, so an edited plan has another study. The list of a
deployment's files is left out of it: its verification keeps that list true.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profilers.files import read_bounded
from tuner.errors import PlanUnreadableError
from tuner.plans.folder import (
    MAX_PLAN_BYTES,
    PLAN_NAME,
    STUDY_NAME,
    TRIALS_NAME,
    read_trials_as,
    trial_file,
    write_trial,
)
from tuner.verify.kept_logs import kept_log
from tuner.verify.records import AnyRecord, Decision
from tuner.verify.space import DecisionSpace

if TYPE_CHECKING:
    # Optuna is imported when a study is opened.
    from tuner.verify.search import StudySearch
    from tuner.verify.study.shared import TrialKind


@contextmanager
def opened_study(
    folder: Path,
    space: DecisionSpace[Decision, Any, AnyRecord],
    *,
    kind: "TrialKind[Decision, AnyRecord]",
    sha256: str,
    scratch: Path,
    resume: bool,
    storage: str,
    on_message: Callable[[str], None],
) -> Iterator["StudySearch[Decision, AnyRecord]"]:
    """Join the study of a plan.

    Args:
        folder: of the plan.
        space: what may be launched.
        kind: of decision.
        sha256: of the plan.
        scratch: folder of the folders of trials.
        resume: keep what earlier processes did.
        storage: URL of a database; empty: a file in the folder.
        on_message: gets a line when others are waited for or have taken a trial over.

    Raises:
        PlanUnreadableError: trials exist already, are of another plan, or cannot be read.
        OutputError: the folder cannot be written.
        StudyError: the study cannot be reached or locked.
    """
    from tuner.verify.search import StudySearch
    from tuner.verify.study.database import open_study
    from tuner.verify.study.shared import StudyCallbacks, former_trials, join_workers

    def write(record: AnyRecord) -> None:
        place = scratch / f"{record.number:04d}"
        write_trial(folder, record, log="" if record.status == "ok" else kept_log(place))
        shutil.rmtree(place, ignore_errors=True)

    def copy(record: AnyRecord) -> None:
        if trial_file(folder, record.number).exists():
            return
        if is_joining and not storage:
            on_message(_missing(folder, record.number, resume=resume))
        write_trial(folder, record)

    finished = read_trials_as(kind.record, folder / TRIALS_NAME)
    may_join = resume or bool(storage)
    if finished and not may_join:
        raise PlanUnreadableError(
            f"{folder} holds {len(finished)} trials already: add --resume to continue, or plan anew"
        )
    database = open_study(
        storage or folder / TRIALS_NAME / STUDY_NAME,
        study_name=f"moetune-verify-{sha256[:32]}",
        former=former_trials(finished),
        on_message=on_message,
    )
    is_joining = True
    outside = StudyCallbacks(write=write, copy=copy, on_message=on_message)
    with join_workers(
        database, kind=kind, finished=finished, outside=outside, may_join=may_join
    ) as shared:
        is_joining = False
        search = StudySearch(space, shared)
        for record in search.records:
            space.predicted(record.decision)
        yield search


def _missing(folder: Path, trial: int, *, resume: bool) -> str:
    """Return the line about a finished trial without a record; an error unless resumed."""
    line = f"{folder / TRIALS_NAME / STUDY_NAME} holds trial {trial}, whose record is missing"
    if not resume:
        raise PlanUnreadableError(
            f"{line}: add --resume to write it again, or delete {STUDY_NAME} to measure anew"
        )
    return f"{line} and written again; to measure it again, delete its record and {STUDY_NAME}"


def plan_sha256(folder: Path) -> str:
    """Return the hash of a plan's file."""
    return hashlib.sha256(read_bounded(folder / PLAN_NAME, most_bytes=MAX_PLAN_BYTES)).hexdigest()
