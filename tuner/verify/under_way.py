"""Trials that outlive the process which started them: each has a folder with its proposal in it.

    <folder>/NNNN/proposal.json      written before the launch, removed with the folder at its end

A verification that was killed finds them again and asks the launcher which ones it still holds;
those are awaited, the others are removed and their decisions launched again.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from pydantic import ValidationError

from profilers.records import Record
from profilers.steps.config import Size
from tuner.output import write_files
from tuner.plan import TrainDecision
from tuner.verify.launcher import Launch, LaunchResult
from tuner.verify.proposal import Origin, Proposal

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


class Stored(Record):
    """`proposal.json`."""

    plan_sha256: str
    number: Size
    origin: Origin
    decision: TrainDecision


def note(folder: Path, proposal: Proposal, *, plan_sha256: str) -> None:
    """Write down what a folder is going to hold.

    Raises:
        OutputError: the folder cannot be written.
    """
    stored = Stored(
        plan_sha256=plan_sha256,
        number=proposal.number,
        origin=proposal.origin,
        decision=proposal.decision,
    )
    write_files(folder, {PROPOSAL_NAME: stored.model_dump_json(indent=1) + "\n"})


def found_under_way(
    folder: Path, launcher: DurableLauncher, *, plan_sha256: str, finished: Sequence[int]
) -> tuple[Proposal, ...]:
    """Return the trials that an earlier process left under way; end and remove all others.

    Args:
        folder: of all trials under way.
        launcher: that started them.
        plan_sha256: of the plan; trials of another one are not ours to count.
        finished: numbers of the trials that have a record already.
    """
    awaited = []
    for one in sorted(folder.glob("[0-9]*")):
        stored = _stored(one / PROPOSAL_NAME)
        is_ours = stored is not None and stored.plan_sha256 == plan_sha256
        if stored is not None and is_ours and stored.number not in finished and launcher.holds(one):
            awaited.append(
                Proposal(number=stored.number, decision=stored.decision, origin=stored.origin)
            )
            continue
        launcher.forget(one)
        shutil.rmtree(one, ignore_errors=True)
    return tuple(awaited)


def _stored(file: Path) -> Stored | None:
    try:
        return Stored.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None
