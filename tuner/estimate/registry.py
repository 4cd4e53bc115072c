"""Launch formats by name: their file suffixes and readers."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from tuner.catalog.target import LaunchFormat
from tuner.engines.reading.launch import LaunchSettings
from tuner.engines.reading.programs import unknown_script
from tuner.engines.reading.shell_words import shell_text
from tuner.engines.reading.variables import read_variables
from tuner.engines.registry import engine_file, launch_formats
from tuner.engines.torchtitan.command import is_training_command
from tuner.errors import SpecError
from tuner.estimate.started import (
    LONGEST_BYTES,
    ResolvedLaunch,
    resolve_command,
    resolve_launch,
)
from tuner.spec.complaint import complaint
from tuner.spec.files import read_small_text, shown_path, shown_value

FORMATS: Final[tuple[tuple[str, LaunchFormat], ...]] = tuple(launch_formats())
"""Formats of launches, each with the folder of its engine."""
NAMES: Final = tuple(dict.fromkeys(launch_format.name for _, launch_format in FORMATS))
_COMMAND: Final = re.compile(r"\s|^-")

Reader = Callable[..., LaunchSettings]


def read_launch(launch: str, *, format_name: str | None = None) -> LaunchSettings:
    """Read a launch file, or a command that was pasted instead of one.

    Args:
        launch: path of a file, or a command or its arguments as text.
        format_name: one of `NAMES`; by the file's ending when absent, Megatron-LM's otherwise.

    Raises:
        SpecError: no such file or format, or a launch that cannot be read.
    """
    path = Path(launch)
    is_pasted = is_command(launch, path)
    chosen = _chosen(format_name, "" if is_pasted else path.suffix.lower())
    if is_pasted:
        if len(launch) > LONGEST_BYTES:
            raise SpecError(f"the command: longer than {LONGEST_BYTES} characters")
        if format_name in (None, "trainer"):
            resolved = resolve_command(launch, folder=Path())
            if resolved is not None:
                return _started_settings(resolved)
        if format_name is None:
            chosen = _recognised(launch) or chosen
        return _settings(chosen, launch, source="the command")
    text = read_small_text(path, what="launch", most_bytes=LONGEST_BYTES)
    follows = format_name in (None, chosen[1].name)
    resolved = resolve_launch(path, text) if follows else None
    if resolved is None or format_name not in (None, resolved.format_name):
        recognised = _recognised(text) if format_name is None else None
        return _settings(recognised or chosen, text, source=shown_path(path))
    return _started_settings(resolved)


def _recognised(text: str) -> tuple[str, LaunchFormat] | None:
    """Return the format of the program that a text starts, or whose settings it holds."""
    for folder, launch_format in FORMATS:
        if launch_format.recognised_by and getattr(
            engine_file(folder, "read"), launch_format.recognised_by
        )(text):
            return folder, launch_format
    return _chosen("torchtitan", "") if _starts_torchtitan(text) else None


def _starts_torchtitan(text: str) -> bool:
    try:
        commands = shell_text(text, source="the command").commands
    except SpecError:
        return False
    return any(is_training_command(command.words) for command in commands)


def _started_settings(resolved: ResolvedLaunch) -> LaunchSettings:
    """Read the launch that a script starts, with the script's devices and environment."""
    more: dict[str, Any] = {}
    if resolved.format_name in ("megatron", "ms-swift", "trainer"):
        more = {"environment": resolved.environment, "beside": resolved.beside}
    if resolved.format_name == "megatron-bridge":
        more = {"program": resolved.program}
    if resolved.format_name == "torchtitan":
        more = {"command_words": resolved.command_words, "beside": resolved.beside}
    read = _settings(
        _chosen(resolved.format_name, ""), resolved.text, source=resolved.source, **more
    )
    if resolved.nodes and resolved.devices_per_node and read.devices is None:
        devices = {
            "devices": resolved.nodes * resolved.devices_per_node,
            "devices_per_node": resolved.devices_per_node,
        }
        read = read.model_copy(update=devices)
    variables = read_variables({**resolved.environment, **read.environment})
    notes = (*read.notes, *resolved.notes)
    return read.model_copy(update={"environment": variables, "notes": notes})


def read_text(text: str, *, format_name: str, source: str) -> LaunchSettings:
    """Read the text of a launch of a known format; `source` is what messages call it.

    Raises:
        SpecError: no such format, or a launch that cannot be read.
    """
    return _settings(_chosen(format_name, ""), text, source=source)


def _settings(
    chosen: tuple[str, LaunchFormat], text: str, *, source: str, **more: Any
) -> LaunchSettings:
    """Read a text; combinations of numbers that are impossible are refused here."""
    folder, form = chosen
    reader: Reader = getattr(engine_file(folder, "read"), form.reader)
    try:
        return reader(text, source=source, **more)
    except ValidationError as error:
        raise SpecError(f"{source}: {complaint(error, model=LaunchSettings)}") from error
    except SpecError as error:
        script = unknown_script(text) if form.name == "megatron" else None
        if script is None:
            raise
        raise SpecError(
            f"{source}: starts {script}, which is no program whose launches are read; give the run"
            " as a command with the arguments of Transformers' Trainer, a DeepSpeed JSON, a "
            "torchtitan TOML or Megatron-LM's flags"
        ) from error


def is_command(launch: str, path: Path) -> bool:
    """Say whether a launch is text to read, and not the path of a file.

    Raises:
        SpecError: it is empty.
    """
    if not launch.strip():
        raise SpecError("--launch is empty; name a launch file, or paste the command")
    if "\0" in launch or len(launch) > 4096:
        return True
    try:
        return bool(_COMMAND.search(launch)) and not path.exists()
    except OSError:
        return True


def _chosen(name: str | None, suffix: str) -> tuple[str, LaunchFormat]:
    """Return the format of a name or suffix, with the folder of its engine."""
    if name is not None and name not in NAMES:
        raise SpecError(f"--format {shown_value(name)} is none of {', '.join(NAMES)}")
    by_suffix = [
        (folder, launch_format)
        for folder, launch_format in FORMATS
        if suffix in launch_format.suffixes and (name is None or launch_format.name == name)
    ]
    plain = {launch_format.name: (folder, launch_format) for folder, launch_format in FORMATS}
    return by_suffix[0] if by_suffix else plain[name or "megatron"]
