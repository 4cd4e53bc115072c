"""A report as one HTML file that needs no network.

Plotly's script is inlined once from the installed `plotly` package. A Content-Security-Policy
(https://www.w3.org/TR/CSP3/) lets only the page's two scripts run, each named by its SHA-256, and
fetches nothing; styles may be inline because Plotly sets them on its elements. Every plot has a
table with the same data, for accessibility.

Style is in page.css, behaviour in page.js.
"""

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from itertools import groupby
from typing import Final

from tuner.report.content import (
    Block,
    Cell,
    Figure,
    File,
    NamedValues,
    Notes,
    Paragraph,
    Report,
    Section,
    Table,
)
from tuner.report.markup import Fragment, data_script, element, readable
from tuner.units import format_bytes

NARROW_HEIGHT: Final = 60
"""Pixels added to a plot on a phone, where its legend takes more lines."""


def page_html(report: Report, plotly: str) -> str:
    """Return the file, with Plotly's script in it."""
    folder = resources.files("tuner.report")
    script, style = (
        folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.js", "page.css")
    )
    name = f"{report.title} - moetune"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(plotly, script)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="generator", content="moetune report"),
        element("title", name),
        element("style", Fragment(style)),
    )
    body = element(
        "body",
        element("a", "Skip to the report", href="#report", class_="skip"),
        _headline(report),
        _navigation(report) if len(report.sections) > 1 else "",
        element("main", *(_section(section) for section in report.sections), id="report"),
        element("footer", element("p", "Written by moetune. This file needs no network.")),
        element("p", role="status", aria_live="polite", id="said", class_="skip"),
        data_script([_drawn(figure) for figure in report.figures], name="data-of-figures"),
        element("script", Fragment(plotly)),
        element("script", Fragment(script)),
    )
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en").html + "\n"


def _policy(*scripts: str) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "font-src 'none'; connect-src 'none'; base-uri 'none'; form-action 'none'"
    )


def _headline(report: Report) -> Fragment:
    return element(
        "header",
        element("p", report.kind, class_="kind"),
        element("h1", report.title),
        *([element("p", report.warning, class_="warning", role="alert")] if report.warning else []),
        element("p", report.verdict, class_="verdict"),
        _block(report.facts),
        element("p", report.proof, class_="proof"),
        class_="found" if report.is_found else "nothing",
    )


def _navigation(report: Report) -> Fragment:
    links = (
        element("li", element("a", section.heading, href=f"#{section.name}"))
        for section in report.sections
    )
    return element("nav", element("ul", *links), aria_label="Sections")


def _section(section: Section) -> Fragment:
    heading = f"{section.name}-heading"
    return element(
        "section",
        element("h2", section.heading, id=heading),
        *_blocks(section.blocks),
        id=section.name,
        aria_labelledby=heading,
    )


def _blocks(blocks: Sequence[Block]) -> Iterator[Fragment]:
    """Yield the blocks; consecutive small figures are side by side."""
    numbered = enumerate(blocks)
    for is_small, run in groupby(numbered, lambda pair: _is_small(pair[1])):
        drawn = [_block(block, number) for number, block in run]
        if is_small:
            yield element("div", *drawn, class_="pair")
        else:
            yield from drawn


def _is_small(block: Block) -> bool:
    return isinstance(block, Figure) and block.is_small


def _block(block: Block, number: int = 0) -> Fragment:
    match block:
        case Paragraph():
            return element("p", block.text)
        case Notes():
            return element("ul", *(element("li", note) for note in block.notes), class_="notes")
        case NamedValues():
            return _facts(block)
        case Table():
            return _table(block, is_bare=True)
        case Figure():
            return _figure(block)
        case File():
            return _file(block, number)


def _facts(facts: NamedValues) -> Fragment:
    pairs = (
        element("div", element("dt", name), element("dd", cell.text, **_behind(cell)))
        for name, cell in facts.facts
    )
    return element("dl", *pairs, class_="large" if facts.are_large else "plain")


def _figure(figure: Figure) -> Fragment:
    caption = f"caption-{figure.name}"
    reading = f"reading-{figure.name}"
    return element(
        "figure",
        element(
            "figcaption",
            element("h3", figure.title, id=caption),
            element("p", figure.reading, id=reading),
        ),
        element(
            "div",
            id=f"plot-{figure.name}",
            class_="plot",
            role="img",
            aria_labelledby=caption,
            aria_describedby=reading,
            style=f"min-height:{figure.height}px",
        ),
        element(
            "details",
            element("summary", f"Data of '{figure.title}'"),
            _table(figure.table, is_bare=False),
            open=figure.is_table_open,
        ),
    )


def _table(table: Table, *, is_bare: bool) -> Fragment:
    are_figures = [
        bool(table.rows) and all(row[column].value is not None for row in table.rows)
        for column in range(len(table.header))
    ]
    header = element(
        "thead",
        element(
            "tr",
            *(
                element("th", name, scope="col", class_="figure" if is_figure else "word")
                for name, is_figure in zip(table.header, are_figures, strict=True)
            ),
        ),
    )
    body = element("tbody", *(element("tr", *_cells(row)) for row in table.rows))
    return element(
        "div",
        element("table", element("caption", table.caption), header, body),
        class_="scroll bare" if is_bare else "scroll",
        tabindex="0",
        role="region",
        aria_label=table.caption,
    )


def _cells(row: tuple[Cell, ...]) -> Iterator[Fragment]:
    yield element("th", row[0].text, scope="row", **_behind(row[0]))
    for cell in row[1:]:
        shown = "word" if cell.value is None else "figure"
        yield element("td", cell.text, class_=shown, **_behind(cell))


def _behind(cell: Cell) -> dict[str, str]:
    """Return the tooltip of a cell: the exact number and its path in the plan."""
    behind = {} if cell.value is None else {"data_value": repr(cell.value)}
    return behind | ({"data_key": cell.key} if cell.key else {})


def _file(file: File, number: int) -> Fragment:
    place = f"file-{number}"
    shown = format_bytes(file.shown_bytes)
    size = shown if file.is_whole else f"beginning of {shown}"
    button = element(
        "button", "Copy", type="button", data_copies=place, aria_label=f"Copy {file.path}"
    )
    return element(
        "details",
        element("summary", file.path),
        element("div", size, button if file.is_whole else "", class_="bar"),
        element("pre", element("code", file.text, id=place), tabindex="0"),
        class_="file",
    )


def _drawn(figure: Figure) -> dict[str, object]:
    return {
        "name": figure.name,
        "traces": _as_text(figure.traces),
        "layout": _as_text(figure.layout),
        "height": figure.height,
        "narrow": NARROW_HEIGHT,
    }


def _as_text(value: object) -> object:
    """Return the data for Plotly, with every text escaped and line breaks in Plotly's form.

    Non-finite numbers are not valid JSON and are not drawn. Plotly interprets some HTML in texts
    (links, line breaks), so names from users are escaped.
    """
    if isinstance(value, str):
        return escape(readable(value), quote=False).replace("\n", "<br>")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {
            name: attribute if name == "hovertemplate" else _as_text(attribute)
            for name, attribute in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_as_text(entry) for entry in value]
    return value
