"""One verification at a time has the deployments of a plan, and begins on a machine without them.

The lock goes with its holder, however that ends. What a killed verification left running on this
machine carries the mark of a folder inside the plan's; by that it is found and ended.

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

UNDER_WAY_NAME: Final = "deployments"
"""In the folder of trials: files and logs of the launch under way."""
LOCK_NAME: Final = "deployments.lock"


@contextmanager
def sole_use(trials: Path, *, plan: Path) -> Iterator[Path]:
    """Keep others from a plan's deployments, end what was left of them, and say where to work.

    Args:
        trials: folder of the plan's trials.
        plan: folder of the plan, for the message.

    Raises:
        OutputError: the folder cannot be written, or another verification has it.
    """
    scratch = trials / UNDER_WAY_NAME
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
