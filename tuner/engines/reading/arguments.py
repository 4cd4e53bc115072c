"""A command line as flags with their values: from shell words to `--flag` and what follows it.

`--flag value`, `--flag=value` and flags with several values are read; a flag that is given twice
counts as it was given last, as argparse does. Words before the training script belong to the
launcher (`torchrun`, `srun`, `deepspeed`), which says how many devices there are.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tuner.engines.reading.shell_words import Command, shell_text
from tuner.errors import SpecError
from tuner.spec.files import shown_value

LARGEST_NUMBER: Final = 2**31
_NODES: Final = ("nnodes", "nodes", "num-nodes", "N")
_PER_NODE: Final = (
    "nproc-per-node",
    "ntasks-per-node",
    "gpus-per-node",
    "num-gpus",
    "nproc",
)
_RENDEZVOUS: Final = re.compile(
    r"--?(node|machine)-rank|--?rdzv-(backend|endpoint|id|conf)|--?(master|main-process)-(addr|ip|port)"
    r"|--?local-addr"
)
"""Rendezvous options, which change no time; `_` written as `-`."""
_SCRIPT: Final = re.compile(r"[^\s=]*\.py|[\w.]+\.pretrain_gpt|pretrain_gpt")


ON: Final = ("true", "1", "yes", "on")
OFF: Final = ("false", "0", "no", "off")
"""Values of a switch, in any case."""
_PLACES: Final = frozenset(
    {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "PET_LOG_DIR"}
)
"""Variables of where ranks meet and torchrun writes its logs."""
UNSET: Final = "not read, because the text does not set it"
"""Begins the note of a variable that may hold any flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The flags of one command."""

    source: str
    values: Mapping[str, tuple[str, ...]]
    """Values of each flag, by name without its dashes, `_` written as `-`."""
    notes: tuple[str, ...]
    nodes: int | None = None
    devices_per_node: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the text exports."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that the text writes, by name."""

    def said(self, name: str) -> str:
        """Return a flag as a user would type it."""
        return " ".join((f"--{name}", *self.values.get(name, ())))

    def number(self, name: str, *, least: int = 1) -> int | None:
        """Return the whole number that a flag holds; None when it is absent.

        Raises:
            SpecError: it holds no whole number, one below `least`, or a variable without a value.
        """
        word = self.word(name)
        if word is None:
            return None
        if not re.fullmatch(r"[+-]?\d{1,20}", word):
            raise SpecError(
                f"{self.source}: --{name} {shown_value(word)} is not a whole number; write one, "
                f"e.g. --{name} {max(least, 1)}"
            )
        if not least <= int(word) <= LARGEST_NUMBER:
            raise SpecError(
                f"{self.source}: --{name} {word} is outside {least}..{LARGEST_NUMBER}; "
                f"the nearest is {min(max(int(word), least), LARGEST_NUMBER)}"
            )
        return int(word)

    def real(self, name: str) -> float | None:
        """Return the number that a flag holds.

        Raises:
            SpecError: it holds none.
        """
        word = self.word(name)
        if word is None:
            return None
        number = r"[+-]?(\d{1,6}\.?\d{0,12}|\.\d{1,12})(e-?\d{1,2})?"
        if not re.fullmatch(number, word, re.IGNORECASE):
            raise SpecError(f"{self.source}: --{name} {shown_value(word)} is not a number")
        return float(word)

    def share(self, name: str) -> float | None:
        """Return the number in [0, 1] that a flag holds.

        Raises:
            SpecError: it holds none.
        """
        number = self.real(name)
        if number is not None and not 0.0 <= number <= 1.0:
            raise SpecError(
                f"{self.source}: --{name} {self.word(name)} is outside 0..1; the nearest is "
                f"{min(max(number, 0.0), 1.0):g}"
            )
        return number

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """Return which of the choices a flag names.

        Raises:
            SpecError: it names none of them.
        """
        word = self.word(name)
        if word is None:
            return default
        if word not in choices:
            raise SpecError(
                f"{self.source}: --{name} {shown_value(word)} is none of {', '.join(choices)}"
            )
        return word

    def word(self, name: str) -> str | None:
        """Return the one value of a flag.

        Raises:
            SpecError: it has none, several, or a variable that the text never sets.
        """
        if name not in self.values:
            return None
        words = self.words(name)
        if len(words) != 1:
            count = f"{len(words)} values" if words else "no value"
            raise SpecError(f"{self.source}: --{name} has {count}; it takes one")
        return words[0]

    def words(self, name: str) -> tuple[str, ...]:
        """Return all values of a flag.

        Raises:
            SpecError: one is a variable that the text never sets.
        """
        for word in self.values.get(name, ()):
            if "$" in word or "`" in word:
                raise SpecError(
                    f"{self.source}: --{name} {shown_value(word)} has no value here; set the "
                    "variable in the same file or write the value out"
                )
        return self.values.get(name, ())

    def is_on(self, name: str) -> bool:
        """Say whether a switch is set; `--flag true` and `--flag false` count as written.

        Raises:
            SpecError: it has another value.
        """
        word = " ".join(self.words(name)).casefold()
        if name not in self.values or word in OFF:
            return False
        if word in ("", *ON):
            return True
        raise SpecError(f"{self.source}: {shown_value(self.said(name))}: a switch takes no value")


