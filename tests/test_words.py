"""Identifiers are the words of the field: engineers of Megatron or vLLM read them unprepared.

Counted are files of the three packages that define a name (function, class, argument, variable,
attribute) with a word that this project once made up. `python -m tests.test_words` lists them.
No name there is a pronoun, except fields of stored records; docstrings of fields, which are the
descriptions of JSON Schemas, stand alone.
"""

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("tuner", "solvers", "profilers")
MOST_FILES = 14
MOST_GERUNDS = 10

OWN_WORDS = frozenset(
    """
    again agains alike alone answer answering answers apart asked asking bench book busiest cards
    company dearer ends exchange frame frames fullest handover handovers judged keeping keepings
    lean leanest leaning lived looks meeting meetings parted play played playing products question
    questions site sites stands tell teller telling tells told unlike visits way ways
    """.split()  # noqa: SIM905
)
BARE_PARTICIPLES = frozenset({"asked", "found", "held", "lived", "told"})
"""Names that say what happened to a value, not what it is."""
PRONOUNS = frozenset({"one", "own", "other", "each", "most"})
"""Names that only the sentence before them explains."""
STORED_FIELDS = frozenset(
    {
        ("tuner/estimate/records.py", "most"),
        ("tuner/estimate/serving/records.py", "other"),
        ("tuner/spec/serving/lengths.py", "most"),
    }
)
"""Pronouns that are fields of files that users keep."""

FRAGMENTS = frozenset(
    "At By From If In Of On Over That Under What When Where Which Whose Why".split()  # noqa: SIM905
)
"""Words that begin no noun phrase."""

TERMS = frozenset(
    """
    accounting annealing batching hybrid_sharding limited_routing matching
    queueing recording routing sampling serving sharding timing training
    """.split()  # noqa: SIM905
)
"""Modules in -ing that the field calls so."""


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that a module defines, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno
            case ast.MatchMapping(rest=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name, node.lineno
            case ast.alias(asname=str(name)):
                yield name, node.lineno


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax tree of each file of the three packages."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@cache
def names_by_file() -> dict[str, list[tuple[str, int]]]:
    """Every name that each file defines, with its line."""
    return {file: list(names(tree)) for file, tree in trees().items()}


def is_own(name: str) -> bool:
    """Whether a name holds a word of the project's own."""
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")
    return not OWN_WORDS.isdisjoint(parts) or name.strip("_").lower() in BARE_PARTICIPLES


def own_names() -> dict[str, list[str]]:
    """For each file that has any: its names of the project's own, each with its line."""
    files: dict[str, list[str]] = {}
    for file, defined in names_by_file().items():
        lines = [f"{line}: {name}" for name, line in defined if is_own(name)]
        if is_own(Path(file).stem):
            lines.insert(0, f"module {Path(file).stem}")
        if lines:
            files[file] = lines
    return files


def test_identifiers_are_the_fields_words() -> None:
    files = own_names()
    assert len(files) <= MOST_FILES, files


def test_no_name_is_a_pronoun() -> None:
    pronouns = [
        f"{file}:{line}: {name}"
        for file, defined in names_by_file().items()
        for name, line in defined
        if name in PRONOUNS and (file, name) not in STORED_FIELDS
    ]
    assert not pronouns, "\n".join(
        ["Name what it is, such as `rank`, `stage` or `largest_batch`:", *pronouns]
    )


def test_docstrings_of_fields_stand_alone() -> None:
    fragments = [
        f"{file}:{text.lineno}: {words}"
        for file, tree in trees().items()
        for record in ast.walk(tree)
        if isinstance(record, ast.ClassDef)
        for field, text in itertools.pairwise(record.body)
        if isinstance(field, ast.AnnAssign | ast.Assign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and (words := str(text.value.value)).split(maxsplit=1)[0].strip(",:;.") in FRAGMENTS
    ]
    assert not fragments, "\n".join(["Begin with what the field holds:", *fragments])


def test_modules_are_nouns_or_verbs() -> None:
    gerunds = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*ing.py")
        if path.stem not in TERMS
    }
    assert len(gerunds) <= MOST_GERUNDS, sorted(gerunds)


if __name__ == "__main__":
    for file, lines in own_names().items():
        sys.stdout.write("\n    ".join([file, *dict.fromkeys(lines)]) + "\n")
