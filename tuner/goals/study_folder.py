"""The Optuna study of a plan: where it is stored, where its trials run, and joining it.

    trials/study.db              shared by all who see the folder; or a database instead
    trials/NNNN.json             the trial records
    trials/under-way/NNNN/       running trials that outlive their process (Slurm jobs)

The study's name holds the plan's hash, so an edited plan has another study. The list of a
deployment's files is left out of it: its verification keeps that list true.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

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
from tuner.verify.durable_trials import (
    DurableLauncher,
    adopt_trial,
    read_running_trials,
    sweep,
    trial_folder,
)
from tuner.verify.kept_logs import kept_log
from tuner.verify.leftovers import end_leftovers, register_scratch
from tuner.verify.neighbourhood import DecisionSpace
from tuner.verify.proposal import Decision, Proposal
from tuner.verify.records import AnyRecord, LaunchRecord

if TYPE_CHECKING:
    # Optuna is imported when a study is opened.
    from tuner.verify.search import StudySearch
    from tuner.verify.study.shared import TrialKind

RUNNING_NAME: Final = "under-way"
"""Name of the folder, inside that of trials, of those trials that outlive this process."""


@contextmanager
def opened_study(
    folder: Path,
    space: DecisionSpace[Decision, AnyRecord],
    *,
    kind: "TrialKind[Decision, AnyRecord]",
    sha256: str,
    by: DurableLauncher | None,
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
        by: what runs trials that outlive this process; None where none do.
        scratch: folder of the folders of trials.
        resume: keep what earlier processes did.
        storage: URL of a database; empty: a file in the folder.
        on_message: gets a line when others are waited for or have taken a trial over.

    Raises:
        PlanUnreadableError: trials exist already, or cannot be read.
        OutputError: the folder cannot be written.
        StudyError: the study cannot be reached or locked.
    """
    from tuner.verify.search import StudySearch
    from tuner.verify.study.database import open_study
    from tuner.verify.study.shared import StudyCallbacks, former_trials, join_workers

    def write(record: AnyRecord) -> None:
        write_trial(folder, record, log=_log_of(record, trial_folder(scratch, record.number)))
        shutil.rmtree(trial_folder(scratch, record.number), ignore_errors=True)

    def copy(record: AnyRecord) -> None:
        if trial_file(folder, record.number).exists():
            return
        if is_joining and not storage:
            on_message(_missing(folder, record.number, resume=resume))
        write_trial(folder, record)

    def adopt(proposal: Proposal[Decision]) -> bool:
        return by is not None and adopt_trial(scratch, by, proposal, plan_sha256=sha256)

    finished = read_trials_as(kind.record, folder / TRIALS_NAME)
    running = read_running_trials(scratch, plan_sha256=sha256) if by else ()
    may_join = resume or bool(storage)
    if (finished or running) and not may_join:
        raise PlanUnreadableError(_refusal(folder, finished))
    database = open_study(
        storage or folder / TRIALS_NAME / STUDY_NAME,
        study_name=f"moetune-verify-{sha256[:32]}",
        former=former_trials(finished, running),
        on_message=on_message,
    )
    is_joining = True
    outside = StudyCallbacks(write=write, copy=copy, adopt=adopt, on_message=on_message)
    with join_workers(
        database, kind=kind, finished=finished, outside=outside, may_join=may_join
    ) as shared:
        is_joining = False
        study = StudySearch(space, shared)
        if by is not None:
            sweep(scratch, by, running=study.running)
        yield study


def _log_of(record: LaunchRecord[Any], folder: Path) -> str:
    return "" if record.status == "ok" else kept_log(folder)


def _missing(folder: Path, trial: int, *, resume: bool) -> str:
    """Return the line about a finished trial without a record; an error unless resumed."""
    line = f"{folder / TRIALS_NAME / STUDY_NAME} holds trial {trial}, whose record is missing"
    if not resume:
        raise PlanUnreadableError(
            f"{line}: add --resume to write it again, or delete {STUDY_NAME} to measure anew"
        )
    return f"{line} and written again; to measure it again, delete its record and {STUDY_NAME}"


def _refusal(folder: Path, finished: Sequence[LaunchRecord[Any]]) -> str:
    if finished:
        return (
            f"{folder} holds {len(finished)} trials already: add --resume to continue, or plan anew"
        )
    place = folder / TRIALS_NAME / RUNNING_NAME
    return f"{place} holds trials that may still run: add --resume to continue with them"


@contextmanager
def trial_folders(
    folder: Path, *, by: DurableLauncher | None, on_message: Callable[[str], None]
) -> Iterator[Path]:
    """Yield the folder of the trials' folders, guarded, or one that outlives this process.

    Args:
        folder: of the plan; what a killed verification left running is ended.
        by: what runs trials that outlive this process; None where none do.
        on_message: gets a line if something was ended.
    """
    trials = folder / TRIALS_NAME
    if end_leftovers(trials):
        on_message("a verification of this plan was killed; its processes here are ended")
    if by is not None:
        yield trials / RUNNING_NAME
        return
    with (
        tempfile.TemporaryDirectory(prefix="moetune-") as scratch,
        register_scratch(trials, scratch=Path(scratch)),
    ):
        yield Path(scratch)


def plan_sha256(folder: Path) -> str:
    """Return the hash of a plan's file."""
    return hashlib.sha256(read_bounded(folder / PLAN_NAME, most_bytes=MAX_PLAN_BYTES)).hexdigest()
