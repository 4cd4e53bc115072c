"""Every table of a report as one CSV, with a row per cell."""

from collections.abc import Iterator

from tuner.report.content import Figure, NamedValues, Report, Table
from tuner.tables import typed_table

TYPES = {
    **{"section": "string", "table": "string", "row": "int64", "column": "string"},
    **{"text": "string", "value": "object", "key": "string"},
}
"""`row` counts from 1; `value` is the exact number behind a text, `key` its path in plan.json."""


def report_csv(report: Report) -> str:
    """Return the text of the file: the headline, then all tables, those of figures included."""
    return typed_table(_rows(report), TYPES).to_csv(index=False)


def _rows(report: Report) -> Iterator[tuple[object, ...]]:
    yield from _facts("headline", report.facts)
    for section in report.sections:
        for block in section.blocks:
            match block:
                case NamedValues():
                    yield from _facts(section.name, block)
                case Table():
                    yield from _table(section.name, block)
                case Figure():
                    yield from _table(section.name, block.table)


def _facts(section: str, facts: NamedValues) -> Iterator[tuple[object, ...]]:
    for name, cell in facts.facts:
        yield section, "facts", 1, name, cell.text, cell.value, cell.key


def _table(section: str, table: Table) -> Iterator[tuple[object, ...]]:
    for number, row in enumerate(table.rows, start=1):
        for column, cell in zip(table.header, row, strict=True):
            yield section, table.caption, number, column, cell.text, cell.value, cell.key
