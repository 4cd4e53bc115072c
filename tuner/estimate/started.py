"""Resolves a launch script to the settings that it starts, in files beside it, without running it.

    job.sbatch           -> bash ../megatron-lm/run.sh, with the variables that the job exports
    run.sh               -> the arguments that it reads from a file (`mapfile`)
    ... train.py         -> the overrides that the program applies (Megatron-Bridge)
    ... --deepspeed_config FILE, --job.config_file FILE, -m torchtitan.train --module NAME
    llamafactory-cli train FILE, accelerate launch --config_file FILE ... (tuner/engines/peft)

Only files below the folder above the script's are opened, so that a script cannot point anywhere.
"""

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tuner.engines.ms_swift.command import is_aside
from tuner.engines.ms_swift.command import is_own_command as is_swift_command
from tuner.engines.peft.arguments import argument_file_command, trainer_command
from tuner.engines.reading.arguments import launched_devices
from tuner.engines.reading.programs import (
    refuse_unread,
    starts_megatron,
    unread,
    unread_command,
    unread_program,
)
from tuner.engines.reading.shell_words import Command, ShellText, shell_text
from tuner.engines.torchtitan.command import (
    RUN_SCRIPT,
    command_notes,
    is_training_command,
    run_script,
)
from tuner.errors import SpecError
from tuner.spec.files import read_small_text, shown_path

LONGEST_BYTES: Final = 200_000
"""Longest file that is read as a launch."""
_DEEPEST: Final = 4
"""Most scripts that start one another."""
_SCRIPTS: Final = (".sh", ".bash", ".sbatch", ".slurm")
_SETTINGS: Final = (".yaml", ".yml", ".json")
_OWN_FOLDER: Final = re.compile(r"^(?:\$PWD|\$\{PWD\}|\$\(own_folder\))/")
"""Beginning of a path that stands for the folder of the script (tuner/engines/files.py)."""
_BESIDE: Final = re.compile(r"with_name\(\s*[\"']([\w.-]{1,80})[\"']\s*\)")
"""Expression by which a Python program names the file of settings beside it."""
_ASSIGNED: Final = re.compile(r"([A-Za-z_]\w*)=(.*)")
_CONFIG_FLAGS: Final[Mapping[str, str]] = {
    "--deepspeed_config": "deepspeed",
    "--deepspeed-config": "deepspeed",
    "--deepspeed": "deepspeed",
    "--job.config_file": "torchtitan",
    "--job.config-file": "torchtitan",
}
"""Flags whose value is a file of settings, and its format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedLaunch:
    """The settings that a script leads to."""

    format_name: str
    """Name of the format, one of tuner/estimate/registry.py."""
    text: str
    source: str
    folder: Path
    program: str = ""
    """Text of the Python program that applies the settings."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the scripts export."""
    command_words: tuple[str, ...] = ()
    """Words of the command that names the settings' file, whose flags override it."""
    nodes: int | None = None
    devices_per_node: int | None = None
    notes: tuple[str, ...] = ()

    def beside(self, name: str) -> str | None:
        """Return the text of a file that the settings name."""
        return _text(self.folder, name)


def resolve_launch(path: Path, text: str) -> ResolvedLaunch | None:
    """Follow a script or program to its settings; None where it holds them itself.

    Raises:
        SpecError: no shell text.
    """
    if path.suffix == ".py":
        resolved = _resolve_program(path.parent, text)
        if resolved is None:
            refuse_unread(text, source=shown_path(path), is_file=True)
        return resolved
    if path.suffix in _SETTINGS:
        refuse_unread(text, source=shown_path(path), is_file=True)
        words = argument_file_command(path.name, text)
        return None if words is None else _settings("trainer", path.parent, path.name, words)
    if path.name == "overrides.txt":
        beside = _text(path.parent, "train.py") or ""
        return _settings("megatron-bridge", path.parent, path.name, text, program=beside)
    if path.suffix in _SCRIPTS or text.startswith("#!"):
        return _resolve_script(path, text, environment={}, depth=0)
    return None


def resolve_command(text: str, *, folder: Path) -> ResolvedLaunch | None:
    """Return what a pasted command of Transformers' Trainer leads to; None for all others.

    Raises:
        SpecError: no shell text, or the command of a program that is not read.
    """
    refuse_unread(text, source="the command")
    shell = shell_text(text, source="the command")
    if not any(trainer_command(command) for command in shell.commands):
        return None
    return ResolvedLaunch(format_name="trainer", text=text, source="the command", folder=folder)


