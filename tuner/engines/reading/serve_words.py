"""The flags of a server's command, out of a script or a pasted command that is never run.

Words before the server (`docker run`, `srun`, `exec`) belong to its launcher; words without a
value, such as `"$@"`, are set aside. A flag has several spellings (`-tp`, `--tp-size`). Of a
repeated spelling the last one counts, as in argparse; two spellings with different values are
refused.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tuner.engines.reading.arguments import Flags
from tuner.engines.reading.shell_words import Command, shell_text
from tuner.errors import SpecError
from tuner.spec.files import shown_value

_FLAG: Final = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_PRINTERS: Final = ("echo", "printf")
"""Commands that only print a server's command."""
_KEYWORDS: Final = frozenset({"if", "elif", "while", "until", "then", "else", "do", "!", "{"})
_OTHERS: Final = frozenset(
    {
        *("apt", "apt-get", "cat", "cd", "chmod", "cp", "curl", "git", "hash", "kill"),
        *("killall", "ln", "ls", "mkdir", "mv", "pgrep", "pip", "pip3", "pkill", "rm", "tar"),
        *("type", "wget", "which"),
    }
)
"""Programs that start no server, whatever they name."""
_OTHER_VERBS: Final = frozenset(
    {
        ("command", "-v"),
        ("command", "-V"),
        ("conda", "install"),
        ("docker", "build"),
        ("uv", "pip"),
    }
)
_OWN_ARGUMENTS: Final = ("$@", "$*", "${@}", "${*}")
_LONGEST_SHORT: Final = 2
_MULTIPLES: Final[Mapping[str, int]] = {
    **{sign: 1000**power for power, sign in enumerate("kmgt", start=1)},
    **{sign: 1024**power for power, sign in enumerate("KMGT", start=1)},
}
"""Suffixes of vLLM's whole numbers: small letters decimal, capitals binary
(vllm/engine/arg_utils.py, `human_readable_int`)."""
MOST_TOKENS: Final = 2**31
MOST_BYTES: Final = 2**50


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """How a server's command is recognised, and its flags."""

    starts: tuple[tuple[str, ...], ...]
    """Words that a command's flags follow, without folders and tags: a module, program and verb, or
    a container image that starts the server by itself."""
    spellings: Mapping[str, str]
    """Alternative names of a flag, without dashes, and its canonical one."""
    switches: frozenset[str]
    """Flags that take no value."""
    read: frozenset[str]
    """Flags that the prediction uses."""
    unpriced: frozenset[str]
    """Flags that affect the launch's speed, and are not modelled."""
    timeless: frozenset[str]
    """Flags that state what is served, where and on which machines: no effect on times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedFlags:
    """Flags as typed, by their effect on the prediction."""

    understood: tuple[str, ...] = ()
    """The prediction uses them."""
    ignored: tuple[str, ...] = ()
    """Not known here; no effect on the prediction."""
    unpriced: tuple[str, ...] = ()
    """They affect the launch's speed, and are not modelled."""
    timeless: tuple[str, ...] = ()
    """No effect on times: what is served, where, on which machines."""


def server_flags(text: str, *, source: str, server: ServerFlags) -> Flags | None:
    """Return the flags of the one server that a text starts; None where it starts none.

    A text of flags only, on one line or several, is read as a server's if it has one that the
    prediction uses.

    Raises:
        SpecError: no shell text, two servers, or two spellings that disagree.
    """
    shell = shell_text(text, source=source)
    starts = [
        (command, rest)
        for command in _with_inner(shell.commands, source=source)
        if (rest := _after_start(command, server)) is not None
    ]
    if not starts:
        return _listed_flags(shell.commands, source=source, server=server)
    if len(starts) > 1:
        raise SpecError(
            f"{source}: starts {len(starts)} servers; estimate one at a time, each from its own"
            " command"
        )
    command, words = starts[0]
    kept, aside = _without_unset(words, server)
    notes = [f"not read, because the text does not set it: {word}" for word in aside]
    if command.is_conditional:
        notes.append("the server starts inside a condition; it was read as if that held")
    notes += [f"not read, because a condition decides: {one[:200]}" for one in shell.skipped[:8]]
    values = _parsed(kept, source=source, server=server)
    shown = {word for name, words in values.items() if name in server.read for word in words}
    notes += [
        f"not set in the file, so its default counts: {default[:80]}"
        for default in shell.defaults
        if default.partition("=")[2] in shown
    ]
    return Flags(source=source, values=values, notes=tuple(notes), environment=shell.environment)


def _with_inner(commands: Sequence[Command], *, source: str) -> Iterator[Command]:
    """Yield commands, and the inner ones of `bash -c "..."`."""
    for command in commands:
        words = command.words
        inner = [
            words[at + 1]
            for at in range(1, len(words) - 1)
            if words[at] in ("-c", "-lc") and words[at - 1].rpartition("/")[2] in ("bash", "sh")
        ]
        if not inner:
            yield command
        for text in inner:
            yield from shell_text(text, source=source).commands


def _listed_flags(commands: Sequence[Command], *, source: str, server: ServerFlags) -> Flags | None:
    if not all(command.words and command.words[0].startswith("-") for command in commands):
        return None
    kept, _ = _without_unset([word for command in commands for word in command.words], server)
    values = _parsed(kept, source=source, server=server)
    return Flags(source=source, values=values, notes=()) if server.read & set(values) else None


def tokens(flags: Flags, name: str) -> int | None:
    """Return a number of tokens, which may be written as 32k or 32K; None where absent.

    Raises:
        SpecError: it is none, or out of range.
    """
    return _scaled(flags, name, unit="tokens", example=8192, most=MOST_TOKENS)


