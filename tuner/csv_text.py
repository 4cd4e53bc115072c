"""Rows as comma-separated text (RFC 4180 quoting, line feeds), for every CSV that is written."""

import csv
import io
from collections.abc import Iterable, Sequence


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a header and its rows; None is an empty cell, floats are written exactly.

    Raises:
        ValueError: a row has another number of cells than the header.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"{len(row)} cells under {len(header)} names")
        writer.writerow(row)
    return out.getvalue()
