"""Trials that outlive the process which started them, e.g. Slurm jobs.

    <folder>/NNNN/proposal.json      written before the launch, removed with the folder at its end

A verification that resumes after a kill finds these folders and checks which trials the launcher
still has; those are awaited, the others are removed and their decisions launched again. Folders are
numbered by the study, so several verifications may share the parent folder.
"""

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final, Protocol

from pydantic import ValidationError

from profilers.files import read_bounded
from tuner.output import write_files
from tuner.plans.folder import MAX_RECORD_BYTES
from tuner.verify.launcher import Launch, LaunchResult
from tuner.verify.proposal import Proposal

PROPOSAL_NAME: Final = "proposal.json"


class DurableLauncher(Protocol):
    """Runs trials that outlive this process."""

    def __call__(self, launch: Launch) -> LaunchResult:
        """Run a trial, or await the one whose folder exists already."""
        ...

    def holds(self, folder: Path) -> bool:
        """Return whether the trial in a folder runs, waits or has a result."""
        ...

    def forget(self, folder: Path) -> None:
        """End what is left of the trial in a folder."""
        ...

    def stop(self) -> None:
        """End every running trial; their calls raise."""
        ...


class Stored(Proposal):
    """`proposal.json`."""

    plan_sha256: str


def note(folder: Path, proposal: Proposal[Any], *, plan_sha256: str) -> None:
    """Write the proposal of a trial into its folder.

    Raises:
        OutputError: the folder cannot be written.
    """
    stored = Stored(plan_sha256=plan_sha256, **proposal.model_dump())
    write_files(folder, {PROPOSAL_NAME: stored.model_dump_json(indent=1) + "\n"})


def read_running_trials(place: Path, *, plan_sha256: str) -> tuple[Proposal, ...]:
    """Return the running trials of earlier or other processes.

    Args:
        place: folder of all running trials.
        plan_sha256: of the plan; trials of other plans are skipped.
    """
    stored = (_stored(one / PROPOSAL_NAME) for one in sorted(place.glob("[0-9]*")))
    return tuple(
        Proposal(**one.model_dump(exclude={"plan_sha256"}))
        for one in stored
        if one is not None and one.plan_sha256 == plan_sha256
    )


def adopt_trial(
    place: Path, launcher: DurableLauncher, proposal: Proposal[Any], *, plan_sha256: str
) -> bool:
    """Return whether a trial still runs and can be awaited here; remove its remains if not."""
    folder = trial_folder(place, proposal.number)
    stored = _stored(folder / PROPOSAL_NAME)
    if stored == Stored(plan_sha256=plan_sha256, **proposal.model_dump()) and launcher.holds(
        folder
    ):
        return True
    _remove(folder, launcher)
    return False


def sweep(
    place: Path, launcher: DurableLauncher, *, running: Callable[[], Collection[int]]
) -> None:
    """Remove the folders of trials that are not running.

    Args:
        place: folder of all running trials.
        launcher: runs them.
        running: returns the numbers of the running trials of all workers.
    """
    # Listed first: the folder of a trial comes after its claim.
    folders = sorted(place.glob("[0-9]*"))
    kept = {trial_folder(place, number) for number in running()}
    for folder in folders:
        if folder not in kept:
            _remove(folder, launcher)


def _remove(folder: Path, launcher: DurableLauncher) -> None:
    if folder.is_dir():
        launcher.forget(folder)
        shutil.rmtree(folder, ignore_errors=True)


def trial_folder(place: Path, number: int) -> Path:
    """Return the folder of a trial."""
    return place / f"{number:04d}"


def _stored(file: Path) -> Stored | None:
    try:
        return Stored.model_validate_json(read_bounded(file, most_bytes=MAX_RECORD_BYTES))
    except (OSError, ValidationError):
        return None
