"""Zip archives, which numpy and torch save in: what is in one and how large it unpacks to."""

import struct
import zipfile
import zlib
from pathlib import Path
from typing import Final

DAMAGED: Final = (zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, EOFError)
"""What reading a damaged archive raises."""


def names_in(path: Path, *, most_bytes: int) -> tuple[str, ...]:
    """The files of an archive; none where the file is no archive.

    Raises:
        ValueError: it is damaged, or it or its content is larger than `most_bytes`.
    """
    size = path.stat().st_size
    if size > most_bytes:
        raise ValueError(f"{size} bytes; at most {most_bytes} are read")
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
