"""Records what the product answers: `python -m tests.frozen.record [--dry-run] [CASE ...]`.

Printed are the differences from what was recorded before, words and structure first, then numbers
from the largest; then the answers are recorded in their place. Rows of tables are drawn anew, which
changes none while `drawn.py` and the specs of `columns.py` stay.
"""

import json
import sys
import time
from collections.abc import Sequence

from tests.benchmarks.bars import parse, say
from tests.frozen import columns
from tests.frozen.comparison import (
    DATA,
    Difference,
    differences,
    largest_first,
    read,
    recorded,
    rows_of,
    write,
)

MOST_SHOWN = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print and record."""
    asked = parse(
        __doc__,
        {
            "cases": {"nargs": "*", "metavar": "CASE", "help": "whole names, or how they begin"},
            "--dry-run": {"action": "store_true", "help": "compare and print alone"},
            "--all": {"action": "store_true", "help": "print every difference"},
        },
        arguments,
    )
    chosen = [
        name for name in columns.names() if not asked.cases or name.startswith(tuple(asked.cases))
    ]
    found: list[Difference] = []
    for name in chosen:
        begun_s = time.process_time()
        found += renewed(name, is_dry=asked.dry_run)
        sys.stderr.write(f"{name}: {time.process_time() - begun_s:.1f} s of the processor\n")
    if not asked.dry_run and not asked.cases:
        for name in set(recorded()) - set(columns.names()):
            sys.stdout.write(f"{name}: no longer asked, removed\n")
            (DATA / f"{name}.json.gz").unlink()
    ordered = largest_first(found)
    shown = ordered if asked.all else ordered[:MOST_SHOWN]
    say(*map(str, shown))
    if len(ordered) > len(shown):
        sys.stdout.write(f"... and {len(ordered) - len(shown)} more (--all)\n")
    words = sum(one.ratio is None for one in found)
    sys.stdout.write(
        f"{len(found) - words} figures and {words} words or fields differ"
        f" in {len({one.case for one in found})} of {len(chosen)} cases\n"
    )
    return 0


def renewed(name: str, *, is_dry: bool) -> list[Difference]:
    """Record a case's answer, and list where it differs from what was recorded."""
    old = read(name)
    rows = rows_of(old) if old is not None and columns.is_table(name) else []
    now = None if old is None else columns.answered(name, rows)
    if not is_dry:
        drawn = columns.drawn(name) if columns.is_table(name) else []
        is_asked = now is not None and json.dumps(drawn) == json.dumps(rows)
        write(name, now if is_asked else columns.answered(name, drawn))
    if old is None:
        sys.stderr.write(f"{name}: recorded for the first time\n")
        return []
    return differences(name, old, now)


if __name__ == "__main__":
    sys.exit(main())
