"""The flags of a server's command, out of a script or a pasted command that is never run.

Words before the server (`docker run`, `srun`, `exec`) belong to its launcher; words without a
value, such as `"$@"`, are set aside. A flag has several spellings (`-tp`, `--tp-size`), and
argparse takes unique prefixes of them (`--tensor-parallel 8`). Of a repeated spelling the last one
counts, as in argparse; two spellings with different values are refused. A text whose server loses
flags, to a line break without a backslash or to a comment, is refused.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final

from tuner.engines.reading.arguments import OFF, ON, Flags
from tuner.engines.reading.shell_words import Command, ShellText, script_text, shell_text
from tuner.errors import SpecError
from tuner.spec.files import shown_value

_FLAG: Final = re.compile(r"--?([A-Za-z][\w.-]*)\+?(?:=(.*))?", re.DOTALL)
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
_SHELLS: Final = frozenset({"bash", "sh", "zsh"})
_HOSTS: Final = frozenset({"ssh", "tmux", "screen", "su"})
"""Programs that take a command as one word."""
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


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """A server's command: how it is recognised, and its flags."""

    starts: tuple[tuple[str, ...], ...]
    """Words that a command's flags follow, without folders: a module, program, program and verb."""
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
    takes_prefixes: bool = True
    """Unique prefixes of flags are flags, as argparse has it; click takes none."""
    other_verbs: tuple[str, ...] = ()
    """Words behind a start that make another program of it."""
    images: tuple[str, ...] = ()
    """Beginnings of the names of container images that start the server by themselves."""

    @cached_property
    def known(self) -> frozenset[str]:
        """All names and spellings that are known here."""
        return frozenset(
            {*self.spellings, *self.spellings.values()}
            | self.switches
            | self.read
            | self.unpriced
            | self.timeless
        )

    def canonical(self, spelled: str) -> str:
        """Return the name of a flag as typed, without its dashes; an unknown one is its own.

        Only names known here can complete a prefix, none of which another flag of the releases
        begins (vLLM 0.33.0, SGLang 0.5.23).
        """
        head, dot, rest = spelled.partition(".")
        name = self.spellings.get(head, head)
        longer = self.completions(name)
        name = longer[0] if len(longer) == 1 else name
        return self.spellings.get(f"{name}{dot}{rest}", f"{name}{dot}{rest}")

    def completions(self, name: str) -> list[str]:
        """Return the flags that a name which is none begins."""
        if name in self.known or not self.takes_prefixes or len(name) <= _LONGEST_SHORT:
            return []
        longer = {self.spellings.get(flag, flag) for flag in self.known if flag.startswith(name)}
        return sorted(flag for flag in longer if "." not in flag)

    def kind(self, name: str) -> str:
        """Return which set a flag is in, or the flag that a dotted one is part of."""
        for flag in (name, name.partition(".")[0]):
            for kind in ("read", "timeless", "unpriced"):
                if flag in getattr(self, kind):
                    return kind
        return "unpriced" if name.startswith("speculative") else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedFlags:
    """Flags as typed, by their effect on the prediction."""

    understood: tuple[str, ...] = ()
    """Flags that the prediction uses."""
    ignored: tuple[str, ...] = ()
    """Flags that are not known here; no effect on the prediction."""
    unpriced: tuple[str, ...] = ()
    """Flags that affect the launch's speed and are not modelled."""
    timeless: tuple[str, ...] = ()
    """Flags that state what is served, where and on which machines: no effect on times."""


