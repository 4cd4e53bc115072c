"""Recognise errors of libraries that mean out of memory but are no MemoryError."""

import errno
from typing import Final

LIBRARY_ERRORS: Final = (OSError, ImportError, RuntimeError, SystemError)
"""Exception types of libraries that run out of memory; the text of others may repeat the user's own
words."""

SIGNS: Final = (
    "failed to map segment",
    "cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "Cannot allocate memory",
    "Failed to launch worker thread",
    "std::bad_alloc",
    "malloc of size",
    "realloc of size",
)
"""Texts of the dynamic loader, torch's allocator, Python's threads, the system, Arrow and C++ for
lack of memory."""


def is_lack_of_memory(error: BaseException) -> bool:
    """Return whether an error is about memory and not about the input."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    return isinstance(error, LIBRARY_ERRORS) and any(sign in str(error) for sign in SIGNS)


def raise_lack_of_memory(error: BaseException) -> None:
    """Raise MemoryError where an error is about memory, so that the input is not blamed.

    Raises:
        MemoryError: it is.
    """
    if is_lack_of_memory(error):
        raise MemoryError(" ".join(str(error).split())[:200]) from error
