"""Locks the deployments of a plan for one verification, and ends leftovers of a killed one.

The lock ends with its holder. Processes that a killed verification left on this machine carry the
mark of a folder inside the plan's; by that they are found and ended.

Not covered: shared file systems without locks (flock), and what was left on other machines.
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tuner.errors import OutputError
from tuner.verify.termination import end_marked

SCRATCH_NAME: Final = "deployments"
"""In the folder of trials: files and logs of the running launch."""
LOCK_NAME: Final = "deployments.lock"


@contextmanager
def exclusive_use(trials: Path, *, plan: Path) -> Iterator[Path]:
    """Lock a plan's deployments, end leftovers, and yield the scratch folder.

    Args:
        trials: folder of the plan's trials.
        plan: folder of the plan, for the message.

    Raises:
        OutputError: the folder cannot be written, or another verification has it.
    """
    scratch = trials / SCRATCH_NAME
    try:
        trials.mkdir(exist_ok=True)
        lock = (trials / LOCK_NAME).open("wb")
    except OSError as error:
        raise OutputError(f"cannot write {str(trials)!r}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"{plan}: another `moetune verify` launches this plan's deployments; wait for it,"
                " or copy the plan"
            ) from error
        except OSError:
            pass  # No locks there, see above.
        end_marked(str(scratch.resolve()))
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