def _resolve_script(
    path: Path, text: str, *, environment: Mapping[str, str], depth: int
) -> ResolvedLaunch | None:
    folder = path.parent
    shell = shell_text(
        text,
        source=shown_path(path),
        environment=environment,
        beside=lambda name: _text(folder, name),
    )
    exported = {**environment, **shell.environment}
    followed: ResolvedLaunch | None = None
    for command in sorted(shell.commands, key=lambda candidate: is_aside(candidate.words)):
        script, arguments, assigned = _next_script(command)
        inner = _text(folder, script) if script and depth < _DEEPEST else None
        at = folder / script if inner is not None else path
        if inner is None and script.rpartition("/")[2] == RUN_SCRIPT and depth < _DEEPEST:
            inner = run_script({**exported, **assigned})
        if inner is not None:
            text_of_script = f"set -- {shlex.join(arguments)}\n{inner}" if arguments else inner
            run = _resolve_script(
                at, text_of_script, environment={**exported, **assigned}, depth=depth + 1
            )
            if run is not None and (run.format_name != "megatron" or starts_megatron(run.text)):
                return run
            followed = followed or run
            continue
        resolved = _resolve_command(path, command, shell, text=text)
        if resolved is not None:
            return _with_devices(resolved, shell, command, exported)
    if followed is not None and not starts_megatron(text):
        return followed
    # The last script holds its settings itself.
    return ResolvedLaunch(
        format_name="megatron",
        text=text,
        source=shown_path(path),
        folder=folder,
        environment=exported,
    )


def _next_script(command: Command) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """Return the script that a command runs, its arguments and variables; empty without one."""
    is_program = True
    for at, (shell, script) in enumerate(itertools.pairwise(("", *command.words))):
        # Words before the first flag may be a program that only runs another one, behind which
        # variables are words of their own.
        is_program = is_program and not script.startswith("-")
        is_run = shell in ("bash", "sh", "source", ".") or (is_program and "/" in script)
        if is_run and Path(script).suffix in _SCRIPTS:
            assigned = filter(None, map(_ASSIGNED.fullmatch, command.words[:at]))
            arguments = command.words[at + 1 :]
            return (
                _OWN_FOLDER.sub("", script),
                arguments,
                {match[1]: match[2] for match in assigned},
            )
    return "", (), {}


def _resolve_command(
    path: Path, command: Command, shell: ShellText, *, text: str
) -> ResolvedLaunch | None:
    folder = path.parent
    if is_swift_command(command.words):
        return _settings("ms-swift", folder, path.name, text)
    if unread_command(command.words):
        if name := unread_program([started.words for started in shell.commands]):
            raise unread(name, source=shown_path(path))
        return None
    if trainer_command(command) is not None:
        return _settings("trainer", folder, path.name, shlex.join(command.words))
    named = _named_settings(folder, command)
    if named is not None:
        return named
    if is_training_command(command.words):
        words = shlex.join(command.words)
        settings = _settings("torchtitan", folder, path.name, words)
        return replace(settings, notes=command_notes(shell, command))
    for word in command.words:
        program = _text(folder, word) if word.endswith(".py") and "$" not in word else None
        resolved = None if program is None else _resolve_program(folder, program)
        if resolved is not None:
            return resolved
    return None


def _named_settings(folder: Path, command: Command) -> ResolvedLaunch | None:
    """Return the settings in a file, or a program, that the command's flags name."""
    for name, value in _flags(command):
        if name in _CONFIG_FLAGS:
            file = _OWN_FOLDER.sub("", value)
            inner = _text(folder, file)
            if inner is not None:
                named = _settings(_CONFIG_FLAGS[name], folder, file, inner)
                return replace(named, command_words=tuple(command.words))
        program = _text(folder, f"{value}.py") if name == "--module" else None
        if program is not None:
            return _resolve_program(folder, program)
    return None


def _flags(command: Command) -> Iterator[tuple[str, str]]:
    words = command.words
    for index, word in enumerate(words):
        name, is_joined, value = word.partition("=")
        if name.startswith("--"):
            yield name, value if is_joined else "".join(words[index + 1 : index + 2])


def _resolve_program(folder: Path, program: str) -> ResolvedLaunch | None:
    """Follow a Python program to the file of settings that it names."""
    for name in _BESIDE.findall(program):
        text = _text(folder, name)
        if text is not None:
            kind = "torchtitan" if name.endswith(".toml") else "megatron-bridge"
            return _settings(kind, folder, name, text, program=program)
    return None


def _settings(
    kind: str, folder: Path, name: str, text: str, *, program: str = ""
) -> ResolvedLaunch:
    return ResolvedLaunch(
        format_name=kind,
        text=text,
        source=shown_path(folder / name),
        folder=folder,
        program=program,
    )


def _with_devices(
    resolved: ResolvedLaunch, shell: ShellText, command: Command, environment: Mapping[str, str]
) -> ResolvedLaunch:
    nodes, per_node = launched_devices(command.words, shell.scheduler)
    return replace(resolved, environment=environment, nodes=nodes, devices_per_node=per_node)


def _text(folder: Path, name: str) -> str | None:
    """Return the text of a file below the parent folder, None where there is none."""
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve().parent) or not path.is_file():
            return None
        return read_small_text(path, what="launch", most_bytes=LONGEST_BYTES)
    except (OSError, ValueError, SpecError):
        return None