def size_bytes(flags: Flags, name: str) -> int | None:
    """Return a number of bytes, which may be written as 20G or 25.5g; None where absent.

    Raises:
        SpecError: it is none, or out of range.
    """
    return _scaled(flags, name, unit="bytes", example=2**33, most=MOST_BYTES)


def _scaled(flags: Flags, name: str, *, unit: str, example: int, most: int) -> int | None:
    """Read a whole number as vLLM does: small letters count by 1000, capital ones by 1024."""
    word = flags.word(name)
    if word is None:
        return None
    match = re.fullmatch(r"(\d{1,15})(\.\d{1,6})?([kKmMgGtT]?)", word)
    if match is None or (match[2] and not match[3]):
        raise SpecError(
            f"{flags.source}: --{name} {shown_value(word)} is not a number of {unit}; write one,"
            f" e.g. --{name} {example}"
        )
    number = int(float(f"{match[1]}{match[2] or ''}") * _MULTIPLES.get(match[3], 1))
    if not 1 <= number <= most:
        raise SpecError(
            f"{flags.source}: --{name} {word} is outside 1..{most}; the nearest is"
            f" {min(max(number, 1), most)}"
        )
    return number


def sorted_flags(flags: Flags, server: ServerFlags) -> SortedFlags:
    """Sort flags as typed by their effect on the prediction."""
    understood, ignored, left, timeless = [], [], [], []
    for name in sorted(flags.values):
        said = _said(flags, name)
        if name in server.read:
            understood.append(said)
        elif name in server.timeless:
            timeless.append(said)
        elif name in server.unpriced or name.startswith("speculative"):
            left.append(said)
        else:
            ignored.append(said)
    return SortedFlags(
        understood=tuple(understood),
        ignored=tuple(ignored),
        unpriced=tuple(left),
        timeless=tuple(timeless),
    )


def _said(flags: Flags, name: str) -> str:
    text = flags.said(name)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _after_start(command: Command, server: ServerFlags) -> list[str] | None:
    """Return the words after the server's start; None where the command does not start it."""
    words = command.words
    if _starts_nothing(words):
        return None
    if words[:1] and words[0] in _PRINTERS:
        # The printed text ends where `$( )` closes.
        closed = next((at for at, word in enumerate(words) if word.endswith(")")), len(words))
        words = words[closed + 1 :]
    names = [word.rpartition("/")[2].partition(":")[0] for word in words]
    for start in server.starts:
        for at in range(len(names) - len(start) + 1):
            if tuple(names[at : at + len(start)]) == start:
                return list(words[at + len(start) :])
    return None


def _starts_nothing(words: Sequence[str]) -> bool:
    command = list(itertools.dropwhile(lambda word: word in _KEYWORDS, words))
    program = command[0].rpartition("/")[2] if command else ""
    return (
        program in _OTHERS
        or tuple(command[:2]) in _OTHER_VERBS
        or (program.startswith("python") and command[1:3] == ["-m", "pip"])
    )


def _without_unset(words: Sequence[str], server: ServerFlags) -> tuple[list[str], list[str]]:
    """Set aside unset variables that are no flag's value, and list them.

    The script's own arguments and a model before the flags are not listed.
    """
    kept: list[str] = []
    aside: list[str] = []
    for at, word in enumerate(words):
        follows = at > 0 and _takes_value(words[at - 1], server)
        if not word.startswith("$") or (follows and word not in _OWN_ARGUMENTS):
            kept.append(word)
        elif at > 0 and word not in _OWN_ARGUMENTS:
            aside.append(word)
    return kept, list(dict.fromkeys(aside))


def _takes_value(word: str, server: ServerFlags) -> bool:
    name = word.lstrip("-").replace("_", "-")
    is_switch = server.spellings.get(name, name) in server.switches
    return word.startswith("-") and "=" not in word and not is_switch


def _parsed(
    words: Sequence[str], *, source: str, server: ServerFlags
) -> dict[str, tuple[str, ...]]:
    """Group words by the flag before them, under its canonical name."""
    given: list[tuple[str, list[str]]] = []
    takes_more = False
    for word in words:
        match = _FLAG.fullmatch(word)
        if match is not None:
            spelled = match.group(1).replace("_", "-")
            given.append((spelled, [] if match.group(2) is None else [match.group(2)]))
            # Behind `--flag=value` argparse reads no second value, unless its braces are open still
            # (JSON whose quotes were lost).
            value, is_switch = match.group(2), _is_switch(spelled, server)
            takes_more = not is_switch and (value is None or _is_open(value))
        elif takes_more:
            given[-1][1].append(word)
    values_of: dict[str, tuple[str, ...]] = {}
    spelled_as: dict[str, str] = {}
    for spelled, values in given:
        name = server.spellings.get(spelled, spelled)
        then = spelled_as.get(name, spelled)
        if then != spelled and values_of[name] != tuple(values):
            raise SpecError(
                f"{source}: {_typed(then)} {' '.join(values_of[name])} and {_typed(spelled)}"
                f" {' '.join(values)} are one flag; keep one of them"
            )
        values_of[name], spelled_as[name] = tuple(values), spelled
    return values_of


def _is_switch(spelled: str, server: ServerFlags) -> bool:
    return server.spellings.get(spelled, spelled) in server.switches


def _is_open(value: str) -> bool:
    return value.count("{") > value.count("}")


def _typed(spelled: str) -> str:
    return f"-{spelled}" if len(spelled) <= _LONGEST_SHORT else f"--{spelled}"