def server_flags(text: str, *, source: str, server: ServerFlags) -> Flags | None:
    """Return the flags of the one server that a text starts; None where it starts none.

    A text of flags only, on one line or several, is read as a server's if it has one that the
    prediction uses.

    Raises:
        SpecError: no shell text, two servers, or two spellings that disagree.
    """
    shell = _split(text, source)
    commands = [*_with_inner(shell.commands, source=source)]
    starts = [
        (at, command, rest)
        for at, command in enumerate(commands)
        if (rest := _after_start(command, server)) is not None
    ]
    if not starts:
        return _listed_flags(shell.commands, source=source, server=server)
    parsed = [
        _parsed(_without_unset(arguments, server)[0], source, server) for _, _, arguments in starts
    ]
    differing = _differing(parsed, server)
    names = _differing_flags(parsed)
    undecided = sum(command.is_conditional for _, command, _ in starts)
    is_priced = any(server.kind(name) == "read" for name in names)
    if len(differing) > 1 and (undecided < len(starts) or is_priced):
        branches = (
            f"; {undecided} are in branches that only variables decide, set those in the text or"
            f" keep one branch: they differ in {', '.join(f'--{name}' for name in names)}"
        )
        raise SpecError(
            f"{source}: starts {len(differing)} servers; estimate one at a time, each from its own"
            f" command{branches if undecided else ''}"
        )
    at, command, words = starts[0]
    _check_cut(words, commands[at + 1 :], source=source)
    kept, aside = _without_unset(words, server)
    notes = [f"not read, because the text does not set it: {word}" for word in aside]
    if command.is_conditional:
        notes.append("the server starts inside a condition; it was read as if that held")
    if len(differing) > 1:
        listed = ", ".join(f"--{name}" for name in names)
        notes.append(f"branches that only variables decide differ in {listed}, which have no price")
    notes += [
        f"not read, because a condition decides: {skipped[:200]}" for skipped in shell.skipped[:8]
    ]
    values = _parsed(kept, source, server)
    shown = {word for name, words in values.items() if name in server.read for word in words}
    notes += [
        f"not set in the file, so its default counts: {default[:80]}"
        for default in shell.defaults
        if default.partition("=")[2] in shown
    ]
    return Flags(
        source=source,
        values=values,
        notes=tuple(notes),
        environment=shell.environment,
        files=shell.files,
    )


def starts_server(text: str, *, source: str, server: ServerFlags) -> bool:
    """Say whether a text starts the server."""
    commands = _with_inner(_split(text, source).commands, source=source)
    return any(_after_start(command, server) is not None for command in commands)


@lru_cache(maxsize=4)
def _split(text: str, source: str) -> ShellText:
    """Split a text, which every engine and router looks at in turn, once."""
    return shell_text(text, source=source)


def _differing(
    parsed: Sequence[Mapping[str, tuple[str, ...]]], server: ServerFlags
) -> list[dict[str, tuple[str, ...]]]:
    """Return the different servers; commands of several nodes differ in ranks and addresses."""
    differing: list[dict[str, tuple[str, ...]]] = []
    for flags in parsed:
        values = {name: words for name, words in flags.items() if server.kind(name) != "timeless"}
        if values not in differing:
            differing.append(values)
    return differing


def _differing_flags(parsed: Sequence[Mapping[str, tuple[str, ...]]]) -> list[str]:
    """Return the flags that not every server has with the same value."""
    names = sorted({name for flags in parsed for name in flags})
    return [name for name in names if len({flags.get(name) for flags in parsed}) > 1]


def _check_cut(words: Sequence[str], after: Sequence[Command], *, source: str) -> None:
    """Refuse a server whose flags go on behind the end of its command.

    Raises:
        SpecError: the next command begins with a flag, or a word with a space and a flag.
    """
    word = after[0].words[0] if after else ""
    if glued := next((word for word in words if word[:1] == " " and word.strip()[:1] == "-"), ""):
        raise SpecError(
            f"{source}: {shown_value(glued)} begins with a space, so it is no flag: a backslash"
            " stands before a space; take the backslashes out where lines are folded into one"
        )
    if _FLAG.fullmatch(word) is not None:
        raise SpecError(
            f"{source}: the server's command ends before {shown_value(word)}, so the flags from"
            " there on are lost; end every line before them with a backslash, without a space or a"
            " comment behind it"
        )


def _with_inner(commands: Sequence[Command], *, source: str) -> Iterator[Command]:
    """Yield commands, and the inner ones of `bash -c "..."`."""
    for command in commands:
        words = command.words
        starts_shell = _program(_entrypoint(words)) in _SHELLS
        shells = (
            script_text(words[at + 1 :])
            for at in range(1, len(words) - 1)
            if re.fullmatch(r"-[a-z]*c", words[at])
            and (starts_shell or _program(words[at - 1]) in _SHELLS)
        )
        inner = [*itertools.islice(shells, 1)]
        if words[:1] == ("eval",):
            inner = [" ".join(words[1:])]
        if not inner and words and _program(words[0]) in _HOSTS:
            inner = [word for word in words[-1:] if " " in word]
        if not inner:
            yield command
        for text in inner:
            inherited = _container_variables(words)
            for nested in shell_text(text, source=source, environment=inherited).commands:
                is_conditional = command.is_conditional or nested.is_conditional
                yield Command(words=nested.words, is_conditional=is_conditional)


