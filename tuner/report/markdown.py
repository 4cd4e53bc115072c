"""A report as GitHub-flavoured Markdown, for pull requests: text and tables, no plots.

Text from users is escaped: backslashes before Markdown's punctuation (CommonMark 0.31, 2.4), HTML
entities, and no line breaks inside a cell.
"""

import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from tuner.report.content import (
    Block,
    Figure,
    File,
    NamedValues,
    Notes,
    Paragraph,
    Report,
    Section,
    Table,
)
from tuner.report.markup import readable
from tuner.units import format_bytes

MOST_ROWS: Final = 32
"""Rows of one table, at most; a comment of a pull request holds 65,536 characters."""

_PUNCTUATION: Final = re.compile(r"([\\`*_\[\]#|~!])")

_NOTHING: Final = "\u2060"
"""A word joiner after an `@`, so that names send no notification."""


def markdown(report: Report) -> str:
    """Return the text."""
    lines = [
        f"## {_text(report.title)}",
        "",
        f"*{_text(report.kind)}.* {_text(report.verdict)}",
        "",
        *([f"**Warning.** {_text(report.warning)}", ""] if report.warning else []),
        *_facts(report.facts),
        f"> {_text(report.proof)}",
        "",
    ]
    for section in report.sections:
        lines += _section(section)
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section) -> Iterator[str]:
    yield f"### {_text(section.heading)}"
    yield ""
    files = [block for block in section.blocks if isinstance(block, File)]
    if files:
        yield from (f"- {_text(file.path)}, {format_bytes(file.shown_bytes)}" for file in files)
        yield ""
        return
    for block in section.blocks:
        yield from _block(block)


def _block(block: Block) -> Iterator[str]:
    match block:
        case Paragraph():
            yield _text(block.text)
            yield ""
        case Notes():
            yield from (f"- {_text(note)}" for note in block.notes)
            yield ""
        case NamedValues():
            yield from _facts(block)
        case Table():
            yield from _table(block)
        case Figure():
            yield f"<details><summary>{_text(block.title)}</summary>"
            yield ""
            yield _text(block.reading)
            yield ""
            yield from _table(block.table)
            yield "</details>"
            yield ""
        case File():
            yield f"- {_text(block.path)}"


def _facts(facts: NamedValues) -> Iterator[str]:
    yield from _rows(("", ""), [(name, cell.text) for name, cell in facts.facts])


def _table(table: Table) -> Iterator[str]:
    yield f"**{_text(table.caption)}**"
    yield ""
    yield from _rows(table.header, [tuple(cell.text for cell in row) for row in table.rows])


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(_text(name) for name in header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows[:MOST_ROWS]:
        yield f"| {' | '.join(_text(text) for text in row)} |"
    if len(rows) > MOST_ROWS:
        yield ""
        yield f"{len(rows) - MOST_ROWS} more rows are on the page."
    yield ""


def _text(text: str) -> str:
    """Return text escaped for Markdown and HTML, on one line."""
    flat = " ".join(readable(text).split()).replace("@", f"@{_NOTHING}")
    return _PUNCTUATION.sub(r"\\\1", escape(flat, quote=False))
