"""Finds the command of Megatron-SWIFT in a script, and its arguments, a file's included.

    megatron sft|pt|rlhf            the command of the package
    python -m swift.cli._megatron.sft, torchrun .../swift/cli/_megatron/sft.py     what it starts

The command starts torchrun itself where NPROC_PER_NODE or NNODES is set (swift/cli/main.py). A
first argument `FILE.yaml` or `FILE.json` stands for the flags that it holds, before those that
follow, and its `ENV` for variables. The same names of `swift` train with Transformers, which
tuner/engines/peft reads, but for `swift rlhf`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tuner.engines.reading.arguments import (
    UNSET,
    Flags,
    grouped_words,
    launched_devices,
    without_unset,
)
from tuner.engines.reading.shell_words import shell_text
from tuner.errors import SpecError
from tuner.spec.files import one_line, shown_value
from tuner.spec.yaml_text import parse_yaml
from tuner.units import parse_whole

METHODS: Final = ("sft", "pt", "rlhf")
"""Methods that train."""
_OTHERS: Final = ("export", "infer", "deploy", "rollout", "sample", "eval", "app", "merge-lora")
_COMMAND: Final = re.compile(r"(?:.*/)?(megatron|swift)")
_MODULE: Final = re.compile(
    r"swift\.cli\.(_megatron\.)?(\w+)|(?:.*/)?swift/cli/(_megatron/)?(\w+)\.py"
)
_COUNTED: Final = ("auto", "gpu")
"""Processes of a node that torchrun counts itself."""
_CONFIG: Final = re.compile(r"[^\s$]+\.(ya?ml|json)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwiftCommand:
    """One command of ms-swift."""

    method: str
    """`sft`, `pt`, `rlhf`, or what does not train."""
    is_megatron: bool
    """Megatron-SWIFT trains; otherwise Transformers does."""
    launcher: tuple[str, ...] = ()
    """Words before the program or module of ms-swift."""
    arguments: tuple[str, ...] = ()
    """Words behind the method: flags, or a file of settings before them."""

    @property
    def trains_with_transformers(self) -> bool:
        """The command starts one model's training with Transformers' Trainer."""
        return not self.is_megatron and self.method in METHODS[:2]


def swift_command(words: Sequence[str]) -> SwiftCommand | None:
    """Return what of a command belongs to ms-swift; None where it starts something else."""
    for index, word in enumerate(words):
        end = index + 1
        following = "".join(words[end : end + 1])
        if match := _COMMAND.fullmatch(word):
            is_megatron, method, end = match.group(1) == "megatron", following, end + 1
        elif match := _MODULE.fullmatch(word):
            is_megatron = bool(match.group(1) or match.group(3))
            method = match.group(2) or match.group(4)
            if method == "main":
                method, end = following, end + 1
        else:
            continue
        if method in (*METHODS, *_OTHERS):
            return SwiftCommand(
                method=method,
                is_megatron=is_megatron,
                launcher=tuple(words[:index]),
                arguments=tuple(words[end:]),
            )
    return None


def is_own_command(words: Sequence[str]) -> bool:
    """Return whether a command is one of ms-swift that Megatron-SWIFT's reader reads or refuses."""
    command = swift_command(words)
    return command is not None and not command.trains_with_transformers


def is_aside(words: Sequence[str]) -> bool:
    """Return whether a command of ms-swift trains nothing, so that another of its script may."""
    command = swift_command(words)
    return command is not None and command.method not in METHODS


