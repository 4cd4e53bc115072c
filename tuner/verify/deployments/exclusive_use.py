"""Locks the deployments of a plan for one verification, and yields the folder of their files.

The lock ends with its holder; what a killed holder left on this machine is ended first
(tuner/verify/leftovers.py).

Not covered: shared file systems without locks (flock), and what was left on other machines.
"""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tuner.errors import OutputError
from tuner.verify.leftovers import end_leftovers, register_scratch

SCRATCH_PREFIX: Final = "deployments-"
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
        EnvironmentMissingError: no shell can be started.
    """
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
        end_leftovers(trials)
        for left in trials.glob(f"{SCRATCH_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=trials))
        with register_scratch(trials, scratch=scratch):
            yield scratch
