"""Plain text for people: aligned columns, the same on a terminal and in a pipe."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[object]], *, header: Sequence[str] = ()) -> str:
    """Return the rows with every column as wide as its longest cell, two spaces between."""
    table = [tuple(map(str, row)) for row in ((header,) if header else ()) + tuple(rows)]
    if not table:
        return ""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )
