"""Plain text for people: aligned columns, the same on a terminal and in a pipe."""

from collections.abc import Sequence


def printable(text: str) -> str:
    """Spell out every sign that would steer a terminal, also the end of a line."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def columns(rows: Sequence[Sequence[object]], *, header: Sequence[str] = ()) -> str:
    """Return the rows with every column as wide as its longest cell, two spaces between."""
    lines = ((header,) if header else ()) + tuple(rows)
    table = [tuple(printable(str(cell)) for cell in row) for row in lines]
    if not table:
        return ""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )
