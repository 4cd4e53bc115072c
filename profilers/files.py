"""Files that a user named: opened without waiting, and read within a bound.

What `stat` says of a path is not what reading it gives: a device has no size and no end, a pipe
without a writer is waited for, files below /proc have the size 0. So it is opened first, without
waiting; what was opened must be a regular file; and its bytes are counted while they are read.

Whatever is wrong is an `OSError` with the path and a reason, as of a file that is not there.
"""

import errno
import io
import os
import stat
from pathlib import Path

PIECE_BYTES = 2**20


class NotRegularError(OSError):
    """A device, a pipe or a socket lies where a file is expected."""


class TooLargeError(OSError):
    """A file holds more than its reader takes."""


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file to read its bytes.

    Raises:
        OSError: it cannot be opened, or is a folder, a device, a pipe or a socket.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except ValueError as error:  # a path with a null character
        raise OSError(errno.EINVAL, str(error), ascii(str(path))) from error
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise NotRegularError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bounded(path: Path, *, most_bytes: int) -> bytes:
    """Read a regular file whole.

    Raises:
        OSError: it cannot be read, is no regular file, or holds more than `most_bytes`.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise _too_large(path, most_bytes)
        # A file that grows, or does not know its size, is limited by the number of bytes read.
        content = bytearray()
        while piece := file.read(min(PIECE_BYTES, most_bytes + 1 - len(content))):
            content += piece
    if len(content) > most_bytes:
        raise _too_large(path, most_bytes)
    return bytes(content)


def require_regular(path: Path, *, most_bytes: int) -> int:
    """Return the size of a file that a library is about to open by its path.

    Raises:
        OSError: it cannot be opened, is no regular file, or holds more than `most_bytes`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size > most_bytes:
        raise _too_large(path, most_bytes)
    return size


def _too_large(path: Path, most_bytes: int) -> TooLargeError:
    return TooLargeError(
        errno.EFBIG, f"larger than the {most_bytes} bytes that are read", str(path)
    )
