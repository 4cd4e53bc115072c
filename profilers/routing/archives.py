"""Zip archives, which numpy and torch save in: what is in one and how large it unpacks to."""

import lzma
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Final

from profilers.files import require_regular

DAMAGED: Final = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    NotImplementedError,
    EOFError,
    RuntimeError,
)
"""What reading a damaged archive raises; RuntimeError: it is encrypted."""


def names_in(path: Path, *, most_bytes: int) -> tuple[str, ...]:
    """The files of an archive; none where the file is no archive.

    Raises:
        ValueError: it is damaged, or it or its content is larger than `most_bytes`.
    """
    require_regular(path, most_bytes=most_bytes)
    try:
        if not zipfile.is_zipfile(path):
            return ()
        with zipfile.ZipFile(path) as archive:
            files = archive.infolist()
    except DAMAGED as error:
        raise ValueError(f"damaged or cut short: {error}") from error
    unpacked = sum(each.file_size for each in files)
    if unpacked > most_bytes:
        raise ValueError(f"unpacks to {unpacked} bytes; at most {most_bytes} are read")
    return tuple(each.filename for each in files)


def unpacked_bytes(path: Path) -> int:
    """How many bytes a file holds; of an archive, what it unpacks to."""
    if not zipfile.is_zipfile(path):
        return path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        return sum(each.file_size for each in archive.infolist())