def _program(word: str) -> str:
    return word.rpartition("/")[2]


def _entrypoint(words: Sequence[str]) -> str:
    """Return what `docker run` starts in place of the image's own program; empty: that."""
    followed = zip((word.partition("=") for word in words), [*words[1:], ""], strict=False)
    return next((parts[2] or after for parts, after in followed if parts[0] == "--entrypoint"), "")


def _container_variables(words: Sequence[str]) -> dict[str, str]:
    """Return what `docker run -e NAME=VALUE` hands to the program that it starts."""
    if not {"docker", "podman"} & {_program(word) for word in words[:2]}:
        return {}
    stated = [word.removeprefix("--env=") for word in words if word.startswith("--env=")]
    stated += [after for flag, after in itertools.pairwise(words) if flag in ("-e", "--env")]
    stated += [word[2:] for word in words if re.match(r"-e\w+=", word)]
    pairs = (text.partition("=") for text in stated)
    return {name: value for name, is_set, value in pairs if is_set}


def _listed_flags(commands: Sequence[Command], *, source: str, server: ServerFlags) -> Flags | None:
    if not all(command.words and command.words[0].startswith("-") for command in commands):
        return None
    kept, _ = _without_unset([word for command in commands for word in command.words], server)
    values = _parsed(kept, source, server)
    return Flags(source=source, values=values, notes=()) if server.read & set(values) else None


def with_json(flags: Flags, names: Mapping[str, tuple[str, str] | None]) -> Flags:
    """Return flags whose dotted parts are merged into the JSON of the flag that they belong to.

    Args:
        flags: of a launch.
        names: flags that hold JSON, with None, and short flags with the JSON flag and its key.

    Raises:
        SpecError: a flag holds no JSON object.
    """
    values = dict(flags.values)
    for name in [flag for flag, part in names.items() if part is None]:
        parts = {flag: part[1] for flag, part in names.items() if part and part[0] == name}
        parts |= {flag: flag.partition(".")[2] for flag in values if flag.startswith(f"{name}.")}
        parts = {flag: key for flag, key in parts.items() if flag in values}
        if not parts:
            continue
        whole = json_object(flags, name) if name in values else {}
        for flag, key in parts.items():
            inner = whole
            *outer, last = key.replace("-", "_").split(".")
            for step in outer:
                inner = inner.setdefault(step, {})
                if not isinstance(inner, dict):
                    raise SpecError(f"{flags.source}: --{flag} and --{name} contradict each other")
            inner[last] = _json_value(flags.word(flag) or "")
            del values[flag]
        values[name] = (json.dumps(whole),)
    return replace(flags, values=values)


def json_object(flags: Flags, name: str) -> dict[str, Any]:
    """Return the JSON object of a flag; strings in it may be variables without a value.

    Raises:
        SpecError: it is none.
    """
    text = " ".join(flags.values[name])
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        flags.words(name)  # Names a variable without a value.
        raise SpecError(f"{flags.source}: --{name} {text!r:.60} is no JSON") from error
    if not isinstance(whole, dict):
        raise SpecError(f"{flags.source}: --{name} {text!r:.60} is no JSON object")
    return whole


def _json_value(word: str) -> Any:
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word


def tokens(flags: Flags, name: str) -> int | None:
    """Return a number of tokens, which may be written as 32k or 32K; None where absent.

    Raises:
        SpecError: it is none, or out of range.
    """
    return _scaled(flags, name, unit="tokens", example=8192, limit=MOST_TOKENS)


def size_bytes(flags: Flags, name: str) -> int | None:
    """Return a number of bytes, which may be written as 20G or 25.5g; None where absent.

    Raises:
        SpecError: it is none, or out of range.
    """
    return _scaled(flags, name, unit="bytes", example=2**33, limit=MOST_BYTES)


def host_sizes(flags: Flags, unit_bytes: Mapping[str, float]) -> dict[str, float]:
    """Return what flags take of host memory a device, in bytes, by the flag as typed.

    Args:
        flags: of the launch.
        unit_bytes: bytes a device for each unit of a flag, by its name.

    Raises:
        SpecError: one holds no number, or one below zero.
    """
    sizes = {}
    for name, unit in unit_bytes.items():
        number = flags.real(name)
        if number is not None and not 0.0 <= number * unit <= MOST_BYTES:
            raise SpecError(
                f"{flags.source}: --{name} {flags.word(name)} is outside 0..{MOST_BYTES / unit:g}"
            )
        if number:
            sizes[flags.said(name)] = number * unit
    return sizes


