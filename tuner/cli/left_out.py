"""Rows of a table that were not predicted, by reason, for people.

Ids are text of a stranger's table: they are quoted, so that none breaks a line or a terminal.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

MOST_REASONS: Final = 24
LONGEST_ID: Final = 80
"""Characters of an id that are shown."""


class UnpredictedRow(NamedTuple):
    """One row without a prediction."""

    id: str
    source: str
    reason: str


def left_out_text(rows: Iterable[UnpredictedRow]) -> str:
    """Return each reason with its rows counted and the first one named; empty without rows."""
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    for row in rows:
        counts[row.source, row.reason] += 1
        first.setdefault((row.source, row.reason), row.id)
    if not counts:
        return ""
    listed = [
        f"{count} of {key[0]}: {key[1]} ({_named(first[key], is_one=count == 1)})"
        for key, count in counts.most_common(MOST_REASONS)
    ]
    more = len(counts) - len(listed)
    if more > 0:
        listed.append(f"... and {more} further reasons")
    head = "not predicted, with the first row of each reason; --json has every row:"
    return head + "\n" + "\n".join(f"  {line}" for line in listed)


def _named(row: str, *, is_one: bool) -> str:
    shown = repr(row if len(row) <= LONGEST_ID else row[: LONGEST_ID - 3] + "...")
    return shown if is_one else f"first {shown}"
