"""Plain text for people, the same on a terminal and in a pipe; the only place that prints.

Names of files, hosts, pools and experts come from others. What would steer a terminal (escapes,
tabs, marks of writing direction) is spelled out here, whoever composed the text.
"""

import sys
from collections.abc import Iterator, Sequence


def printable(text: str) -> str:
    """Spell out every sign that would steer a terminal, also the end of a line."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def print_text(text: str = "") -> None:
    """Print a result for people: names in it may hold what steers a terminal."""
    print(_lines(text))


def print_exact(text: str) -> None:
    """Print what a program reads, JSON above all, as it is."""
    print(text)


def tell(text: str = "", *, end: str = "\n") -> None:
    """Say something on stderr, beside the result."""
    print(_lines(text), end=end, file=sys.stderr, flush=True)


def _lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))


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


def asides(label: str, lines: Sequence[str], *, verbose: bool) -> Iterator[str]:
    """Yield each line after its label, or how many there are; a single one is never hidden."""
    if verbose or len(lines) == 1:
        yield from (f"{label}{line}" for line in lines)
    elif lines:
        yield f"{label}{len(lines)}, shown by --verbose"


def times_words(band: tuple[float, float]) -> str:
    """Say a band of a ratio of times: `0.95 to 1.21 times`."""
    return f"{band[0]:.2f} to {band[1]:.2f} times"
