"""The study of a plan: where it lives, where its trials have their folders, and joining it.

    trials/study.journal*        of all who see the folder, or in place of it a database
    trials/NNNN.json             the records
    trials/under-way/NNNN/       trials that go on when their process ends, by their launcher

The study carries the plan's hash in its name: a plan that was changed has another one.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from profilers.files import read_bounded
from tuner.plan_folder import (
    JOURNAL_NAME,
    MAX_PLAN_BYTES,
    PLAN_NAME,
    TRIALS_NAME,
    trial_file,
    write_trial,
)
from tuner.verify.kept_logs import kept_log
from tuner.verify.neighbourhood import Around
from tuner.verify.proposal import Proposal
from tuner.verify.records import TrialRecord, read_trials
from tuner.verify.under_way import (
    DurableLauncher,
    folder_of,
    found_under_way,
    is_adopted,
    sweep,
)

if TYPE_CHECKING:
    # Optuna is imported when a study is opened.
    from tuner.verify.search import StudySearch
    from tuner.verify.study.store import Store

UNDER_WAY_NAME: Final = "under-way"
"""In the folder of trials: those that go on when this process ends."""


@contextmanager
def opened_study(
    folder: Path,
    around: Around,
    *,
    by: DurableLauncher | None,
    scratch: Path,
    resume: bool,
    storage: str,
    told: Callable[[str], None],
) -> Iterator["StudySearch"]:
    """Take part in the study of a plan.

    Args:
        folder: of the plan.
        around: what may be launched.
        by: what runs trials that outlive this process; None where none do.
        scratch: folder of the folders of trials.
        resume: keep what earlier processes did.
        storage: URL of a database; empty: a journal in the folder.
        told: hears a line when others are waited for or have taken a trial over.

    Raises:
        PlanUnreadableError: trials exist already, or cannot be read.
        OutputError: the folder cannot be written.
        StudyError: the study cannot be reached or locked.
    """
    from tuner.verify.search import studying
    from tuner.verify.study.claims import Outside
    from tuner.verify.study.membership import Left

    sha256 = plan_sha256(folder)

    def write(record: TrialRecord) -> None:
        write_trial(folder, record, log=_log_of(record, folder_of(scratch, record.number)))
        shutil.rmtree(folder_of(scratch, record.number), ignore_errors=True)

    def adopt(proposal: Proposal) -> bool:
        return by is not None and is_adopted(scratch, by, proposal, plan_sha256=sha256)

    finished = read_trials(folder / TRIALS_NAME)
    under_way = found_under_way(scratch, plan_sha256=sha256) if by else ()
    left = Left(
        finished=finished,
        under_way=under_way,
        may_go_on=resume or bool(storage),
        refusal=_refusal(folder, finished),
    )
    outside = Outside(
        write=write,
        is_written=lambda number: trial_file(folder, number).is_file(),
        adopt=adopt,
        told=told,
    )
    store = _store(folder, storage, study_name=f"moetune-verify-{sha256[:32]}", told=told)
    with studying(around, store=store, left=left, outside=outside) as study:
        if by is not None:
            study.sweep(lambda numbers: sweep(scratch, by, but=numbers))
        yield study


def _log_of(record: TrialRecord, folder: Path) -> str:
    return "" if record.status == "ok" else kept_log(folder)


def _store(folder: Path, storage: str, *, study_name: str, told: Callable[[str], None]) -> "Store":
    """Return where the study of a plan lives."""
    if storage:
        from tuner.verify.study.postgres import PostgresStore

        return PostgresStore(storage, study_name=study_name, told=told)
    from tuner.verify.study.journal import JournalStore

    journal = folder / TRIALS_NAME / JOURNAL_NAME
    return JournalStore(journal, study_name=study_name, told=told)


def _refusal(folder: Path, finished: Sequence[TrialRecord]) -> str:
    if finished:
        return f"{folder} holds {len(finished)} trials already: add --resume to go on, or plan anew"
    place = folder / TRIALS_NAME / UNDER_WAY_NAME
    return f"{place} holds trials that may still run: add --resume to go on with them"


@contextmanager
def trial_folders(folder: Path, *, by: DurableLauncher | None) -> Iterator[Path]:
    """Say where trials have their folders; with a durable launcher they outlive this process."""
    if by is not None:
        yield folder / TRIALS_NAME / UNDER_WAY_NAME
        return
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        yield Path(scratch)


def plan_sha256(folder: Path) -> str:
    """Return the hash of a plan's file."""
    return hashlib.sha256(read_bounded(folder / PLAN_NAME, most_bytes=MAX_PLAN_BYTES)).hexdigest()
