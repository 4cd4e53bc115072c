"""Text as sequences of tokens of equal length, read piece by piece.

Files follow each other in the order in which they are named, those of a folder in order of their
names; their tokens are one stream that is cut into sequences. A piece is `PIECE` characters, so a
file may be larger than memory; where it ends inside of a word, that word becomes other tokens.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from profilers.errors import RecordingUnreadableError
from profilers.files import open_regular

PIECE: Final = 2**16
"""Characters that are made into tokens at once."""
BYTES: Final = 256
"""Tokens of text without a tokenizer: its bytes."""

Encode = Callable[[str], Sequence[int]]


def sequences(paths: Sequence[Path], *, encode: Encode, length: int) -> Iterator[list[int]]:
    """Sequences of `length` tokens; what is left at the end is dropped unless it is all there is.

    Raises:
        RecordingUnreadableError: a file is missing or no UTF-8, or all of them hold no token.
    """
    buffer: list[int] = []
    any_yet = False
    for piece in pieces(paths):
        buffer += encode(piece)
        while len(buffer) >= length:
            yield buffer[:length]
            buffer, any_yet = buffer[length:], True
    if not any_yet:
        if not buffer:
            names = ", ".join(str(path) for path in paths[:4])
            raise RecordingUnreadableError(f"{names}: no text in there; name files of UTF-8 text")
        yield buffer


def pieces(paths: Sequence[Path]) -> Iterator[str]:
    """The text of all files, bit by bit."""
    for path in paths:
        # What is no text in a folder is passed over; what was named must be text.
        inside = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else []
        for file in inside or [path]:
            try:
                yield from _pieces(file)
            except UnicodeDecodeError as error:
                if file == path:
                    raise RecordingUnreadableError(
                        f"{file} is no UTF-8 text: {error.reason} at byte {error.start}"
                    ) from error
            except OSError as error:
                raise RecordingUnreadableError(f"{file}: {error.strerror}") from error


def as_bytes(text: str) -> list[int]:
    """The tokens of text for a model without a tokenizer."""
    return list(text.encode("utf-8", errors="surrogatepass"))


def _pieces(file: Path) -> Iterator[str]:
    with open_regular(file) as opened, io.TextIOWrapper(opened, "utf-8") as stream:
        while piece := stream.read(PIECE):
            yield piece
