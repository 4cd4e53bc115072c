"""The content of a report, independent of its format.

    Cell      one number or word; a number keeps its exact value, and its path in the plan
    Table     rows of cells
    Facts     key figures, each with its name
    Figure    a plot, and a table with the same data
    Notes     sentences, as a list
    File      a file to be copied
    Section   a heading over blocks
    Report    the headline and the sections

`key` is the path of a number in `plan.json`, e.g. `predicted.stages.0.forward_s`. Layout and style
are in tuner/report/page.py, markdown.py and terminal.py. The page and Markdown show everything; a
terminal shows the sections and blocks whose `depth` is at most that of the screen.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeVar

from tuner.units import format_bytes, format_ratio, format_s

MOST_SIGNIFICANT: Final = 1000.0
"""Number from which figures have no decimals; below it, four significant digits."""


class Depth(IntEnum):
    """Level of detail at which a section or block is shown."""

    FIRST = 0
    """The first screen of a command."""
    MORE = 1
    """`--verbose`, and `moetune explain`."""
    PAGE = 2
    """`moetune report` only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """Content for screens from a depth on."""

    depth: Depth = Depth.FIRST


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A text, and the number behind it."""

    text: str
    value: float | None = None
    key: str = ""
    """Path of the number in `plan.json`; empty if it was derived from several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Marked):
    """Rows under a header; the first column names the row."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.header) for row in self.rows):
            raise ValueError(f"{self.caption}: a row has other columns than {self.header}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedValues(Marked):
    """Names with values."""

    facts: tuple[tuple[str, Cell], ...]
    are_large: bool = False
    """Shown large, as headline figures."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Figure(Marked):
    """A plot in Plotly's terms, https://plotly.com/javascript/reference/."""

    depth: Depth = Depth.PAGE
    """Depth of the screens that show its table."""
    name: str
    """Unique within the report; letters, digits and hyphens."""
    title: str
    reading: str
    """One or two sentences: what the plot shows and where it is from."""
    traces: tuple[Mapping[str, Any], ...]
    layout: Mapping[str, Any]
    table: Table
    height: int = 380
    """Pixels."""
    is_small: bool = False
    """Two fit side by side."""
    is_table_open: bool = False
    """The table is shown without a click."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph(Marked):
    """Running text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes(Marked):
    """A list of sentences."""

    notes: tuple[str, ...]
    counted_as: str = ""
    """Noun for the notes where a screen shows only their number; empty: each note is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File(Marked):
    """A launch file."""

    depth: Depth = Depth.PAGE
    path: str
    text: str
    shown_bytes: int
    """Bytes of the whole file, where only its beginning is shown."""
    is_whole: bool = True


Block = Paragraph | Notes | NamedValues | Table | Figure | File


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Section(Marked):
    """Blocks under a heading."""

    name: str
    heading: str
    blocks: tuple[Block, ...]


Part = TypeVar("Part", Block, Section)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """Trials, files and results shown beside a plan of any goal."""

    verified: Any = None
    """Conclusion of its trials, if any (`verified.json`)."""
    trials: tuple[Any, ...] = ()
    """All trials, in launch order."""
    files: tuple[File, ...] = ()
    what_if: Section | None = None
    """Results under other limits, if any."""
    replay: Any = None
    """A deployment's traffic simulated again, if it was."""
    maps: tuple[Any, ...] = ()
    """Heat maps of a placement."""


NO_EVIDENCE: Final = Evidence()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """The report on one plan."""

    title: str
    kind: str
    """Kind of report in words, e.g. `Training plan`."""
    verdict: str
    """The headline's one sentence."""
    is_found: bool
    """False where nothing fits."""
    facts: NamedValues
    proof: str
    """The certificate and the binding constraint, in a sentence or two."""
    sections: tuple[Section, ...]
    warning: str = ""
    """Warning above the verdict, or empty."""

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Every plot, in order."""
        return tuple(
            block
            for section in self.sections
            for block in section.blocks
            if isinstance(block, Figure)
        )


def word(text: object) -> Cell:
    """Return a cell that holds no number."""
    return Cell(text=str(text))


def seconds(value: float, *, key: str = "") -> Cell:
    """Return a duration."""
    return Cell(text=format_s(value), value=value, key=key)


def size(value: float, *, key: str = "") -> Cell:
    """Return bytes."""
    return Cell(text=format_bytes(value), value=value, key=key)


def share(value: float, *, key: str = "") -> Cell:
    """Return a share of one."""
    return Cell(text=format_ratio(value), value=value, key=key)


def number(value: float, *, key: str = "", unit: str = "") -> Cell:
    """Return a count or a rate."""
    is_whole = isinstance(value, int) or abs(value) >= MOST_SIGNIFICANT
    shown = f"{value:,.0f}" if is_whole else f"{value:.4g}"
    return Cell(text=f"{shown} {unit}".rstrip(), value=value, key=key)


def between(band: Sequence[float], *, unit: str = "s") -> Cell:
    """Return a band of seconds or bytes."""
    low, high = band
    write = format_s if unit == "s" else format_bytes
    return Cell(text=f"{write(low)} to {write(high)}")


def maybe(write: Callable[..., Cell], value: float | None, *, key: str = "") -> Cell:
    """Return a number's cell, or `-` where there is none."""
    return word("-") if value is None else write(value, key=key)


def named(
    *facts: tuple[str, object], are_large: bool = False, depth: Depth = Depth.FIRST
) -> NamedValues:
    """Return the names with a value: a cell, or a text; what is neither, or empty, is left out."""
    cells = ((name, word(value) if isinstance(value, str) else value) for name, value in facts)
    kept = tuple(
        (name, cell)
        for name, cell in cells
        if isinstance(cell, Cell) and cell.text not in ("", "-")
    )
    return NamedValues(facts=kept, are_large=are_large, depth=depth)


def words_table(caption: str, header: tuple[str, ...], rows: Iterable[Iterable[object]]) -> Table:
    """Return a table of texts and counts."""
    cells: Iterable[tuple[Cell, ...]] = (tuple(map(word, row)) for row in rows)
    return Table(caption=caption, header=header, rows=tuple(cells))


def some(*parts: Part | None) -> tuple[Part, ...]:
    """Return the blocks or sections that are not None."""
    return tuple(part for part in parts if part is not None)


def bullets(
    notes: Iterable[str], *, counted_as: str = "", depth: Depth = Depth.FIRST
) -> Notes | None:
    """Return the sentences as a list; None where there are none."""
    listed = tuple(notes)
    return Notes(notes=listed, counted_as=counted_as, depth=depth) if listed else None


def section(
    name: str, heading: str, *blocks: Block | None, depth: Depth = Depth.FIRST
) -> Section | None:
    """Return the blocks that are not None under a heading; None where there are none."""
    kept = tuple(block for block in blocks if block is not None)
    return Section(name=name, heading=heading, blocks=kept, depth=depth) if kept else None