def training_flags(
    text: str,
    *,
    source: str,
    known: Iterable[str],
    switches: frozenset[str] = frozenset(),
    environment: Mapping[str, str] | None = None,
    beside: Callable[[str], str | None] = lambda _: None,
) -> Flags:
    """Find the training command of a script or pasted command and return its flags.

    Args:
        text: the script, the command, or just its arguments.
        source: what messages call it.
        known: names of the program's flags; the command with most of them is the training run.
        switches: those of them that take no value.
        environment: variables that are set when the script starts.
        beside: the text of a file that the script reads.

    Raises:
        SpecError: no shell text, or none of the commands has a flag of the program.
    """
    shell = shell_text(text, source=source, environment=environment, beside=beside)
    names = frozenset(known)
    scored = [(_known_flags(command.words, names), command) for command in shell.commands]
    best_score = max((score for score, _ in scored), default=0)
    if not best_score:
        raise SpecError(
            f"{source}: no command with Megatron-LM flags such as --tensor-model-parallel-size; "
            "name the launch script, or paste its arguments"
        )
    # A file that only lists arguments has one command per line.
    is_list = all(command.words[0].startswith("-") for command in shell.commands)
    chosen = next(command for score, command in scored if score == best_score)
    words = (
        [word for command in shell.commands for word in command.words]
        if is_list
        else list(chosen.words)
    )
    words, aside = without_unset(words, switches)
    split = _script_index(words)
    launcher = grouped_words(words[:split])
    undecided = [skipped for skipped in shell.skipped if not _is_rendezvous(skipped)]
    notes = [
        *(f"{UNSET}: {word}" for word in aside),
        *_notes(shell.commands, scored, chosen, is_list=is_list),
        *(f"not read, because a condition decides: {skipped}" for skipped in undecided[:8]),
        *(
            f"not set in the file, so its default counts: {default}"
            for default in shell.defaults
            if re.fullmatch(r"(?!.*(PORT|RANK|MAX_CONN))\w+=\d+", default)
        ),
    ]
    scheduler = grouped_words(shell.scheduler)
    return Flags(
        source=source,
        values=grouped_words(words[split:]),
        notes=tuple(shown_value(note)[1:-1] if len(note) > 300 else note for note in notes),
        nodes=_count((launcher, scheduler), _NODES),
        devices_per_node=_count((launcher, scheduler), _PER_NODE),
        environment={**(environment or {}), **shell.environment},
    )


def _is_rendezvous(assignment: str) -> bool:
    """Say whether an assignment only states rendezvous options."""
    name, _, value = assignment.partition("=")
    if name in _PLACES:
        return True
    # What a default or a message holds may have spaces.
    for pattern in (r"\$\(\([^()]*\)\)", r"\$\{[^{}]*\}"):
        value = re.sub(pattern, "$", value)
    words = value.split()
    takes_value = False
    for word in words:
        flag, equals, _ = word.partition("=")
        is_own = _RENDEZVOUS.fullmatch(flag.replace("_", "-")) is not None
        if not is_own and (word.startswith("-") or not takes_value):
            return False
        takes_value = is_own and not equals
    return bool(words)


def launched_devices(
    words: Sequence[str], scheduler: Sequence[str]
) -> tuple[int | None, int | None]:
    """Return nodes and devices of a node that a command or its scheduler states."""
    stated = (grouped_words(words), grouped_words(scheduler))
    return _count(stated, _NODES), _count(stated, _PER_NODE)


def _known_flags(words: Sequence[str], names: frozenset[str]) -> int:
    return sum(name in names for name in grouped_words(words))


def without_unset(words: Sequence[str], switches: frozenset[str]) -> tuple[list[str], list[str]]:
    """Set aside variables that nothing sets and that are no flag's first value, such as `$@`."""
    kept: list[str] = []
    aside: list[str] = []
    takes_value = False
    for word in words:
        if word.startswith("$") and not takes_value and not _SCRIPT.fullmatch(word):
            aside.append(word)
            continue
        is_flag = word.startswith("--")
        name = word.lstrip("-").replace("_", "-")
        takes_value = is_flag and "=" not in word and name not in switches
        kept.append(word)
    return kept, list(dict.fromkeys(aside))


def _script_index(words: Sequence[str]) -> int:
    """Return where the training program's own arguments begin."""
    for index, word in enumerate(words):
        if _SCRIPT.fullmatch(word):
            return index + 1
    return 0


def grouped_words(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Group words by the flag before them; words before the first flag belong to none."""
    values: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words:
        # Also a single dash with letters, as srun's -N; but not a negative number.
        match = re.fullmatch(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)
        if match:
            name = match.group(1).replace("_", "-")
            values.pop(name, None)
            values[name] = () if match.group(2) is None else (match.group(2),)
        elif name:
            values[name] += (word,)
    return values


def _count(parsed: Iterable[Mapping[str, tuple[str, ...]]], names: Sequence[str]) -> int | None:
    """Return the first number that a launcher states; variables, `gpu` and ranges are none."""
    for values in parsed:
        for name in names:
            word = values.get(name, ("",))[:1]
            if word and re.fullmatch(r"\d{1,7}", word[0]) and int(word[0]):
                return int(word[0])
    return None


def _notes(
    commands: Sequence[Command],
    scored: Sequence[tuple[int, Command]],
    chosen: Command,
    *,
    is_list: bool,
) -> Iterable[str]:
    if is_list:
        return
    others = sum(score > 3 for score, command in scored if command is not chosen)
    if others:
        yield f"{others + 1} of {len(commands)} commands train; read the one with most flags"
    if chosen.is_conditional:
        yield "the training command is inside a condition; it was read as if that held"
