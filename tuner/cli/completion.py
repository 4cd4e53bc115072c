"""Completion in the user's shell: the script that asks us, and the answers.

The shell runs `moetune` with `_MOETUNE_COMPLETE` set and what was typed in the environment; the
answers are Typer's, from the commands and the options' own completions.
"""

import os
from pathlib import Path
from typing import Any, Final

from tuner.errors import EnvironmentMissingError, TunerError

VARIABLE: Final = "_MOETUNE_COMPLETE"
SHELLS: Final = ("bash", "zsh", "fish")
SHELL_FILES: Final = (".bashrc", ".zshrc")
"""Files of the user that are added to."""


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
        EnvironmentMissingError: there is no home.
        OSError: its folder cannot be written.
    """
    from typer._completion_shared import install

    _check(shell)
    home = os.environ.get("HOME", "")
    if not (home.startswith("/") and Path(home).is_dir()):
        raise EnvironmentMissingError(
            f"HOME is {home!r}, which is no folder; set it, or put what --show-completion prints"
            " where your shell reads it"
        )
    for name in SHELL_FILES:
        file = Path(home, name)
        if file.exists() and not file.is_file():
            raise EnvironmentMissingError(f"{file}: not a regular file; put one there")
    _, path = install(shell=shell, prog_name="moetune", complete_var=VARIABLE)
    return str(path)


def _check(shell: str) -> None:
    if shell not in SHELLS:
        raise TunerError(f"{shell!r} is no shell that can be completed in: {', '.join(SHELLS)}")
