"""One writer of a folder at a time.

The folder itself is locked (flock), so that nothing is left in it and the lock goes with its
holder, however that ends.

Not covered: file systems without locks, and network file systems that lock no folder: there two
writers are not separated.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from profilers.errors import ProfileUnwritableError


@contextmanager
def sole_writer(folder: Path, *, what: str) -> Iterator[None]:
    """Keep others from writing into a folder that exists.

    Args:
        folder: what is locked.
        what: the command that is under way there, for the message to another one.

    Raises:
        ProfileUnwritableError: another process writes there.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ProfileUnwritableError(f"{folder}: {error.strerror}") from error
    try:
        # Without such locks of the file system the run continues: most users are the only writer.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ProfileUnwritableError(
                    f"{folder}: another {what} writes there; wait for it, or choose another folder"
                ) from error
        yield
    finally:
        os.close(descriptor)
