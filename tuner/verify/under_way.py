"""Trials that outlive the process which started them: each has a folder with its proposal in it.

    <folder>/NNNN/proposal.json      written before the launch, removed with the folder at its end

Whoever takes over the trials of a verification that was killed finds them again and asks the
launcher which ones it still holds; those are awaited, the others are removed and their decisions
launched again. Folders are numbered by the study, so several verifications may share the place.
"""

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Final, Protocol

from pydantic import ValidationError

from profilers.files import read_bounded
from tuner.output import write_files
from tuner.verify.launcher import Launch, LaunchResult
from tuner.verify.proposal import Proposal
from tuner.verify.records import MAX_RECORD_BYTES

PROPOSAL_NAME: Final = "proposal.json"


class DurableLauncher(Protocol):
    """Runs trials that go on when this process ends."""

    def __call__(self, launch: Launch) -> LaunchResult:
        """Run a trial, or await the one that lies in its folder already."""
        ...

    def holds(self, folder: Path) -> bool:
        """Whether the trial in a folder runs, waits or has left its result."""
        ...

    def forget(self, folder: Path) -> None:
        """End what may be left of the trial in a folder."""
        ...

    def stop(self) -> None:
        """End every trial under way; their calls raise."""
        ...


class Stored(Proposal):
    """`proposal.json`."""

    plan_sha256: str


def note(folder: Path, proposal: Proposal, *, plan_sha256: str) -> None:
    """Write down what a folder is going to hold.

    Raises:
        OutputError: the folder cannot be written.
    """
    stored = Stored(plan_sha256=plan_sha256, **proposal.model_dump())
    write_files(folder, {PROPOSAL_NAME: stored.model_dump_json(indent=1) + "\n"})


def found_under_way(place: Path, *, plan_sha256: str) -> tuple[Proposal, ...]:
    """Return the trials that earlier processes, or others, have under way.

    Args:
        place: folder of all trials under way.
        plan_sha256: of the plan; trials of another one are not ours to count.
    """
    found = (_stored(one / PROPOSAL_NAME) for one in sorted(place.glob("[0-9]*")))
    return tuple(
        Proposal(**one.model_dump(exclude={"plan_sha256"}))
        for one in found
        if one is not None and one.plan_sha256 == plan_sha256
    )


def is_adopted(
    place: Path, launcher: DurableLauncher, proposal: Proposal, *, plan_sha256: str
) -> bool:
    """Whether a trial goes on and can be awaited here; what is left of it is removed if not."""
    folder = folder_of(place, proposal.number)
    stored = _stored(folder / PROPOSAL_NAME)
    if stored == Stored(plan_sha256=plan_sha256, **proposal.model_dump()) and launcher.holds(
        folder
    ):
        return True
    _remove(folder, launcher)
    return False


def sweep(place: Path, launcher: DurableLauncher, *, but: Collection[int]) -> None:
    """Remove the folders of trials that nobody has under way."""
    kept = {folder_of(place, number) for number in but}
    for folder in sorted(place.glob("[0-9]*")):
        if folder not in kept:
            _remove(folder, launcher)


def _remove(folder: Path, launcher: DurableLauncher) -> None:
    if folder.is_dir():
        launcher.forget(folder)
        shutil.rmtree(folder, ignore_errors=True)


def folder_of(place: Path, number: int) -> Path:
    """Return the folder of a trial."""
    return place / f"{number:04d}"


def _stored(file: Path) -> Stored | None:
    try:
        return Stored.model_validate_json(read_bounded(file, most_bytes=MAX_RECORD_BYTES))
    except (OSError, ValidationError):
        return None
