"""Ends processes that a killed verification of the same plan left on this machine.

    trials/commands.NODE@SCRATCH    holds the folder of a verification's trials; locked (flock)

The lock ends with its holder. Processes of a trial carry its folder as their mark
(tuner/verify/termination.py), so those of killed verifications are found and those of running ones
are left alone.

Not covered: file systems without locks, on which every verification counts as running; processes on
other machines or of another user.
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
from tuner.verify.termination import end_marked, single_interrupt

MOST_PATH_BYTES: Final = 4096


@contextmanager
def register_scratch(trials: Path, *, scratch: Path) -> Iterator[None]:
    """Register the folder of this verification's trials until none of them runs.

    Args:
        trials: folder of the plan's trials.
        scratch: folder of the trials' folders; its name is unique.

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
            # Invisible until it is locked.
            with contextlib.suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            hidden.rename(own)
            yield
        finally:
            with single_interrupt() as interruption:
                interruption.hold()
                hidden.unlink(missing_ok=True)
                # Processes that still run are found by this file only.
                if end_marked(str(scratch.resolve())):
                    own.unlink(missing_ok=True)


def end_leftovers(trials: Path) -> int:
    """End the processes of killed verifications here; return how many verifications there were."""
    dead = 0
    for file in sorted(trials.glob(f"{glob.escape(_prefix())}*")):
        with contextlib.suppress(OSError), file.open("rb+") as stream:
            # A running verification holds the lock.
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            scratch = Path(os.fsdecode(stream.read(MOST_PATH_BYTES)))
            # Its folders may be gone by now; a damaged file names none.
            is_named = scratch.is_absolute() and file.name == f"{_prefix()}{scratch.name}"
            began_s = os.fstat(stream.fileno()).st_mtime
            if not is_named or end_marked(str(scratch)):
                release_builds(os.environ, since_s=began_s)
                file.unlink(missing_ok=True)
                dead += 1
    return dead


def _prefix() -> str:
    return f"commands.{os.uname().nodename}@"
