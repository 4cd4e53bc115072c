"""A report as plain text within a width, for terminals and pipes.

A screen shows the sections and blocks of its depth. Where a table is too wide its words wrap; where
they cannot, every row becomes lines of `column  value`. Characters that control a terminal are
escaped: names of files, hosts, pools and experts are untrusted.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import Final

from tuner.report.content import (
    Block,
    Depth,
    Figure,
    File,
    NamedValues,
    Notes,
    Paragraph,
    Report,
    Section,
    Table,
    word,
)
from tuner.report.printable import printable
from tuner.units import format_bytes

NARROWEST: Final = 80
WIDEST: Final = 200
PIPE_WIDTH: Final = 100
"""Columns of lines that go to no terminal."""
LABEL_WIDTH: Final = 15
"""Least columns of a label with the space after it."""
GAP: Final = "  "
MOST_ROWS: Final = 24
"""Rows of a table unless all are wanted."""
MOST_LINES: Final = 6
"""Lines of a wrapped cell; where one has more, rows are stacked."""
LEAST_WRAPPED: Final = 16
"""Letters of a cell below which its words are not wrapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Width of a screen, and the depth of the report that it shows."""

    width: int = PIPE_WIDTH
    depth: Depth = Depth.FIRST
    is_whole: bool = False
    """Long tables and lists are shown whole."""


def report_text(report: Report, screen: Screen) -> str:
    """Return the headline and the sections of the screen's depth."""
    head: tuple[Block, ...] = (
        *([NamedValues(facts=(("WARNING", word(report.warning)),))] if report.warning else []),
        Paragraph(text=f"{report.kind}: {report.title}"),
        Paragraph(text=report.verdict),
        report.facts,
        *([Paragraph(text=report.proof)] if report.proof else []),
    )
    return blocks_text((*head, *report.sections), screen)


def blocks_text(blocks: Iterable[Block | Section], screen: Screen) -> str:
    """Return blocks and sections of the screen's depth, an empty line between them."""
    shown = ("\n".join(_block(block, screen)) for block in blocks if block.depth <= screen.depth)
    return "\n\n".join(text for text in shown if text)


def _block(block: Block | Section, screen: Screen) -> Iterator[str]:
    match block:
        case Section():
            if text := blocks_text(block.blocks, screen):
                yield f"{printable(block.heading)}\n{text}".lstrip("\n")
        case Paragraph():
            yield from _wrapped(block.text, screen.width)
        case Notes():
            yield from _notes(block, screen)
        case NamedValues():
            yield from _labelled([(name, cell.text) for name, cell in block.facts], screen.width)
        case Table():
            yield from _table(block, screen)
        case Figure():
            yield from _table(block.table, screen)
        case File():
            yield printable(f"{block.path}, {format_bytes(block.shown_bytes)}")


def _notes(block: Notes, screen: Screen) -> Iterator[str]:
    if block.counted_as and len(block.notes) > 1 and not screen.is_whole:
        yield f"{len(block.notes)} {block.counted_as}, shown by --verbose"
        return
    for note in block.notes:
        yield from _wrapped(note, screen.width, first="- ", others="  ")


def _labelled(pairs: Sequence[tuple[str, str]], width: int, *, indent: str = "") -> Iterator[str]:
    """Yield each text after its label, all in one column."""
    labels = [printable(label) for label, _ in pairs]
    column = max(LABEL_WIDTH, *(len(label) + len(GAP) for label in labels), 0)
    for label, (_, text) in zip(labels, pairs, strict=True):
        first = f"{indent}{label:<{column}}"
        yield from _wrapped(text, width, first=first, others=" " * len(first)) or [first.rstrip()]


def _table(table: Table, screen: Screen) -> Iterator[str]:
    yield from _wrapped(table.caption, screen.width)
    shown = table.rows if screen.is_whole else table.rows[:MOST_ROWS]
    header = tuple(map(printable, table.header))
    rows = [tuple(printable(cell.text) for cell in row) for row in shown]
    are_numbers = [
        any(row[at].value is not None for row in shown)
        and all(row[at].value is not None or row[at].text in ("", "-") for row in shown)
        for at in range(len(header))
    ]
    widths = _fitted(header, rows, are_numbers, width=screen.width - len(GAP))
    if widths is None:
        for row in rows:
            yield from _wrapped(row[0], screen.width, first=GAP, others=GAP * 2)
            pairs = [pair for pair in zip(header[1:], row[1:], strict=True) if pair[1]]
            yield from _labelled(pairs, screen.width, indent=GAP * 2)
    else:
        for line in ([header] if any(header) else []) + rows:
            yield from _columns(line, widths, are_numbers)
    if len(table.rows) > len(rows):
        yield f"{GAP}and {len(table.rows) - len(rows):,} more rows, shown by --verbose"


def _fitted(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    are_numbers: Sequence[bool],
    *,
    width: int,
) -> list[int] | None:
    """Return the columns' widths, words of the widest wrapped; None where rows must be stacked."""
    least, natural = [], []
    for name, *cells, is_number in zip(header, *rows, are_numbers, strict=True):
        words = (
            len(cell) if is_number else max(min(len(cell), LEAST_WRAPPED), _longest_word(cell))
            for cell in cells
        )
        least.append(max(_longest_word(name), *words, 1))
        natural.append(max(1, *(len(cell) for cell in (name, *cells))))
    room = width - len(GAP) * (len(header) - 1)
    for cap in range(min(room, max(natural)), 0, -1):
        widths = [min(full, max(low, cap)) for low, full in zip(least, natural, strict=True)]
        if sum(widths) <= room:
            texts = ((cell, fit) for row in rows for cell, fit in zip(row, widths, strict=True))
            return None if any(len(cell) > MOST_LINES * fit for cell, fit in texts) else widths
    return None


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _columns(
    cells: Sequence[str], widths: Sequence[int], are_numbers: Sequence[bool]
) -> Iterator[str]:
    """Yield a row, of several lines where a cell is wrapped."""
    columns = [
        [cell] if len(cell) <= width else _wrapped(cell, width)
        for cell, width in zip(cells, widths, strict=True)
    ]
    for parts in zip_longest(*columns, fillvalue=""):
        line = (
            part.rjust(width) if is_number else part.ljust(width)
            for part, width, is_number in zip(parts, widths, are_numbers, strict=True)
        )
        yield f"{GAP}{GAP.join(line)}".rstrip()


def _wrapped(text: str, width: int, *, first: str = "", others: str = "") -> list[str]:
    """Return the lines of a text; a word that is longer than a line stays whole, to be copied."""
    return wrap(
        printable(text),
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