def _scaled(flags: Flags, name: str, *, unit: str, example: int, limit: int) -> int | None:
    """Read a whole number as vLLM does: small letters count by 1000, capital ones by 1024."""
    word = flags.word(name)
    if not word:  # Empty counts as absent (vLLM's engine/arg_utils.py, `optional_type`).
        return None
    match = re.fullmatch(r"(\d{1,15})(\.\d{1,6})?([kKmMgGtT]?)", word)
    if match is None or (match[2] and not match[3]):
        raise SpecError(
            f"{flags.source}: --{name} {shown_value(word)} is not a number of {unit}; write one,"
            f" e.g. --{name} {example}"
        )
    number = int(float(f"{match[1]}{match[2] or ''}") * _MULTIPLES.get(match[3], 1))
    if not 1 <= number <= limit:
        raise SpecError(
            f"{flags.source}: --{name} {word} is outside 1..{limit}; the nearest is"
            f" {min(max(number, 1), limit)}"
        )
    return number


def sorted_flags(flags: Flags, server: ServerFlags) -> SortedFlags:
    """Sort flags as typed by their effect on the prediction."""
    said: dict[str, list[str]] = {name: [] for name in ("", "read", "unpriced", "timeless")}
    for name in sorted(flags.values):
        said[server.kind(name)].append(_said(flags, name))
    return SortedFlags(
        understood=tuple(said["read"]),
        ignored=tuple(said[""]),
        unpriced=tuple(said["unpriced"]),
        timeless=tuple(said["timeless"]),
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
    names = [_program(word) for word in words]
    for start in server.starts:
        for at in range(len(names) - len(start) + 1):
            first = words[at + len(start) : at + len(start) + 1]
            if tuple(names[at : at + len(start)]) == start and first != ("--help",):
                is_other = bool(first) and first[0] in server.other_verbs
                return None if is_other else list(words[at + len(start) :])
    entrypoint = _program(_entrypoint(words))
    verb = next((known[1] for known in server.starts if known[:-1] == (entrypoint,)), "")
    for at, word in enumerate(words):
        # The verb follows the image; behind a flag the same word is a name or a path.
        if verb and word == verb and words[at - 1][:1] != "-":
            return list(words[at + 1 :])
    for at, name in enumerate(names):
        # An image that runs another program, or a shell, starts no server.
        if name.startswith(server.images) and words[at][:1] != "-" and words[at - 1] != "--name":
            rest = list(words[at + 1 :])
            is_shell = not rest or _program(rest[0]) in _SHELLS
            return None if is_shell or entrypoint else rest
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
    is_switch = _is_switch(word.lstrip("-").replace("_", "-"), server)
    return word.startswith("-") and "=" not in word and not is_switch


def _parsed(words: Sequence[str], source: str, server: ServerFlags) -> dict[str, tuple[str, ...]]:
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
        elif takes_more or (given and not given[-1][1] and word.casefold() in (*ON, *OFF)):
            # A switch takes the value that is written behind it, as a file of options has one.
            given[-1][1].append(word)
    values_of: dict[str, tuple[str, ...]] = {}
    spelled_as: dict[str, str] = {}
    for spelled, typed in given:
        # JSON over several lines is one value.
        values = [" ".join(typed)] if typed and _is_open(typed[0]) else typed
        name = server.canonical(spelled)
        if len(longer := server.completions(name)) > 1 and server.read & {*longer}:
            raise SpecError(
                f"{source}: --{name} is short for --{' and --'.join(longer[:3])}; write one of them"
            )
        then = spelled_as.get(name, spelled)
        is_read = name in server.read
        if is_read and then != spelled and values_of[name] != tuple(values):
            raise SpecError(
                f"{source}: {_typed(then)} {' '.join(values_of[name])} and {_typed(spelled)}"
                f" {' '.join(values)} are one flag; keep one of them"
            )
        values_of[name], spelled_as[name] = tuple(values), spelled
    return values_of


def _is_switch(spelled: str, server: ServerFlags) -> bool:
    return server.canonical(spelled) in server.switches


def _is_open(value: str) -> bool:
    return value.count("{") > value.count("}")


def _typed(spelled: str) -> str:
    return f"-{spelled}" if len(spelled) <= _LONGEST_SHORT else f"--{spelled}"
