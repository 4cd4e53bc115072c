"""Folders that appear and vanish as a whole: one for each checkpoint, `step-00000012`.

A folder is written under a name that begins with a dot, which no reader takes, its files are
synchronised with storage, and one rename completes it. It is removed under such a name too, so that
a process that is killed leaves whole folders and leftovers, and nothing in between.
"""

import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

STEP_FOLDER: Final = re.compile(r"step-(\d{8,})")
PARTIAL: Final = ".partial-"
REMOVED: Final = ".removed-"


def step_name(step: int) -> str:
    """Name the folder of a step."""
    return f"step-{step:08d}"


def partial_of(folder: Path) -> Path:
    """Name a folder while it is written."""
    return folder.with_name(PARTIAL + folder.name)


def step_folders(inside: Path) -> Iterator[tuple[int, Path]]:
    """List complete folders by their steps; none where there is no folder."""
    try:
        folders = sorted(inside.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for folder in folders:
        match = STEP_FOLDER.fullmatch(folder.name)
        if match is not None:
            yield int(match[1]), folder


def begin(folder: Path) -> Path:
    """Make the empty folder in which a checkpoint is written."""
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def complete(folder: Path) -> None:
    """Let readers take what was written; a folder of this name from before is removed."""
    partial = partial_of(folder)
    synchronize(partial)
    if folder.exists():
        remove(folder)
    partial.rename(folder)
    synchronize(folder.parent)


def remove(folder: Path) -> None:
    """Remove a folder, which is none any more from the first moment on."""
    unnamed = folder.with_name(REMOVED + folder.name)
    shutil.rmtree(unnamed, ignore_errors=True)
    folder.rename(unnamed)
    shutil.rmtree(unnamed)


def keep_only(inside: Path, names: Collection[str]) -> None:
    """Remove all other checkpoints."""
    for _, folder in list(step_folders(inside)):
        if folder.name not in names:
            remove(folder)


def remove_leftovers(inside: Path) -> None:
    """Remove what processes that were killed have left."""
    for path in list(inside.iterdir()):
        if path.name.startswith((PARTIAL, REMOVED)):
            shutil.rmtree(path)


def synchronize(folder: Path) -> None:
    """Have the names in a folder on storage."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
