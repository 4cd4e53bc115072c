"""The words of a launch command, out of a shell script or a pasted command that is never run.

The text is split by `shlex`. Literal assignments (`TP=8`, `ARGS=( ... )`, `ARGS+=`) are
substituted for `$TP`, `${TP}`, `${ARGS[@]}` or `${NNODES:-1}`; a default counts where the file
assigns nothing; `$((A * 2))`, `$(expr A / 2)` are computed over whole numbers; the script's folder
(`$(dirname "$0")`) is `.`. Tests in `[ ]`, `[[ ]]` and `(( ))` whose sides are known take their
branch, also before `&&` and `||`. Everything else that a shell would do (commands in `$( )`, other
tests, loops, sourced files) is left as it is: a word that still holds a `$` has no value here, and
what an undecided test or a loop would add is named rather than guessed.
An array that `mapfile` fills from a file beside the script holds that file's words, comment lines
left out. A here-document is the file that it is written to, or the value of `$(cat <<EOF`; one that
a shell reads is part of the script.

A comment starts at a `#` that begins a word outside quotes. `#SBATCH` lines are collected
separately.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from tuner.errors import SpecError
from tuner.spec.files import shown_value
from tuner.units import parse_whole

MOST_CHARACTERS: Final = 2_000_000
"""Most characters of all expanded variables together; more is a runaway expansion."""
_DEEPEST: Final = 8
"""Assignments that refer to assignments."""
_MOST_OPEN: Final = 100
"""Tests and loops within one another."""

_PIECE: Final = re.compile(
    r"""(?P<quoted>'[^']*'|"(?:[^"\\]|\\.)*")|(?P<escaped>\\.)|(?P<comment>(?<![^\s;(])\#[^\n]*)"""
    r"""|(?P<plain>[^'"\\\#]+|\#)""",
    re.DOTALL | re.VERBOSE,
)
_ASSIGNED: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE: Final = re.compile(
    r"\$(?:([A-Za-z_]\w*|\d|[@*#])|\{([A-Za-z_]\w*|\d+|[@*#])(?:\[[@*]\])?(?::?-([^{}]*))?\})"
)
_EXPR: Final = re.compile(
    r"(?:\$\(|`)expr ([\w${}]{1,80}(?: \\?[-+*/%] [\w${}]{1,80}){1,8})(?:\)|`)"
)
_ARITHMETIC: Final = re.compile(r"\$\(\(((?:[^()\n]|\([^()\n]{0,80}\)){1,200})\)\)")
_NAME: Final = re.compile(r"(?<![\w.${])[A-Za-z_]\w*")
_LONGEST_SUM: Final = 400
_LARGEST: Final = 2**63
_OPERATIONS: Final[Mapping[type[ast.AST], Callable[[int, int], int]]] = {
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_HERE: Final = re.compile(
    r"(?P<value>\$\(\s*cat\s*)?(?<!<)<<-?[ \t]*(?P<quote>[\"']?)(?P<end>\w{1,40})(?P=quote)"
    r"(?P<after>[^\n]*)\n(?P<body>.*?)^[ \t]*(?P=end)[ \t]*$(?(value)\s*\))",
    re.DOTALL | re.MULTILINE,
)
"""A here-document."""
_MOST_DOCUMENTS: Final = 200
_WRITTEN: Final = re.compile(r"(?:>{1,2}|\btee(?:\s+-a)?\s)\s*[\"']?([^\s\"';|&<>]{1,200})")
_SHELL_READS: Final = re.compile(r"\b(?:bash|sh|ssh|srun|sbatch|\.sh|sbatch)\b")
_FILE: Final = r"""["']?\$(?:0|\{0\}|\{BASH_SOURCE(?:\[0\])?\})["']?"""
_DIRNAME: Final = rf"""\$\(\s*dirname\s+(?:--\s+)?{_FILE}\s*\)"""
_OWN_FOLDER: Final = re.compile(
    rf"""\$\(\s*(?:CDPATH=\s+)?cd\s+(?:--\s+)?["']?{_DIRNAME}["']?\s*(?:[&12]?>{{1,2}}\s*(?:/dev/null|&[12])\s+){{0,3}}&&\s*pwd(?:\s+-P)?\s*\)"""
    rf"""|{_DIRNAME}"""
)
_TEST: Final[Mapping[str, Callable[[str, str], bool]]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
_NUMERIC_TEST: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_UNDECIDED: Final = re.compile(r"[$`*?\[\]]")
"""Characters in an operand of a test that only a running shell expands, or that make a pattern."""
_FROM_SCHEDULER: Final = ("SLURM_", "PBS_", "LSB_")
"""Prefixes of variables that the scheduler sets."""
_SLURM: Final[Mapping[str, tuple[str, ...]]] = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "n": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gres": ("SLURM_GPUS_ON_NODE",),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "c": ("SLURM_CPUS_PER_TASK",),
}
"""Variables that a job has by the options of its `#SBATCH` lines (Slurm, sbatch(1), output
environment variables)."""
_SLURM_COUNT: Final = re.compile(r"(?:[A-Za-z][\w.-]*:)*(\d{1,9})")
"""A count, after the type of what is counted, such as `gpu:h100:8`."""
_REDIRECTION: Final = re.compile(r"(\d|&)?(>{1,2}|<)(?P<target>.*)")
_GLUED: Final = re.compile(r"(--?[A-Za-z][\w-]*)([<>]{1,2}.*)")
"""A redirection right behind a flag."""
_SCRIPT_FOLLOWS: Final = re.compile(r"-[a-z]*c")
_PLACEHOLDER: Final = re.compile(r"<[^<>&]{1,80}>")
"""A value that whoever wrote the text left open, such as `<MODEL>`."""
_OPENERS: Final = frozenset({"if", "for", "while", "until", "case", "select"})
_CLOSERS: Final = frozenset({"fi", "done", "esac"})
_PREFIXES: Final = frozenset({"then", "else", "do", "export", "local", "declare", "readonly"})
_BRACKETS: Final = frozenset({("[", "]"), ("[[", "]]")})
_SEPARATORS: Final = frozenset({";", "&&", "||", "|", "&"})
_JOINTS: Final = frozenset({"&&", "||"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of the text, known variables expanded."""

    words: tuple[str, ...]
    is_conditional: bool
    """Inside an `if`, a loop or a `case`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellText:
    """Commands, variables and files of a script."""

    commands: tuple[Command, ...]
    scheduler: tuple[str, ...]
    """Words of the `#SBATCH` lines."""
    skipped: tuple[str, ...]
    """Assignments that only a running shell could decide on."""
    defaults: tuple[str, ...]
    """Variables whose default was taken, as `NAME=value`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the text exports with a literal value."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Here-documents by the name of the file that they are written to."""


def _slurm_variables(scheduler: Sequence[str]) -> dict[str, str]:
    """Return the variables that Slurm sets by the words of a script's `#SBATCH` lines."""
    variables: dict[str, str] = {}
    for word, following in pairwise((*scheduler, "")):
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("--") and word[2:]:
            name, equals, value = word[1:2], "=", word[2:].removeprefix("=")
        count = _SLURM_COUNT.fullmatch(value if equals else following)
        if word.startswith("-") and count is not None:
            variables.update(dict.fromkeys(_SLURM.get(name, ()), count[1]))
    return variables


def shell_text(
    text: str,
    *,
    source: str,
    environment: Mapping[str, str] | None = None,
    beside: Callable[[str], str | None] = lambda _: None,
) -> ShellText:
    """Split a script or command into commands.

    Args:
        text: the script or command.
        source: what messages call it.
        environment: variables that are set when it starts.
        beside: the text of a file that the script reads, None where there is none.

    Raises:
        SpecError: a quote or array is never closed, or the text is no shell text.
    """
    scheduler = tuple(
        word
        for line in text.splitlines()
        if line.startswith("#SBATCH")
        for word in line.split()[1:]
    )
    variables = _Variables(source, {**_slurm_variables(scheduler), **(environment or {})})
    exported: set[str] = set()
    commands: list[Command] = []
    skipped: list[str] = []
    blocks = _Blocks(variables)
    text, files = _without_documents(text)
    for words, separator in _statements(_words(text, source=source), source=source):
        blocks.enter(words, separator)
        if blocks.is_left_out:
            continue
        undecided = blocks.is_undecided
        rest = _without_prefixes(words)
        assigned = _leading_assignments(rest)
        for name, adds, values in assigned:
            if undecided:
                variables.doubt([name])
                skipped.append(f"{name}{'+' if adds else ''}={' '.join(values)}")
            else:
                variables.assign(name, values, adds=adds)
        left = rest[len(assigned) :]
        if not undecided:
            exported |= _exported(words, [name for name, *_ in assigned], left)
            _read_array(left, variables, beside)
        if left and (given := _given_arguments(left, variables)) is not None:
            if undecided:
                skipped.append(" ".join(left))
            else:
                variables.arguments = given
        elif left:
            filled = tuple(variables.filled([*_without_redirections(left)]))
            if filled:
                commands.append(Command(words=filled, is_conditional=undecided))
    return ShellText(
        commands=tuple(commands),
        scheduler=scheduler,
        skipped=tuple(skipped),
        defaults=tuple(f"{name}={value}" for name, value in variables.defaults.items()),
        environment=variables.written_out(exported),
        files={
            "".join(variables.filled([name])): "\n".join(
                " ".join(variables.filled([line], splits=False)) for line in body.split("\n")
            )
            for name, body in files.items()
        },
    )


def script_text(words: Sequence[str]) -> str:
    """Return what a shell runs by `-c`: a script, behind it the script's name and arguments."""
    kept = [*words[1:], ""] if words[0] == "--" else [*words, ""]
    return f"set -- {shlex.join(kept[2:-1])}\n{kept[0]}" if kept[2:-1] else kept[0]


def _without_documents(text: str) -> tuple[str, dict[str, str]]:
    """Take here-documents out of a script; those that a shell reads stay in it."""
    files: dict[str, str] = {}
    if text.count("<<") > _MOST_DOCUMENTS:
        return text, files

    def replaced(match: re.Match[str]) -> str:
        start = match.string.rfind("\n", 0, match.start()) + 1
        line = match.string[start : match.start()] + match["after"]
        if match["value"]:
            return "'" + match["body"].rstrip("\n").replace("'", "'\"'\"'") + "'"
        if written := _WRITTEN.search(line):
            files[written[1].strip("\"'").rpartition("/")[2]] = match["body"]
        is_script = _SHELL_READS.search(line) is not None
        return match["after"] + ("\n" + match["body"] if is_script else "")

    return _HERE.sub(replaced, text), files


def _exported(words: Sequence[str], assigned: Sequence[str], left: Sequence[str]) -> set[str]:
    """Return the variables that a statement exports, or sets for its one command."""
    if "export" in words[: len(words) - len(left)]:
        return {*assigned, *left}
    return set(assigned) if left else set()


def _read_array(
    words: Sequence[str], variables: "_Variables", beside: Callable[[str], str | None]
) -> None:
    """Fill the array of `mapfile -t NAME < FILE`, also through `grep` or `tr`."""
    if not words or words[0] not in ("mapfile", "readarray"):
        return
    names = [word for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word)]
    text = beside(" ".join(variables.filled([words[-1].rstrip(")")])))
    if names and text is not None:
        lines = (line for line in text.splitlines() if not line.startswith("#"))
        variables.assign(names[0], [word for line in lines for word in line.split()], adds=False)


def _given_arguments(words: Sequence[str], variables: "_Variables") -> list[str] | None:
    """Return what `set --` or `shift` makes the arguments, None of others; doubt what they set."""
    if tuple(words[:2]) == ("set", "--"):
        return list(variables.filled(words[2:]))
    if words[0] == "shift":
        count = words[1] if len(words) > 1 else "1"
        return variables.arguments[int(count[:6]) :] if count.isdecimal() else []
    if words[0] in ("read", "getopts"):
        variables.doubt(words[1:])
    elif words[0] in ("source", ".", "eval"):
        variables.doubt_all()
    return None


def _words(text: str, *, source: str) -> Iterator[str]:
    """Yield words, and the line breaks between them.

    Comments and continued lines go first, because shlex knows quotes but not both of these.
    """
    if "\0" in text:
        raise SpecError(f"{source}: holds a null character, so it is not a launch")
    kept = []
    position = 0
    plain = _OWN_FOLDER.sub(".", text.replace("\r\n", "\n"))
    plain = _EXPR.sub(lambda match: f"$(({match.group(1).replace(chr(92), '')}))", plain)
    plain = _ARITHMETIC.sub(lambda match: re.sub(r"[\s\"]", "", match.group()), plain)
    while position < len(plain):
        match = _PIECE.match(plain, position)
        if match is None:
            line = plain.count("\n", 0, position) + 1
            raise SpecError(f"{source}: line {line}: a quote is never closed")
        if match.lastgroup != "comment":
            kept.append(match.group().replace("\\\n", " "))
        position = match.end()
    lexer = shlex.shlex("".join(kept), posix=True, punctuation_chars="\n")
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        yield from lexer
    except ValueError as error:
        raise SpecError(f"{source}: not shell text: {str(error).lower()}") from error


def _statements(words: Iterator[str], *, source: str) -> Iterator[tuple[list[str], str]]:
    """Group words into statements, each with the separator before it.

    Inside an array's parentheses a new line ends nothing, inside `[[ ]]` no `&&` does.
    """
    statement: list[str] = []
    open_parentheses = 0
    separator = ";"
    for word in words:
        is_break = word != "" and word.strip("\n") == ""
        if open_parentheses and is_break:
            continue
        is_inside = open_parentheses or (word in _JOINTS and "[[" in statement[:3])
        if is_break or (word in _SEPARATORS and not is_inside):
            if statement:
                yield statement, separator
            if statement or not is_break:
                separator = ";" if is_break else word
            statement = []
            continue
        if open_parentheses or re.match(r"[A-Za-z_]\w*\+?=\(", word):
            open_parentheses = max(0, open_parentheses + word.count("(") - word.count(")"))
        is_end = word.endswith(";") and not open_parentheses
        statement.append(word.rstrip(";") if is_end else word)
        if is_end or (word == "]]" and not open_parentheses):
            yield statement, separator
            separator = ";"
            statement = []
    if open_parentheses:
        raise SpecError(f"{source}: the array {shown_value(statement[0])} is never closed with )")
    if statement:
        yield statement, separator


def _without_redirections(words: Sequence[str]) -> Iterator[str]:
    is_target = False
    for whole in words:
        word = whole
        if glued := _GLUED.fullmatch(whole):
            yield glued[1]
            word = glued[2]
        redirection = None if _PLACEHOLDER.fullmatch(word) else _REDIRECTION.fullmatch(word)
        if redirection is None and not is_target:
            yield word
        is_target = redirection is not None and not redirection["target"]


def _without_prefixes(words: Sequence[str]) -> list[str]:
    start = 0
    while start < len(words) and words[start] in _PREFIXES:
        start += 1
    return list(words[start:])


def _leading_assignments(words: list[str]) -> list[tuple[str, bool, tuple[str, ...]]]:
    """Read the assignments that a statement begins with; an array's words shrink to one entry.

    `words` is shortened in place so that each assignment takes exactly one word of it.
    """
    assignments: list[tuple[str, bool, tuple[str, ...]]] = []
    while len(assignments) < len(words):
        match = _ASSIGNED.fullmatch(words[len(assignments)])
        if match is None or words[len(assignments)].startswith("-"):
            break
        name, adds, value = match.groups()
        values: tuple[str, ...] = (value,) if value else ()
        if value.startswith("("):
            inner = [value[1:], *words[len(assignments) + 1 :]]
            end = _closing(inner)
            values = tuple(word for word in (*inner[:end], inner[end][:-1]) if word)
            del words[len(assignments) + 1 : len(assignments) + 1 + end]
        assignments.append((name, bool(adds), values))
    return assignments


def _closing(words: Sequence[str]) -> int:
    depth = 1
    for index, word in enumerate(words):
        depth += word.count("(") - word.count(")")
        if depth <= 0 and word.endswith(")"):
            return index
    return len(words) - 1


class _Variables:
    """Variables that the text assigns, while it is read from top to bottom."""

    def __init__(self, source: str, environment: Mapping[str, str]) -> None:
        self.defaults: dict[str, str] = {}
        self.source = source
        self._words: dict[str, tuple[str, ...]] = {
            name: (value,) for name, value in environment.items()
        }
        self._left = MOST_CHARACTERS
        self._doubted: set[str] = set()
        self._is_all_doubted = False
        self._sure: set[str] = set()
        """Variables assigned since all were doubted."""

    @property
    def arguments(self) -> list[str]:
        """The script's own arguments, none where they are not known."""
        return [*self._words.get("@", ())]

    @arguments.setter
    def arguments(self, words: Sequence[str]) -> None:
        for name in [key for key in self._words if not key[:1].isalpha() and key[:1] != "_"]:
            del self._words[name]
        if words:
            numbered = {str(at): (word,) for at, word in enumerate(words, start=1)}
            count = (str(len(words)),)
            self._words |= {"@": tuple(words), "*": tuple(words), "#": count, **numbered}

    def doubt(self, names: Iterable[str]) -> None:
        """Mark these variables as known only to a running shell from here on."""
        self._doubted |= set(names)

    def doubt_all(self) -> None:
        """Mark every variable so."""
        self._is_all_doubted = True
        self._sure.clear()

    def decided(self, word: str) -> str | None:
        """Return a side of a test; None where only a running shell knows it."""
        for plain, braced, default in _VARIABLE.findall(word):
            name = plain or braced
            is_given = name in self._words
            is_open = not is_given and (not default or name.startswith(_FROM_SCHEDULER))
            is_doubted = self._is_all_doubted and name not in self._sure
            if is_doubted or name in self._doubted or is_open:
                return None
        filled = " ".join(self.filled([word])) if word else ""
        return None if _UNDECIDED.search(filled) else filled

    def written_out(self, names: Iterable[str]) -> dict[str, str]:
        """Return the values of those variables that need no running shell."""
        values = {
            name: " ".join(self._words[name]) for name in sorted(names) if name in self._words
        }
        return {name: value for name, value in values.items() if "$" not in value}

    def assign(self, name: str, values: Sequence[str], *, adds: bool) -> None:
        words = tuple(self.filled(values))
        if not adds:
            self._doubted.discard(name)
            self._sure.add(name)
        self._words[name] = (*self._words.get(name, ()), *words) if adds else words

    def filled(self, words: Sequence[str], *, splits: bool = True) -> Iterator[str]:
        """Expand variables; each value is split at spaces, as without quotes."""
        for behind, word in zip(("", *words), words, strict=False):
            if word in ("$@", "${@}") and self.arguments:
                for argument in self.arguments:
                    self._charge(argument)
                    yield argument
                continue
            if "$" not in word:
                yield from word.split() if splits and word.startswith("--") else (word,)
                continue
            filled = word
            for _ in range(_DEEPEST):
                before = filled
                filled = _ARITHMETIC.sub(self._sum, _VARIABLE.sub(self._value, filled))
                if filled == before:
                    break
            is_script = _SCRIPT_FOLLOWS.fullmatch(behind) is not None
            yield from filled.split() if splits and not is_script else (filled,)

    def computed(self, expression: str) -> int | None:
        """Return the value of shell arithmetic, whose names need no `$`; None where it has none."""
        named = _NAME.sub(
            lambda match: " ".join(self._words.get(match.group(), ("",))) or match.group(),
            expression,
        )
        if len(named) > _LONGEST_SUM:
            return None
        condition, asks, branches = named.partition("?")
        yes, _, no = branches.partition(":")
        text = f"({yes}) if ({condition}) else ({no})" if asks else named
        text = text.replace("&&", " and ").replace("||", " or ").replace("/", "//")
        try:
            return int(_value_of(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None

    def _sum(self, match: re.Match[str]) -> str:
        value = self.computed(match.group(1))
        return match.group() if value is None else str(value)

    def _value(self, match: re.Match[str]) -> str:
        plain, braced, default = match.groups()
        name = plain or braced
        if name in self._words:
            value = " ".join(self._words[name])
        elif default is not None and (self.arguments or name[0].isalpha() or name[0] == "_"):
            value = self.defaults[name] = default
        else:
            return match.group()
        self._charge(value)
        return value

    def _charge(self, value: str) -> None:
        """Count the characters of a value towards what a launch may hold."""
        self._left -= len(value) + 1
        if self._left < 0:
            raise SpecError(
                f"{self.source}: its variables hold more than {MOST_CHARACTERS} characters, so "
                "it is not a launch"
            )


class _Blocks:
    """The open `if`, loops and `case` of a statement, and whether they run."""

    def __init__(self, variables: _Variables) -> None:
        self._variables = variables
        self._open: list[_Block] = []
        self._runs: bool | None = True
        """The statement runs by the `&&` or `||` that joins it to the one before; None:
        undecided."""
        self._before: bool | None = True
        """Result of the test before the statement; None: undecided."""
        self._is_after_test = False

    @property
    def is_undecided(self) -> bool:
        """Only a running shell knows whether the statement runs."""
        return self._runs is None or any(block.runs is None for block in self._open)

    @property
    def is_left_out(self) -> bool:
        """The statement does not run."""
        return self._runs is False or any(block.runs is False for block in self._open)

    def enter(self, words: Sequence[str], separator: str) -> None:
        """Track the blocks that a statement opens, continues or closes."""
        first = words[0] if words else ""
        opener = next((word for word in words if word not in _PREFIXES), "")
        if self._open and self._open[-1].is_test and first != "then":
            self._open[-1].runs = _joined(
                self._open[-1].runs, separator, self._test(words) if separator in _JOINTS else None
            )
            return
        self._runs = self._runs_behind(separator)
        if self._open and first in ("then", "else"):
            self._open[-1].is_test = False
        if self._open and first in ("elif", "else"):
            block = self._open.pop()
            block.go_on(self._test(words[1:]) if first == "elif" else True)
            block.is_test = first == "elif"
            self._open.append(block)
        elif opener in _OPENERS:
            tested = self._test(words[words.index(opener) + 1 :]) if opener == "if" else None
            self._open.append(_Block(runs=tested, is_test=opener == "if"))
            if len(self._open) > _MOST_OPEN:
                raise SpecError(
                    f"{self._variables.source}: more than {_MOST_OPEN} tests and loops within one"
                    " another, so it is not a launch"
                )
        elif opener in _CLOSERS and self._open:
            self._open.pop()
        after = words[1:] if first in ("then", "else", "do") else words
        if self._runs is not False:
            self._is_after_test = self._runs is None or _is_test(after)
            self._before = self._test(after) if self._runs else None

    def _runs_behind(self, separator: str) -> bool | None:
        """Say whether a statement runs; a command before it is taken to have succeeded."""
        if separator not in _JOINTS:
            return True
        if not self._is_after_test:
            return True if separator == "&&" else None
        return None if self._before is None else self._before is (separator == "&&")

    def _test(self, words: Sequence[str]) -> bool | None:
        """Decide a test whose sides are known; None for all else."""
        if any(block.runs is False for block in self._open):
            return None
        if list(words[:1]) == ["!"]:
            inner = self._test(words[1:])
            return None if inner is None else not inner
        text = " ".join(words)
        if text.startswith("((") and text.endswith("))"):
            known = self._variables.decided(_NAME.sub(r"${\g<0>}", text[2:-2]))
            value = None if known is None else self._variables.computed(known)
            return None if value is None else bool(value)
        if len(words) < 3 or (words[0], words[-1]) not in _BRACKETS:
            return None
        decided: bool | None = None
        separator, part = "", list[str]()
        for word in words[1:]:
            if word in _JOINTS or word in ("-a", "-o", words[-1]):
                value = self._compared(part)
                decided = _joined(decided, separator, value) if separator else value
                separator, part = {"-a": "&&", "-o": "||"}.get(word, word), []
            else:
                part.append(word)
        return decided

    def _compared(self, words: Sequence[str]) -> bool | None:
        """Decide `A = B`, `A -gt B`, `-n A`, `-z A`, or one of them behind `!`."""
        if words[:1] == ["!"]:
            inner = self._compared(words[1:])
            return None if inner is None else not inner
        match [self._variables.decided(word) for word in words]:
            case [str(left), str(sign), str(right)] if sign in _TEST:
                return _TEST[sign](left, right)
            case [str(left), str(sign), str(right)] if sign in _NUMERIC_TEST:
                first, second = parse_whole(left), parse_whole(right)
                if first is None or second is None:
                    return None
                return _NUMERIC_TEST[sign](first, second)
            case ["-n", str(value)]:
                return bool(value)
            case ["-z", str(value)]:
                return not value
        return None


def _is_test(words: Sequence[str]) -> bool:
    return bool(words) and (words[0] in ("[", "[[", "!") or words[0].startswith("(("))


def _joined(left: bool | None, separator: str, right: bool | None) -> bool | None:
    """Join two tests by `&&` or `||`; None: unknown."""
    decides = separator == "||"
    if decides in (left, right):
        return decides
    return None if None in (left, right) else right


def _value_of(node: ast.expr) -> int:
    """Return the value of a whole-number expression.

    Raises:
        ValueError: it is none, or is too large.
    """
    match node:
        case ast.Constant(value=int(value)):
            result = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value_of(operand)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            result = _value_of(body if _value_of(test) else orelse)
        case ast.BoolOp(op=op, values=values):
            joined = all if isinstance(op, ast.And) else any
            result = int(joined(_value_of(part) for part in values))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            result = _OPERATIONS[type(op)](_value_of(left), _value_of(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATIONS:
            result = int(_OPERATIONS[type(op)](_value_of(left), _value_of(right)))
        case _:
            raise ValueError("no whole number")
    if abs(result) > _LARGEST:
        raise ValueError("too large")
    return result


@dataclass(slots=True, kw_only=True)
class _Block:
    """One `if`, loop or `case` that is open."""

    runs: bool | None
    """The current branch runs; None where a running shell decides."""
    is_test: bool
    """The block's condition is being read."""
    was_taken: bool = False
    """A branch of the block before the current one ran."""

    def go_on(self, tested: bool | None) -> None:
        """Come to the next branch."""
        if self.runs is None:
            return
        self.was_taken = self.was_taken or self.runs
        self.runs = False if self.was_taken else tested
