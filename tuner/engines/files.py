"""An emitted file as a value, and the escaping of untrusted text.

Emitters return text and touch no disk. Text from a user (a model's name, a path, the reason of a
waiver) passes through `comment` when people read it, through `shlex.quote` when a shell does, and
through `label` where a scheduler allows only a few characters.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

OWN_FOLDER: Final = (
    'FILES="$(CDPATH= cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null && pwd)"\n'
)
"""Bash that names the folder of the emitted files, wherever a script is called from."""

JOB_NAME: Final = "job.sbatch"
JOB_FOLDER: Final = f"""\
own_folder() {{
  # Slurm runs a copy of this file, and knows where it was.
  local line=
  read -r line < <(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=/|/|p') || true
  if [[ "$line" == */{JOB_NAME}* ]]; then
    printf '%s' "${{line%%/{JOB_NAME}*}}"
  elif [[ "${{BASH_SOURCE[0]}}" == */{JOB_NAME} ]]; then
    dirname -- "${{BASH_SOURCE[0]}}"
  else
    printf '%s' "$PWD"
  fi
}}
JOB="$(own_folder)"
"""
"""Bash that names the folder of a batch script, wherever it was submitted from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedFile:
    """One file of a target's folder."""

    path: PurePosixPath
    """Relative to the folder of the target."""
    text: str = ""
    executable: bool = False
    data: bytes | None = None
    """Content of a binary file; `text` is empty then."""

    def __post_init__(self) -> None:
        if self.path.is_absolute() or ".." in self.path.parts:
            raise ValueError(f"{self.path} leaves the folder of its target")
        if self.data is not None and self.text:
            raise ValueError(f"{self.path} is text and bytes at once")

    @property
    def content(self) -> str | bytes:
        """Content that is written to disk."""
        return self.text if self.data is None else self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFiles:
    """Files by path relative to the plan's folder, and which of them can be executed."""

    contents: Mapping[str, str | bytes]
    executable: frozenset[str]


def launch_files(emitted: Mapping[str, Iterable[EmittedFile]]) -> LaunchFiles:
    """Return the files of all targets, each in `launch/<target>`."""
    files = {
        f"launch/{target}/{file.path}": file
        for target, target_files in emitted.items()
        for file in target_files
    }
    return LaunchFiles(
        contents={name: file.content for name, file in files.items()},
        executable=frozenset(name for name, file in files.items() if file.executable),
    )


def comment(lines: Iterable[str], *, prefix: str = "# ") -> str:
    """Return the lines as comments; nothing in them can end a comment or move a cursor."""
    return "".join(f"{prefix}{_printable(line)}".rstrip() + "\n" for line in lines)


def label(text: str) -> str:
    """Return the text as a scheduler's job name: ASCII letters, digits, dot, dash, underscore."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:64] or "model"


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
