"""The launch files of a plan's folder, to be read and copied.

Only text files that the plan names are read, each up to a limit.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from profilers.files import open_regular
from tuner.errors import PlanUnreadableError
from tuner.plans.folder import linked_folder
from tuner.report.content import Block, Depth, File, Paragraph, Section

MOST_FILES: Final = 40
MOST_FILE_BYTES: Final = 64 * 1024
"""Shown of one file."""
MOST_BYTES: Final = 1024 * 1024
"""Shown of all files."""


def read_launch_files(folder: Path, names: Sequence[str]) -> tuple[File, ...]:
    """Read the launch files that a plan names.

    Raises:
        PlanUnreadableError: one cannot be read.
    """
    wanted = [name for name in names if name.startswith("launch/") and ".." not in Path(name).parts]
    files: list[File] = []
    left = MOST_BYTES
    for name in wanted[:MOST_FILES]:
        file = _read(folder, name, most_bytes=min(left, MOST_FILE_BYTES))
        if file is not None:
            files.append(file)
            left -= len(file.text.encode())
    return tuple(files)


def _read(folder: Path, name: str, *, most_bytes: int) -> File | None:
    """Read a file's beginning; None if it is missing or no text."""
    path = folder / name
    if path.is_symlink() or linked_folder(folder, name):
        return None
    if not path.is_file() or most_bytes <= 0:
        return None
    try:
        with open_regular(path) as file:
            content = file.read(most_bytes + 1)
            size_bytes = path.stat().st_size
    except OSError as error:
        raise PlanUnreadableError(f"{path}: {error.strerror}") from error
    if b"\0" in content:
        return None
    is_whole = len(content) <= most_bytes
    text = content[:most_bytes].decode("utf-8", errors="ignore" if not is_whole else "replace")
    return File(path=name, text=text, shown_bytes=size_bytes, is_whole=is_whole)


def launch_section(files: Sequence[File], *, names: Sequence[str]) -> Section:
    """Return the section of launch files.

    Args:
        files: to show.
        names: of all files of the plan.
    """
    named = sum(name.startswith("launch/") for name in names)
    blocks: list[Block] = [Paragraph(text="Click a file to open it; its button copies all of it.")]
    if named > len(files):
        rest = named - len(files)
        said = f"Not shown, but in the plan's folder: {rest}, which are binary or too large."
        blocks.append(Paragraph(text=said))
    return Section(
        name="launch", heading="Launch files", depth=Depth.PAGE, blocks=(*blocks, *files)
    )