def command_flags(
    text: str,
    *,
    source: str,
    environment: Mapping[str, str] | None = None,
    beside: Callable[[str], str | None] = lambda _: None,
) -> tuple[SwiftCommand, Flags]:
    """Return the training command of a text and its flags, by their names as they are written.

    Args:
        text: the script, the command, or just its arguments, which count as `megatron sft`'s.
        source: what messages call it.
        environment: variables that are set when the script starts.
        beside: the text of a file that the command reads.

    Raises:
        SpecError: no shell text, no command of Megatron-SWIFT that trains, or an unread file.
    """
    shell = shell_text(text, source=source, environment=environment, beside=beside)
    commands = [*filter(None, (swift_command(command.words) for command in shell.commands))]
    training = [
        command for command in commands if command.is_megatron and command.method in METHODS
    ]
    if training:
        chosen = training[0]
    elif not commands and shell.commands and shell.commands[0].words[0].startswith("-"):
        every = tuple(word for command in shell.commands for word in command.words)
        chosen = SwiftCommand(method="sft", is_megatron=True, arguments=every)
    else:
        raise SpecError(f"{source}: {_obstacle(commands)}")
    words, aside = without_unset(chosen.arguments, frozenset())
    given, variables = _configured(words, source=source, beside=beside)
    variables = {**variables, **(environment or {}), **shell.environment}
    nodes, per_node = launched_devices(chosen.launcher, shell.scheduler)
    # The command starts torchrun where one of the two is set.
    per_node = per_node or whole(variables.get("NPROC_PER_NODE"))
    nodes = nodes or whole(variables.get("NNODES")) or (None if "NNODES=" in text else 1)
    notes = [f"{UNSET}: {word}" for word in aside]
    if len(training) > 1:
        notes.append(f"{len(training)} commands train; the first is read")
    return chosen, Flags(
        source=source,
        values={**given, **grouped_words(words)},
        notes=tuple(shown_value(note)[1:-1] if len(note) > 300 else note for note in notes),
        nodes=nodes,
        devices_per_node=per_node,
        environment=variables,
    )


def _obstacle(commands: Sequence[SwiftCommand]) -> str:
    """Say why none of these commands of ms-swift is read."""
    plain = [command.method for command in commands if command.method in METHODS]
    if plain:
        return (
            f"swift {plain[0]} of ms-swift runs other models or generation beside the trained one,"
            f" which has no price here; estimate the same flags as swift {METHODS[0]}, which is the"
            " trained model's share"
        )
    if commands:
        return f"{commands[0].method} of ms-swift does not train; give the command that does"
    return "no command `megatron sft` or `pt` of ms-swift in it"


def _configured(
    words: Sequence[str], *, source: str, beside: Callable[[str], str | None]
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the flags and variables of the file that a command's first argument names."""
    if not words or not _CONFIG.fullmatch(words[0]):
        return {}, {}
    text = beside(words[0])
    if text is None:
        raise SpecError(
            f"{source}: {shown_value(words[0])} is not beside the launch; put the file there, or"
            " write its settings as flags"
        )
    return configured_flags(text, source=words[0])


def configured_flags(
    text: str, *, source: str
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the flags and the variables (`ENV`) of a file of settings, YAML or JSON.

    Raises:
        SpecError: neither, or settings that are no flags.
    """
    # JSON is YAML but for tabs.
    raw = _json(text, source) if source.endswith(".json") else parse_yaml(text, source=source)
    if not isinstance(raw, dict):
        raise SpecError(f"{source}: {shown_value(raw)} at the top, where settings belong")
    variables = raw.pop("ENV", None) or {}
    if not isinstance(variables, dict):
        raise SpecError(f"{source}: ENV {shown_value(variables)} holds no variables")
    flags = {
        key.replace("_", "-"): tuple(map(_word, value))
        if isinstance(value, list)
        else (_word(value),)
        for key, value in raw.items()
        if value is not None
    }
    stated = {str(name): str(value) for name, value in variables.items()}
    for name in ("NNODES", "NPROC_PER_NODE"):
        if name in stated and stated[name] not in _COUNTED and whole(stated[name]) is None:
            raise SpecError(
                f"{source}: ENV {name} {shown_value(stated[name])} is no number of processes or"
                " nodes; write one from 1 to 9999999, or leave it out"
            )
    return flags, stated


def _json(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(one_line(f"{source}: not valid JSON: {error}")) from error


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def whole(word: str | None) -> int | None:
    """Return the positive number that a variable holds; None where it holds none."""
    return parse_whole(word or "", digits=7) or None
