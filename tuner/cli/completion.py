"""Completion in the user's shell: the script that asks us, and the answers.

The shell runs `moetune` with `_MOETUNE_COMPLETE` set and what was typed in the environment; the
answers are Typer's, from the commands and the options' own completions.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from profilers.files import read_bounded
from tuner.errors import EnvironmentMissingError, OutputError, TunerError
from tuner.output import write_files

VARIABLE: Final = "_MOETUNE_COMPLETE"
MOST_STARTUP_BYTES: Final = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a shell looks for completions, below the home."""

    script: str
    startup: str = ""
    """File of the user that has to name the script; empty where the shell finds it by itself."""
    line: str = ""
    """What that file has to hold."""


PLACES: Final = MappingProxyType(
    {
        "bash": Place(
            script=".bash_completions/moetune.sh", startup=".bashrc", line="source {script}"
        ),
        "zsh": Place(
            script=".zfunc/_moetune",
            startup=".zshrc",
            line="fpath+=~/.zfunc; autoload -Uz compinit; compinit",
        ),
        "fish": Place(script=".config/fish/completions/moetune.fish"),
    }
)
SHELLS: Final = tuple(PLACES)


def is_asked() -> bool:
    """Whether a shell asks for completions."""
    return bool(os.environ.get(VARIABLE))


def answer(command: Any) -> int:
    """Print what may follow what was typed, and return the exit code.

    Args:
        command: Typer's, of the whole program.
    """
    from typer._completion_classes import completion_init

    completion_init()
    try:
        command.main(args=[], prog_name="moetune", complete_var=VARIABLE)
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def script(shell: str) -> str:
    """Return what a shell has to run to complete our commands.

    Raises:
        TunerError: not a shell that we know.
    """
    from typer._completion_shared import get_completion_script

    _check(shell)
    return get_completion_script(prog_name="moetune", complete_var=VARIABLE, shell=shell)


def installed(shell: str) -> str:
    """Write the script where the shell finds it, and return where that is.

    Raises:
        TunerError: not a shell that we know.
        EnvironmentMissingError: there is no home, or its files cannot be written or added to.
    """
    text = script(shell)
    home = os.environ.get("HOME", "")
    if not (home.startswith("/") and Path(home).is_dir()):
        raise EnvironmentMissingError(
            f"HOME is {home!r}, which is no folder; set it, or put what --show-completion prints"
            " where your shell reads it"
        )
    place = PLACES[shell]
    target = Path(home, place.script)
    try:
        write_files(Path(home), {place.script: f"{text}\n"})
    except OutputError as error:
        reason = getattr(error.__cause__, "strerror", "")
        raise EnvironmentMissingError(
            f"cannot write {str(target)!r}: {reason}; make room for it, or put what"
            " --show-completion prints where your shell reads it"
        ) from error
    if place.startup:
        line = place.line.format(script=shlex.quote(str(target)))
        _add_line(Path(home, place.startup), line)
    return str(target)


def _add_line(file: Path, line: str) -> None:
    """Add a line to the end of a file of the user's that lacks it; nothing of it is rewritten."""
    try:
        text = read_bounded(file, most_bytes=MOST_STARTUP_BYTES) if file.exists() else b""
        if line.encode() in (one.strip() for one in text.splitlines()):
            return
        # A pipe that came meanwhile is not waited for.
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
        with os.fdopen(descriptor, "ab") as stream:
            stream.write(f"\n{line}\n".encode())
    except OSError as error:
        raise EnvironmentMissingError(
            f"{file}: {error.strerror}; add the line {line!r} to what your shell reads, and what"
            " --show-completion prints to where it points"
        ) from error


def _check(shell: str) -> None:
    if shell not in SHELLS:
        raise TunerError(f"{shell!r} is no shell that can be completed in: {', '.join(SHELLS)}")
