"""A profile on disk: a directory of `profile.json` and one `<operation>.parquet` per table.

Every file is written beside its place and then renamed over it, so that a reader finds the old file
or the new one, never half of one. A table is written before the header that counts it; a crash in
between leaves a file that the header does not yet list, and readers ignore it.
"""

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from profilers.errors import ProfileUnreadableError, ProfileUnwritableError, first_problem
from profilers.files import NotRegularError, TooLargeError, read_bounded
from profilers.records import (
    AXES,
    BETWEEN_PEERS,
    SCHEMA_VERSION,
    Measurement,
    Profile,
    ProfileHeader,
)
from profilers.schema_version import refusal_of_newer

HEADER_NAME = "profile.json"
MAX_HEADER_BYTES = 2**20


def read_profile(
    path: str | os.PathLike[str],
    *,
    operations: Collection[str] | None = None,
    with_incomplete: bool = False,
) -> Profile:
    """Read a stored profile.

    Args:
        path: its directory.
        operations: tables to read, as imported ones can be large; None: all.
        with_incomplete: also rows of tables whose measurement was interrupted.

    Raises:
        ProfileUnreadableError: anything in it is missing, damaged or of another schema version.
    """
    from profilers.tables import read_parquet

    path = Path(path)
    header = read_header(path)
    rows: list[Measurement] = []
    for operation, info in header.tables.items():
        is_wanted = info.complete or (with_incomplete and info.rows > 0)
        if is_wanted and (operations is None or operation in operations):
            file = path / f"{operation}.parquet"
            # A table in progress is written before the header that counts it.
            expected = info.rows if info.complete else None
            table_rows = read_parquet(file, operation=operation, expected_rows=expected)
            if operation in BETWEEN_PEERS:
                _refuse_misplaced(file, table_rows, world=header.machine.world)
            rows += table_rows
    return Profile(header=header, measurements=tuple(rows))


def read_header(path: Path) -> ProfileHeader:
    """Read only `profile.json`: what was measured, where, and how completely.

    Raises:
        ProfileUnreadableError: it is missing, damaged or of another schema version.
    """
    file = path / HEADER_NAME
    content = _bounded_bytes(path)
    if refusal := refusal_of_newer(content, known=SCHEMA_VERSION):
        raise ProfileUnreadableError(f"{file}: {refusal}")
    try:
        header = ProfileHeader.model_validate_json(content, strict=True)
    except ValidationError as error:
        raise ProfileUnreadableError(
            f"{file}: {first_problem(error)}; it was edited, damaged or written by another release"
        ) from error
    if unknown := sorted(header.tables.keys() - AXES.keys()):
        raise ProfileUnreadableError(
            f"{file}: table {unknown[0]!r} is not one of {', '.join(AXES)}"
        )
    return header


def holds_profile(path: Path) -> bool:
    """Return whether there is a header to read, readable or not."""
    return os.path.lexists(path / HEADER_NAME)


def write_header(path: Path, header: ProfileHeader) -> None:
    """Replace `profile.json`, atomically."""
    text = header.model_dump_json(indent=2) + "\n"

    def write(file: Path) -> None:
        with file.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())

    _replace(path / HEADER_NAME, write)


def write_table(path: Path, rows: Sequence[Measurement], *, operation: str) -> None:
    """Replace the table of one operation, atomically."""
    from profilers.tables import write_parquet

    if misplaced := {row.case.operation for row in rows} - {operation}:
        raise ValueError(f"rows of {sorted(misplaced)} do not belong in table {operation!r}")
    _replace(
        path / f"{operation}.parquet",
        lambda file: write_parquet(file, rows, operation=operation),
    )


def write_profile(path: Path, profile: Profile) -> None:
    """Write a whole profile; one that the directory holds is replaced.

    Raises:
        ProfileUnwritableError: the directory does not take it, or cannot be rid of what it held.
    """
    _refuse_folders(path, profile.header)
    for operation in profile.header.tables:
        rows = [row for row in profile.measurements if row.case.operation == operation]
        write_table(path, rows, operation=operation)
    write_header(path, profile.header)
    clear_unlisted(path, profile.header)


def clear_unlisted(path: Path, header: ProfileHeader) -> None:
    """Remove tables that the header does not count, and what a killed process left half written.

    Raises:
        ProfileUnwritableError: one of them cannot be removed.
    """
    for file in _unlisted(path, header):
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise ProfileUnwritableError(
                f"{file} cannot be removed: {error.strerror}; choose another directory"
            ) from error


def _refuse_folders(path: Path, header: ProfileHeader) -> None:
    try:
        unlisted = _unlisted(path, header)
        folder = next((file for file in unlisted if file.is_dir() and not file.is_symlink()), None)
    except OSError as error:
        raise ProfileUnwritableError(
            f"{path} cannot be written: {error.strerror}; choose another directory"
        ) from error
    if folder is not None:
        raise ProfileUnwritableError(
            f"{folder} is a directory where a file may lie; remove it, or choose another directory"
        )


def _unlisted(path: Path, header: ProfileHeader) -> Iterator[Path]:
    for operation in AXES:
        if operation not in header.tables:
            yield path / f"{operation}.parquet"
    for name in (HEADER_NAME, *(f"{operation}.parquet" for operation in AXES)):
        yield from path.glob(f".{name}.*")


def _refuse_misplaced(file: Path, rows: Sequence[Measurement], *, world: int) -> None:
    for number, row in enumerate(rows):
        axes = row.case.axes
        rank = max(row.rank, axes.get("sender", 0), axes.get("receiver", 0))
        if rank >= world:
            raise ProfileUnreadableError(
                f"{file}: row {number}: rank {rank} of a machine of {world} ranks; measure it again"
            )


def _bounded_bytes(path: Path) -> bytes:
    file = path / HEADER_NAME
    try:
        if not path.is_dir():
            reason = "is not a directory" if os.path.lexists(path) else "does not exist"
            raise ProfileUnreadableError(f"{path} {reason}; a profile is a directory")
        if not os.path.lexists(file):
            raise ProfileUnreadableError(f"{path} holds no {HEADER_NAME}; `moetune profile -o` it")
        return read_bounded(file, most_bytes=MAX_HEADER_BYTES)
    except (IsADirectoryError, NotRegularError, TooLargeError) as error:
        raise ProfileUnreadableError(
            f"{file}: {error.strerror}; it must be a regular file of at most {MAX_HEADER_BYTES}"
        ) from error
    except OSError as error:
        raise ProfileUnreadableError(f"{file}: {error.strerror}") from error


def _replace(target: Path, write: Callable[[Path], None]) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace_or_raise(target, write)
    except OSError as error:
        raise ProfileUnwritableError(
            f"{target} cannot be written: {error.strerror}; choose another directory"
        ) from error


def _replace_or_raise(target: Path, write: Callable[[Path], None]) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        temporary.chmod(0o644)
        write(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
