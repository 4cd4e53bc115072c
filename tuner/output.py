"""Writes results to disk: a file appears whole or not at all.

A file is written beside its final place, flushed to the disk, and renamed over it. A new directory
is filled under a temporary name and renamed as a whole; an existing one is updated file by file, so
a reader sees old or new files and never half of one. Unfinished files are removed after a failure
or Ctrl-C.

Not covered: two writers of one directory at a time; the last one wins, file by file.
"""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import OutputError

if TYPE_CHECKING:
    from pandas import DataFrame


def write_directory(
    directory: Path, files: Mapping[str, str | bytes], *, executable: Collection[str] = ()
) -> None:
    """Write the files, by path relative to `directory`, all or none when it does not exist yet.

    Only commands with the option -o write whole directories.

    Raises:
        OutputError: the disk is full or read-only, or the place is not ours to write to.
    """
    if directory.exists():
        write_files(directory, files, executable=executable, option="-o")
        return
    _stay_inside(files)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as error:
        raise _unwritable(directory, error, option="-o") from error
    try:
        for name, content in files.items():
            _write(unfinished / name, content, executable=name in executable)
        unfinished.chmod(0o777 & ~_umask())
        unfinished.rename(directory)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise OutputError(
                f"another command has just written {str(directory)!r}; run this one again to"
                " replace that, or choose another place with -o"
            ) from error
        raise _unwritable(directory, error, option="-o") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_files(
    directory: Path,
    files: Mapping[str, str | bytes],
    *,
    executable: Collection[str] = (),
    option: str = "",
) -> None:
    """Write each file atomically, by path relative to `directory`, which is made when absent.

    Args:
        directory: that paths are relative to.
        files: by path.
        executable: paths of those that may be run.
        option: of the command, by which the user chose the place; empty where none did.

    Raises:
        OutputError: the disk is full or read-only, or the place is not ours to write to.
        ValueError: a path leaves the directory.
    """
    _stay_inside(files)
    for name, content in files.items():
        try:
            _write(directory / name, content, executable=name in executable)
        except OSError as error:
            raise _unwritable(directory / name, error, option=option) from error


def write_csv(file: Path, table: "DataFrame") -> None:
    """Write a data frame to the file that --csv names, atomically.

    Raises:
        OutputError: the disk is full or read-only, or the place is not ours to write to.
    """
    write_files(file.parent, {file.name: table.to_csv(index=False)}, option="--csv")


def entries_json(values: Mapping[str, Any]) -> str:
    """Return values as JSON, every entry of a list or a mapping on a line of its own."""
    blocks = []
    for name, value in values.items():
        block = json.dumps(value)
        if isinstance(value, list | dict) and value:
            names = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else ()
            entries = value.values() if isinstance(value, dict) else value
            lines = zip(names or [""] * len(value), map(json.dumps, entries), strict=True)
            rows = ",\n".join(f"  {key}{entry}" for key, entry in lines)
            block = f"{block[0]}\n{rows}\n {block[-1]}"
        blocks.append(f" {json.dumps(name)}: {block}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _stay_inside(names: Iterable[str]) -> None:
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name!r} leaves its directory")


def _write(path: Path, content: str | bytes, *, executable: bool) -> None:
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not (path.is_file() or path.is_dir()):
        # A rename over /dev/null would replace it for everybody.
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(unfinished).chmod((0o777 if executable else 0o666) & ~_umask())
        Path(unfinished).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(unfinished).unlink()
        raise


def _umask() -> int:
    # The mask can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _unwritable(path: Path, error: OSError, *, option: str) -> OutputError:
    reason = error.strerror or str(error)
    remedy = f"choose another place with {option}" if option else "fix that and run this again"
    return OutputError(f"cannot write {str(path)!r}: {reason}; {remedy}")
