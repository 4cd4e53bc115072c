"""Plain text output, the same on a terminal and in a pipe; the only module that prints.

Names of files, hosts, pools and experts are untrusted. Characters that control a terminal (escapes,
tabs, direction marks) are escaped here for all text.
"""

import shlex
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from tuner.report.printable import printable

if TYPE_CHECKING:
    from pathlib import Path

    from profilers.records import Record
    from tuner.report.content import Block, Depth, Section
    from tuner.report.terminal import Screen

AnyResult = TypeVar("AnyResult", bound="Record")


def print_text(text: str = "") -> None:
    """Print a result for people, with control characters escaped."""
    print(_lines(text))


def print_exact(text: str) -> None:
    """Print machine-readable output, such as JSON, unchanged."""
    print(text)


def print_result(result: AnyResult, text: Callable[[AnyResult], str], *, as_json: bool) -> None:
    """Print a result as JSON, or as the text that people read."""
    if as_json:
        print_exact(result.model_dump_json(indent=2))
    else:
        print_text(text(result))


def screen(depth: "Depth | None" = None, *, verbose: bool = False, width: int = 0) -> "Screen":
    """Return what stdout shows; all with `verbose`.

    Args:
        depth: of the report that is shown.
        verbose: long tables and lists are shown whole.
        width: columns; 0: those of the terminal, or of a pipe.
    """
    from tuner.report.content import Depth
    from tuner.report.terminal import NARROWEST, PIPE_WIDTH, WIDEST, Screen

    if not width:
        shown = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
        width = min(max(shown, NARROWEST), WIDEST)
    depth = Depth.MORE if verbose else depth or Depth.FIRST
    return Screen(width=width, depth=depth, is_whole=verbose)


def whole_text(*blocks: "Block | Section | None", width: int = 0) -> str:
    """Return the blocks that are there, each table whole."""
    from tuner.report.terminal import blocks_text

    return blocks_text(
        (block for block in blocks if block is not None), screen(verbose=True, width=width)
    )


def print_stderr(text: str = "", *, end: str = "\n") -> None:
    """Print a message on stderr, separate from the result."""
    print(_lines(text), end=end, file=sys.stderr, flush=True)


def _lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))


def quote_path(path: "Path") -> str:
    """Return a path as a shell's user types it, where it cannot be taken for an option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))
