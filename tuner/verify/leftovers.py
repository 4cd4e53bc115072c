"""What a verification that was killed left running on this machine, the next one of the plan ends.

    trials/commands.NODE@SCRATCH    holds the folder of a verification's trials; locked (flock)

The lock goes with its holder, however that ends. Processes of a trial carry its folder as their
mark (tuner/verify/termination.py), so that those of the dead are found and those of verifications
that go on beside are left alone.

Not covered: file systems without locks, on which everybody counts as alive; what a command has left
on other machines, or under another user.
"""

import contextlib
import fcntl
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tuner.errors import OutputError
from tuner.verify.build_locks import release_builds
from tuner.verify.termination import end_marked, interrupted_once

MOST_PATH_BYTES: Final = 4096


@contextmanager
def found_again(trials: Path, *, scratch: Path) -> Iterator[None]:
    """Leave word of where this verification's trials have their folders, until none of them runs.

    Args:
        trials: folder of the plan's trials.
        scratch: folder of the trials' folders; its name is nobody else's.

    Raises:
        OutputError: the folder cannot be written.
    """
    own = trials / f"{_prefix()}{scratch.name}"
    hidden = own.with_name(f".{own.name}")
    try:
        trials.mkdir(parents=True, exist_ok=True)
        stream = hidden.open("wb")
    except OSError as error:
        raise OutputError(f"cannot write {str(trials)!r}: {error.strerror}") from error
    with stream:
        try:
            stream.write(os.fsencode(scratch.resolve()))
            stream.flush()
            # Nobody sees it before it is locked.
            with contextlib.suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            hidden.rename(own)
            yield
        finally:
            with interrupted_once() as interruption:
                interruption.hold()
                hidden.unlink(missing_ok=True)
                # Whatever still runs is found by this file alone.
                if end_marked(str(scratch.resolve())):
                    own.unlink(missing_ok=True)


def end_left(trials: Path) -> int:
    """End what verifications that are dead left running here; return how many there were."""
    dead = 0
    for file in sorted(trials.glob(f"{glob.escape(_prefix())}*")):
        with contextlib.suppress(OSError), file.open("rb+") as stream:
            # Whoever is alive holds it.
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            scratch = Path(os.fsdecode(stream.read(MOST_PATH_BYTES)))
            # Its folders may be gone by now; a damaged file names nobody's.
            is_named = scratch.is_absolute() and file.name == f"{_prefix()}{scratch.name}"
            began_s = os.fstat(stream.fileno()).st_mtime
            if not is_named or end_marked(str(scratch)):
                release_builds(os.environ, since_s=began_s)
                file.unlink(missing_ok=True)
                dead += 1
    return dead


def _prefix() -> str:
    return f"commands.{os.uname().nodename}@"
