"""Shell completion: the script for the shell, and the completions.

The shell runs `moetune` with `_MOETUNE_COMPLETE` and the typed text in the environment; Typer
completes from the commands and from the options' own completions.
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
    """Where a shell looks for completions, relative to HOME."""

    script: str
    startup: str = ""
    """Startup file that has to load the script; empty if the shell finds it by itself."""
    line: str = ""
    """Line that the startup file needs."""


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


def is_completion_request() -> bool:
    """Whether a shell requests completions."""
    return bool(os.environ.get(VARIABLE))


def complete(command: Any) -> int:
    """Print the completions of the typed text, and return the exit code.

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
    """Return the script that a shell runs to complete our commands.

    Raises:
        TunerError: not a shell that we know.
    """
    from typer._completion_shared import get_completion_script

    _check(shell)
    return get_completion_script(prog_name="moetune", complete_var=VARIABLE, shell=shell)


def installed(shell: str) -> str:
    """Write the script where the shell finds it, and return its path.

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
    """Append a line to the user's file if it is missing; nothing is rewritten."""
    try:
        text = read_bounded(file, most_bytes=MOST_STARTUP_BYTES) if file.exists() else b""
        if line.encode() in (one.strip() for one in text.splitlines()):
            return
        # Never wait for a pipe that has appeared meanwhile.
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
